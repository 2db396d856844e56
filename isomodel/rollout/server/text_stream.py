"""TextStream: what of a growing completion's text may be sent already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isomodel.rollout.detokenizer import GrowingText


class TextStream:
    """Gives out text in pieces that are never taken back.

    Held back are bytes that are no whole character yet, and an end of the text that a stop string begins with: should
    the rest of it follow, none of it belongs to the completion. The pieces, joined, are the completion's text.
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]):
        self._stops = tuple(stops)
        self._growing = GrowingText(decode)
        self._sent = 0

    def push(self, token: int) -> int:
        """Adds a token; returns where its text begins, in characters."""
        start = len(self._growing.text)
        self._growing.push(token)
        return start

    def take(self) -> str:
        """What may be sent now and was not."""
        text = self._growing.text
        end = max(self._sent, len(text) - self._held(text))
        piece, self._sent = text[self._sent : end], end
        return piece

    def finish(self, text: str) -> str:
        """The rest of the completion's final `text`."""
        piece, self._sent = text[self._sent :], len(text)
        return piece

    def _held(self, text: str) -> int:
        """Characters at the end of `text` that begin a stop string."""
        longest = 0
        for stop in self._stops:
            for k in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:k]):
                    longest = k
                    break
        return longest

"""GrowingText: text of tokens that arrive one by one; StopStrings: finds the string that ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not (yet) a whole character."""


class GrowingText:
    """Text of a growing completion; only whole characters enter it.

    Decodes a short window of tokens at a time. A token's text can depend on the tokens before it (a leading space, a
    character of several bytes), so the window starts one accepted piece earlier and only the difference is new text; a
    piece that ends in the middle of a character waits for its rest (the scheme of Hugging Face's
    text-generation-inference).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        """`decode` turns token ids into text, without special tokens."""
        self.text = ""
        self._decode = decode
        self._ids: list[int] = []
        self._window = 0  # first token of the window
        self._done = 0  # tokens whose text is in `text`

    def push(self, token: int) -> str:
        """Adds a token; returns what that adds to `text`, "" while a character lacks bytes."""
        self._ids.append(token)
        before = self._decode(self._ids[self._window : self._done])
        now = self._decode(self._ids[self._window :])
        if len(now) <= len(before) or now.endswith(REPLACEMENT):
            return ""
        new = now[len(before) :]
        self._window, self._done = self._done, len(self._ids)
        self.text += new
        return new


class StopStrings:
    """Text of a growing completion, and the first stop string in it."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]):
        """`decode` turns token ids into text, without special tokens."""
        self.stops = tuple(stops)
        self.text = ""
        self._growing = GrowingText(decode)
        self._longest = max(map(len, self.stops))

    def push(self, token: int) -> str | None:
        """Adds a token. Returns the stop string it completed, if any; `text` then ends before that string.

        Of several that one token completes, the one that begins first wins, and of these the longest.
        """
        if not self._growing.push(token):
            return None
        search_from = max(0, len(self.text) - self._longest + 1)
        self.text = self._growing.text
        found = [(at, -len(stop), stop) for stop in self.stops if (at := self.text.find(stop, search_from)) >= 0]
        if not found:
            return None
        at, _, stop = min(found)
        self.text = self.text[:at]
        return stop

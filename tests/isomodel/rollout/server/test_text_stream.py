"""TextStream: pieces, joined, are the text; nothing of a stop string or of half a character is ever sent."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from isomodel.rollout.detokenizer import REPLACEMENT, StopStrings
from isomodel.rollout.server.text_stream import TextStream


def decode(ids):
    return bytes(ids).decode("utf-8", errors="replace")


@given(
    st.text("aboé日 ", max_size=30), st.lists(st.text("abé日", min_size=1, max_size=4), max_size=3), st.integers(1, 5)
)
def test_pieces_are_the_text_up_to_the_stop(text, stops, stride):
    """Tokens are bytes, handed out `stride` at a time, as looks of a host are."""
    ids = list(text.encode())
    finder = StopStrings(stops, decode) if stops else None
    end = next((i for i, token in enumerate(ids) if finder and finder.push(token)), None)
    final = finder.text if end is not None else text
    stream, sent = TextStream(stops, decode), ""
    unfinished = ids if end is None else ids[:end]
    for at in range(0, len(unfinished) - len(unfinished) % stride, stride):
        for token in unfinished[at : at + stride]:
            stream.push(token)
        sent += stream.take()
        assert final.startswith(sent) and REPLACEMENT not in sent
    assert sent + stream.finish(final) == final


def test_what_cannot_begin_a_stop_string_is_not_held_back():
    stream = TextStream(["END", "D!"], decode)
    takes = []
    for byte in b"a ENx E":
        stream.push(byte)
        takes.append(stream.take())
    assert takes == ["a", " ", "", "", "ENx", " ", ""]


def test_offsets_are_characters():
    stream = TextStream([], decode)
    assert [stream.push(byte) for byte in "é日x".encode()] == [0, 0, 1, 1, 1, 2]

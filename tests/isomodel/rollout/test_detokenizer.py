"""StopStrings: found wherever token borders fall, also inside characters of several bytes."""

from __future__ import annotations

import pytest

from isomodel.rollout.detokenizer import StopStrings


def bytes_codec(ids):
    """One token a byte: the hardest borders there are."""
    return bytes(ids).decode("utf-8", errors="replace")


def word_codec(ids):
    """Words with a leading space that the first one loses, as SentencePiece decoders do."""
    return "".join(WORDS[i] for i in ids).removeprefix(" ")


WORDS = [" one", " two", "stop", "!!", " three", "o", "ne"]


def run(finder: StopStrings, ids):
    for n, token in enumerate(ids, 1):
        if (stop := finder.push(token)) is not None:
            return stop, n
    return None, len(ids)


def test_a_stop_string_over_many_tokens():
    finder = StopStrings(["END"], bytes_codec)
    assert run(finder, b"the END of it") == ("END", 7)
    assert finder.text == "the "


def test_characters_of_several_bytes():
    ids = "naïve 日本 STOP日".encode()
    finder = StopStrings(["本 S"], bytes_codec)
    stop, n = run(finder, ids)
    assert stop == "本 S" and finder.text == "naïve 日" and ids[:n].decode().endswith("本 S")
    finder = StopStrings(["P日"], bytes_codec)
    assert run(finder, ids) == ("P日", len(ids))


def test_the_first_of_several_wins_then_the_longest():
    finder = StopStrings(["b", "ab", "abc"], lambda ids: "".join(["x", "abc"][i] for i in ids))
    assert run(finder, [0, 1]) == ("abc", 2)
    assert finder.text == "x"


def test_words_keep_their_spaces():
    finder = StopStrings(["never"], word_codec)
    assert run(finder, [0, 1, 4, 5, 6]) == (None, 5)
    assert finder.text == word_codec([0, 1, 4, 5, 6]) == "one two threeone"


@pytest.mark.parametrize("stop", ["twostop", "e t", "!! three"])
def test_found_as_soon_as_the_whole_text_has_it(stop):
    ids = [0, 1, 2, 3, 4, 0]
    finder = StopStrings([stop], word_codec)
    found, n = run(finder, ids)
    first = next(k for k in range(1, 7) if stop in word_codec(ids[:k]))
    assert (found, n) == (stop, first)
    assert finder.text == word_codec(ids[:n]).split(stop)[0]

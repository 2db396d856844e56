"""A fault of one request's own text ends that request; others keep their bits, and nothing is left behind."""

from __future__ import annotations

import contextlib
import threading

import openai
import pytest

from isomodel.rollout import SamplingParams
from tests.isomodel.rollout.server import served

PROMPT = [7, 7, 7]
GOOD = {"max_tokens": 60, "ignore_eos": True, "seed": 4}
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, seed=4)


class Broken(Exception):
    """What no code expects."""


@contextlib.contextmanager
def poisoned(server, folder):
    """The tokenizer raises on texts that begin as the completion of PROMPT begins, after some tokens; gives these."""
    (whole,) = served.alone(folder, PROMPT, PARAMS)
    poison = whole.token_ids[:9].tolist()
    decode = server.tokenizer.decode

    def broken(ids, **options):
        ids = list(ids)
        if any(ids[i : i + 3] == poison[6:] for i in range(len(ids))):
            raise Broken("half a glyph")
        return decode(ids, **options)

    server.tokenizer.decode = broken  # of the instance: the engine asks it anew for each request
    try:
        yield whole
    finally:
        server.tokenizer.decode = decode


def beside(server, folder, bad) -> None:
    """Runs `bad` while three others are in flight, whole and streamed, which must get what they get alone."""
    prompts = [[1, 2, i] for i in range(3)]
    expected = [served.alone(folder, prompt, PARAMS)[0] for prompt in prompts]
    got = {}

    def ask(i: int) -> None:
        got[i] = server.ask("/v1/rollout", {"prompt_ids": prompts[i], **GOOD})

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(3)]
    with server.slow():
        for thread in threads:
            thread.start()
        served.wait_for(lambda: server.service.thread.stats.running == 3)
        bad()
        assert all(thread.is_alive() for thread in threads), "they ran beside it"
        for thread in threads:
            thread.join(30)
    for i, completion in enumerate(expected):
        status, answer = got[i]
        assert status == 200 and answer["samples"][0]["token_ids"] == completion.token_ids.tolist()
        assert served.same_bits(answer["samples"][0]["logprobs"], completion.logprobs)
    server.settled()
    assert server.ask("/health")[0] == 200


@pytest.mark.parametrize("n", [1, 4])
def test_a_stop_string_that_cannot_be_looked_for(server, folder, n):
    with poisoned(server, folder):
        body = {"prompt": PROMPT, "stop": "never there", "n": n, **GOOD}
        beside(server, folder, lambda: _fails(server, "/v1/completions", body))


def _fails(server, path, body) -> None:
    status, answer = server.ask(path, body)
    assert status == 500 and "Broken: half a glyph" in answer["error"]["message"] and "others go on" in str(answer)


def test_a_text_that_cannot_be_made_at_the_end(server, folder):
    with poisoned(server, folder):
        beside(server, folder, lambda: _fails(server, "/v1/rollout", {"prompt_ids": PROMPT, **GOOD, "max_tokens": 12}))


def test_a_stream_whose_pieces_cannot_be_made(server, folder):
    with poisoned(server, folder) as whole:

        def bad():
            stream = server.client().completions.create(
                model=served.NAME, prompt=PROMPT, stream=True, extra_body={"ignore_eos": True}, seed=4, max_tokens=60
            )
            pieces = []
            with pytest.raises(openai.APIError, match="Broken"):
                for chunk in stream:
                    pieces.append(chunk.choices[0].text)
            assert pieces and whole.text.startswith("".join(pieces)), "what was whole before was sent"

        beside(server, folder, bad)


def test_the_engine_alone_raises_it(server, folder):
    engine = served.tiny.engine(cfg=served.CONFIG, tokenizer=server.tokenizer)
    with poisoned(server, folder) as whole:
        for stop in ((), ("never there",)):
            with pytest.raises(RuntimeError, match="prompt 1, sample 0: the tokenizer failed: Broken"):
                engine.generate([[1, 2], PROMPT], SamplingParams(max_tokens=60, ignore_eos=True, seed=4, stop=stop))
            engine.check()
    (again,) = engine.generate([PROMPT], PARAMS)
    assert again.token_ids.tolist() == whole.token_ids.tolist()

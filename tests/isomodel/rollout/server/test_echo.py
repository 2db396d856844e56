"""`echo`: the prompt and its log-probabilities before the completion's; what scores a text without sampling one."""

from __future__ import annotations

import types

import pytest

from isomodel.rollout import SamplingParams
from tests.isomodel.rollout import tiny
from tests.isomodel.rollout.server import served

ASK = {"max_tokens": 5, "seed": 2, "ignore_eos": True, "temperature": 0.7, "logprobs": 0, "echo": True}
PARAMS = SamplingParams(max_tokens=5, seed=2, ignore_eos=True, temperature=0.7, prompt_logprobs=True)
TEXT = "Ein Satz: é日."


@pytest.fixture(scope="module")
def scoring(folder):
    server = served.Served(folder, prompt_logprobs=True)
    yield server
    server.close()


@pytest.fixture(scope="module")
def expected(folder, scoring):
    engine = tiny.engine(cfg=served.CONFIG, tokenizer=scoring.tokenizer, prompt_logprobs=True)
    return engine.generate([scoring.tokenizer.encode(TEXT)], PARAMS)[0]


def test_a_prompt_before_its_completion(scoring, expected):
    for prompt in (TEXT, scoring.tokenizer.encode(TEXT)):
        (choice,) = scoring.ask("/v1/completions", {**ASK, "prompt": prompt})[1]["choices"]
        assert choice["text"] == TEXT + expected.text and choice["finish_reason"] == "length"
        logprobs, n = types.SimpleNamespace(**choice["logprobs"]), len(expected.prompt_ids)
        ids = [*expected.prompt_ids, *expected.token_ids]
        assert logprobs.tokens == [scoring.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        assert logprobs.token_logprobs[0] is None
        assert served.same_bits(logprobs.token_logprobs[1:n], expected.prompt_logprobs[1:])
        assert served.same_bits(logprobs.token_logprobs[n:], expected.logprobs)
        assert logprobs.text_offset[0] == 0 and logprobs.text_offset[n] == len(TEXT)
        assert logprobs.text_offset == sorted(logprobs.text_offset) and len(logprobs.text_offset) == len(ids)


def test_nothing_but_the_prompt(scoring, expected):
    status, answer = scoring.ask("/v1/completions", {**ASK, "prompt": TEXT, "max_tokens": 0, "return_token_ids": True})
    (choice,) = answer["choices"]
    assert status == 200 and choice["text"] == TEXT and choice["token_ids"] == choice["versions"] == []
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    assert served.same_bits(choice["logprobs"]["token_logprobs"][1:], expected.prompt_logprobs[1:])
    plain = scoring.ask("/v1/completions", {"prompt": TEXT, "max_tokens": 0, "echo": True})[1]["choices"][0]
    assert plain["text"] == TEXT and plain["logprobs"] is None


def test_several_samples_and_prompts(scoring, expected):
    body = {**ASK, "prompt": [TEXT, "b"], "n": 2}
    choices = scoring.ask("/v1/completions", body)[1]["choices"]
    assert [c["text"].startswith(p) for c, p in zip(choices, (TEXT, TEXT, "b", "b"), strict=True)] == [True] * 4
    assert choices[0]["text"] == TEXT + expected.text
    first, second = (c["logprobs"]["token_logprobs"] for c in choices[:2])
    n = len(expected.prompt_ids)
    assert first[:n] == second[:n] and first[n:] != second[n:]


def test_what_is_refused(scoring, server):
    assert "leave out stream, or echo" in scoring.refused("/v1/completions", {**ASK, "prompt": "a", "stream": True})
    assert "max_tokens=0 must be" in scoring.refused("/v1/completions", {"prompt": "a", "max_tokens": 0})
    assert "prompt_logprobs=False" in server.refused("/v1/completions", {**ASK, "prompt": "a"})
    assert server.ask("/v1/completions", {"prompt": "a", "echo": True, "max_tokens": 1})[0] == 200

"""Log-probabilities beyond the sampled tokens' own: `echo` gives the prompt's, `top_logprobs` the likeliest tokens'."""

from __future__ import annotations

import types

import pytest

from isomodel.rollout import SamplingParams
from tests.isomodel.rollout import tiny
from tests.isomodel.rollout.server import served

ASK = {"max_tokens": 5, "seed": 2, "ignore_eos": True, "temperature": 0.7, "logprobs": 0, "echo": True}
PARAMS = SamplingParams(
    max_tokens=5, seed=2, ignore_eos=True, temperature=0.7, prompt_logprobs=True, top_logprobs=3
)
TEXT = "Ein Satz: é日."


@pytest.fixture(scope="module")
def scoring(folder):
    server = served.Served(folder, prompt_logprobs=True, top_logprobs=3)
    yield server
    server.close()


@pytest.fixture(scope="module")
def expected(folder, scoring):
    engine = tiny.engine(cfg=served.CONFIG, tokenizer=scoring.tokenizer, prompt_logprobs=True, top_logprobs=3)
    return engine.generate([scoring.tokenizer.encode(TEXT)], PARAMS)[0]


def spelled(server, top_ids, top_logprobs) -> list[list[tuple[str, float]]]:
    names = [[server.tokenizer.decode([i], skip_special_tokens=False) for i in ids] for ids in top_ids]
    return [list(zip(*pair, strict=True)) for pair in zip(names, top_logprobs.tolist(), strict=True)]


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


@pytest.mark.parametrize("stream", [False, True])
def test_the_likeliest_tokens_of_a_completion(scoring, expected, stream):
    extra = {"ignore_eos": True}
    asked = {"model": served.NAME, "prompt": TEXT, "max_tokens": 5, "seed": 2, "temperature": 0.7, "logprobs": 3}
    got = scoring.client().completions.create(stream=stream, extra_body=extra, **asked)
    pieces = [chunk.choices[0] for chunk in got] if stream else got.choices
    top = [found for piece in pieces for found in piece.logprobs.top_logprobs]
    tokens = [token for piece in pieces for token in piece.logprobs.tokens]
    want = spelled(scoring, expected.top_ids, expected.top_logprobs)
    for found, pairs, token, value in zip(top, want, tokens, expected.logprobs.tolist(), strict=True):
        first = dict(reversed(pairs))  # of tokens that look alike the likeliest
        assert found == {token: value} | first and found[token] == max(first.get(token, value), value)


@pytest.mark.parametrize("stream", [False, True])
def test_the_likeliest_tokens_of_a_chat(scoring, folder, stream):
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"model": served.NAME, "messages": messages, "max_tokens": 6, "seed": 2, "logprobs": True, "top_logprobs": 2}
    got = scoring.client().chat.completions.create(stream=stream, extra_body={"ignore_eos": True}, **asked)
    pieces = [chunk.choices[0] for chunk in got] if stream else got.choices
    content = [t for piece in pieces if piece.logprobs for t in piece.logprobs.content]
    params = SamplingParams(max_tokens=6, seed=2, ignore_eos=True, top_logprobs=2)
    engine = tiny.engine(cfg=served.CONFIG, prompt_logprobs=True, top_logprobs=3)
    (completion,) = engine.generate([scoring.tokenizer.apply_chat_template(messages)], params)
    want = spelled(scoring, completion.top_ids, completion.top_logprobs)
    assert [[(t.token, t.logprob) for t in found.top_logprobs] for found in content] == want
    assert served.same_bits([t.logprob for t in content], completion.logprobs)


def test_the_likeliest_tokens_as_ids(scoring, expected):
    body = {"prompt_ids": expected.prompt_ids.tolist(), "max_tokens": 5, "seed": 2, "ignore_eos": True, "temperature": 0.7}
    (sample,) = scoring.ask("/v1/rollout", {**body, "top_logprobs": 3})[1]["samples"]
    assert sample["top_ids"] == expected.top_ids.tolist()
    assert sample["top_logprobs"] == [[float(x) for x in row] for row in expected.top_logprobs]
    assert "top_ids" not in scoring.ask("/v1/rollout", body)[1]["samples"][0]


def test_the_likeliest_tokens_with_echo(scoring, expected):
    logprobs = scoring.ask("/v1/completions", {**ASK, "prompt": TEXT, "logprobs": 1})[1]["choices"][0]["logprobs"]
    n = len(expected.prompt_ids)
    assert logprobs["top_logprobs"][:n] == [None] * n
    assert all(len(found) in (1, 2) for found in logprobs["top_logprobs"][n:])


def test_more_than_the_server_computes(scoring, server):
    assert "top_logprobs=4, and the engine was made with top_logprobs=3" in scoring.refused("/v1/completions", {"prompt": "a", "logprobs": 4})
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1}
    assert "made with top_logprobs=0" in server.refused("/v1/chat/completions", body)

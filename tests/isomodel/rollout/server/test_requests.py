"""What a body may hold: every fault is named, in OpenAI's shape, and the nearest known name is offered."""

from __future__ import annotations

import json

import pytest

from isomodel.rollout.server.errors import ApiError
from isomodel.rollout.server.requests import ChatBody, CompletionBody, RolloutBody

MESSAGES = [{"role": "user", "content": "Hi"}]


def refusal(cls, body) -> ApiError:
    with pytest.raises(ApiError) as e:
        cls.parse(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert e.value.status == 400
    return e.value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "temprature": 1}, "temprature is unknown; did you mean 'temperature'?"),
        ({"prompt": "a", "max_token": 1}, "max_token is unknown; did you mean 'max_tokens'?"),
        ({}, "prompt is missing: it is a text, a list of texts"),
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": 3}, "prompt must be a text, a list of texts"),
        ({"prompt": [1, "a"]}, "prompt must be"),
        ({"prompt": [True]}, "prompt must be"),
        ({"prompt": [[1], [0.5]]}, "prompt must be"),
        ({"prompt": {"a": 1}}, "prompt must be"),
        ({"prompt": "a", "n": "2"}, "n must be an integer"),
        ({"prompt": "a", "n": True}, "n must be an integer"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"prompt": "a", "stream": 1}, "stream must be true or false"),
        ({"prompt": "a", "stop": [1]}, "stop must be a text or a list of texts"),
        ({"prompt": "a", "logprobs": 0.5}, "logprobs must be an integer >= 0"),
        ({"prompt": "a", "echo": 1}, "echo must be true or false"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty=0.5 is not offered here"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options must be"),
        ({"prompt": "a", "stream_options": {"other": True}}, "stream_options must be"),
    ],
    ids=str,
)
def test_faults_of_a_completion(body, message):
    assert message in refusal(CompletionBody, body).message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"prompt": "a"',
        b"\xff",
        b"[" * 100_000,
        b'{"temperature": NaN}',
        b'{"prompt": "\\ud800"}',
        b"1" * 5000,
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_what_is_no_json(raw):
    assert "no valid JSON" in refusal(CompletionBody, raw).message


@pytest.mark.parametrize("raw", [b"[]", b"3", b'"a"', b"null"])
def test_what_is_no_object(raw):
    assert "must be a JSON object" in refusal(CompletionBody, raw).message


def test_all_faults_at_once():
    message = refusal(CompletionBody, {"n": "x", "seed": [], "best_of": 4, "what": 1}).message
    assert all(name in message for name in ("n must", "seed must", "best_of=4", "what is unknown", "prompt is missing"))


def test_a_list_of_a_million_faults_gives_one_message():
    body = b'{"prompt_ids": [' + b'"a",' * 300_000 + b"1]}"
    assert refusal(RolloutBody, body).message == "prompt_ids must be a list of token ids, or a list of such lists"


def test_values_out_of_range_are_named_together():
    body = CompletionBody.parse(b'{"prompt": "a", "temperature": -1, "top_p": 0, "n": 0, "seed": -4}')
    with pytest.raises(ApiError) as e:
        body.sampling()
    assert all(name in e.value.message for name in ("temperature=-1", "top_p=0", "n=0", "seed=-4"))


def test_null_is_the_default_and_neutral_values_ask_for_nothing():
    raw = {"prompt": "a", "n": None, "echo": False, "best_of": 1, "logit_bias": {}, "suffix": None, "user": "me"}
    body = CompletionBody.parse(json.dumps(raw).encode())
    assert (body.n, body.max_tokens, body.sampling().max_tokens) == (1, 16, 16)
    assert ChatBody.parse(json.dumps({"messages": MESSAGES}).encode()).sampling().max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], []),
        ([[]], [[]]),
    ],
    ids=str,
)
def test_the_four_kinds_of_prompts(prompt, prompts):
    assert CompletionBody.parse(json.dumps({"prompt": prompt}).encode()).prompts() == prompts


def test_alternatives_of_chats_need_logprobs():
    assert "needs logprobs" in refusal(ChatBody, {"messages": MESSAGES, "top_logprobs": 2}).message
    ChatBody.parse(json.dumps({"messages": MESSAGES, "top_logprobs": 2, "logprobs": True}).encode())


def test_a_whole_number_is_an_integer_however_it_is_written():
    raw = b'{"prompt": [[1.0, 2], [3e0]], "n": 2.0, "seed": 9007199254740992.0, "stop_token_ids": [7.0], "temperature": 1.0}'
    body = CompletionBody.parse(raw)
    assert body.prompts() == [[1, 2], [3]] and body.sampling().stop_token_ids == (7,)
    assert (body.n, body.seed, body.temperature) == (2, 2**53, 1.0)
    for raw in (b'{"prompt": [1.5]}', b'{"prompt": "a", "n": 1e400}', b'{"prompt": "a", "seed": 1e19}', b'{"prompt": [[[1.0]]]}'):
        refusal(CompletionBody, raw)
    message = {"role": "user", "content": "a", "weight": 1.0}
    body = ChatBody.parse(json.dumps({"messages": [message], "chat_template_kwargs": {"x": 2.0}}).encode())
    assert str(body.chat()[0]["weight"]) == "1.0" and str(body.chat_template_kwargs["x"]) == "2.0", "what a template prints"


def test_parts_of_a_message():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = ChatBody.parse(json.dumps({"messages": [{"role": "user", "content": parts}, *MESSAGES]}).encode())
    assert body.chat() == [{"role": "user", "content": "ab"}, *MESSAGES]
    for content in ([{"type": "image_url"}], [1], [{"type": "text", "text": 1}], 3, {"a": 1}):
        with pytest.raises(ApiError, match="message 0"):
            ChatBody.parse(json.dumps({"messages": [{"role": "user", "content": content}]}).encode()).chat()

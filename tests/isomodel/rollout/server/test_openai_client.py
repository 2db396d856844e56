"""The official client, unchanged: what it gets is what the engine gives, whole or streamed."""

from __future__ import annotations

import dataclasses

import openai
import pytest

from isomodel.rollout import SamplingParams
from tests.isomodel.rollout.server import served

ASK = {"model": served.NAME, "max_tokens": 24, "temperature": 0.9, "seed": 5}
PARAMS = SamplingParams(max_tokens=24, temperature=0.9, seed=5)
MESSAGES = [{"role": "system", "content": "Sei kurz."}, {"role": "user", "content": "Grüße! 日本"}]


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def text_params(server) -> tuple[list[int], SamplingParams]:
    """A prompt and sampling whose completion has characters of several bytes."""
    return server.tokenizer.encode("Aé日"), dataclasses.replace(PARAMS, ignore_eos=True)


def test_completion_with_logprobs(server, client, folder):
    prompt = server.tokenizer.encode("The capital")
    (expected,) = served.alone(folder, prompt, PARAMS)
    got = client.completions.create(prompt="The capital", logprobs=0, extra_body={"return_token_ids": True}, **ASK)
    (choice,) = got.choices
    assert choice.text == expected.text and choice.finish_reason == expected.finish_reason
    assert choice.token_ids == expected.token_ids.tolist() and choice.prompt_token_ids == prompt
    assert served.same_bits(choice.logprobs.token_logprobs, expected.logprobs)
    spelled = [server.tokenizer.decode([i], skip_special_tokens=False) for i in expected.token_ids]
    assert choice.logprobs.tokens == spelled and choice.logprobs.text_offset[0] == 0 and choice.seed == 5
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(prompt), len(expected.token_ids))
    assert got.object == "text_completion" and got.model == served.NAME
    assert got.system_fingerprint == server.service.fingerprint and got.system_fingerprint.startswith("iso-")
    plain = client.completions.create(prompt="The capital", **ASK).choices[0]
    assert plain.text == choice.text and plain.logprobs is None


@pytest.mark.parametrize("kind", ["text", "texts", "ids", "lists of ids"])
def test_kinds_of_prompts_and_n(server, client, folder, kind):
    texts = ["One", "zwei"] if kind in ("texts", "lists of ids") else ["One"]
    ids = [server.tokenizer.encode(text) for text in texts]
    prompt = {"text": texts[0], "texts": texts, "ids": ids[0], "lists of ids": ids}[kind]
    expected = [c for p in ids for c in served.alone(folder, p, dataclasses.replace(PARAMS, n=2))]
    got = client.completions.create(prompt=prompt, n=2, **ASK)
    assert [c.index for c in got.choices] == list(range(2 * len(texts)))
    assert [c.text for c in got.choices] == [c.text for c in expected]
    assert got.choices[0].text != got.choices[1].text, "samples of one prompt differ"


def test_extensions_reach_the_sampler(server, client, folder):
    prompt = server.tokenizer.encode("x")
    for extra in ({"top_k": 3}, {"min_p": 0.3}, {"ignore_eos": True}, {"top_p": 0.5}):
        params = dataclasses.replace(PARAMS, n=3, **extra)
        expected = served.alone(folder, prompt, params)
        got = client.completions.create(prompt=prompt, n=3, extra_body=extra, **ASK)
        assert [c.text for c in got.choices] == [c.text for c in expected]
    whole = served.alone(folder, prompt, dataclasses.replace(PARAMS, ignore_eos=True))[0]
    stop = int(whole.token_ids[4])
    first = whole.token_ids.tolist().index(stop)
    extra = {"stop_token_ids": [stop], "return_token_ids": True, "ignore_eos": True}
    (choice,) = client.completions.create(prompt=prompt, extra_body=extra, **ASK).choices
    assert choice.token_ids == whole.token_ids[: first + 1].tolist()
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_a_stream_says_what_the_whole_answer_says(server, client, folder):
    prompt, params = text_params(server)
    expected = served.alone(folder, prompt, dataclasses.replace(params, n=3))
    extra = {"ignore_eos": True, "return_token_ids": True}
    stream = client.completions.create(
        prompt=prompt, n=3, stream=True, logprobs=0, stream_options={"include_usage": True}, extra_body=extra, **ASK
    )
    chunks = list(stream)
    assert len(chunks) > 3, "in pieces"
    assert len({c.id for c in chunks}) == 1
    last = chunks.pop()
    assert last.choices == [] and last.usage.completion_tokens == 72 and last.usage.prompt_tokens == len(prompt)
    for i, completion in enumerate(expected):
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == i]
        assert "".join(p.text for p in pieces) == completion.text
        assert [t for p in pieces for t in p.token_ids] == completion.token_ids.tolist()
        assert served.same_bits([x for p in pieces for x in p.logprobs.token_logprobs], completion.logprobs)
        assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert all(p.logprobs.text_offset == sorted(p.logprobs.text_offset) for p in pieces)


def test_a_stream_never_sends_a_part_of_a_stop_string(server, client, folder):
    prompt, params = text_params(server)
    whole = served.alone(folder, prompt, params)[0].text
    found = 0
    for at in range(2, len(whole) - 3, 2):
        stop = whole[at : at + 3]
        (expected,) = served.alone(folder, prompt, dataclasses.replace(params, stop=(stop,)))
        stream = client.completions.create(
            prompt=prompt, stop=stop, stream=True, extra_body={"ignore_eos": True}, **ASK
        )
        pieces = [chunk.choices[0] for chunk in stream]
        assert "".join(p.text for p in pieces) == expected.text
        assert pieces[-1].finish_reason == expected.finish_reason
        found += expected.finish_reason == "stop" and pieces[-1].stop_reason == stop
    assert found > 3


def test_chat(server, client, folder):
    prompt = server.tokenizer.apply_chat_template(MESSAGES)
    (expected,) = served.alone(folder, prompt, PARAMS)
    got = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=0, **ASK)
    (choice,) = got.choices
    assert choice.message.role == "assistant" and choice.message.content == expected.text
    content = choice.logprobs.content
    assert served.same_bits([t.logprob for t in content], expected.logprobs)
    assert all(t.bytes is None or bytes(t.bytes).decode() == t.token for t in content)
    assert got.usage.prompt_tokens == len(prompt) and got.object == "chat.completion"
    limited = client.chat.completions.create(model=served.NAME, messages=MESSAGES, max_completion_tokens=2, seed=5)
    assert limited.usage.completion_tokens == 2 and limited.choices[0].logprobs is None


def test_what_the_chat_template_reads(server, client, folder):
    prompt = server.tokenizer.apply_chat_template(MESSAGES, enable_thinking=False)
    assert prompt != server.tokenizer.apply_chat_template(MESSAGES)
    (expected,) = served.alone(folder, prompt, PARAMS)
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True}
    (choice,) = client.chat.completions.create(messages=MESSAGES, extra_body=extra, **ASK).choices
    assert choice.prompt_token_ids == prompt and choice.message.content == expected.text
    for given in ({"enable_thinkin": False}, {"chat_template": "x"}, {"messages": []}, {"tokenize": True}):
        with pytest.raises(openai.BadRequestError, match=f"does not read {next(iter(given))}"):
            client.chat.completions.create(messages=MESSAGES, extra_body={"chat_template_kwargs": given}, **ASK)


def test_chat_stream(server, client, folder):
    prompt = server.tokenizer.apply_chat_template(MESSAGES)
    expected = served.alone(folder, prompt, dataclasses.replace(PARAMS, n=2))
    chunks = list(client.chat.completions.create(messages=MESSAGES, n=2, logprobs=True, stream=True, **ASK))
    assert [c.delta.role for c in chunks[0].choices] == ["assistant", "assistant"]
    for i, completion in enumerate(expected):
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == i]
        assert "".join(p.delta.content or "" for p in pieces) == completion.text
        sent = [t.logprob for p in pieces if p.logprobs for t in p.logprobs.content]
        assert served.same_bits(sent, completion.logprobs)
        assert pieces[-1].finish_reason == completion.finish_reason


def test_models(client):
    assert [m.id for m in client.models.list()] == [served.NAME]
    assert client.models.retrieve(served.NAME).id == served.NAME
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; 'tiny' is"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.completions.create(model="other", prompt="a")


def test_refusals_are_the_clients_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="temprature is unknown; did you mean 'temperature'"):
        client.completions.create(prompt="a", model=served.NAME, extra_body={"temprature": 1})
    with pytest.raises(openai.BadRequestError, match="token 1 of the prompt is 300") as e:
        client.completions.create(prompt=[1, 300], model=served.NAME)
    assert e.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="refuses these messages"):
        client.chat.completions.create(model=served.NAME, messages=[{"role": "wizard", "content": "a"}])


def test_assigned_seeds_are_said_and_reproduce(server, client, folder):
    ask = {"model": served.NAME, "prompt": "again", "max_tokens": 12}
    first = client.completions.create(**ask).choices[0]
    again = client.completions.create(seed=first.seed, **ask).choices[0]
    other = client.completions.create(**ask).choices[0]
    assert again.text == first.text and other.seed != first.seed

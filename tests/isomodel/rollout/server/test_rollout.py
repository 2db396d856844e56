"""/v1/rollout: the engine's tokens and floats, bit for bit, whoever else asks; clients that go away leave nothing."""

from __future__ import annotations

import concurrent.futures
import json

import numpy as np
import pytest

from isomodel.rollout import SamplingParams
from tests.isomodel.rollout import tiny
from tests.isomodel.rollout.server import served

FIELDS = {
    "prompt", "index", "token_ids", "logprobs", "truncated_logprobs", "versions", "inv_temp", "finish_reason",
    "stop_reason", "seed",
}  # fmt: skip


def assert_is(sample: dict, completion) -> None:
    assert sample.keys() == FIELDS
    assert sample["token_ids"] == completion.token_ids.tolist()
    assert served.same_bits(sample["logprobs"], completion.logprobs)
    assert served.same_bits(sample["truncated_logprobs"], completion.truncated_logprobs)
    assert sample["versions"] == completion.versions.tolist() and sample["inv_temp"] == float(completion.inv_temp)
    assert (sample["finish_reason"], sample["seed"]) == (completion.finish_reason, completion.seed)
    assert (sample["stop_reason"], sample["index"]) == (completion.stop_reason, completion.index)


def test_tokens_in_tokens_out(server, folder):
    prompts = [p.tolist() for p in tiny.prompts(2)]
    body = {"n": 3, "max_tokens": 20, "temperature": 0.7, "top_p": 0.9, "seed": 2**64 - 1}
    status, answer = server.ask("/v1/rollout", {"prompt_ids": prompts, **body})
    assert status == 200 and answer["object"] == "rollout"
    assert answer["system_fingerprint"] == server.service.fingerprint
    expected = [c for p in prompts for c in served.alone(folder, p, SamplingParams(**body))]
    assert [s["prompt"] for s in answer["samples"]] == [0, 0, 0, 1, 1, 1]
    for sample, completion in zip(answer["samples"], expected, strict=True):
        assert_is(sample, completion)
    one = server.ask("/v1/rollout", {"prompt_ids": prompts[1], **body})[1]["samples"]
    assert [s["token_ids"] for s in one] == [s["token_ids"] for s in answer["samples"][3:]]
    assert_is(one[0], expected[3])


def test_the_comparison_sees_one_bit(folder):
    logprobs = served.alone(folder, [1, 2, 3], SamplingParams(max_tokens=4, seed=0))[0].logprobs
    assert served.same_bits(json.loads(json.dumps(logprobs.tolist())), logprobs)
    assert not served.same_bits(np.nextafter(logprobs, np.float32(0)).tolist(), logprobs)


def test_sixteen_clients_of_mixed_lengths_get_what_each_gets_alone(server, folder):
    prompts = tiny.prompts(16, seed=7, low=1, high=120)
    asks = [{"max_tokens": 3 + 5 * i, "temperature": 0.5 + i / 10, "seed": i, "n": 1 + i % 3} for i in range(16)]
    seen = []

    def ask(i: int) -> list[dict]:
        status, answer = server.ask("/v1/rollout", {"prompt_ids": prompts[i].tolist(), **asks[i]})
        seen.append(server.service.thread.stats.running)
        assert status == 200, answer
        return answer["samples"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        with server.held():  # all stand in the queue when the engine goes on
            running = [pool.submit(ask, i) for i in range(16)]
            served.wait_for(lambda: len(server.service.runs) == 16)
        answers = [future.result() for future in running]
    for prompt, ask_, samples in zip(prompts, asks, answers, strict=True):
        expected = served.alone(folder, prompt, SamplingParams(**ask_))
        for sample, completion in zip(samples, expected, strict=True):
            assert_is(sample, completion)
    assert max(seen) > 1, "they ran beside each other"


def test_prompt_logprobs_are_refused_where_the_engine_has_none(server):
    message = server.refused("/v1/rollout", {"prompt_ids": [1, 2], "prompt_logprobs": True})
    assert "prompt_logprobs=False" in message


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_pages(server, stream):
    body = {"prompt": list(range(100)), "n": 4, "max_tokens": 150, "ignore_eos": True, "stream": stream}
    completions = server.service.thread.stats.completions
    with server.slow():
        with server.connection() as connection:
            connection.request("POST", "/v1/completions", json.dumps(body))
            if stream:
                assert connection.getresponse().read(30).startswith(b"data: ")
            served.wait_for(lambda: server.service.thread.stats.running == 4)
            before = server.service.thread.stats
            assert before.pages_in_use > 0
        server.settled()
    after = server.service.thread.stats
    assert after.completions == completions + 4
    assert after.generated_tokens - before.generated_tokens < 4 * 100, "it was not run to its end"
    assert b'isomodel_requests_total{endpoint="/v1/completions",status="499"}' in server.service.metrics.text()


def test_a_client_that_goes_while_it_waits(server):
    with server.held():
        with server.connection() as connection:
            connection.request("POST", "/v1/rollout", json.dumps({"prompt_ids": [1, 2], "max_tokens": 200}))
            served.wait_for(lambda: len(server.service.runs) == 1)
        served.wait_for(lambda: not server.service.runs)
    server.settled()

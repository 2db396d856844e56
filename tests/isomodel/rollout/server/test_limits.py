"""Every limit, with what to do; health, metrics, contract; the administrative routes and their token."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from isomodel import weights
from isomodel.contract import Contract
from isomodel.rollout.server.limits import ServerLimits
from tests.isomodel.rollout import tiny
from tests.isomodel.rollout.server import served

BEARER = {"Authorization": f"Bearer {served.TOKEN}".encode()}
ROUTES = ("pause", "resume", "reset_prefix_cache", "update_weights")


def test_a_body_that_is_too_large(server):
    body = json.dumps({"prompt": "a" * served.LIMITS.body_bytes}).encode()
    assert "more than 20000 bytes" in server.refused("/v1/completions", body, 413)


def test_a_body_that_is_too_large_and_does_not_say_so(server):
    with socket.create_connection(("127.0.0.1", server.port), 30) as s:
        s.sendall(b"POST /v1/rollout HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        s.sendall(b"3000\r\n" + b" " * 0x3000 + b"\r\n3000\r\n" + b" " * 0x3000 + b"\r\n")
        assert b" 413 " in s.recv(100)


def test_a_body_that_does_not_come(server):
    with socket.create_connection(("127.0.0.1", server.port), 30) as s:
        s.sendall(b"POST /v1/rollout HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        start = time.monotonic()
        assert b" 408 " in s.recv(100)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": [1] * 201}, "prompt 0 has 201 tokens; at most 200 are taken"),
        ("/v1/completions", {"prompt": ["a", "b" * 201]}, "prompt 1 has 201 tokens; at most 200 are taken"),
        ("/v1/rollout", {"prompt_ids": [1] * 201}, "prompt 0 has 201 tokens; at most 200 are taken"),
        ("/v1/completions", {"prompt": "a", "n": 9}, "n=9; at most 8 samples"),
        ("/v1/rollout", {"prompt_ids": [1], "n": 0}, "n=0 must be an integer >= 1"),
        ("/v1/completions", {"prompt": ["a"] * 4}, "4 prompts; at most 3"),
        ("/v1/completions", {"prompt": ""}, "prompt 0: the prompt is empty"),
        ("/v1/completions", {"prompt": []}, "there is no prompt; give at least one"),
        ("/v1/rollout", {"prompt_ids": [[1], []]}, "prompt 1: the prompt is empty"),
        ("/v1/rollout", {"prompt_ids": [1, 300]}, "token 1 of the prompt is 300; the vocabulary has 0 to 299"),
        ("/v1/rollout", {"prompt_ids": [1, -1]}, "token 1 of the prompt is -1"),
        ("/v1/rollout", {"prompt_ids": [1, 2**70]}, "must be a list of token ids"),
        ("/v1/rollout", {"prompt_ids": [1], "stop_token_ids": [300]}, "outside the vocabulary"),
        ("/v1/rollout", {"prompt_ids": [1], "max_tokens": 0}, "max_tokens=0 must be"),
        ("/v1/rollout", {"prompt_ids": [1], "stop": ""}, "strings that are not empty"),
        ("/v1/rollout", b"{", "no valid JSON"),
        ("/v1/rollout", {"prompt": "a"}, "prompt is unknown; did you mean 'prompt_ids'?"),
        ("/v1/chat/completions", {"messages": []}, "there are no messages"),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "message 0 has no role"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_is_refused(server, path, body, message):
    assert message in server.refused(path, body)


def test_a_bad_request_harms_no_other(server, folder):
    answers = []
    good = threading.Thread(
        target=lambda: answers.append(server.ask("/v1/rollout", {"prompt_ids": [1, 2, 3], "seed": 1}))
    )
    with server.held():
        good.start()
        served.wait_for(lambda: len(server.service.runs) == 1)
        bad = threading.Thread(target=server.refused, args=("/v1/rollout", {"prompt_ids": [[4, 5], [300]]}))
        bad.start()
        served.wait_for(lambda: len(server.service.runs) == 2)
    good.join()
    bad.join()
    expected = served.alone(folder, [1, 2, 3], served.SamplingParams(seed=1))[0]
    (sample,) = answers[0][1]["samples"]
    assert sample["token_ids"] == expected.token_ids.tolist()


def test_too_many_requests(server):
    ask = {"prompt_ids": [1, 2], "max_tokens": 2}
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(server.ask("/v1/rollout", ask)[0])) for _ in range(20)]
    with server.held():
        for thread in threads:
            thread.start()
        served.wait_for(lambda: len(server.service.runs) == 20)
        assert "20 requests are in flight" in server.refused("/v1/rollout", ask, 429)
    for thread in threads:
        thread.join()
    assert answers == [200] * 20 and server.ask("/v1/rollout", ask)[0] == 200


def test_paths_and_methods(server):
    assert "there is no /v1/complete here" in server.refused("/v1/complete", {}, 404)
    assert server.ask("/v1/rollout", method="GET")[0] == 405
    paths = server.ask("/openapi.json")[1]["paths"]
    assert "temperature" in json.dumps(paths["/v1/rollout"]["post"]["requestBody"])


def test_the_description_has_this_servers_bounds(server):
    paths = server.ask("/openapi.json")[1]["paths"]
    schema = lambda path: paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]  # noqa: E731
    rollout, completions = schema("/v1/rollout")["properties"], schema("/v1/completions")["properties"]
    one, many = rollout["prompt_ids"]["anyOf"]
    assert one == {"items": {"type": "integer", "minimum": 0, "maximum": 299}, "type": "array", "minItems": 1, "maxItems": 200}
    assert many["items"] == one and (many["minItems"], many["maxItems"]) == (1, 3)
    assert (rollout["n"]["minimum"], rollout["n"]["maximum"]) == (1, 8) and rollout["model"]["enum"] == ["tiny", None]
    assert (rollout["max_tokens"]["minimum"], completions["max_tokens"]["minimum"]) == (1, 0), "with echo"
    assert rollout["top_logprobs"]["maximum"] == 0 and completions["best_of"]["enum"] == [1, None]
    for path in ("/v1/rollout", "/admin/pause"):
        assert {"200", "4XX", "503"} <= paths[path]["post"]["responses"].keys()


def test_limits_are_checked():
    with pytest.raises(ValueError, match="body_bytes=0 .*; n='a'"):
        ServerLimits(body_bytes=0, n="a")


def test_health_metrics_contract(server):
    assert server.ask("/health") == (200, {"status": "ok", "reason": None})
    contract = Contract.from_json(server.ask("/contract")[1])
    assert server.service.fingerprint == "iso-" + contract.identities.numerical[:16]

    def metric(name: str) -> float:
        with server.connection() as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).split()[-1])

    names = ("generated_tokens_total", "prompt_tokens_total", "prefix_hits_total", "step_seconds_count")
    names = [f"isomodel_{name}" for name in names]
    prompt = tiny.prompts(1, seed=11, low=40)[0].tolist()
    ask = {"prompt_ids": prompt, "max_tokens": 5, "ignore_eos": True}
    assert server.ask("/v1/rollout", ask)[0] == 200
    before = [metric(name) for name in names]
    label = 'isomodel_requests_total{endpoint="/v1/rollout",status="200"}'
    requests = metric(label)
    assert server.ask("/v1/rollout", ask)[0] == 200
    tokens, prompt_tokens, hits, steps = (metric(name) - was for name, was in zip(names, before, strict=True))
    assert (tokens, prompt_tokens, hits) == (5, len(prompt), len(prompt) // 16) and steps >= 2
    assert metric(label) == requests + 1
    assert metric("isomodel_pages") == 64 and metric("isomodel_pages_in_use") == metric("isomodel_running") == 0
    assert metric("isomodel_preemptions_total") >= 0 == metric("isomodel_waiting")


@pytest.mark.parametrize("route", ROUTES)
def test_administration_needs_the_token(server, route):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": served.TOKEN.encode()}):
        assert "admin token" in server.refused(f"/admin/{route}", {}, 403, **headers)


def test_pause_and_resume(server):
    answers = []
    ask = threading.Thread(
        target=lambda: answers.append(server.ask("/v1/rollout", {"prompt_ids": [1], "max_tokens": 2}))
    )
    try:
        assert server.ask("/admin/pause", b"", **BEARER) == (200, {"paused": True})
        served.wait_for(lambda: server.ask("/health") == (200, {"status": "paused", "reason": None}))
        ask.start()
        served.wait_for(lambda: server.service.thread.stats.waiting == 1)
        time.sleep(0.1)
        assert not answers
    finally:
        assert server.ask("/admin/resume", b"", **BEARER)[0] == 200
    ask.join()
    assert answers[0][0] == 200


def test_reset_prefix_cache(server):
    prompt = tiny.prompts(1, seed=12, low=40)[0].tolist()
    ask = {"prompt_ids": prompt, "max_tokens": 2, "seed": 3}
    first = server.ask("/v1/rollout", ask)[1]["samples"]
    hits = server.service.thread.stats.prefix_hits
    assert server.ask("/v1/rollout", ask)[1]["samples"] == first
    assert server.service.thread.stats.prefix_hits > hits, "it was cached"
    status, answer = server.ask("/admin/reset_prefix_cache", b"", **BEARER)
    assert status == 200 and answer["dropped_pages"] >= len(prompt) // 16
    hits = server.service.thread.stats.prefix_hits
    assert server.ask("/v1/rollout", ask)[1]["samples"] == first
    assert server.service.thread.stats.prefix_hits == hits


def test_update_weights(folder, tmp_path):
    other = tmp_path / "other"
    weights.save(other, served.CONFIG, tiny.params(1))
    server = served.Served(folder, admin_token="t")
    bearer = {"Authorization": "Bearer t"}
    ask = {"prompt_ids": [1, 2, 3], "max_tokens": 6, "seed": 3, "ignore_eos": True}

    def update(status: int, **body) -> dict:
        got, answer = server.ask("/admin/update_weights", body, **bearer)
        assert got == status, answer
        return answer

    try:
        old = server.ask("/v1/rollout", ask)[1]["samples"][0]
        assert "on_update must be" in str(update(400, folder=str(other), version=1, on_update="later"))
        assert "nothing has changed" in str(update(400, folder=str(tmp_path / "none"), version=1))
        assert "above the present version 0" in str(update(400, folder=str(other), version=0))
        assert "verson is unknown" in str(update(400, folder=str(other), verson=1))
        assert server.ask("/v1/rollout", ask)[1]["samples"][0] == old
        assert update(200, folder=str(other), version=7)["version"] == 7
        new = server.ask("/v1/rollout", ask)[1]["samples"][0]
        assert old["versions"] == [0] * 6 and new["versions"] == [7] * 6
        expected = tiny.engine(tiny.params(1), served.CONFIG).generate(
            [[1, 2, 3]], served.SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
        )[0]
        assert new["token_ids"] == expected.token_ids.tolist() and new["logprobs"] != old["logprobs"]
        assert served.same_bits(new["logprobs"], expected.logprobs)
        server.settled()
    finally:
        server.close()


def test_without_a_token_there_is_no_administration(folder):
    server = served.Served(folder)
    try:
        for route in ROUTES:
            server.refused(f"/admin/{route}", b"", 404, Authorization="Bearer None")
        assert not any("admin" in path for path in server.ask("/openapi.json")[1]["paths"])
    finally:
        server.close()

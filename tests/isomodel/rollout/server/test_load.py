"""64 clients at once, with too few pages for what they ask: each answer has the bits that it has alone.

The load is benchmarks.serve_load's, as a user runs it against a server of theirs; controls show that it sees one bit.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import socket

import numpy as np
import pytest
import rich.console

from benchmarks import report, serve_fuzz, serve_load
from benchmarks.live_server import Faulty, LiveServer
from benchmarks.serve_load import Answer, Choice
from tests.isomodel.rollout.server import served

LIMITS = dataclasses.replace(served.LIMITS, requests=100)


@pytest.fixture(scope="module")
def few_pages(folder):
    server = served.Served(folder, LIMITS, served.TOKEN, num_pages=13)
    yield server
    server.close()


@pytest.fixture
def live(few_pages):
    yield LiveServer(f"http://127.0.0.1:{few_pages.port}")
    few_pages.settled()


def test_64_clients_get_what_each_gets_alone(live, tmp_path, capsys):
    asked = serve_load.asks(live, 72, longest=80, max_tokens=80, gone=0.2, seed=1)
    found = serve_load.load(live, asked, 64)
    assert found.passed, (found.where, found.faults, found.leak)
    assert found.values > 2000 and found.preemptions > 0 and found.prefix_hits > 0 and found.gone > 5
    assert found.most_running > 4 and len(found.first_s) > 20
    kinds = {(ask.path, ask.body.get("stream", False)) for ask in asked}
    assert len(kinds) == 5 and {ask.body["n"] for ask in asked} == {1, 2, 4}
    serve_load.print_load(found, 64, rich.console.Console(width=120))
    assert re.search(rf"preemptions +│ +{found.preemptions} │", capsys.readouterr().out)
    results = tmp_path / "results.jsonl"
    serve_load.record(found, "A/Model", 64, "a command", "a GPU", results)
    rows = report.load(results)
    assert [row.id for row in rows] == ["server-load-a-model" + end for end in ("", "-rate", "-first-token")]
    assert rows[0].ours == 0 and rows[0].met


@contextlib.contextmanager
def a_bit_more_in_company(server):
    """Log-probabilities are one ULP off while two samples or more run side by side."""
    runner, in_company = server.engine._runner, []
    start, result = runner.start, runner.result

    def started(plan, after=None):
        running = start(plan, after)
        if len(plan.samples) > 1:
            in_company.append(running)
        return running

    def wrong(running):
        found = result(running)
        if any(running is other for other in in_company):
            lower = np.nextafter(found.chosen.logprobs, np.float32(-np.inf))
            found.chosen = found.chosen._replace(logprobs=lower)
        return found

    runner.start, runner.result = started, wrong
    try:
        yield
    finally:
        runner.start, runner.result = start, result


def test_control_one_ulp_in_company_is_seen(few_pages, live):
    asked = [serve_load.Ask("/v1/rollout", {"prompt_ids": [1, 2, i], "seed": i, "max_tokens": 30}) for i in range(8)]
    with a_bit_more_in_company(few_pages):
        found = serve_load.load(live, asked, 8)
    assert not found.passed and found.different > 0 and found.where and not found.faults


def test_control_a_page_that_is_held_is_seen(few_pages, live):
    pages = few_pages.on_engine(lambda engine: engine._pool.allocate(1))
    with pytest.raises(Faulty, match="pages_in_use 1"):
        live.settled(0.1)
    few_pages.on_engine(lambda engine: engine._pool.release(pages))


def test_a_request_that_fails_is_told(live):
    asked = [serve_load.Ask("/v1/rollout", {"prompt_ids": ids, "max_tokens": 3, "seed": 1}) for ids in ([300], [1])]
    found = serve_load.load(live, asked, 2)
    assert not found.passed and found.values == 8 and found.different == 0
    assert len(found.faults) == 2 and all("request 0: 400" in fault for fault in found.faults)


WHOLE = Answer({0: Choice([1, 2], [-0.5, -0.25], "ab", "length")})


def changed(**fields) -> Answer:
    answer = copy.deepcopy(WHOLE)
    answer.choices[0] = dataclasses.replace(answer.choices[0], **fields)
    return answer


@pytest.mark.parametrize(
    ("other", "different"),
    [
        (WHOLE, 0),
        (changed(token_ids=[1, 3]), 1),
        (changed(logprobs=[-0.5, float(np.nextafter(np.float32(-0.25), np.float32(0)))]), 1),
        (changed(token_ids=[1], logprobs=[-0.5]), 2),
        (changed(token_ids=[1, 2, 3], logprobs=[-0.5, -0.25, -1.0]), 2),
        (changed(text="ac"), 1),
        (changed(finish_reason="stop"), 1),
        (Answer({}), 1),
        (Answer(WHOLE.choices | {1: Choice()}), 1),
    ],
)
def test_what_is_compared(other, different):
    assert serve_load.compare(other, WHOLE)[1] == different


def test_of_a_client_that_went_away_what_it_had_is_compared():
    part = dataclasses.replace(changed(token_ids=[1], logprobs=[-0.5], text="a", finish_reason=None), gone=True)
    assert serve_load.compare(part, WHOLE) == (3, 0)
    part.choices[0].logprobs = [-0.75]
    assert serve_load.compare(part, WHOLE) == (3, 1)
    assert serve_load.compare(Answer(gone=True), WHOLE) == (0, 0)


@pytest.mark.parametrize("script", [serve_load, serve_fuzz])
def test_no_server(script, capsys):
    with socket.create_server(("127.0.0.1", 0)) as s:
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
    assert script.main(["--url", url]) == 2 and "is it up yet?" in capsys.readouterr().err
    assert script.main(["--url", "nowhere"]) == 2 and "is not like" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://a", "http://a/v1"])
def test_an_address_that_is_none(url):
    with pytest.raises(ValueError, match="is not like"):
        LiveServer(url)

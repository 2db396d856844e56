"""New weights while requests are in flight: streams go on, every token says its version, and has that version's bits."""

from __future__ import annotations

import contextlib
import json
import threading

import numpy as np
import pytest

from isomodel import weights
from isomodel.rollout import SamplingParams
from tests.isomodel.rollout import tiny
from tests.isomodel.rollout.server import served

BEARER = {"Authorization": "Bearer t"}
LONG = {"prompt": [1, 2, 3], "max_tokens": 80, "seed": 3, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
LONG_PARAMS = SamplingParams(max_tokens=80, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "other"
    weights.save(folder, served.CONFIG, tiny.params(1))
    return folder


@pytest.fixture
def mine(folder):
    server = served.Served(folder, admin_token="t")
    yield server
    server.close()


def under_new_weights(prompt, params) -> list:
    return tiny.engine(tiny.params(1), served.CONFIG, prefix_cache=False).generate([prompt], params)


class Stream:
    """A stream of LONG that is read piece by piece."""

    def __init__(self, server):
        self.token_ids, self.logprobs, self.versions = [], [], []
        self._exit = contextlib.ExitStack()
        connection = self._exit.enter_context(server.connection())
        connection.request("POST", "/v1/completions", json.dumps({**LONG, "stream": True}))
        self._response = connection.getresponse()

    def piece(self) -> bool:
        """Reads one; False after the last."""
        while not (line := self._response.readline()).startswith(b"data: "):
            assert line, "the stream broke"
        if line == b"data: [DONE]\n":
            self._exit.close()
            return False
        (choice,) = json.loads(line[6:])["choices"]
        self.token_ids += choice["token_ids"]
        self.logprobs += choice["logprobs"]["token_logprobs"]
        self.versions += choice["versions"]
        return True

    def rest(self) -> int:
        count = 0
        while self.piece():
            count += 1
        return count


class Update(threading.Thread):
    """Asks for new weights; `answer` is there once they sample."""

    def __init__(self, server, folder, on_update: str, version: int = 1):
        super().__init__(daemon=True)
        self.answer = None
        self._ask = (server, {"folder": str(folder), "version": version, "on_update": on_update})
        self.start()

    def run(self) -> None:
        server, body = self._ask
        self.answer = server.ask("/admin/update_weights", body, **BEARER)


def assert_is(stream, completion) -> None:
    assert stream.token_ids == completion.token_ids.tolist() and served.same_bits(stream.logprobs, completion.logprobs)


def test_streams_go_on_until_the_old_weights_are_done(mine, folder, other):
    with mine.slow():
        stream = Stream(mine)
        stream.piece()
        update = Update(mine, other, "finish")
        served.wait_for(lambda: mine.engine.updating)
        seen = len(stream.token_ids)
        late = {}
        ask = {"prompt_ids": [1, 2, 3], "max_tokens": 4, "seed": 3, "ignore_eos": True}
        waits = threading.Thread(target=lambda: late.update(mine.ask("/v1/rollout", ask)[1]), daemon=True)
        waits.start()
        served.wait_for(lambda: mine.service.thread.stats.waiting == 1)
        for _ in range(5):
            stream.piece()
        assert mine.engine.updating and update.answer is None and mine.engine.version == 0
        assert len(stream.token_ids) >= seen + 5 and not late
        assert "version 1 is on its way" in mine.refused(
            "/admin/update_weights", {"folder": str(other), "version": 2}, 400, **BEARER
        )
        stream.rest()
        update.join(30)
        waits.join(30)
    assert update.answer[0] == 200 and update.answer[1]["version"] == 1 and update.answer[1]["dropped_pages"] >= 5
    assert stream.versions == [0] * 80
    assert_is(stream, served.alone(folder, [1, 2, 3], LONG_PARAMS)[0])
    (sample,) = late["samples"]
    (expected,) = under_new_weights([1, 2, 3], SamplingParams(max_tokens=4, seed=3, ignore_eos=True))
    assert sample["versions"] == [1] * 4 and sample["token_ids"] == expected.token_ids.tolist()
    assert served.same_bits(sample["logprobs"], expected.logprobs)
    mine.settled()


def test_a_stream_continues_under_the_new_weights(mine, folder, other):
    with mine.slow():
        stream = Stream(mine)
        for _ in range(3):
            stream.piece()
        update = Update(mine, other, "continue")
        stream.rest()
        update.join(30)
    old = stream.versions.count(0)
    assert 0 < old < 80 and stream.versions == [0] * old + [1] * (80 - old)
    before = served.alone(folder, [1, 2, 3], LONG_PARAMS)[0]
    assert stream.token_ids[:old] == before.token_ids[:old].tolist()
    prefix = [1, 2, 3, *stream.token_ids[:old]]
    (after,) = under_new_weights(prefix, SamplingParams(max_tokens=80 - old, seed=3, ignore_eos=True))
    assert stream.token_ids[old:] == after.token_ids.tolist()
    assert served.same_bits(stream.logprobs, np.concatenate([before.logprobs[:old], after.logprobs]))
    mine.settled()


def test_restart_takes_back_what_nobody_has_seen(mine, other):
    body = {"prompt_ids": [1, 2, 3], "max_tokens": 80, "seed": 3, "ignore_eos": True, "n": 2}
    got = {}
    with mine.slow():
        ask = threading.Thread(target=lambda: got.update(mine.ask("/v1/rollout", body)[1]), daemon=True)
        ask.start()
        served.wait_for(lambda: mine.service.thread.stats.generated_tokens > 20)
        update = Update(mine, other, "restart")
        update.join(30)
        assert update.answer[0] == 200 and ask.is_alive()
        ask.join(30)
    expected = under_new_weights([1, 2, 3], SamplingParams(max_tokens=80, seed=3, ignore_eos=True, n=2))
    for sample, completion in zip(got["samples"], expected, strict=True):
        assert sample["versions"] == [1] * 80 and sample["token_ids"] == completion.token_ids.tolist()
        assert served.same_bits(sample["logprobs"], completion.logprobs)
    mine.settled()


def test_restart_is_refused_where_a_stream_has_sent_tokens(mine, folder, other):
    with mine.slow():
        stream = Stream(mine)
        stream.piece()
        update = Update(mine, other, "restart")
        update.join(30)
        stream.rest()
    assert update.answer[0] == 400 and "1 streams have sent" in update.answer[1]["error"]["message"]
    assert stream.versions == [0] * 80
    assert_is(stream, served.alone(folder, [1, 2, 3], LONG_PARAMS)[0])


def test_a_paused_engine_finishes_what_is_in_flight_and_stays_paused(mine, other):
    with mine.slow():
        stream = Stream(mine)
        stream.piece()
        assert mine.ask("/admin/pause", b"", **BEARER)[0] == 200
        served.wait_for(lambda: mine.service.thread.paused)
        update = Update(mine, other, "finish")
        stream.rest()
        update.join(30)
    assert update.answer[0] == 200 and stream.versions == [0] * 80
    assert mine.ask("/health")[1]["status"] == "paused"


def test_an_engine_that_fails_meanwhile_ends_the_update(mine, other):
    with mine.slow():
        stream = Stream(mine)
        stream.piece()
        update = Update(mine, other, "finish")
        served.wait_for(lambda: mine.engine.updating)

        def fail():
            raise RuntimeError("out of luck")

        mine.engine.step = fail
        update.join(30)
    assert update.answer[0] == 500 and "out of luck" in update.answer[1]["error"]["message"]

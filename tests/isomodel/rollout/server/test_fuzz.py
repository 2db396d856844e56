"""A few hundred of the requests that benchmarks.serve_fuzz sends by the hundred thousand; controls show what it sees."""

from __future__ import annotations

import functools
import json
import random
import types

import pytest
import rich.console

from benchmarks import serve_fuzz
from benchmarks.live_server import LiveServer
from isomodel.rollout.server.service import Service
from tests.isomodel.rollout import tiny
from tests.isomodel.rollout.server import served


@pytest.fixture
def live(server):
    return LiveServer(f"http://127.0.0.1:{server.port}")


def test_whatever_is_sent_the_server_stays_well(live, capsys):
    found = serve_fuzz.fuzz(live, 400, seed=3, share=0.1)
    assert found.passed, (found.faults[:5], found.leak)
    assert found.sent.total() >= 400 and found.watched > 10
    assert found.sent.keys() == {*serve_fuzz.SHARES, "described, positive", "described, negative"}
    for kind in ("valid", "fields changed", "described, positive"):
        assert found.statuses[kind]["200"] > 2, "some of them ran"
    serve_fuzz.print_found(found, rich.console.Console(width=100))
    said = capsys.readouterr().out
    assert all(kind in said for kind in found.sent) and "0 faults" in said


def test_control_a_route_that_fails_is_seen(live, monkeypatch):
    real = Service.check_name

    def check_name(self, name):
        if name == "x":
            raise RuntimeError("not thought of")
        real(self, name)

    monkeypatch.setattr(Service, "check_name", check_name)
    monkeypatch.setattr(serve_fuzz, "changed", lambda rng, path: json.dumps({"model": "x", **serve_fuzz.valid(rng, path)}).encode())
    monkeypatch.setitem(serve_fuzz.BODIES, "fields changed", serve_fuzz.changed)
    found = serve_fuzz.fuzz(live, 60, share=0)
    assert not found.passed and all(fault.startswith("500") for fault in found.faults)
    assert found.statuses["fields changed"] == {"500": found.sent["fields changed"]}


def test_control_a_page_that_is_held_and_other_bits_are_seen(folder, monkeypatch):
    server = served.Served(folder)
    live = LiveServer(f"http://127.0.0.1:{server.port}")
    monkeypatch.setattr(LiveServer, "settled", functools.partialmethod(LiveServer.settled, 0.1))
    try:
        found = serve_fuzz.Found()
        serve_fuzz.watch(live, found)
        server.on_engine(lambda engine: engine.update_weights(tiny.params(1), 1))
        serve_fuzz.watch(live, found)
        assert found.faults == ["the known request has other bits than at first"]
        server.on_engine(lambda engine: engine._pool.allocate(1))
        found = serve_fuzz.fuzz(live, 10, share=0)
        assert not found.faults and "pages_in_use 1" in found.leak and not found.passed
    finally:
        server.close()


def test_control_an_answer_beyond_the_description_is_seen(live, server):
    found = serve_fuzz.Found()
    routes = server.server.config.app.openapi_schema or server.server.config.app.openapi()
    said = routes["paths"]["/v1/rollout"]["post"]["responses"]
    errors = said.pop("4XX")
    try:
        serve_fuzz.described(live, 18, 0, found)
    finally:
        said["4XX"] = errors
    assert found.faults and all("Undocumented status code" in fault for fault in found.faults)


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (200, b"anything", None),
        (400, b'{"error": {"message": "a", "type": "b", "param": null, "code": null}}', None),
        (400, b'{"error": {"message": "", "type": "b", "param": null, "code": null}}', "without its parts"),
        (400, b'{"error": {"message": "a"}}', "without its parts"),
        (422, b'{"detail": []}', "none of ours"),
        (400, b"Bad Request", "none of ours"),
        (503, b'{"error": {}}', "error"),
    ],
)
def test_what_is_wrong_with_an_answer(status, body, fault):
    said = serve_fuzz.wrong(types.SimpleNamespace(status=status), body, "/v1/rollout", "POST")
    assert said is None if fault is None else fault in said


@pytest.mark.parametrize("path", serve_fuzz.PATHS)
def test_valid_bodies_are(server, path):
    rng = random.Random(5)
    for _ in range(10):
        body = serve_fuzz.valid(rng, path)
        if not body.get("stream"):
            assert server.ask(path, body)[0] == 200, body

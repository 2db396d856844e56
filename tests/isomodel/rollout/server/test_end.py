"""How a server ends: it drains on a signal, and an engine that fails says so to everyone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import openai
import pytest

from isomodel import cli
from tests.isomodel.rollout.server import served

ASK = {"prompt_ids": [1, 2, 3], "max_tokens": 60, "seed": 1, "ignore_eos": True}


def in_flight(server, count: int = 1) -> tuple[list, list[threading.Thread]]:
    """Answers that will come, and the threads that wait for them."""
    answers: list = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.ask("/v1/rollout", ASK)), daemon=True)
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    served.wait_for(lambda: len(server.service.runs) == count)
    return answers, threads


def test_a_signal_drains(folder):
    server = served.Served(folder)
    expected = served.alone(folder, [1, 2, 3], served.SamplingParams(max_tokens=60, seed=1, ignore_eos=True))[0]
    with server.held():
        answers, threads = in_flight(server, 3)
        server.server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.5)  # uvicorn looks ten times a second whether it should close its door
        assert "shutting down" in server.refused("/v1/rollout", ASK, 503)
        assert server.ask("/health")[1]["status"] == "draining" and server.ask("/health")[0] == 503
    for thread in threads:
        thread.join(30)
    assert [status for status, _ in answers] == [200] * 3
    assert all(answer["samples"][0]["token_ids"] == expected.token_ids.tolist() for _, answer in answers)
    server.join()


def test_a_paused_engine_drains_too(folder):
    server = served.Served(folder)
    server.service.thread.set_paused(True)
    answers, threads = in_flight(server)
    server.server.handle_exit(signal.SIGTERM, None)
    threads[0].join(30)
    assert answers[0][0] == 200
    server.join()


def test_a_second_signal_ends_at_once(folder):
    server = served.Served(folder)
    with server.held():
        answers, threads = in_flight(server)
        server.server.handle_exit(signal.SIGTERM, None)
        server.server.handle_exit(signal.SIGTERM, None)
    threads[0].join(30)
    assert answers[0][0] == 503 and "end at once" in answers[0][1]["error"]["message"]
    server.join()


def test_an_engine_that_fails(folder):
    server = served.Served(folder)
    real = server.engine.step
    try:
        with server.held():
            answers, threads = in_flight(server, 2)
            server.engine.step = fail
        for thread in threads:
            thread.join(30)
        assert [status for status, _ in answers] == [500, 500]
        assert all("RuntimeError: out of luck" in answer["error"]["message"] for _, answer in answers)
        assert server.ask("/health")[0] == 503 and "out of luck" in server.ask("/health")[1]["reason"]
        server.engine.step = real
        assert "restart the server" in server.refused("/v1/rollout", ASK, 503)
        with pytest.raises(openai.InternalServerError, match="out of luck"):
            server.client().completions.create(model=served.NAME, prompt="a")
    finally:
        server.close()


def test_an_engine_that_fails_under_a_stream(folder):
    server = served.Served(folder)
    real, looks = server.engine.step, []

    def step():
        looks.append(1)
        return real() if len(looks) < 4 else fail()

    server.engine.step = step
    try:
        extra = {"ignore_eos": True, "return_token_ids": True}
        stream = server.client().completions.create(
            model=served.NAME, prompt=[1], max_tokens=99, stream=True, extra_body=extra
        )
        tokens = []
        with pytest.raises(openai.APIError, match="out of luck"):
            for chunk in stream:
                tokens += chunk.choices[0].token_ids
        assert len(tokens) == 1 + 2 * 4, "what was there before was sent"
    finally:
        server.close()


def fail():
    raise RuntimeError("out of luck")


def test_the_command(folder):
    """In a process of its own: it serves, and SIGTERM ends it with exit code 0."""
    environment = os.environ | {"ISOMODEL_ADMIN_TOKEN": "t", "PYTHONUNBUFFERED": "1"}
    words = [
        "serve",
        folder,
        "--port",
        "0",
        "--name",
        "mine",
        "--max-seqs",
        "2",
        "--max-model-len",
        "64",
        "--max-n",
        "2",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "isomodel.cli", *map(str, words)], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        said = ""
        while "serving mine at http://127.0.0.1:" not in said:
            assert (line := process.stderr.readline()), f"it ended: {said}"
            said += line
        server = Remote(int(said.split("127.0.0.1:")[1].split()[0]))
        assert [m["id"] for m in server.ask("/v1/models")[1]["data"]] == ["mine"]
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True}
        assert server.ask("/v1/chat/completions", body)[1]["usage"]["completion_tokens"] == 3
        assert "at most 2 samples" in server.refused("/v1/chat/completions", body | {"n": 3})
        assert server.ask("/admin/resume", b"", Authorization="Bearer t")[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "SIGTERM: 0 requests in flight" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


class Remote(served.Served):
    """A server of another process."""

    def __init__(self, port: int):
        self.port = port


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-n", "0"], "n=0 must be an integer >= 1"),
        (["--admin-token", " "], "the admin token is empty"),
        (["--port", "70000"], "port 70000"),
    ],
    ids=str,
)
def test_the_command_refuses(folder, capsys, words, message):
    assert cli.main(["serve", str(folder), *words]) == 2
    assert message in capsys.readouterr().err

"""A server on the tiny model in this process, at a real port, and ways to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import json
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import openai
import tokenizers
from transformers import PreTrainedTokenizerFast

from isomodel import contract, weights
from isomodel.rollout import Completion, SamplingParams
from isomodel.rollout.server.limits import ServerLimits
from isomodel.rollout.server.process import DrainingServer
from isomodel.rollout.server.service import Service
from isomodel.tokenizer import Tokenizer
from tests.isomodel.rollout import tiny

CONFIG = dataclasses.replace(tiny.CONFIG, eos_token_ids=(258,))
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('role ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>"
    "{% endfor %}<|im_start|>assistant:"
    "{% if enable_thinking is defined and enable_thinking is false %}(no thoughts){% endif %}"
)
NAME = "tiny"
LIMITS = ServerLimits(body_bytes=20_000, body_seconds=1, prompt_tokens=200, prompts=3, n=8, requests=20)
TOKEN = "a-secret-é"


def write_model(folder: Path) -> Path:
    """A folder with random weights and a byte-level tokenizer of 256 + 3 ids."""
    weights.save(folder, CONFIG, tiny.params())
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = tokenizers.decoders.ByteLevel()
    byte_level.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="<|im_end|>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    return folder


class Served:
    """A running server. `alone` gives what the engine gives for the same request with nothing beside it."""

    def __init__(
        self,
        folder: Path,
        limits: ServerLimits = ServerLimits(),
        admin_token: str | None = None,
        port: int = 0,
        **sizes,
    ):
        self.tokenizer = Tokenizer(folder)
        self.engine = tiny.engine(cfg=CONFIG, tokenizer=self.tokenizer, **sizes)
        self.service = Service(self.engine, self.tokenizer, _contract(), NAME, limits, admin_token)
        listener = socket.create_server(("127.0.0.1", port))
        self.port = listener.getsockname()[1]
        self.server = DrainingServer(self.service)
        self._thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self._thread.start()
        wait_for(lambda: self.server.started)

    def close(self) -> None:
        self.server.should_exit = True
        self.join()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server has not ended"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60)

    @contextlib.contextmanager
    def connection(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            yield connection
        finally:
            connection.close()

    def ask(self, path: str, body=None, method: str | None = None, **headers) -> tuple[int, dict]:
        """(status, JSON) of one request; a body that is no bytes is sent as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        with self.connection() as connection:
            connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def refused(self, path: str, body, status: int = 400, **headers) -> str:
        """Message of a refusal, whose shape is OpenAI's."""
        got, answer = self.ask(path, body, **headers)
        assert got == status, (got, answer)
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        return answer["error"]["message"]

    def on_engine(self, function):
        """Runs `function(engine)` on the engine's thread."""
        return asyncio.run(self.service.thread.call(function))

    @contextlib.contextmanager
    def held(self):
        """The engine's thread stands still inside, as in a long step."""
        release = threading.Event()
        order = threading.Thread(target=self.on_engine, args=(lambda engine: release.wait(30),))
        order.start()
        try:
            yield
        finally:
            release.set()
            order.join()

    @contextlib.contextmanager
    def slow(self):
        """Steps take so long inside that others can act between them."""
        step = self.engine.step

        def slowly():
            time.sleep(0.03)
            return step()

        self.engine.step = slowly
        try:
            yield
        finally:
            self.engine.step = step

    def settled(self) -> None:
        """Waits for all requests to end, then looks whether the engine holds anything that it should not."""
        wait_for(lambda: not self.service.runs)
        self.on_engine(lambda engine: engine.check())
        stats = self.on_engine(lambda engine: engine.stats())
        assert (stats.running, stats.waiting, stats.pages_in_use) == (0, 0, 0)


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@functools.cache
def _contract():
    return contract.derive(CONFIG, tiny.BF16, tiny.engine(cfg=CONFIG).traces())


@functools.cache
def _alone_engine(folder: Path):
    return tiny.engine(cfg=CONFIG, tokenizer=Tokenizer(folder), prefix_cache=False)


def alone(folder: Path, prompt, sampling: SamplingParams) -> list[Completion]:
    """The n completions of one prompt by an engine that runs nothing else."""
    return _alone_engine(folder).generate([prompt], sampling)


def same_bits(sent: list[float], expected: np.ndarray) -> bool:
    """Whether JSON's numbers are the float32 numbers, bit for bit."""
    exact = [float(x) for x in expected]
    return sent == exact and np.float32(sent).tobytes() == expected.tobytes()


def main() -> None:
    """`python -m tests.isomodel.rollout.server.served PORT` serves the tiny model until Ctrl-C, with few pages, for
    benchmarks.serve_load and benchmarks.serve_fuzz."""
    with tempfile.TemporaryDirectory() as folder:
        limits = dataclasses.replace(LIMITS, requests=256, n=4, prompts=2)
        sizes = {"num_pages": 8, "max_model_len": 64, "prompt_logprobs": True, "top_logprobs": 2, "return_logits": False}
        server = Served(write_model(Path(folder)), limits, TOKEN, int(sys.argv[1]), **sizes)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        server.close()


if __name__ == "__main__":
    main()

"""Service: what the routes share; Run: one request from its arrival to the end of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import Request

from isomodel.contract import Contract
from isomodel.rollout.engine import Engine
from isomodel.rollout.outputs import Completion
from isomodel.rollout.sampling_params import SamplingParams
from isomodel.rollout.server.engine_thread import EngineThread, Ticket
from isomodel.rollout.server.errors import ApiError, Disconnected
from isomodel.rollout.server.limits import ServerLimits
from isomodel.rollout.server.metrics import ServerMetrics
from isomodel.tokenizer import Tokenizer


class Service:
    """An engine with its tokenizer, contract, limits and metrics, and the requests in flight.

    Attributes:
      name: of the served model. fingerprint: `system_fingerprint` of answers, the contract's numerical identity.
      draining: no request is taken any more.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        contract: Contract,
        name: str,
        limits: ServerLimits = ServerLimits(),
        admin_token: str | None = None,
    ):
        """`engine` belongs to this object from now on. Without an `admin_token` there are no administrative routes."""
        self.tokenizer, self.contract, self.name, self.limits = tokenizer, contract, name, limits
        self.admin_token = admin_token
        self.cfg, self.config, self.numerics = engine.cfg, engine.config, engine.numerics
        self.fingerprint = f"{contract.numerics['mode']}-{contract.identities.numerical[:16]}"
        self.metrics = ServerMetrics()
        self.thread = EngineThread(engine, self.metrics.stepped)
        self.metrics.show_engine(lambda: self.thread.stats, lambda: self.thread.version)
        self.draining = False
        self.runs: set[Run] = set()
        # The first encoding may change the tokenizer's own settings, which two threads must not do at one time.
        tokenizer.encode("a")

    @property
    def prompt_limit(self) -> int:
        """Most tokens of a prompt."""
        room = self.config.max_model_len - 1
        return room if self.limits.prompt_tokens is None else min(room, self.limits.prompt_tokens)

    def drain(self) -> None:
        """Takes no more requests; those in flight finish, also when the engine was paused."""
        self.draining = True
        self.thread.set_paused(False)

    def admit(self, request: Request, endpoint: str) -> Run:
        """Counts a request in.

        Raises:
          ApiError: 503 while draining or when the engine has failed; 429 when there are too many.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down; ask another one", code="shutting_down")
        if self.thread.fault:
            raise ApiError(503, self.thread.fault, code="engine_failed")
        if len(self.runs) >= self.limits.requests:
            message = f"{self.limits.requests} requests are in flight, the most that are taken; try again later"
            raise ApiError(429, message, code="too_many_requests")
        run = Run(self, request, endpoint)
        self.runs.add(run)
        return run

    def check_name(self, name: str | None) -> None:
        """Raises ApiError 404 when a request names another model."""
        if name is not None and name != self.name:
            raise ApiError(
                404, f"model {name[:200]!r} is not served here; {self.name!r} is", param="model", code="model_not_found"
            )


class Run:
    """One request in flight. `close` ends it, whatever state it is in, and frees what it held in the engine.

    Attributes:
      status: of the answer, for the metrics.
    """

    def __init__(self, service: Service, request: Request, endpoint: str):
        self.service, self.status = service, 200
        self._request, self._endpoint = request, endpoint
        self._ticket: Ticket | None = None
        self._watcher: asyncio.Task | None = None
        self._left = 0

    async def body(self) -> bytes:
        """The request's body.

        Raises:
          ApiError: 413, it is too large; 408, it does not come.
          Disconnected: the client has gone.
        """
        limits, parts, size = self.service.limits, [], 0
        too_large = ApiError(
            413, f"the body has more than {limits.body_bytes} bytes, the most that are taken; send less"
        )
        if int(self._request.headers.get("content-length", 0)) > limits.body_bytes:
            raise too_large
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await self._request.receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limits.body_bytes:
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError as e:
            raise ApiError(408, f"the body did not arrive within {limits.body_seconds} s") from e

    async def start(
        self, prompts: Sequence[str | list[int]], params: SamplingParams, *, stream: bool
    ) -> list[list[int]]:
        """Gives the request to the engine; returns the prompts' token ids.

        Raises:
          ApiError: a limit is exceeded, or the engine refuses the request.
          Disconnected: the client has gone.
        """
        limits = self.service.limits
        if len(prompts) > limits.prompts:
            raise ApiError(400, f"{len(prompts)} prompts; at most {limits.prompts} are taken in one request")
        if not prompts:
            raise ApiError(400, "there is no prompt; give at least one")
        if params.n > limits.n:
            raise ApiError(400, f"n={params.n}; at most {limits.n} samples of a prompt are taken", param="n")
        self._watcher = asyncio.create_task(self._watch())
        if any(isinstance(prompt, str) for prompt in prompts):
            prompts = await asyncio.to_thread(self._encoded, prompts)
        for i, prompt in enumerate(prompts):
            if len(prompt) > self.service.prompt_limit:
                message = f"prompt {i} has {len(prompt)} tokens; at most {self.service.prompt_limit} are taken"
                raise ApiError(400, message, code="context_length_exceeded")
        self._ticket = Ticket(prompts, params, stream=stream)
        self._left = len(prompts) * params.n
        if self not in self.service.runs:  # the client went while the texts were encoded
            raise Disconnected
        self.service.thread.submit(self._ticket)
        await self._ticket.news()
        self.service.metrics.took(sum(map(len, prompts)))
        return prompts

    def _encoded(self, prompts: Sequence[Any]) -> list[list[int]]:
        return [self.service.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]

    async def events(self):
        """Yields what is new of the samples, lists of Event, until all have finished.

        Raises:
          ApiError: the engine failed, or the server stops.
          Disconnected: the client has gone.
        """
        while self._left:
            events = await self._ticket.news()
            self._left -= sum(isinstance(event.what, Completion) for event in events)
            yield events

    async def completions(self) -> list[list[Completion]]:
        """All samples of every prompt, in order; raises as `events` does."""
        ticket = self._ticket
        found: list[list[Completion | None]] = [[None] * ticket.params.n for _ in ticket.prompts]
        async for events in self.events():
            for event in events:
                found[event.prompt][event.index] = event.what
        return found

    async def _watch(self) -> None:
        """Ends the run when the client goes."""
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.status = 499
        ticket = self._ticket
        self.close()
        if ticket is not None:
            ticket.bring(Disconnected())

    def close(self) -> None:
        """Ends the run; more than once is fine."""
        if self not in self.service.runs:
            return
        self.service.metrics.answered(self._endpoint, self.status)
        if self._ticket is not None and self._left:
            self.service.thread.cancel(self._ticket)
        self.service.runs.discard(self)
        if self._watcher is not None and self._watcher is not asyncio.current_task():
            self._watcher.cancel()

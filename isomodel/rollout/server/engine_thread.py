"""EngineThread: the one thread that calls the engine, and Ticket: one request's line to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from isomodel.rollout.engine import Engine
from isomodel.rollout.outputs import Completion, EngineStats, Tail
from isomodel.rollout.sampling_params import SamplingParams
from isomodel.rollout.server.errors import ApiError
from isomodel.specs import Params

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Event:
    """What is new of one sample: `what` is a Tail while it runs, then once its Completion."""

    prompt: int
    index: int
    what: Tail | Completion


class Ticket:
    """A request on its way through the engine. Made and read on the event loop; the engine's thread fills it."""

    def __init__(self, prompts: Sequence[Sequence[int] | np.ndarray], params: SamplingParams, *, stream: bool):
        """`stream`: bring Tails of unfinished samples too. Call within a running event loop."""
        self.prompts, self.params, self.stream = prompts, params, stream
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[list[Event] | BaseException] = asyncio.Queue()
        # Of the engine's thread: names of the requests in order, and tokens seen of each unfinished sample.
        self.names: list[str] = []
        self.seen: dict[tuple[int, int], int] = {}

    async def news(self) -> list[Event]:
        """Waits for what comes next: first an empty list, when the engine has taken the request; then events.

        Raises:
          ApiError: the request was refused, or ended by a fault.
        """
        item = await self._news.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def bring(self, item: list[Event] | BaseException) -> None:
        """Hands something to the reader, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._news.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads
            self.cancelled = True


class EngineThread:
    """Runs an engine: takes orders between steps, steps while there is work, hands out what is new after each step.

    An exception of the engine ends every request in flight with an error and leaves `fault` set: what the engine holds
    is then in doubt, so nothing is taken any more. A request that the engine refuses harms no other.

    Attributes:
      stats: of the engine, after the last step. fault: why it has failed, or None. paused: it takes requests, and waits.
    """

    def __init__(self, engine: Engine, on_step: Callable[[float], None] = lambda seconds: None):
        """`on_step` is called with the seconds of every step, on the engine's thread."""
        self._engine, self._on_step = engine, on_step
        self.stats: EngineStats = engine.stats()
        self.version = engine.version
        self.fault: str | None = None
        self.paused = False
        self._orders: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._tickets: dict[str, tuple[Ticket, int]] = {}  # by the engine's name: ticket, which of its prompts
        self._updated: concurrent.futures.Future | None = None  # of an update that waits for samples in flight
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that runs now; requests in flight end with an error."""
        self._orders.put(self._stop)
        self._thread.join()

    def submit(self, ticket: Ticket) -> None:
        """Queues a request; its fate comes by `ticket.news`."""
        self._orders.put(lambda: self._submit(ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request whose reader has gone, and frees its pages. No news come afterwards."""
        ticket.cancelled = True
        self._orders.put(lambda: self._cancel(ticket))

    def abort_all(self, message: str) -> None:
        """Ends every request in flight with a 503."""
        self._orders.put(lambda: self._end_all(ApiError(503, message, code="shutting_down")))

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Runs `function(engine)` between two steps; returns or raises what it does."""
        future: concurrent.futures.Future = concurrent.futures.Future()

        def order():
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self.fault:
                    raise ApiError(503, self.fault, code="engine_failed")
                result = function(self._engine)
                self._look()
                future.set_result(result)
            except Exception as e:
                future.set_exception(e)
                if not isinstance(e, ValueError | ApiError):  # a refusal changed nothing; anything else is a fault
                    raise

        self._orders.put(order)
        return await asyncio.wrap_future(future)

    async def update_weights(self, params: Params, version: int, on_update: str) -> int:
        """`Engine.update_weights`; returns or raises what it does, once the new weights sample.

        With "finish" the thread goes on stepping, so that streams bring their tokens until the old weights have done
        their last one; also where it is paused, and then it stays paused. "restart" is refused where a stream has sent
        what it would take back.
        """

        def begin(engine: Engine) -> concurrent.futures.Future:
            done: concurrent.futures.Future = concurrent.futures.Future()
            done.set_running_or_notify_cancel()  # who asked may go, and the update goes on
            sent = {ticket for ticket, _ in self._tickets.values() if ticket.stream and any(ticket.seen.values())}
            if on_update == "finish":
                engine.begin_update(params, version)
                self._updated = done
            elif on_update == "restart" and sent:
                raise ValueError(f"restart would take back tokens that {len(sent)} streams have sent; use finish or continue")
            else:
                done.set_result(engine.update_weights(params, version, on_update=on_update))
            return done

        return await asyncio.wrap_future(await self.call(begin))

    def set_paused(self, paused: bool) -> None:
        """Steps no more, so that requests wait; or goes on."""
        self._orders.put(lambda: setattr(self, "paused", paused))

    def _look(self) -> None:
        self.stats, self.version = self._engine.stats(), self._engine.version

    def _run(self) -> None:
        while not self._stopped:
            steps = self._engine.has_work and (not self.paused or self._updated) and not self.fault
            try:
                try:
                    order = self._orders.get(block=not steps)
                except queue.Empty:
                    order = self._step
                order()
            except Exception as e:
                self._fail(e)

    def _stop(self) -> None:
        self._stopped = True
        self._end_all(ApiError(503, "the server has stopped", code="shutting_down"))

    def _submit(self, ticket: Ticket) -> None:
        if ticket.cancelled:
            return
        if self.fault:
            ticket.bring(ApiError(503, self.fault, code="engine_failed"))
            return
        try:
            self._engine.validate(ticket.prompts, ticket.params)
            for i, prompt in enumerate(ticket.prompts):
                name = self._engine.add_request(prompt, ticket.params)
                ticket.names.append(name)
                self._tickets[name] = ticket, i
                ticket.seen.update({(i, k): 0 for k in range(ticket.params.n)})
        except Exception as e:
            self._cancel(ticket)
            if isinstance(e, ValueError):
                ticket.bring(ApiError(400, str(e)))
            else:
                log.exception("a request failed before it ran")
                ticket.bring(ApiError(500, f"the request failed before it ran: {type(e).__name__}: {e}"))
            return
        self._look()
        ticket.bring([])

    def _cancel(self, ticket: Ticket) -> None:
        for name in ticket.names:
            self._tickets.pop(name, None)
            if not self.fault:
                self._engine.abort(name)
        self._look()

    def _step(self) -> None:
        start = time.perf_counter()
        done = self._engine.step()
        self._on_step(time.perf_counter() - start)
        dropped = self._engine.stats().dropped - self.stats.dropped
        self._look()
        self._hand_out(done)
        if self._updated and not self._engine.updating:
            self._end_update(dropped)

    def _fail(self, e: Exception) -> None:
        log.error("the engine failed", exc_info=e)
        self.fault = f"the engine failed ({type(e).__name__}: {e}); restart the server"
        self._end_all(ApiError(500, self.fault, code="engine_failed"))

    def _hand_out(self, done: list[Completion]) -> None:
        news: dict[Ticket, list[Event]] = {}
        for completion in done:
            if completion.request_id not in self._tickets:
                continue  # cancelled
            ticket, prompt = self._tickets[completion.request_id]
            if completion.error:
                self._end_one(ticket, completion.error)
                news.pop(ticket, None)
                continue
            del ticket.seen[prompt, completion.index]
            news.setdefault(ticket, []).append(Event(prompt, completion.index, completion))
            if not any((prompt, k) in ticket.seen for k in range(ticket.params.n)):
                del self._tickets[completion.request_id]
        for ticket in {ticket for ticket, _ in self._tickets.values() if ticket.stream}:
            for (prompt, index), seen in ticket.seen.items():
                tail = self._engine.tail(ticket.names[prompt], index, seen)
                if tail is not None and tail.token_ids.size:
                    ticket.seen[prompt, index] += tail.token_ids.size
                    news.setdefault(ticket, []).append(Event(prompt, index, tail))
        for ticket, events in news.items():
            ticket.bring(events)

    def _end_one(self, ticket: Ticket, e: Exception) -> None:
        log.error("a request failed", exc_info=e)
        self._cancel(ticket)
        ticket.bring(ApiError(500, f"the text of this request's tokens failed ({type(e).__name__}: {e}); others go on"))

    def _end_update(self, outcome: int | ApiError) -> None:
        """Answers who waits for new weights: how many cached pages they dropped, or why they do not come."""
        future, self._updated = self._updated, None
        if isinstance(outcome, ApiError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _end_all(self, error: ApiError) -> None:
        if self._updated and (self.fault or self._stopped):
            self._end_update(error)
        for ticket in {ticket for ticket, _ in self._tickets.values()}:
            ticket.bring(error)
            self._cancel(ticket)
        self._tickets.clear()

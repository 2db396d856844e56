"""Rewards: what a completion is worth, by a task's verifier, an answer check, or a function of the user's.

A function of the user's is `reward(item, completion, **args) -> float`, named "module:function"; item is a `data.Item`,
completion the text. If it has parameters `finish_reason` and `num_tokens`, it is given them too. It should be pure: after
a time-out it may be called again for the same completion.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import multiprocessing
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from isomodel.yaml_config import ConfigError
from trainer import tasks
from trainer.config import DataSection, RewardSection, RewardTerm
from trainer.data import MAX_LISTED, Item
from trainer.verifiers import CHECKS, EXTRACT

START_TIMEOUT_S = 300.0
"""Seconds in which worker processes must have imported everything."""

GRACE_S = 5.0
"""Seconds after its time limit in which a worker must answer; then the workers are replaced."""


class RewardError(RuntimeError):
    """A reward function raised, ran out of time, or returned no finite number; names the function and the item."""


@dataclasses.dataclass(frozen=True)
class Response:
    """One completion as rewards see it.

    Attributes:
      text: decoded completion, without the prompt and without end tokens.
      finish_reason: "stop" or "length".
      num_tokens: sampled tokens, the end token included.
    """

    text: str
    finish_reason: str = "stop"
    num_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class RewardBatch:
    """Rewards of n responses.

    Attributes:
      total_N: float64 [n], the weighted sum of terms.
      terms: each term's own value, before its weight, float64 [n], by name.
      timeouts: responses given 0 because a function ran out of time.
      errors: responses given 0 because a function failed (reward.on_error: zero).
    """

    total_N: np.ndarray
    terms: dict[str, np.ndarray]
    timeouts: int = 0
    errors: int = 0


class Rewards:
    """Judges responses by the run's reward section; a context manager that ends its worker processes."""

    def __init__(self, cfg: RewardSection, data: DataSection):
        """Finds every function and, with reward.workers, starts the processes.

        Raises:
          ConfigError: an unknown kind, a function that cannot be imported or does not take its arguments; lists all.
        """
        self._cfg, self._data = cfg, data
        self._judge = _Judge(cfg, data)
        self.names = self._judge.names
        self._pool: multiprocessing.pool.Pool | None = None
        if cfg.workers:
            self._pool = self._start_pool()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers. Harmless twice."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._pool = None

    def check(self, items: Sequence[Item]) -> None:
        """Refuses, before anything is sampled, items whose answer a term needs and cannot use.

        Raises:
          ValueError: names up to MAX_LISTED items.
        """
        self._judge.check(items)

    def __call__(self, items: Sequence[Item], responses: Sequence[Response]) -> RewardBatch:
        """Rewards of responses[i] to items[i], in order.

        Raises:
          RewardError: a function failed, or ran out of time under on_timeout: stop.
        """
        if len(items) != len(responses):
            raise ValueError(f"{len(items)} items, but {len(responses)} responses")
        outcomes = (
            self._in_pool(items, responses)
            if self._pool
            else [self._judge(i, r) for i, r in zip(items, responses, strict=True)]
        )
        values_NK = np.zeros((len(items), len(self.names)))
        timeouts = errors = 0
        for n, (outcome, item, response) in enumerate(zip(outcomes, items, responses, strict=True)):
            if outcome.fault is None:
                values_NK[n] = outcome.values
                continue
            timeouts += outcome.timed_out
            errors += not outcome.timed_out
            if (self._cfg.on_timeout if outcome.timed_out else self._cfg.on_error) == "stop":
                raise RewardError(_failure(outcome, item, response))
        weights_K = np.array([t.weight for t in self._cfg.all_terms])
        # Term by term, in order: the same sum for one response whatever the batch (a matrix product would not promise it).
        total_N = functools.reduce(np.add, (values_NK[:, k] * w for k, w in enumerate(weights_K)))
        return RewardBatch(total_N, {name: values_NK[:, k] for k, name in enumerate(self.names)}, timeouts, errors)

    def _start_pool(self) -> multiprocessing.pool.Pool:
        # spawn: a fork of a process with JAX's threads can hang.
        context = multiprocessing.get_context("spawn")
        pool = context.Pool(self._cfg.workers, _worker_start, (self._cfg, self._data))
        ready = pool.map_async(_worker_ready, range(self._cfg.workers), chunksize=1)
        try:
            ready.get(START_TIMEOUT_S)
        except multiprocessing.TimeoutError:
            pool.terminate()
            raise RewardError(
                f"reward.workers: the processes did not start within {START_TIMEOUT_S:.0f} s; reward.workers=0 runs without them"
            ) from None
        return pool

    def _in_pool(self, items: Sequence[Item], responses: Sequence[Response]) -> list[_Outcome]:
        work = list(zip(items, responses, strict=True))
        outcomes: list[_Outcome] = []
        while len(outcomes) < len(work):
            results = self._pool.imap(_worker_judge, work[len(outcomes) :], chunksize=1)
            try:
                while len(outcomes) < len(work):
                    outcomes.append(results.next(self._cfg.timeout_s + GRACE_S))
            except multiprocessing.TimeoutError:
                # Work starts in order, so the result waited for is the one that hangs (or whose worker died).
                outcomes.append(_Outcome.of_timeout(self._cfg.timeout_s))
                self.close()
                self._pool = self._start_pool()
        return outcomes


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What became of one response: a value of each term, or a fault (picklable, unlike some exceptions)."""

    values: tuple[float, ...] = ()
    fault: str | None = None
    function: str = ""
    trace: str = ""
    timed_out: bool = False

    @classmethod
    def of_timeout(cls, seconds: float) -> _Outcome:
        return cls(fault=f"did not answer within reward.timeout_s = {seconds:g} s", function="reward", timed_out=True)


class _Judge:
    """All terms of a reward section, callable in the trainer's process or in a worker."""

    def __init__(self, cfg: RewardSection, data: DataSection):
        self._extract = EXTRACT[cfg.extract]
        self._functions: list[Callable[[Item, Response], Any]] = []
        self._checks: list[Callable[[Item], str | None]] = []
        self.names: list[str] = []
        faults: list[str] = []
        for k, term in enumerate(cfg.all_terms):
            path = "reward" if k == 0 else f"reward.terms.{k - 1}"
            try:
                function, check = self._make(term, data)
            except ConfigError as e:
                faults += [f"{path}.{f}" for f in e.faults]
                continue
            self._functions.append(function)
            self._checks.append(check)
            same = sum(t.kind == term.kind for t in cfg.all_terms[:k])
            self.names.append(f"{term.kind}.{same}" if same else term.kind)
        if faults:
            raise ConfigError(faults, "reward")

    def __call__(self, item: Item, response: Response) -> _Outcome:
        values = []
        for name, function in zip(self.names, self._functions, strict=True):
            try:
                value = function(item, response)
            except _TimeUp:
                raise
            except Exception as e:
                return _Outcome(fault=f"raised {type(e).__name__}: {e}", function=name, trace=traceback.format_exc())
            fault = _not_a_reward(value)
            if fault:
                return _Outcome(fault=fault, function=name)
            values.append(float(value))
        return _Outcome(tuple(values))

    def check(self, items: Sequence[Item]) -> None:
        faults = []
        for item in items:
            for name, check in zip(self.names, self._checks, strict=True):
                fault = check(item)
                if fault:
                    faults.append(f"{item.id}: {fault} (reward {name})")
        if faults:
            more = [f"and {len(faults) - MAX_LISTED} more"] if len(faults) > MAX_LISTED else []
            raise ValueError("\n  ".join(["items that the reward cannot judge:", *faults[:MAX_LISTED], *more]))

    def _make(
        self, term: RewardTerm, data: DataSection
    ) -> tuple[Callable[[Item, Response], Any], Callable[[Item], str | None]]:
        if ":" in term.kind:
            return _user_function(term), lambda item: None
        if term.kind == "task":
            task = tasks.resolve(data.source, data.params)
            if task is None:
                raise ConfigError(
                    [
                        f"kind: task needs a task that judges, and data.source {data.source!r} is a file; use exact, math_verify"
                        " or module:function"
                    ]
                )
            _takes(task.score, term, positional=2)
            return lambda item, response: task.score(self._extract(response.text), item.row), lambda item: None
        if term.kind in CHECKS:
            judge, check = CHECKS[term.kind]
            _takes(judge, term, positional=2)
            return lambda item, response: judge(self._extract(response.text), item.answer, **term.args), check
        raise ConfigError([f"kind: {term.kind!r} is none of task, {', '.join(CHECKS)}, or module:function"])


def _user_function(term: RewardTerm) -> Callable[[Item, Response], Any]:
    """Imports "module:function"; the current folder counts, as it does for `python -m`."""
    module_name, _, name = term.kind.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = functools.reduce(getattr, name.split("."), importlib.import_module(module_name))
    except Exception as e:
        raise ConfigError([f"kind: cannot import {term.kind}: {type(e).__name__}: {e}"]) from e
    if not callable(function):
        raise ConfigError([f"kind: {term.kind} is {type(function).__name__}, not a function"])
    extra = _takes(function, term, positional=2)

    def call(item: Item, response: Response) -> Any:
        given = {name: getattr(response, name) for name in extra}
        return function(item, response.text, **{**given, **term.args})

    return call


def _takes(function: Callable, term: RewardTerm, positional: int) -> list[str]:
    """Which of finish_reason and num_tokens the function has parameters for.

    Raises:
      ConfigError: it does not take its positional arguments and the term's args.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    extra = [n for n in ("finish_reason", "num_tokens") if n in signature.parameters and n not in term.args]
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(extra), **term.args)
    except TypeError as e:
        raise ConfigError(
            [f"args: {term.kind}{signature} cannot be called with {sorted(term.args) or 'no args'}: {e}"]
        ) from e
    return extra


def _not_a_reward(value: Any) -> str | None:
    number = isinstance(value, numbers.Real | np.bool_) or (
        getattr(value, "shape", None) == () and hasattr(value, "__float__")
    )
    if not number:
        return f"returned {_short(value)}, not a number"
    if not math.isfinite(float(value)):
        return f"returned {float(value)}, not a finite number"
    return None


def _failure(outcome: _Outcome, item: Item, response: Response) -> str:
    lines = [f"reward {outcome.function} on {item.id}: {outcome.fault}", f"  completion: {_short(response.text, 300)}"]
    if outcome.trace:
        lines += ["  " + line for line in outcome.trace.rstrip().splitlines()]
    else:
        lines.append(
            "  a reward must be a finite number"
            if not outcome.timed_out
            else "  reward.on_timeout=zero goes on without it"
        )
    return "\n".join(lines)


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class _TimeUp(BaseException):
    """A worker's time limit. No Exception, so that a function's own `except Exception` does not swallow it."""


_worker: tuple[_Judge, float] | None = None


def _worker_start(cfg: RewardSection, data: DataSection) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    signal.signal(signal.SIGALRM, _time_up)
    _worker = (_Judge(cfg, data), cfg.timeout_s)


def _worker_ready(_: int) -> bool:
    return _worker is not None


def _time_up(signum, frame):
    raise _TimeUp


def _worker_judge(work: tuple[Item, Response]) -> _Outcome:
    judge, timeout_s = _worker
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            return judge(*work)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeUp:
        return _Outcome.of_timeout(timeout_s)

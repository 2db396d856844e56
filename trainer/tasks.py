"""Tasks that make their own prompts and judge their own answers: reasoning-gym's by name, and small ones of ours.

A task makes row i of a seed as a pure function of (seed, i). A row is a dict with `prompt`, `answer`, and whatever the
verifier reads besides.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from isomodel.yaml_config import ConfigError, nearest

DEFAULT_SIZE = 1000
"""Rows that a task makes when data.size is not set."""


class Task(Protocol):
    """What `resolve` returns."""

    name: str

    def rows(self, size: int, seed: int) -> list[dict[str, Any]]:
        """`size` rows; row i depends on seed and i only."""

    def score(self, answer: str | None, row: Mapping[str, Any]) -> float:
        """The task's own judgement of an answer (None: nothing could be extracted), in [0, 1]."""


def resolve(source: str, params: Mapping[str, Any]) -> Task | None:
    """The task that data.source names ("reasoning_gym:NAME" or "task:NAME"), None where it names a file.

    Raises:
      ConfigError: no such task, or parameters that it does not take.
    """
    kind, colon, name = source.partition(":")
    if colon and kind == "reasoning_gym":
        return ReasoningGym(name, params)
    if colon and kind == "task":
        return BuiltinTask(name, params)
    return None


class ReasoningGym:
    """A reasoning-gym task (github.com/open-thought/reasoning-gym) with its own generator and verifier.

    `params` are the fields of the task's own config. The task "composite" takes a list `datasets` of
    {name, weight, config}, and mixes them.
    """

    def __init__(self, name: str, params: Mapping[str, Any]):
        import reasoning_gym  # takes more than a second, and files need none of it
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS

        self.name = f"reasoning_gym:{name}"
        if name not in DATASETS:
            raise ConfigError([f"data.source: reasoning-gym has no task {name!r}; {_near(name, DATASETS)}"])
        reserved = sorted({"seed", "size"} & set(params))
        if reserved:
            raise ConfigError([f"data.params.{key}: is set by data.{key}" for key in reserved])
        params = dict(params)
        known = [f.name for f in dataclasses.fields(DATASETS[name][1]) if f.name not in ("seed", "size")]
        unknown = [key for key in params if key not in known]
        if unknown:
            raise ConfigError(
                [f"data.params.{key}: task {name} has no such parameter; {nearest(key, known)}" for key in unknown]
            )
        if name == "composite":
            try:
                params["datasets"] = [
                    DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) for spec in params.get("datasets", ())
                ]
            except TypeError as e:
                raise ConfigError([f"data.params.datasets: want a list of {{name, weight, config}}: {e}"]) from e
        self._make = lambda size, seed: reasoning_gym.create_dataset(name, size=size, seed=seed, **params)
        try:
            self._dataset = self._make(1, 0)
        except Exception as e:
            raise ConfigError([f"data.params: reasoning-gym task {name}: {type(e).__name__}: {e}"]) from e

    def rows(self, size: int, seed: int) -> list[dict[str, Any]]:
        dataset = self._make(size, seed)
        rows = []
        for i in range(size):
            try:
                entry = dataset[i]
            except Exception as e:
                raise ValueError(f"{self.name} cannot make row {i} of seed {seed}: {type(e).__name__}: {e}") from e
            rows.append({"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]})
        return rows

    def score(self, answer: str | None, row: Mapping[str, Any]) -> float:
        entry = {"question": row["prompt"], "answer": row["answer"], "metadata": row["metadata"]}
        return self._dataset.score_answer(answer, entry)


_BUILTIN: dict[str, Callable[..., tuple[str, str]]] = {}


def builtin(make: Callable[..., tuple[str, str]]) -> Callable[..., tuple[str, str]]:
    """Registers `make(rng, **params) -> (prompt, answer)` under its name; keyword defaults are its parameters."""
    _BUILTIN[make.__name__] = make
    return make


@builtin
def add(rng: random.Random, *, digits: int = 1) -> tuple[str, str]:
    """ "3+4=" -> "07": the sum of two numbers, zero-padded."""
    a, b = (rng.randrange(10**digits) for _ in range(2))
    return f"{a:0{digits}d}+{b:0{digits}d}=", f"{a + b:0{digits + 1}d}"


@builtin
def copy(rng: random.Random, *, length: int = 4, symbols: int = 10) -> tuple[str, str]:
    """ "3141>" -> "3141"."""
    text = _digits(rng, length, symbols)
    return f"{text}>", text


@builtin
def reverse(rng: random.Random, *, length: int = 4, symbols: int = 10) -> tuple[str, str]:
    """ "3142<" -> "2413"."""
    text = _digits(rng, length, symbols)
    return f"{text}<", text[::-1]


@builtin
def sort(rng: random.Random, *, length: int = 4, symbols: int = 10) -> tuple[str, str]:
    """ "3142#" -> "1234"."""
    text = _digits(rng, length, symbols)
    return f"{text}#", "".join(sorted(text))


class BuiltinTask:
    """A small string or arithmetic task with a graded reward: the share of characters that are right where they stand.

    Dense rewards let a model learn from random weights. Parameters are whole numbers >= 1.
    """

    def __init__(self, name: str, params: Mapping[str, Any]):
        self.name = f"task:{name}"
        if name not in _BUILTIN:
            raise ConfigError([f"data.source: no task {name!r}; {nearest(name, _BUILTIN)}"])
        self._make, self._params = _BUILTIN[name], dict(params)
        known = [p.name for p in inspect.signature(self._make).parameters.values() if p.kind is p.KEYWORD_ONLY]
        faults = []
        for key, value in params.items():
            if key not in known:
                faults.append(f"data.params.{key}: task {name} has no such parameter; {nearest(key, known)}")
            elif type(value) is not int or value < 1:
                faults.append(f"data.params.{key}: must be a whole number of at least 1, not {value!r}")
            elif key == "symbols" and value > 10:
                faults.append(f"data.params.symbols: there are 10 digits, not {value}")
        if faults:
            raise ConfigError(faults)

    def rows(self, size: int, seed: int) -> list[dict[str, Any]]:
        # A string seed goes through SHA-512, so that rows of neighbouring seeds share nothing.
        made = (self._make(random.Random(f"{seed}/{i}"), **self._params) for i in range(size))
        return [{"prompt": prompt, "answer": answer} for prompt, answer in made]

    def score(self, answer: str | None, row: Mapping[str, Any]) -> float:
        return graded(answer or "", row["answer"])


def graded(answer: str, expected: str) -> float:
    """Characters of `answer` equal to `expected` at their place, over the longer one's length; in [0, 1]."""
    longest = max(len(answer), len(expected))
    return sum(a == b for a, b in zip(answer, expected, strict=False)) / longest if longest else 1.0


def _digits(rng: random.Random, length: int, symbols: int) -> str:
    return "".join(str(rng.randrange(symbols)) for _ in range(length))


def _near(name: str, known) -> str:
    import difflib

    match = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"near it: {', '.join(match)}" if match else f"it has {len(known)}: {', '.join(sorted(known))}"

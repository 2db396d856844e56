"""Contract: what is computed, how, and where, as data that two programs can compare before they exchange a token."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from isomodel import atomic
from isomodel.config import ModelConfig
from isomodel.contract.canonical import digest, plain
from isomodel.numerics import Numerics
from pallas_kernels import environment, registry

FORMAT = 1
CASES = ("train", "score", "remat", "prefill", "decode")
ALL_CASES = "all cases"
FILE = "contract.json"
"""Name of the contract in a run folder."""

HEAD = ("lm_head", "logprob")
"""Regions that every case has which gives a log-probability: all but prefill, where most rows need none."""
ROLLOUT_ONLY = ("sample",)
"""Regions that the trainer has no counterpart of."""

LOGPROB_SEMANTICS = {
    "quantity": "log-softmax of logits * inv_temp over the full vocabulary, before top-k, top-p and min-p",
    "unit": "nats",
    "dtype": "float32",
    "inv_temp": "float32(1) / float32(temperature), once on the host; 1 for temperature 0 (greedy)",
    "largest": 0,
}

_ISO_CLAIMS = {
    "batch": True,
    "packing": True,
    "chunking": True,
    "prefix_cache": True,
    "remat": True,
    "tensor_parallel": [1],
    "sequence_parallel": False,
    "expert_parallel": False,
}
CLAIMS = {
    "reference": _ISO_CLAIMS,
    "hopper": _ISO_CLAIMS,
    "native": {name: [1] if name == "tensor_parallel" else False for name in _ISO_CLAIMS},
}
"""Per implementation, the axes that a row's bits are invariant over, as far as tests/ (tests/gpu for hopper) proves it."""

DROPPED_ON_UPDATE = ("KV pages", "prefix cache index", "compute copy of the weights")
"""State that depends on the weights, so that a weight update must drop it."""


class ContractError(RuntimeError):
    """A contract that cannot be derived, read or agreed on; the message says why."""


@dataclasses.dataclass(frozen=True)
class Identities:
    """SHA-256 of the three parts, 64 hex digits each.

    Attributes:
      semantic: what is computed: the model's configuration and the meaning of a log-probability.
      numerical: how: numerics, every region's entry, and the environment.
      deployment: where: mesh and batch sizes. Recorded; need not match.
    """

    semantic: str
    numerical: str
    deployment: str


@dataclasses.dataclass(frozen=True)
class Contract:
    """What one program computes and how. All values are JSON values, floats as bit strings (canonical.plain).

    Attributes:
      semantics: {"model": the ModelConfig's fields, "logprob": what a log-probability means}.
      numerics: {"mode", "implementation", "compute_dtype"}.
      entries: {region: {case: entry}}, regions in the order in which the forward reaches them.
      environment: `environment.describe()`.
      claims: axes that a row's bits are invariant over.
      dropped_on_update: state that a weight update drops.
      deployment: mesh and batch sizes.
    """

    semantics: dict[str, Any]
    numerics: dict[str, Any]
    entries: dict[str, dict[str, dict[str, Any]]]
    environment: dict[str, Any]
    claims: dict[str, Any]
    dropped_on_update: list[str]
    deployment: dict[str, Any]

    @property
    def cases(self) -> tuple[str, ...]:
        """The cases that it covers, in the order of CASES."""
        return tuple(case for case in CASES if any(case in by_case for by_case in self.entries.values()))

    @property
    def arithmetic(self) -> dict[str, dict[str, Any]]:
        """{region: its one entry, under "all cases"}; for a region whose cases differ (native), {case: entry}.

        So a contract does not depend on which cases a program happens to run: with or without recomputation, say.
        """
        found = {}
        for region, by_case in self.entries.items():
            first = next(iter(by_case.values()))
            found[region] = {ALL_CASES: first} if all(entry == first for entry in by_case.values()) else by_case
        return found

    @property
    def identities(self) -> Identities:
        numerical = {"numerics": self.numerics, "entries": self.arithmetic, "environment": self.environment}
        return Identities(digest(self.semantics), digest(numerical), digest(self.deployment))

    def to_json(self) -> dict[str, Any]:
        """The file's content: the fields, the format's number and the identities (to notice an edited file)."""
        return {"format": FORMAT, "identities": dataclasses.asdict(self.identities)} | dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any, source: str = "contract") -> Contract:
        """The contract of `to_json`'s result.

        Raises:
          ContractError: it is no contract, one of a newer format, or its identities are not those of its content.
        """
        fields = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(data, dict) or "format" not in data:
            raise ContractError(f"{source} is no contract: it has no field `format`")
        if data["format"] != FORMAT:
            raise ContractError(f"{source} has format {data['format']}, and this version reads {FORMAT}")
        missing = [name for name in fields if name not in data]
        if missing:
            raise ContractError(f"{source} lacks {', '.join(missing)}")
        contract = cls(**{name: data[name] for name in fields})
        actual = dataclasses.asdict(contract.identities)
        stored = data.get("identities") or {}
        wrong = [name for name, value in actual.items() if stored.get(name) != value]
        if wrong:
            raise ContractError(
                f"{source} was changed after it was written: its {' and '.join(wrong)} identity is not its content's"
            )
        return contract

    def save(self, path: str | os.PathLike) -> None:
        """Writes the JSON file; a reader finds the old file or the new one, never a part.

        Raises:
          OSError: it cannot be written; nothing is left behind.
        """
        atomic.write_file(path, (json.dumps(self.to_json(), indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Contract:
        """Reads a file of `save`.

        Raises:
          ContractError: the file is missing, torn, changed or of a newer format.
        """
        try:
            data = json.loads(pathlib.Path(path).read_text())
        except (OSError, ValueError) as e:
            raise ContractError(f"{path} cannot be read as a contract: {e}") from e
        return cls.from_json(data, str(path))


def derive(
    cfg: ModelConfig,
    numerics: Numerics,
    traces: Mapping[str, Callable[[], Any]],
    *,
    deployment: Mapping[str, Any] | None = None,
    dropped_on_update: tuple[str, ...] = DROPPED_ON_UPDATE,
) -> Contract:
    """The contract of what `traces` run.

    Args:
      cfg: the model.
      numerics: how it computes.
      traces: for each case that this program runs, a function without arguments that traces its real step, with
        `jax.eval_shape` say; nothing needs to be computed. Every op that it reaches is recorded.
      deployment: mesh, batch sizes and the like.
      dropped_on_update: what this program drops on a weight update.

    Raises:
      ContractError: a case is unknown or records no region, two cases that must agree differ (iso), or no claim is
        known for the implementation.
      environment.EnvironmentFault: iso numerics in a process whose XLA flags are not the contract's.
    """
    impl = numerics.impl
    if impl not in CLAIMS:
        raise ContractError(f"nothing is claimed for implementation {impl!r}; choose one of {', '.join(CLAIMS)}")
    if numerics.mode == "iso":
        environment.check()
    if unknown := [case for case in traces if case not in CASES]:
        raise ContractError(f"unknown case {unknown[0]!r}; the cases are {', '.join(CASES)}")
    entries: dict[str, dict[str, dict]] = {}
    for case in sorted(traces, key=CASES.index):
        with registry.recording() as recorded:
            traces[case]()
        if not recorded:
            raise ContractError(f"case {case} recorded no region: its trace reached no op")
        for region, entry in recorded.items():
            entries.setdefault(region, {})[case] = plain(entry, f"{region} in {case}")
    contract = Contract(
        semantics=plain({"model": dataclasses.asdict(cfg), "logprob": LOGPROB_SEMANTICS}),
        numerics={"mode": numerics.mode, "implementation": impl, "compute_dtype": numerics.compute_dtype},
        entries=entries,
        environment=plain(environment.describe(), "environment"),
        claims=dict(CLAIMS[impl]),
        dropped_on_update=list(dropped_on_update),
        deployment=plain(dict(deployment or {"devices": jax.device_count(), "processes": jax.process_count()})),
    )
    check_cases(contract)
    return contract


def check_cases(contract: Contract) -> None:
    """In iso numerics every case must run every region, with one and the same entry: that is what parity means."""
    if contract.numerics["mode"] != "iso":
        return
    faults = []
    for region, by_case in contract.entries.items():
        spared = CASES if region in ROLLOUT_ONLY else ("prefill",) if region in HEAD else ()
        absent = [case for case in contract.cases if case not in by_case and case not in spared]
        if absent:
            faults.append(f"region {region} runs in {', '.join(by_case)} and not in {', '.join(absent)}")
        first = next(iter(by_case))
        for case, entry in by_case.items():
            keys = [key for key in entry | by_case[first] if entry.get(key) != by_case[first].get(key)]
            if keys:
                faults.append(
                    f"region {region} differs between {first} and {case}: "
                    + "; ".join(f"{key} is {by_case[first].get(key)!r} and {entry.get(key)!r}" for key in keys)
                )
    if faults:
        raise ContractError("the cases do not run the same arithmetic:\n" + "\n".join(f"  - {f}" for f in faults))

"""The live gate: the trainer's log-probabilities against the rollout's, as integers, before the optimizer runs.

Fail-closed: a token that the gate should have seen and has no observation for, or that is NaN on either side, is a
mismatch, never equal. It covers the tokens whose whole prefix one version of the weights computed, that version being the
one that the trainer's forward runs under.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from trainer.packing import Packed
from trainer.trajectory import Trajectory

MAX_LISTED = 20
"""Tokens that one report lists; the rest is counted."""


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """One token that differs.

    Attributes:
      trajectory: index in the step. position: of the token in its sequence. token_id: the token.
      rollout, trainer: the log-probabilities; `trainer` is NaN where it has none.
    """

    trajectory: int
    position: int
    token_id: int
    rollout: float
    trainer: float

    def __str__(self) -> str:
        return (
            f"trajectory {self.trajectory}, position {self.position}, token {self.token_id}: "
            f"rollout {_shown(self.rollout)}, trainer {_shown(self.trainer)}"
        )


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What the gate saw.

    Attributes:
      tokens: compared, or due to be compared. mismatched: those that differ in a bit. missing: those of them without a
        trainer's value, or NaN on a side.
      uncovered: sampled tokens that it may not compare: their prefix was not computed under the trainer's weights alone.
      max_abs, mean_abs: of |rollout - trainer| in nats; infinite when anything is missing.
      by_trajectory: {trajectory: mismatched tokens} of those with any.
      first: the first mismatches, at most MAX_LISTED.
    """

    tokens: int
    mismatched: int
    missing: int
    uncovered: int
    max_abs: float
    mean_abs: float
    by_trajectory: dict[int, int]
    first: tuple[Mismatch, ...]

    @property
    def exact(self) -> bool:
        """Whether every token was compared and none differs in a bit."""
        return not self.mismatched and not self.uncovered

    def metrics(self) -> dict[str, float]:
        """By the names of metrics.jsonl."""
        return {
            "parity/max_abs": self.max_abs,
            "parity/mean_abs": self.mean_abs,
            "parity/mismatched_tokens": self.mismatched,
            "parity/tokens": self.tokens,
        }


class ParityError(RuntimeError):
    """The gate stops the run.

    Attributes:
      report: what differs. region: the first region that differs, or why none was found.
    """

    exit_code = 1  # a difference was found, nothing was used wrongly

    def __init__(self, message: str, report: ParityReport, region: str | None = None):
        super().__init__(message)
        self.report, self.region = report, region


class Gate:
    """Collects the trainer's log-probabilities of some trajectories of a step, and compares them.

    Use: `observe` after every forward under the rollout's weights, then `report` once before the optimizer.
    """

    def __init__(self, trajectories: Sequence[Trajectory], version: int):
        """`version`: of the weights that the observed forwards run under."""
        self._trajectories = trajectories
        self._version = version
        self._observed: dict[int, np.ndarray] = {}

    def observe(self, packed: Packed, logprobs_T, members: Sequence[int] | None = None) -> None:
        """Takes the log-probabilities of a microbatch's rows; `members` translates its trajectories' indices to the
        step's."""
        for i, values in packed.unpack(logprobs_T):
            # Value of row t belongs to token t + 1; nothing predicts token 0.
            self._observed[i if members is None else members[i]] = np.concatenate([[np.float32(np.nan)], values])

    def report(self, due: Sequence[int] | None = None) -> ParityReport:
        """Compares trajectories `due` (None: all); one that was never observed counts with all its tokens."""
        rollout, trainer, covered, at = [], [], [], []
        due = range(len(self._trajectories)) if due is None else due
        for i in due:
            tokens = self._trajectories[i].flatten()
            theirs = self._observed.get(i)
            if theirs is None:
                theirs = np.full(len(tokens.token_ids), np.nan, np.float32)
            elif len(theirs) != len(tokens.token_ids):
                raise ValueError(f"trajectory {i} has {len(tokens.token_ids)} tokens and {len(theirs)} observations")
            # Tokens of the loss mask are due whatever they hold: a NaN there is a mismatch and no exemption.
            where = np.flatnonzero(tokens.sampled | tokens.loss_mask)
            rollout.append(tokens.logprobs[where])
            trainer.append(theirs[where].astype(np.float32))
            covered.append(tokens.under(self._version)[where])
            at += [(i, int(p), int(tokens.token_ids[p])) for p in where]
        return _compare(_joined(rollout, np.float32), _joined(trainer, np.float32), _joined(covered, np.bool_), at)


def _joined(parts, dtype) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _compare(rollout: np.ndarray, trainer: np.ndarray, covered: np.ndarray, at) -> ParityReport:
    nan = np.isnan(rollout) | np.isnan(trainer)
    differs = covered & (nan | (rollout.view(np.uint32) != trainer.view(np.uint32)))
    missing = int((covered & nan).sum())
    tokens = int(covered.sum())
    gap = np.abs(rollout.astype(np.float64) - trainer.astype(np.float64))[covered]
    where = np.flatnonzero(differs)
    by_trajectory: dict[int, int] = {}
    for k in where:
        by_trajectory[at[k][0]] = by_trajectory.get(at[k][0], 0) + 1
    return ParityReport(
        tokens=tokens,
        mismatched=len(where),
        missing=missing,
        uncovered=int((~covered).sum()),
        max_abs=math.inf if missing else float(gap.max()) if tokens else 0.0,
        mean_abs=math.inf if missing else float(gap.mean()) if tokens else 0.0,
        by_trajectory=by_trajectory,
        first=tuple(Mismatch(*at[k], float(rollout[k]), float(trainer[k])) for k in where[:MAX_LISTED]),
    )


def enforce(
    report: ParityReport,
    trajectories: Sequence[Trajectory],
    *,
    step: int,
    stop: bool,
    replay: Callable[[np.ndarray, int], str],
    dump: pathlib.Path,
) -> None:
    """Lets the optimizer run, or stops the run.

    Stops on any mismatched or uncovered token when `stop` is set, and in any case when the gate compared nothing or a
    log-probability is missing or NaN: then there is nothing to record.

    Args:
      report: of the gate; `trajectories`: that it looked at.
      replay: takes a sequence's token ids and the length of its prompt, and names the first region that differs.
      dump: JSON file that gets the report and the sequences that differ.

    Raises:
      ParityError: with the tokens, sequences and the first region that differs; nothing was updated.
    """
    if report.tokens and not report.missing and (report.exact or not stop):
        return
    lines = [f"parity gate, step {step}: the optimizer did not run"]
    if not report.tokens:
        lines.append("no token was compared: the rollout gave none whose whole prefix ran under the trainer's weights")
    if report.mismatched:
        lines.append(
            f"{report.mismatched} of {report.tokens} log-probabilities differ in {len(report.by_trajectory)} of "
            f"{len(trajectories)} sequences; max |difference| {report.max_abs:.9g}, mean {report.mean_abs:.9g} nats"
        )
    if report.missing:
        lines.append(f"{report.missing} of them have no value on one side (not observed, or NaN)")
    if report.uncovered:
        lines.append(
            f"{report.uncovered} tokens were sampled after a prefix that the trainer's weights did not compute alone; "
            "train on rollouts of one version, or score them again first"
        )
    region = None
    if report.first:
        first = trajectories[report.first[0].trajectory]
        try:
            region = replay(first.flatten().token_ids, first.prompt_length)
        except Exception as e:  # the report is worth more than the reason why its last line is missing
            region = f"unknown, the replay failed: {type(e).__name__}: {e}"
        lines.append(f"first region that differs, by replaying trajectory {report.first[0].trajectory}: {region}")
    lines += [f"  {m}" for m in report.first]
    if report.mismatched > len(report.first):
        lines.append(f"  and {report.mismatched - len(report.first)} more")
    try:
        _dump(dump, report, trajectories, step, region)
        lines.append(f"the sequences are in {dump}")
    except OSError as e:
        lines.append(f"the sequences could not be written: {e}")
    raise ParityError("\n".join(lines), report, region)


def _dump(path: pathlib.Path, report: ParityReport, trajectories: Sequence[Trajectory], step: int, region) -> None:
    sequences = {}
    for i in list(report.by_trajectory)[:MAX_LISTED]:
        t = trajectories[i].flatten()
        sequences[i] = {
            "prompt_length": trajectories[i].prompt_length,
            "token_ids": t.token_ids.tolist(),
            "rollout_logprob_bits": [f"{b:08x}" for b in t.logprobs.view(np.uint32).tolist()],
            "inv_temp_bits": [f"{b:08x}" for b in t.inv_temp.view(np.uint32).tolist()],
            "versions": t.versions.tolist(),
        }
    first = [
        dataclasses.asdict(m) | {"rollout": _shown(m.rollout), "trainer": _shown(m.trainer)} for m in report.first
    ]
    counts = {k: getattr(report, k) for k in ("tokens", "mismatched", "missing", "uncovered")}
    content = {"step": step, **counts, "first_region": region, "first": first, "sequences": sequences}
    path.write_text(json.dumps(content, indent=1))


def _shown(x: float) -> str:
    return f"{x:.9g} (0x{int(np.float32(x).view(np.uint32)):08x})"

"""What a run writes while it trains: metrics.jsonl, samples, TensorBoard events, Weights & Biases.

metrics.jsonl has one JSON object a step, written whole and flushed to the disk before the step counts as done. JSON has no
NaN or infinity: they are written as the strings "NaN", "Infinity" and "-Infinity" (Protocol Buffers' JSON mapping), and
`read_metrics` turns them back into numbers.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from isomodel.atomic import write_file
from trainer.config import LogSection

FILE = "metrics.jsonl"

REQUIRED = (
    "step",
    "reward/mean",
    "reward/std",
    "loss",
    "grad_norm",
    "ratio/max",
    "parity/max_abs",
    "parity/mean_abs",
    "parity/mismatched_tokens",
    "parity/tokens",
    "length/mean",
    "time/generate_s",
    "time/train_s",
    "time/step_s",
    "tokens_per_s/generate",
)
"""Keys of every row, first and in this order. Steps count from 1; lengths in tokens, times in seconds, |difference| of
log-probabilities in nats."""

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsError(ValueError):
    """A metrics file that cannot be read, or a row that cannot be written."""


class MetricsWriter:
    """Writes a run's rows and samples; a context manager.

    Attributes:
      path: of metrics.jsonl.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        log: LogSection,
        *,
        resumed_step: int = 0,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        """Opens the run's files to go on after `resumed_step` (0: a new run): later rows and samples are taken away.

        Args:
          folder: the run's folder, there already.
          log: which writers to use.
          resumed_step: last step that the loaded checkpoint holds.
          name, config: of the run, for Weights & Biases.

        Raises:
          MetricsError: the file that is there is damaged before its last line, or wandb is asked for and not installed.
          OSError: the folder cannot be written.
        """
        folder = pathlib.Path(folder)
        self.path = folder / FILE
        self._samples = folder / "samples"
        self._log = log
        keep_until(self.path, resumed_step)
        for path in self._samples.glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > resumed_step:
                path.unlink()
        self._events = self._wandb = None
        if log.wandb:
            self._wandb = _wandb_run(log.wandb, folder, name or folder.name, config)
        if log.tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(
                str(folder / "tensorboard"), purge_step=resumed_step + 1 if resumed_step else None
            )
        self._file = open(self.path, "ab")  # noqa: SIM115 (closed by close)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a step's row: REQUIRED keys and any others with numbers; on the disk when this returns.

        Raises:
          MetricsError: required keys are missing, or values are no numbers; nothing is written.
          OSError: no space, or the disk fails. A torn line may remain, which resume takes away.
        """
        line = encode_row(row)
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as e:
            raise OSError(e.errno, f"cannot write {self.path}: {e.strerror or e}") from e
        step = int(row["step"])
        if self._events is not None:
            for key, value in row.items():
                if key != "step":
                    self._events.add_scalar(key, float(value), step)
            self._events.flush()
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in row.items() if k != "step"}, step=step)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes samples/step_K.jsonl where the log section asks for it (every samples_every steps, and step 1).

        Raises:
          OSError: cannot be written; the file is then as it was.
        """
        if self._log.samples == 0 or (step % self._log.samples_every and step != 1):
            return
        self._samples.mkdir(exist_ok=True)
        lines = (json.dumps(s, ensure_ascii=False, default=str) + "\n" for s in samples[: self._log.samples])
        write_file(self._samples / f"step_{step:06d}.jsonl", "".join(lines).encode())

    def close(self) -> None:
        """Closes every writer. Harmless twice."""
        self._file.close()
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None


def encode_row(row: Mapping[str, Any]) -> bytes:
    """One line of metrics.jsonl: required keys first, the others sorted.

    Raises:
      MetricsError: lists required keys that are missing and values that are no numbers.
    """
    faults = [f"{key} is missing" for key in REQUIRED if key not in row]
    values = {}
    for key in (*(k for k in REQUIRED if k in row), *sorted(set(row) - set(REQUIRED))):
        value = row[key]
        if isinstance(value, np.generic | np.ndarray) or hasattr(value, "__array__"):
            value = np.asarray(value).item() if np.ndim(value) == 0 else value
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            faults.append(f"{key} is {value!r}, not a number")
        else:
            values[key] = (
                value if math.isfinite(value) else next(k for k, v in _SPECIAL.items() if repr(v) == repr(float(value)))
            )
    if faults:
        raise MetricsError("metrics row: " + "; ".join(faults))
    return json.dumps(values, allow_nan=False).encode() + b"\n"


def read_metrics(path: str | pathlib.Path) -> list[dict[str, float]]:
    """Rows of a metrics.jsonl, or of the one in a run folder. A torn last line (a run killed while writing) is left out.

    Raises:
      MetricsError: there is no such file, or a line before the last is damaged (named by number).
    """
    path = pathlib.Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as e:
        raise MetricsError(f"{path}: cannot be read: {e.strerror}") from e
    rows = []
    # What follows the last newline is empty, or torn.
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
        except (ValueError, TypeError, KeyError) as e:
            raise MetricsError(f"{path}: line {number} is damaged: {e}") from e
        rows.append({k: _SPECIAL.get(v, v) if isinstance(v, str) else v for k, v in row.items()})
    return rows


def keep_until(path: pathlib.Path, step: int) -> None:
    """Takes every row after `step` out of a metrics file, and a torn last line. No file is fine.

    Raises:
      MetricsError: a line before the last is damaged.
    """
    if not path.exists():
        return
    steps = [row["step"] for row in read_metrics(path)]
    lines = path.read_bytes().split(b"\n")
    kept = b"".join(line + b"\n" for line, s in zip(lines[:-1], steps, strict=True) if s <= step)
    if kept != path.read_bytes():
        write_file(path, kept)


def rollout_metrics(
    rewards_N: np.ndarray, group_size: int, lengths_N: Sequence[int], finish_reasons: Iterable[str]
) -> dict[str, float]:
    """Rewards and lengths of a step's N responses, groups of `group_size` in order.

    Returns reward/mean, /std, /min, /max (over all responses), reward/group_std (mean of each group's deviation),
    reward/flat_groups (share of groups whose rewards are all equal: no gradient), length/mean, /min, /max (tokens),
    length/truncated (share that ended at the token limit).
    """
    rewards_N = np.asarray(rewards_N, np.float64)
    groups_GM = rewards_N.reshape(-1, group_size)
    lengths_N = np.asarray(lengths_N, np.int64)
    flat_G = (groups_GM == groups_GM[:, :1]).all(axis=1)
    return {
        "reward/mean": float(rewards_N.mean()),
        "reward/std": float(rewards_N.std()),
        "reward/min": float(rewards_N.min()),
        "reward/max": float(rewards_N.max()),
        "reward/group_std": float(groups_GM.std(axis=1).mean()),
        "reward/flat_groups": float(flat_G.mean()),
        "length/mean": float(lengths_N.mean()),
        "length/min": int(lengths_N.min()),
        "length/max": int(lengths_N.max()),
        "length/truncated": float(np.mean([reason == "length" for reason in finish_reasons])),
    }


def _wandb_run(project: str, folder: pathlib.Path, name: str, config: Mapping[str, Any] | None):
    try:
        import wandb
    except ImportError as e:
        raise MetricsError("log.wandb is set, but wandb is not installed: pip install wandb (or log.wandb=null)") from e
    # The id is kept in the run's folder, so that a resumed run goes on in the same W&B run.
    id_file = folder / "wandb_id"
    if not id_file.exists():
        write_file(id_file, wandb.util.generate_id().encode())
    return wandb.init(
        project=project, name=name, id=id_file.read_text(), resume="allow", dir=str(folder), config=dict(config or {})
    )

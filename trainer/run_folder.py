"""RunFolder: the folder of one run, held by one process, with the config that it was begun under.

    runs/NAME/
      config.yaml         the resolved config
      contract.json       what computes
      metrics.jsonl       one object a step
      evaluations.jsonl   one object an evaluation on held-out prompts
      samples/            some responses
      checkpoints/        see checkpoint.py
      tensorboard/        events
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from typing import Any

from isomodel import yaml_config
from isomodel.atomic import write_file
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.config import TrainConfig
from trainer.metrics import FILE as METRICS
from trainer.metrics import keep_until, read_metrics

CONFIG = "config.yaml"
EVALUATIONS = "evaluations.jsonl"

FREE = (
    "name",
    "run_dir",
    "train.steps",
    "checkpoint.",
    "eval.",
    "log.",
    "reward.workers",
    "reward.timeout_s",
    "rollout.engine.",
)
"""Settings (and sections) that a run may be continued under with other values: none reaches a weight, given that the
resolved schedule stays as it is and, for the engine's sizes, that numerics are iso."""


class RunError(RuntimeError):
    """A run folder that cannot be used as asked; the message says why and what to do."""


class RunFolder:
    """A context manager that holds the folder's lock.

    Attributes:
      path: the folder. store: its checkpoints. resumed: the checkpoint to go on from, None for a run that begins.
      notes: what a person should know about how it was opened.
    """

    def __init__(self, config: TrainConfig, *, allow_config_change: bool = False):
        """Makes or takes the folder.

        Raises:
          RunError: another process has it; it holds a run with another config (and no permission to change it), or one
            that checkpoint.resume=never forbids to continue; checkpoint.resume=must and nothing to continue; all of its
            checkpoints are torn; or it cannot be written. Nothing in it was changed.
        """
        self.path = config.run_folder
        self.store = CheckpointStore(self.path / "checkpoints", config.checkpoint.keep)
        self.notes: list[str] = []
        self._lock = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "ab")  # noqa: SIM115 (closed by close)
        except OSError as e:
            raise RunError(f"the run folder {self.path} cannot be written: {e.strerror or e}; set run_dir to another place") from e
        try:
            self._take_lock()
            self.resumed = self._open(config, allow_config_change)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Gives the folder back. Harmless twice."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise RunError(f"another process is running {self.path}; wait for it, end it, or choose another name") from e

    def _open(self, config: TrainConfig, allow_config_change: bool) -> Checkpoint | None:
        saved_text = self._read_config()
        found, torn = self.store.latest()
        self.notes += [f"checkpoint of step {step} is torn and was passed over: {reason}" for step, reason in torn.items()]
        mode = config.checkpoint.resume
        if saved_text is None:
            if found or torn or any(p.name != ".lock" for p in self.path.iterdir()):
                raise RunError(f"{self.path} holds files, and no {CONFIG}: it is no run; choose another name or empty it")
            if mode == "must":
                raise RunError(f"checkpoint.resume=must, and {self.path} holds no run")
            self._write_config(config)
            return None
        if mode == "never":
            raise RunError(
                f"{self.path} holds a run already, and checkpoint.resume=never: choose another name, or resume=auto to continue it"
            )
        if torn and found is None:
            listed = "".join(f"\n  step {step}: {reason}" for step, reason in torn.items())
            raise RunError(
                f"every checkpoint of {self.path} is torn, so the run cannot be continued; move the folder away to begin "
                f"again:{listed}"
            )
        if found is None and mode == "must":
            raise RunError(f"checkpoint.resume=must, and {self.path} has no checkpoint yet")
        if found is None and not self._has_steps():
            if saved_text != config.to_yaml():  # begun, and no step finished: nothing binds it
                (self.path / EVALUATIONS).unlink(missing_ok=True)
                self._write_config(config)
        else:
            self._compare_config(saved_text, config, allow_config_change, found)
        self.store.sweep()
        return found

    def _has_steps(self) -> bool:
        path = self.path / METRICS
        return path.exists() and bool(read_metrics(path))

    def _read_config(self) -> str | None:
        try:
            return (self.path / CONFIG).read_text()
        except FileNotFoundError:
            return None
        except OSError as e:
            raise RunError(f"{self.path / CONFIG} cannot be read: {e.strerror or e}") from e

    def _write_config(self, config: TrainConfig) -> None:
        try:
            write_file(self.path / CONFIG, config.to_yaml().encode())
        except OSError as e:
            raise RunError(f"the run folder {self.path} cannot be written: {e.strerror or e}; set run_dir to another place") from e

    def _compare_config(self, saved_text: str, config: TrainConfig, allowed: bool, found: Checkpoint | None) -> None:
        saved = flatten(yaml_config.parse_yaml(saved_text, str(self.path / CONFIG)) or {})
        current = flatten(yaml_config.parse_yaml(config.to_yaml()))
        changed = {k: (saved.get(k, "-"), current.get(k, "-")) for k in saved | current if saved.get(k) != current.get(k)}
        if not changed:
            return
        free = FREE if config.numerics.mode == "iso" else tuple(f for f in FREE if f != "rollout.engine.")
        hard = [k for k in changed if not any(k == f or (f.endswith(".") and k.startswith(f)) for f in free)]
        shown = lambda keys: "".join(f"\n  {k}: {changed[k][0]} -> {changed[k][1]}" for k in keys)  # noqa: E731
        if hard and not allowed:
            hint = ""
            if "optimizer.total_steps" in hard and "train.steps" in changed:
                hint = f" (optimizer.total_steps={saved['optimizer.total_steps']} keeps the schedule that it was begun with)"
            raise RunError(
                f"{self.path} holds a run with another config:{shown(hard)}\n"
                f"choose another name, set them back{hint}, or pass --allow-config-change to go on with the new ones"
            )
        step = found.step if found else 0
        self.notes.append(f"settings changed since the run was begun:{shown(changed)}")
        write_file(self.path / f"config.until_step_{step}.yaml", saved_text.encode())
        self._write_config(config)

    def add_evaluation(self, row: Mapping[str, Any]) -> None:
        """Appends to evaluations.jsonl; on the disk when this returns.

        Raises:
          OSError: it cannot be written.
        """
        with open(self.path / EVALUATIONS, "ab") as file:
            file.write(json.dumps(dict(row)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def evaluated_at(self, step: int) -> bool:
        """Whether evaluations.jsonl has a row of `step`; rows after `step`, and a torn one, are taken away."""
        path = self.path / EVALUATIONS
        keep_until(path, step)
        return path.exists() and any(json.loads(line)["step"] == step for line in path.read_bytes().splitlines())


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists are values."""
    flat = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat

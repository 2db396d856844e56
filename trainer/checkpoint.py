"""Checkpoints: masters, optimizer state, facts and contract in one folder that is there whole or not at all.

    checkpoints/step_00000010/
      state/          arrays, by orbax
      facts.json      JSON values of the loop (step, weight version, ...)
      contract.json   what computed it
      COMMIT          every file with its size and SHA-256

A checkpoint is written beside its place, flushed to the disk, and renamed. COMMIT lists what must be there: a folder
whose files are not those of its COMMIT is torn, is never loaded, and the one before it is.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from isomodel import contract as contracts
from isomodel.atomic import new_folder

COMMIT, FACTS, STATE = "COMMIT", "facts.json", "state"
FORMAT = 1
_NAME = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\.(tmp|old)-[0-9a-f]+")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message says why, and what is still there."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint: its files are those of its COMMIT.

    Attributes:
      path: its folder. step: steps that were finished. facts: what the loop saved. contract: what computed it.
    """

    path: pathlib.Path
    step: int
    facts: dict[str, Any]
    contract: contracts.Contract


class CheckpointStore:
    """The checkpoints of one run, newest `keep` of them."""

    def __init__(self, folder: pathlib.Path, keep: int):
        self.folder, self.keep = pathlib.Path(folder), keep

    def steps(self) -> list[int]:
        """Steps that have a folder, torn ones included, rising."""
        if not self.folder.is_dir():
            return []
        return sorted(int(m[1]) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name)))

    def path(self, step: int) -> pathlib.Path:
        return self.folder / f"step_{step:08d}"

    def save(self, step: int, state: Any, facts: Mapping[str, Any], contract: contracts.Contract) -> pathlib.Path:
        """Writes a checkpoint and removes those beyond the newest `keep`. An intact one of this step is left as it is.

        Args:
          state: pytree of arrays.
          facts: JSON values; `step` is added.

        Raises:
          CheckpointError: it could not be written (no space, no permission); those before it are as they were.
        """
        target = self.path(step)
        if target.exists():
            if not fault(target):
                return target
            shutil.rmtree(target)
        try:
            self._check_space(state)
            with new_folder(target) as temporary:
                _write_arrays(temporary / STATE, state)
                (temporary / FACTS).write_text(json.dumps(dict(facts) | {"step": step}, indent=1))
                contract.save(temporary / contracts.FILE)
                listed = {"files": _manifest(temporary), "arrays": _arrays(state)}
                commit = {"format": FORMAT, "step": step, "digest": _digest(listed)} | listed
                (temporary / COMMIT).write_text(json.dumps(commit, indent=1))
        except OSError as e:
            kept = ", ".join(map(str, self.steps())) or "none"
            hint = "free some space" if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "check the folder"
            raise CheckpointError(
                f"step {step} could not be saved: {e.strerror or e}; {hint} and start the run again. Checkpoints that are "
                f"still there: {kept}"
            ) from e
        self._prune()
        return target

    def _check_space(self, state: Any) -> None:
        """Refuses a write that cannot succeed before it begins. (Files are compressed, so this may be a few percent early.)"""
        place = next(p for p in (self.folder, *self.folder.resolve().parents) if p.is_dir())
        free, needed = shutil.disk_usage(place).free, sum(x.nbytes for x in jax.tree.leaves(state))
        if free < needed:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: it needs {needed:,} bytes, and {free:,} are free")

    def _prune(self) -> None:
        """Removes all but the newest `keep` intact ones (torn ones before them too), and what killed writers left."""
        for step in self.steps()[: -self.keep]:
            path = self.path(step)
            # The commit goes first: from then on the folder is torn, and nobody loads half of it.
            (path / COMMIT).unlink(missing_ok=True)
            shutil.rmtree(path)
        self.sweep()

    def sweep(self) -> None:
        """Removes what a writer left that was killed."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if _LEFTOVER.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def latest(self) -> tuple[Checkpoint | None, dict[int, str]]:
        """The newest intact checkpoint (None: there is none), and {step: why it is torn} of those that it passed over."""
        torn: dict[int, str] = {}
        for step in reversed(self.steps()):
            found, reasons = self.at(step)
            if found is not None:
                return found, torn
            torn |= reasons
        return None, torn

    def at(self, step: int) -> tuple[Checkpoint | None, dict[int, str]]:
        """The checkpoint of a step, or None and {step: why it is torn}; None and {} where there is none."""
        path = self.path(step)
        if not path.is_dir():
            return None, {}
        if reason := fault(path):
            return None, {step: reason}
        facts = json.loads((path / FACTS).read_text())
        return Checkpoint(path, step, facts, contracts.Contract.load(path / contracts.FILE)), {}


def load_arrays(checkpoint: Checkpoint, abstract: Any) -> Any:
    """The arrays of a checkpoint, in the structure of `abstract` (jax.ShapeDtypeStruct leaves), on the first device.

    Raises:
      CheckpointError: they are not of that structure, shape or dtype.
    """
    stored, wanted = json.loads((checkpoint.path / COMMIT).read_text())["arrays"], _arrays(abstract)
    faults = [
        f"{name} is {stored.get(name, 'missing')}, expected {wanted.get(name, 'none')}"
        for name in stored | wanted
        if stored.get(name) != wanted.get(name)
    ]
    if faults:
        raise CheckpointError(
            f"{checkpoint.path} does not hold the state of this model and optimizer:\n  " + "\n  ".join(faults)
        )
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        return checkpointer.restore(checkpoint.path / STATE, args=ocp.args.StandardRestore(target))


def fault(path: pathlib.Path) -> str | None:
    """Why a checkpoint's folder is torn; None if its files are those of its COMMIT, to the byte."""
    try:
        commit = json.loads((path / COMMIT).read_text())
        files = commit["files"]
        if commit["format"] != FORMAT or commit["digest"] != _digest({"files": files, "arrays": commit["arrays"]}):
            return "its COMMIT is of another format, or was changed"
    except FileNotFoundError:
        return "it has no COMMIT: the writer did not finish"
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"its COMMIT cannot be read: {e}"
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, and was written with {entry['bytes']}"
        if _sha256(file) != entry["sha256"]:
            return f"{name} was changed"
    return None


def _write_arrays(path: pathlib.Path, state: Any) -> None:
    """Raises OSError, whatever orbax makes of a full disk."""
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(path, args=ocp.args.StandardSave(state))
    except ValueError as e:  # tensorstore's, with the system's error number in its text
        code = re.search(r"os_error_code='(\d+)'", str(e))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from e


def _manifest(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files
    }


def _arrays(state: Any) -> dict[str, str]:
    """{path in the tree: dtype and shape} of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _digest(listed: Mapping) -> str:
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


def _sha256(file: pathlib.Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

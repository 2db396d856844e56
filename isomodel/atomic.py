"""Folders and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary folder beside `target`; it becomes `target` when the block ends without an error.

    Everything is flushed to the disk before the rename. On an error the temporary folder is removed and `target` is
    as it was. Replacing an existing folder takes two renames: a process killed between them leaves the old folder as
    `.NAME.old-*` beside it, never a mixture.

    Args:
      target: path of the folder to make; its parents are made too. An empty folder may be there already.
      overwrite: replace a model folder (one with a config.json) that is there.

    Raises:
      FileExistsError: `target` is there, and is not empty, and `overwrite` is false or it is not a model folder.
      OSError: it cannot be written (no space, no permission).
    """
    target = Path(os.path.abspath(target))
    _refuse_existing(target, overwrite)
    suffix = uuid.uuid4().hex[:8]
    temporary = target.parent / f".{target.name}.tmp-{suffix}"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in sorted(temporary.rglob("*")):
            _flush(path)
        _flush(temporary)
        _refuse_existing(target, overwrite)
        if overwrite and target.is_dir() and any(target.iterdir()):
            old = target.parent / f".{target.name}.old-{suffix}"
            target.rename(old)
            temporary.rename(target)
            shutil.rmtree(old)
        else:
            temporary.rename(target)
        _flush(target.parent)
    except OSError as e:
        if isinstance(e, FileExistsError) or e.errno is None:  # ours, with a message that says it all
            raise
        raise OSError(e.errno, f"cannot write {target}, nothing was left there: {e.strerror or e}") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_file(path: str | Path, content: bytes) -> None:
    """Writes or replaces a file: a reader finds the old one or the new one, never a part.

    Raises:
      OSError: it cannot be written (no space, no permission); nothing is left behind.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError as e:
        raise OSError(e.errno, f"cannot write {path}: {e.strerror or e}") from e
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _refuse_existing(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{target} is already there; remove it, or ask to overwrite it")
    if not (target / "config.json").is_file():
        raise FileExistsError(f"{target} is already there and is not a model folder; it is not overwritten")


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

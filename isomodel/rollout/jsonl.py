"""Prompts from a JSONL file, completions to one: every bad line is named, and a file appears whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from isomodel.config import FaultyInput
from isomodel.rollout.sampling_params import SamplingParams
from isomodel.tokenizer import Tokenizer

SOURCES = ("prompt", "messages", "prompt_ids")
MOST_FAULTS = 20
"""Bad lines that an error message names; it counts the others."""


class PromptFileError(FaultyInput):
    """A file of prompts that cannot be used; the message names every bad line."""


@dataclasses.dataclass(frozen=True)
class PromptLine:
    """One line of a file of prompts.

    Attributes:
      number: of the line, from 1.
      kind: which of SOURCES it has: "prompt" is text, "messages" a chat, "prompt_ids" token ids.
      value: that field's.
      sampling: the command's parameters, with what the line says instead.
      id: the line's own name for itself, any JSON value, or None.
    """

    number: int
    kind: str
    value: Any
    sampling: SamplingParams
    id: Any = None


def read_prompts(path: str | Path, sampling: SamplingParams) -> list[PromptLine]:
    """The prompts of a JSONL file: one object a line, with one of `prompt`, `messages` and `prompt_ids`.

    A line may also have an `id`, which goes to its completions, and `sampling`, an object of those fields of
    SamplingParams that differ from `sampling`. Other fields are data of yours; nobody reads them. Empty lines are skipped.

    Raises:
      PromptFileError: the file cannot be read, has no prompt, or has bad lines (named by number).
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as e:
        raise PromptFileError(str(path), [e.strerror or str(e)]) from e
    except UnicodeDecodeError as e:
        line = e.object[: e.start].count(b"\n") + 1
        raise PromptFileError(str(path), [f"line {line} is not UTF-8"]) from e
    lines, faults = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            lines.append(_parse(number, line, sampling))
        except ValueError as e:
            faults.append(f"line {number}: {e}")
    if not lines and not faults:
        faults.append("it holds no prompt")
    if faults:
        raise PromptFileError(str(path), shortened(faults))
    return lines


def token_ids(
    line: PromptLine,
    tokenizer: Tokenizer | None,
    *,
    raw: bool = False,
    system: str | None = None,
    template_args: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """A line's token ids: its own, or those of its text or chat through the chat template.

    Args:
      tokenizer: needed where the line is not token ids.
      raw: a text is encoded as it stands.
      system: message put before a text.
      template_args: of the chat template.

    Raises:
      TokenizerError: the chat template refuses the messages, or there is none.
    """
    if line.kind == "prompt_ids":
        return line.value
    if line.kind == "prompt" and raw:
        return tokenizer.encode(line.value)
    messages = line.value
    if line.kind == "prompt":
        before = [{"role": "system", "content": system}] if system is not None else []
        messages = [*before, {"role": "user", "content": line.value}]
    return tokenizer.apply_chat_template(messages, **template_args)


def shortened(faults: list[str]) -> list[str]:
    """The first faults, and how many more there are."""
    extra = len(faults) - MOST_FAULTS
    return faults if extra <= 0 else [*faults[:MOST_FAULTS], f"and {extra} more"]


def _parse(number: int, line: str, sampling: SamplingParams) -> PromptLine:
    try:
        data = json.loads(line)
    except ValueError as e:
        raise ValueError(f"not JSON ({e})") from e
    if not isinstance(data, dict):
        raise ValueError(f"a {type(data).__name__}, not an object")
    kinds = [kind for kind in SOURCES if kind in data]
    if len(kinds) != 1:
        raise ValueError(f"it has {' and '.join(kinds) or 'none'} of {', '.join(SOURCES)}; give one")
    (kind,) = kinds
    value = data[kind]
    if kind == "prompt" and not (isinstance(value, str) and value):
        raise ValueError("`prompt` must be text that is not empty")
    if kind == "messages" and not (isinstance(value, list) and value and all(isinstance(m, Mapping) for m in value)):
        raise ValueError("`messages` must be a list of objects, each with role and content")
    if kind == "prompt_ids" and not (isinstance(value, list) and value and all(type(t) is int for t in value)):
        raise ValueError("`prompt_ids` must be a list of integers that is not empty")
    return PromptLine(number, kind, value, _override(sampling, data.get("sampling", {})), data.get("id"))


def _override(sampling: SamplingParams, changes: Any) -> SamplingParams:
    if not isinstance(changes, dict):
        raise ValueError("`sampling` must be an object")
    known = [f.name for f in dataclasses.fields(SamplingParams)]
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise ValueError(f"`sampling` has unknown fields {', '.join(unknown)}; there are {', '.join(known)}")
    lists = [name for name in ("stop", "stop_token_ids") if not isinstance(changes.get(name, []), (list, str))]
    if lists or isinstance(changes.get("stop_token_ids"), str):
        raise ValueError("`stop` must be a list of strings, `stop_token_ids` a list of token ids")
    return dataclasses.replace(sampling, **changes)


@contextlib.contextmanager
def new_text_file(path: str | Path) -> Iterator[TextIO]:
    """Opens a temporary file beside `path`; it replaces `path` when the block ends without an error.

    On an error nothing is left, and a file that was at `path` stays as it was.

    Raises:
      OSError: it cannot be written (no such folder, no permission, no space).
    """
    path = Path(os.path.abspath(path))
    if path.is_dir():
        raise IsADirectoryError(21, f"cannot write {path}: it is a folder")
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as e:
        raise OSError(e.errno, f"cannot write {path}: {e.strerror or e}") from e
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
            try:
                file.flush()
                os.fsync(file.fileno())
            except OSError as e:
                raise OSError(e.errno, f"cannot write {path}, nothing was left there: {e.strerror or e}") from e
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's files are for their owner alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_lines(file: TextIO, objects: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    for line in objects:
        file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")

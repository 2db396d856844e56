"""Prompts: from JSONL and parquet files or tasks, split once, in an order that is a pure function of (seed, step)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from trainer import tasks
from trainer.config import DataSection

MAX_LISTED = 20
"""Faulty rows that one error names; the rest is counted."""

ROLES = ("system", "user", "assistant", "tool")


class DataError(ValueError):
    """A source that cannot be used: missing, damaged, or with rows at fault (named, up to MAX_LISTED of them)."""


class Encoder(Protocol):
    """What data needs of isomodel.tokenizer.Tokenizer."""

    def encode(self, text: str) -> Sequence[int]: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **template_args: Any) -> Sequence[int]: ...


@dataclasses.dataclass(frozen=True)
class Item:
    """One prompt with what its reward needs.

    Attributes:
      id: names it to a person: "train.jsonl line 12", "reasoning_gym:chain_sum row 7".
      prompt: the prompt text; of a chat, the last message.
      messages: the chat, system prompt included; empty where the prompt is encoded as plain text.
      answer: the expected answer, None if the source has none.
      row: the whole row, for rewards of your own.
      prompt_ids: token ids of the prompt, chat template applied.
    """

    id: str
    prompt: str
    messages: tuple[Mapping[str, str], ...]
    answer: str | None
    row: Mapping[str, Any]
    prompt_ids: tuple[int, ...] = ()


class Dataset:
    """Items of a run: `train`, `held_out`, and the batch of each step.

    Attributes:
      train, held_out: items; no prompt is in both.
      dropped: prompts left out because they are too long (data.long_prompts: drop).
      task: the task that made the items, None for files.
      fingerprint: hash of every prompt's tokens and answer, and of the order's seed; a resumed run compares it.
    """

    def __init__(self, cfg: DataSection, tokenizer: Encoder, *, rounds: int = 1):
        """Reads or makes every item and encodes it.

        Args:
          cfg: the run's data section, seed filled in.
          tokenizer: encodes prompts.
          rounds: sampling rounds that a step can take (dynamic sampling); part of the order.

        Raises:
          DataError: nothing to read, rows at fault, prompts too long, or nothing left to train on.
          yaml_config.ConfigError: a task that does not exist, or parameters that it does not take.
        """
        self.task = tasks.resolve(cfg.source, cfg.params)
        self._cfg, self._rounds = cfg, rounds
        rows = self._task_rows() if self.task is not None else read_file(cfg)
        self.dropped = 0
        items = self._encode(items_of(rows, cfg), tokenizer)
        self.train, self.held_out = _split(items, cfg)
        digest = hashlib.sha256(f"{cfg.seed}/{cfg.shuffle}/{rounds}".encode())
        for item in (*self.train, *self.held_out):
            digest.update(json.dumps([item.prompt_ids, item.answer]).encode())
        self.fingerprint = digest.hexdigest()
        self._orders: dict[int, list[int]] = {}

    def batch(self, step: int, n: int, round_: int = 0) -> list[Item]:
        """The `n` prompts of a step (0-based), and of its further sampling rounds: a pure function of its arguments.

        Epochs follow one another, each a new permutation; a batch may span two.

        Raises:
          ValueError: round_ is not below the number of rounds that the dataset was made with.
        """
        if not 0 <= round_ < self._rounds:
            raise ValueError(f"round {round_} of a step, but the dataset was made for {self._rounds}")
        start = (step * self._rounds + round_) * n
        return [self._at(i) for i in range(start, start + n)]

    def evaluation(self, n: int | None = None) -> tuple[Item, ...]:
        """The first `n` held-out items (None: all)."""
        return self.held_out if n is None else self.held_out[:n]

    def _at(self, position: int) -> Item:
        epoch, offset = divmod(position, len(self.train))
        if epoch not in self._orders:
            # A batch spans two epochs at most in any order of use; older ones are made again when asked for.
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) <= 1}
            self._orders[epoch] = (
                _permutation(len(self.train), f"{self._cfg.seed}/{epoch}")
                if self._cfg.shuffle
                else list(range(len(self.train)))
            )
        return self.train[self._orders[epoch][offset]]

    def _task_rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        size = tasks.DEFAULT_SIZE if self._cfg.size is None else self._cfg.size
        for i, row in enumerate(self.task.rows(size, self._cfg.seed)):
            yield f"{self.task.name} row {i}", row

    def _encode(self, items: list[Item], tokenizer: Encoder) -> list[Item]:
        encoded, long, empty = [], [], []
        for item in items:
            if item.messages:
                ids = tokenizer.apply_chat_template(item.messages, **self._cfg.template_args)
            else:
                ids = tokenizer.encode(item.prompt)
            if len(ids) > self._cfg.max_prompt_tokens:
                long.append(f"{item.id}: {len(ids)} tokens")
            elif not len(ids):
                empty.append(f"{item.id}: no tokens")
            else:
                encoded.append(dataclasses.replace(item, prompt_ids=tuple(int(i) for i in ids)))
        if empty:
            raise DataError(_listed(f"{self._cfg.source}: prompts that encode to nothing", empty))
        if long and self._cfg.long_prompts == "refuse":
            head = (
                f"{self._cfg.source}: prompts longer than data.max_prompt_tokens = {self._cfg.max_prompt_tokens}"
                " (raise it, or set data.long_prompts=drop)"
            )
            raise DataError(_listed(head, long))
        self.dropped = len(long)
        if not encoded:
            raise DataError(
                f"{self._cfg.source}: all {len(items)} prompts are longer than {self._cfg.max_prompt_tokens} tokens"
            )
        return encoded


def read_file(cfg: DataSection) -> list[tuple[str, Mapping[str, Any]]]:
    """Rows of a .jsonl or .parquet file, at most data.size of them, each with its name for a person.

    Raises:
      DataError: the file is missing or no readable JSONL or parquet; bad lines are named by number.
    """
    if cfg.params:
        raise DataError(f"data.params: {cfg.source} is a file, only tasks take parameters")
    path = pathlib.Path(cfg.source)
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise DataError(
            f"data.source: {cfg.source!r} is neither reasoning_gym:TASK, task:NAME, nor a .jsonl or .parquet file"
        )
    if not path.is_file():
        raise DataError(f"data.source: no file {path} (relative to {pathlib.Path.cwd()})")
    rows = list(_read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path))
    if not rows:
        raise DataError(f"{path}: has no rows")
    return rows[: cfg.size]


def items_of(rows: Iterable[tuple[str, Mapping[str, Any]]], cfg: DataSection) -> list[Item]:
    """Items, not encoded yet.

    Raises:
      DataError: names every row without a usable prompt or answer.
    """
    items, faults = [], []
    for name, row in rows:
        try:
            items.append(_item(name, row, cfg))
        except DataError as e:
            faults.append(f"{name}: {e}")
    if faults:
        raise DataError(_listed(f"{cfg.source}: {_count(len(faults), 'row')} at fault", faults))
    return items


def _item(name: str, row: Mapping[str, Any], cfg: DataSection) -> Item:
    prompt = _lookup(row, cfg.prompt)
    # A chat under the prompt's name is common in published parquet files.
    messages = prompt if isinstance(prompt, list) else _lookup(row, cfg.messages) if prompt is None else None
    if prompt is None and messages is None:
        raise DataError(
            f"has neither {cfg.prompt!r} nor {cfg.messages!r}; it has: {', '.join(map(str, row)) or 'nothing'}"
        )
    if messages is None:
        if not isinstance(prompt, str) or not prompt:
            raise DataError(f"{cfg.prompt!r} must be text that is not empty, not {_short(prompt)}")
        if not cfg.chat_template:
            return Item(name, (cfg.system_prompt or "") + prompt, (), _answer(row, cfg), row)
        messages = [{"role": "user", "content": prompt}]
    elif not cfg.chat_template:
        raise DataError("is a chat, and data.chat_template is false")
    messages = _messages(messages)
    if cfg.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise DataError("has a system message already, and data.system_prompt is set")
        messages = [{"role": "system", "content": cfg.system_prompt}, *messages]
    return Item(name, messages[-1]["content"], tuple(messages), _answer(row, cfg), row)


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"messages must be a list that is not empty, not {_short(messages)}")
    for i, message in enumerate(messages):
        if (
            not isinstance(message, Mapping)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise DataError(f"message {i} must be {{role: {' | '.join(ROLES)}, content: text}}, not {_short(message)}")
    if messages[-1]["role"] == "assistant":
        raise DataError("the last message is the assistant's: there is nothing to answer")
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _answer(row: Mapping[str, Any], cfg: DataSection) -> str | None:
    answer = _lookup(row, cfg.answer)
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, bool | int | float):
        return str(answer)
    return json.dumps(answer, ensure_ascii=False, default=str)


def _lookup(row: Mapping[str, Any], path: str) -> Any:
    """row["a"]["b"] for "a.b", unless the row has a key "a.b"; None where there is nothing."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _read_jsonl(path: pathlib.Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows, faults = [], []
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e}") from e
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as e:
            faults.append(f"line {number}: not UTF-8 text ({e.reason} at byte {e.start})")
        except json.JSONDecodeError as e:
            faults.append(f"line {number}: not valid JSON ({e.msg} at column {e.colno}): {_short(line.decode())}")
        except RecursionError:
            faults.append(f"line {number}: nested too deeply")
        else:
            if isinstance(row, Mapping):
                rows.append((f"{path.name} line {number}", row))
            else:
                faults.append(f"line {number}: must be an object with fields, not {_short(row)}")
    if faults:
        raise DataError(_listed(f"{path}: {_count(len(faults), 'bad line')}", faults))
    yield from rows


def _read_parquet(path: pathlib.Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as e:
        raise DataError(f"{path}: not a readable parquet file: {e}") from e
    for i, row in enumerate(table.to_pylist()):
        yield f"{path.name} row {i}", row


def _split(items: list[Item], cfg: DataSection) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """(train, held_out): `held_out` distinct prompts, one item each; rows that repeat one of them are in neither part."""
    if not cfg.held_out:
        return tuple(items), ()
    prompts: dict[tuple[int, ...], Item] = {}
    for item in items:
        prompts.setdefault(item.prompt_ids, item)
    if cfg.held_out >= len(prompts):
        raise DataError(
            f"data.held_out: {cfg.held_out} prompts leave nothing to train on, {cfg.source} has {len(prompts)} distinct ones"
        )
    keys = list(prompts)
    held = [keys[i] for i in _permutation(len(keys), f"{cfg.seed}/held_out")[: cfg.held_out]]
    out = frozenset(held)
    return tuple(item for item in items if item.prompt_ids not in out), tuple(prompts[key] for key in held)


def _permutation(n: int, seed: str) -> list[int]:
    """A permutation by hash: no library's generator has a say in it, so it is the same in every version."""
    key = hashlib.sha256(seed.encode()).digest()
    return sorted(range(n), key=lambda i: hashlib.blake2b(i.to_bytes(8, "little"), key=key, digest_size=16).digest())


def _listed(head: str, faults: Sequence[str]) -> str:
    lines = [f"{head}:", *(f"  {fault}" for fault in faults[:MAX_LISTED])]
    if len(faults) > MAX_LISTED:
        lines.append(f"  and {len(faults) - MAX_LISTED} more")
    return "\n".join(lines)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' if n != 1 else ''}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""Reads the golden files that make_golden.py made with Hugging Face transformers."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import ml_dtypes
import numpy as np

ROOT = pathlib.Path(__file__).parent / "golden"
TINY = sorted(path.parent.name for path in ROOT.glob("*/golden.npz"))
"""Names of the tiny models; ROOT / name is a Hugging Face folder. A name ends with the dtype of the file's weights."""


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One sequence through one model.

    Attributes:
      ids: int32 [T].
      rows: int32 [R], the positions whose logits are stored.
      float32: fp32 logits [R, V] of a forward in fp32.
      bfloat16: bf16 logits [R, V] of a forward in bf16; empty for SmolLM2.
    """

    ids: np.ndarray
    rows: np.ndarray
    float32: np.ndarray
    bfloat16: np.ndarray


def folder(name: str) -> pathlib.Path:
    return ROOT / name


def sequences(name: str) -> list[Sequence]:
    """The sequences of a tiny model."""
    with np.load(ROOT / name / "golden.npz") as f:
        count = sum(key.startswith("ids_") for key in f)
        return [
            Sequence(f[f"ids_{i}"], f[f"rows_{i}"], f[f"float32_{i}"], f[f"bfloat16_{i}"].view(ml_dtypes.bfloat16))
            for i in range(count)
        ]


def smollm2_chats() -> list[dict]:
    """8 chats, each with its greedy continuation in fp32.

    Keys: `messages`, `rendered` text, `prompt` ids, 32 `greedy` ids (an end of turn does not stop them), their `text`,
    and `smallest_margin`, the least lead of a greedy token's logit over the next one's.
    """
    return json.loads((ROOT / "smollm2.json").read_text(encoding="utf-8"))


def smollm2_sequences() -> list[Sequence]:
    """Prompt and greedy tokens of some of the chats, with the fp32 logits of the prompt's last row and the last row."""
    chats = smollm2_chats()
    with np.load(ROOT / "smollm2_logits.npz") as f:
        numbers = sorted(int(key.removeprefix("rows_")) for key in f if key.startswith("rows_"))
        return [
            Sequence(
                np.array(chats[i]["prompt"] + chats[i]["greedy"], np.int32),
                f[f"rows_{i}"],
                f[f"float32_{i}"],
                np.zeros((0, 0), ml_dtypes.bfloat16),
            )
            for i in numbers
        ]

"""Whole GRPO runs on the GPU: parity at every step, and the same weights from run to run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.trainer import kill_many, tiny
from trainer.loop import train
from trainer.metrics import read_metrics

# The kernels take widths in multiples of 64, and heads of 32 and more.
MODEL = dataclasses.replace(tiny.CONFIG, hidden_size=128, intermediate_size=256, head_dim=64)

pytestmark = pytest.mark.xdist_group("train")


def run(folder, **overrides) -> list[dict]:
    train(tiny.run_config(folder, MODEL, checkpoint__every=0, numerics__backend="hopper", **overrides))
    rows = read_metrics(folder / "runs/run")
    for row in rows:
        assert (row["parity/max_abs"], row["parity/mismatched_tokens"]) == (0, 0) and row["parity/tokens"] > 0
        assert row["ratio/max"] == row["ratio/min"] == 1
    return rows


def weights(folder) -> dict[str, bytes]:
    _, arrays = kill_many.arrays(folder / "runs/run")
    return {name: np.asarray(a).tobytes() for name, a in arrays.items() if name.startswith("['masters']")}


def test_fifty_steps_at_learning_rate_zero(tmp_path):
    """Gate 12 of the design."""
    assert len(run(tmp_path, train__steps=50, optimizer__lr=0, rollout__temperature=0.7)) == 50


def test_two_runs_learn_the_same_weights(tmp_path):
    for name, remat in (("a", "false"), ("b", "false"), ("c", "true"), ("e", "save_attention")):
        assert len(run(tmp_path / name, train__steps=8, optimizer__lr=0.01, train__remat=remat)) == 8
    run(tmp_path / "d", train__steps=8, optimizer__lr=0.0101)
    a, b, c, d, e = (weights(tmp_path / name) for name in "abcde")
    assert a and a == b == c == e
    assert a != d  # control: another learning rate is seen

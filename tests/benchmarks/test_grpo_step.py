"""`benchmarks.grpo_step`: its steps on a tiny model, and the rows that they give."""

from __future__ import annotations

import pytest

from benchmarks import grpo_step, report
from isomodel.bench.work import Work
from tests.trainer import tiny


def test_steps_train_on_what_was_generated_or_score_and_train():
    work = Work(prompts=2, samples=2, prompt_tokens=5, max_tokens=6)
    ours = grpo_step.steps("iso", tiny.CONFIG, work, 24, repeats=2)
    assert {name: len(seconds) for name, seconds in ours.items()} == {"generate": 2, "train": 2, "sync": 2}
    native = grpo_step.steps("native", tiny.CONFIG, work, 24, repeats=1)
    assert {name: len(seconds) for name, seconds in native.items()} == {"score": 1, "train": 1}


def test_rows_hold_what_the_issue_asks():
    ours = {"generate": [2.0, 9.0, 1.0], "train": [1.0] * 3, "sync": [0.0] * 3}
    native = {"train": [1.0] * 3, "score": [0.5] * 3}
    facts = {"area": "engine", "gpu": "1 x G", "versions": {"jax": "1"}, "date": "2026-01-01", "commit": "c"}
    rows = {
        row["id"]: report._result(facts | {"reason": "why"} | row)
        for row in grpo_step.rows("qwen3-0.6b", ours, native, {"seconds": [5.0] * 3})
    }
    assert {name.removeprefix("grpo-qwen3-0.6b-"): (row.ratio, row.met) for name, row in rows.items()} == {
        "generation": (pytest.approx(0.4), True),
        "training": (pytest.approx(1.0), True),
        "training-with-pass": (pytest.approx(2 / 3), True),
        "step": (pytest.approx(3 / 6.5), True),
    }
    assert grpo_step.shape("qwen3-8b").num_layers == 8 and grpo_step.shape("qwen3-0.6b").num_layers == 28

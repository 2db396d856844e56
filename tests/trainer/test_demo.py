"""The demo's own judgement: it must notice what the demo should show and does not."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "demo.py"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: pathlib.Path, rewards, held_out, mismatched=0, max_abs=0.0, tokens=100) -> pathlib.Path:
    rows = [
        {
            "step": i,
            "reward/mean": reward,
            "ratio/max": 1.0,
            "parity/tokens": tokens,
            "parity/mismatched_tokens": mismatched,
            "parity/max_abs": max_abs,
        }
        for i, reward in enumerate(rewards, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = [{"step": i, "eval/reward_mean": r} for i, r in enumerate(held_out)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    return folder


LEARNED = ([0.1] * 5 + [0.9] * 5, [0.0, 0.95])


def test_a_run_that_learned_in_parity_passes_and_is_summed_up(demo, tmp_path):
    run = write(tmp_path, *LEARNED)
    assert demo.faults(run) == []
    cells = demo.summary(run)
    assert cells["tokens compared"] == "1,000" and cells["tokens whose bits differ"] == "0"
    assert cells["reward, first 5 and last 5 steps"] == "0.100 -> 0.900"
    text = demo.table({"iso": cells, "native": cells})
    assert len(text.splitlines()) == len(cells) + 1 and "0.000 -> 0.950" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rewards=[0.1] * 5 + [0.5] * 5), "reward went from 0.100 to 0.500"),
        (dict(rewards=[0.4] * 5 + [0.7] * 5), "should double"),
        (dict(held_out=[0.0, 0.3]), "held-out reward went from 0.000 to 0.300"),
        (dict(mismatched=1), "parity is not 0 in steps"),
        (dict(max_abs=1e-7), "parity is not 0 in steps"),
        (dict(max_abs="NaN"), "parity is not 0 in steps"),
        (dict(tokens=0), "parity is not 0 in steps"),
    ],
)
def test_what_is_not_shown_is_said(demo, tmp_path, changes, message):
    rewards, held_out = LEARNED
    found = demo.faults(write(tmp_path, **(dict(rewards=rewards, held_out=held_out) | changes)))
    assert any(message in f for f in found)

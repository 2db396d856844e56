"""The real run's script: it kills where it should, goes on after its time, sees every difference, and sums up honestly."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
import time

import pytest

from benchmarks import real_run, report
from benchmarks.real_run import OutOfTime, Run, together
from benchmarks.real_run_report import compared, markdown, rows, summary
from trainer.config import TrainConfig
from trainer.metrics import encode_row

CONFIG = TrainConfig.load(real_run.CONFIG)
CHILD = """
import pathlib, signal, sys, time
folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
rows = folder / "metrics.jsonl"
done = rows.read_bytes().count(b"\\n") if rows.exists() else 0
for step in range(done, steps):
    with rows.open("a") as file:
        file.write("{}\\n")
    time.sleep(0.02)
sys.exit(int(sys.argv[3]))
"""
"""Stands for `isomodel train`: a row every 20 ms, goes on where it was."""


def run(tmp_path: pathlib.Path, steps: int = 10**6, code: int = 0) -> Run:
    folder = tmp_path / "a"
    return Run(folder, (sys.executable, "-c", CHILD, str(folder), str(steps), str(code)), dict(os.environ))


def later(seconds: float = 60) -> float:
    return time.monotonic() + seconds


def test_a_life_is_killed_after_its_step_and_the_next_goes_on(tmp_path):
    together(run(tmp_path).live(later(), kill_at=5))
    assert 5 <= run(tmp_path).steps < 10**6
    reached = run(tmp_path).steps
    together(run(tmp_path, steps=reached + 3).live(later()))
    assert run(tmp_path).steps == reached + 3


def test_the_deadline_stops_a_life_softly_and_those_beside_it(tmp_path):
    beside = tmp_path / "beside"
    beside.mkdir()
    other = run(beside)
    with pytest.raises(OutOfTime, match="a stopped after"):
        together(run(tmp_path).live(later(1.0)), other.live(later()))
    reached = other.steps
    time.sleep(0.3)
    assert other.steps == reached  # nobody is left running


def test_a_life_that_ends_otherwise_than_it_should_is_an_error_with_its_log(tmp_path):
    with pytest.raises(RuntimeError, match="ended by itself with 3 after 2 steps"):
        together(run(tmp_path, steps=2, code=3).live(later()))
    with pytest.raises(RuntimeError, match="ended by itself with 0"):  # over before it could be killed
        together(run(tmp_path, steps=2).live(later(), kill_at=5))


def row(step: int, **changes) -> dict:
    plain = {"step": step, "reward/mean": 0.1 * step, "reward/std": 0.0, "loss": 0.5, "grad_norm": 1.0, "ratio/max": 1.0, "ratio/min": 1.0,
             "parity/max_abs": 0.0, "parity/mean_abs": 0.0, "parity/mismatched_tokens": 0, "parity/tokens": 100, "length/mean": 60.0,
             "time/generate_s": 1.0, "time/reward_s": 0.1, "time/train_s": 0.5, "time/sync_s": 0.001, "time/step_s": 2.0,
             "tokens_per_s/generate": 5000.0}  # fmt: skip
    return plain | {key.replace("__", "/"): value for key, value in changes.items()}


def write(folder: pathlib.Path, given: list[dict], samples: str = "x\n", held_out=(0.2, 0.6)) -> pathlib.Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(map(encode_row, given)))
    (folder / "samples/step_00000002.jsonl").write_text(samples)
    lines = [json.dumps({"step": i * len(given), "eval/reward_mean": x}) for i, x in enumerate(held_out)]
    (folder / "evaluations.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_two_lives_are_compared_to_the_last_bit_but_for_their_times(tmp_path):
    first = write(tmp_path / "first", [row(1), row(2, time__step_s=9.0)])
    assert compared(first, write(tmp_path / "same", [row(1), row(2), row(3)])) == []
    off = math.nextafter(0.5, 1)
    assert compared(first, write(tmp_path / "loss", [row(1), row(2, loss=off)])) == ["metrics.jsonl, step 2: ['loss']"]
    assert len(compared(first, write(tmp_path / "short", [row(1)]))) == 1
    assert compared(first, write(tmp_path / "samples", [row(1), row(2)], "y\n")) == ["samples/step_00000002.jsonl"]
    assert compared(write(tmp_path / "none", []), tmp_path / "same")  # nothing compared is no proof


NATIVE = dict(parity__max_abs=0.25, parity__mean_abs=0.01, parity__mismatched_tokens=40, ratio__max=1.3)


def test_the_table_and_the_rows_say_what_the_runs_did(tmp_path):
    runs = {
        "iso": write(tmp_path / "iso", [row(1), row(2), row(3, time__step_s=9.0)]),
        "native": write(tmp_path / "native", [row(1, time__step_s=1.0), row(2, time__step_s=1.0, **NATIVE)]),
    }
    found = {"iso": {"killed_after": 2, "checkpoint": 1, "differences": []}}
    facts = {"gpu": "1 x NVIDIA H200", "versions": {"jax": "0.11.2"}, "commit": "abc1234", "date": "2026-11-30"}
    text = markdown(CONFIG, runs, found, facts)
    assert "| | iso | iso, first 2 steps | native |" in text
    assert "| largest difference, nats | 0 | 0 | 0.25 |" in text and "| mean difference, nats | 0 | 0 | 0.005 |" in text
    assert "| held-out accuracy, before and after | 0.200 -> 0.600 | 0.200 -> 0.200 | 0.200 -> 0.600 |" in text
    assert "| whole step, median ms | 2000.0 | 2000.0 | 1000.0 |" in text
    assert "Steps 2 to 2 were made twice: 0 differences" in text
    made = {r["id"]: r for r in rows(CONFIG, runs, found)}
    assert (made["real-run-parity"]["ours"], made["real-run-native-parity"]["ours"]) == (0, 0.25)
    assert made["real-run-native-ratio"]["ours"] == 1.3
    assert (made["real-run-whole-step"]["ours"], made["real-run-whole-step"]["baseline"]) == (2000, 1000)
    out = tmp_path / "results.jsonl"
    results = report.record_all([{"area": "engine", "command": "x"} | facts | r for r in made.values()], out)
    assert all(r.met for r in results) and len(results) == 10


def test_what_a_run_left_goes_into_the_results_and_the_guide(tmp_path):
    out, guide, results = tmp_path / "out", tmp_path / "training.md", tmp_path / "results.jsonl"
    out.mkdir()
    row = dict(id="real-run-parity", area="engine", work="w", metric="nats", ours=0.0, target="== 0", gpu="g", versions={"jax": "1"},
               commit="abc1234", date="2026-11-30", command="c")  # fmt: skip
    (out / "real_run.json").write_text(json.dumps([row]))
    (out / "real_run.md").write_text("| steps | 200 |\n")
    (out / "real_run.png").write_bytes(b"png")
    guide.write_text("before\n")
    with pytest.raises(report.ResultsError, match="once each"):
        real_run.enter(out, None, results, guide)
    assert not results.exists()
    guide.write_text(real_run.GUIDE.read_text())
    assert real_run.enter(out, None, results, guide) == real_run.enter(out, None, results, guide) == 1
    text = guide.read_text()
    assert text.count("| steps | 200 |") == 1 and "(real_run.png)" in text and text.startswith("# Training")
    assert (tmp_path / "real_run.png").read_bytes() == b"png"


def test_a_missed_bit_is_not_summed_up_as_none(tmp_path):
    runs = {"iso": write(tmp_path / "iso", [row(1), row(2, parity__max_abs=math.nan, parity__mismatched_tokens=1)])}
    assert math.isnan(summary(runs["iso"])["worst"])
    found = {"kill": {"steps": 12, "killed_after": 8, "checkpoint": 5, "differences": ["array w"]}}
    made = {r["id"]: r for r in rows(CONFIG, runs, found)}
    assert made["real-run-resume-kill"]["ours"] == 1
    with pytest.raises(RuntimeError, match="1 steps compared no token"):
        rows(CONFIG, {"iso": write(tmp_path / "nothing", [row(1, parity__tokens=0)])}, {})


def test_words_that_mean_nothing_are_refused(tmp_path):
    command = [sys.executable, "-m", "benchmarks.real_run", str(tmp_path), "izo"]
    done = subprocess.run(command, cwd=real_run.ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown part izo" in done.stderr

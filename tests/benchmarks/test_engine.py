"""The rows of `benchmarks.engine` from what two arms found: ratios, targets, and what a failed arm leaves."""

from __future__ import annotations

import json

import pytest

from benchmarks import engine, report
from isomodel.bench import arm
from isomodel.bench.work import SHAPES, Work

FACTS = {"gpu": "1 x G", "versions": {"jax": "1"}, "date": "2026-01-01", "commit": "c"}


def found(rate: float, works: int, ttft: float = 0.01) -> list[dict]:
    return [{"tokens": [1000] * 3, "seconds": [1000 / rate] * 3, "ttft_s": [ttft], "copy_tb_per_s": 4.0} for _ in range(works)]


@pytest.fixture
def arms(monkeypatch, tmp_path):
    """What each arm is to find, by name; and what it was asked."""
    results, asked = {}, {}

    def measure(name, python, timeout, **arguments):
        asked[name] = arguments
        if name not in results:
            raise arm.ArmFailed(f"{name} ended with 1")
        return results[name]

    monkeypatch.setattr(arm, "measure", measure)
    monkeypatch.setattr(report, "facts", lambda: FACTS)
    return results, asked, tmp_path / "out.json"


def test_rows_of_both_engines_and_of_ours_without_logprobs(arms):
    results, asked, out = arms
    results |= {"iso": [*found(500, 1), *found(510, 1)], "vllm": found(200, 1, ttft=0.02)}
    assert engine.main([str(out), "qwen3-0.6b", "--option", "iso.decode_steps=64", "--option", "vllm.performance_mode=throughput"]) == 0
    rows = {row["id"]: report._result({"area": "engine"} | FACTS | row) for row in json.loads(out.read_text())["rows"]}
    rollouts = rows["engine-qwen3-0.6b-rollouts"]
    assert rollouts.ratio == pytest.approx(2.5) and rollouts.met and rollouts.target == ">= 2.0"
    assert rows["engine-qwen3-0.6b-logprobs"].ratio == pytest.approx(1.02) and rows["engine-qwen3-0.6b-logprobs"].met
    assert rows["engine-qwen3-0.6b-rollouts-first-token"].ratio == pytest.approx(0.5)
    assert rows["engine-qwen3-0.6b-rollouts-floor"].baseline > 0
    assert asked["iso"]["options"] == {"decode_steps": 64} and asked["vllm"]["options"] == {"performance_mode": "throughput"}
    assert rollouts.baseline_name.endswith("its own defaults but performance_mode=throughput")
    assert rollouts.command.endswith('qwen3-0.6b --option iso.decode_steps=64 --option vllm.performance_mode="throughput"')
    assert [w["logprobs"] for w in asked["iso"]["works"]] == [True, False]
    assert [w["logprobs"] for w in asked["vllm"]["works"]] == [True]


def test_a_missed_target_needs_its_reason_to_be_entered(arms, monkeypatch):
    results, _, out = arms
    results |= {"iso": found(300, 3), "vllm": found(200, 2)}
    assert engine.main([str(out), "qwen3-8b"]) == 0
    results["iso"] = found(210, 3)
    assert engine.main([str(out), "qwen3-8b"]) == 0
    monkeypatch.setattr(report, "RESULTS", out.with_name("results.jsonl"))
    with pytest.raises(report.ResultsError, match="engine-qwen3-8b-groups"):
        engine.main(["--record", str(out)])


def test_a_real_models_row_has_its_steps_and_their_floor(arms, monkeypatch, tmp_path):
    results, _, out = arms
    work = Work(file="ids.json")
    monkeypatch.setattr(engine, "arithmetic", lambda folder, to: work)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["smollm2-135m"].to_hf()))
    monkeypatch.setattr(engine.fetch, "resolve", lambda model: str(tmp_path))
    results |= {"iso": found(500, 1), "vllm": found(100, 1)}
    results["iso"][0]["stats"] = {"decode_steps": 400}
    assert engine.main([str(out), "smollm2"]) == 0
    rows = {row["id"]: row for row in json.loads(out.read_text())["rows"]}
    floor = rows["engine-smollm2-rollouts-floor"]
    assert floor["ours"] == pytest.approx(2000 / 100) and "100 a run, 10 samples in each" in floor["work"]
    assert floor["baseline"] == pytest.approx(work.step_bytes(SHAPES["smollm2-135m"])[0] / 4e12 * 1e3)
    assert rows["engine-smollm2-rollouts"]["target"] == ">= 3.0"


def test_an_engine_that_does_not_run_leaves_no_row(arms, capsys):
    results, _, out = arms
    results["iso"] = found(300, 2)
    assert engine.main([str(out), "qwen3-0.6b"]) == 1
    kept = json.loads(out.read_text())
    assert kept["rows"] == [] and "vllm ended with 1" in kept["failed"]["qwen3-0.6b"]
    with pytest.raises(SystemExit):
        engine.main([str(out), "gpt2"])


def test_prompts_of_the_task_are_written_for_both_engines(tmp_path):
    from isomodel import weights
    from tests.isomodel.rollout import tiny

    folder = tmp_path / "tiny"
    weights.save(folder, tiny.CONFIG, tiny.params())
    (tmp_path / "to").mkdir()
    with pytest.raises(Exception, match="tokenizer"):
        engine.arithmetic(folder, tmp_path / "to", 3)
    assert len((tmp_path / "to" / "prompts.jsonl").read_text().splitlines()) == 3

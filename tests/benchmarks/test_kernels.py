"""The kernel benchmarks' bookkeeping, without a GPU: processes of their own, rows kept, reasons asked for."""

from __future__ import annotations

import fcntl
import functools
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import report
from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import separate, timing, tune_rows

FACTS = {"gpu": "1 x NVIDIA H200", "versions": {"jax": "0.11.2"}, "commit": "abc", "date": "2026-11-30"}
ROW = {
    "id": "x",
    "work": "w",
    "metric": "us",
    "ours": 2.0,
    "baseline": 1.0,
    "baseline_name": "b",
    "target": "<= 1",
    "command": "c",
}


def measured(tmp_path, *rows) -> str:
    path = tmp_path / "out.json"
    path.write_text(json.dumps({"facts": FACTS, "rows": rows, "failed": {"stack": "no memory"}}))
    return str(path)


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    original = report.record_all
    monkeypatch.setattr(report, "record_all", lambda rows: original(rows, path))
    return path


def test_rows_are_entered_with_the_facts_of_the_machine_that_measured(tmp_path, results, capsys):
    assert kernels.main(["--record", measured(tmp_path, ROW | {"ours": 0.5})]) == 0
    (result,) = report.load(results)
    assert (result.area, result.gpu, result.commit, result.ratio, result.met) == (
        "kernels",
        "1 x NVIDIA H200",
        "abc",
        0.5,
        True,
    )
    assert "1 rows entered; failed: stack" in capsys.readouterr().out


def test_a_missed_target_needs_its_reason(tmp_path, results, monkeypatch):
    with pytest.raises(report.ResultsError, match="misses its target <= 1 and gives no reason"):
        kernels.main(["--record", measured(tmp_path, ROW | {"id": "y", "ours": 0.5}, ROW)])
    assert not results.exists(), "half of a file was entered"
    monkeypatch.setitem(kernels.REASONS, "x", "two passes")
    assert kernels.main(["--record", measured(tmp_path, ROW)]) == 0
    (result,) = report.load(results)
    assert result.reason == "two passes" and not result.met


def test_what_one_module_measured_is_kept_when_another_fails(tmp_path, monkeypatch):
    def run(command, **options):
        ok = command[-1] == "rows"
        return type("Done", (), {"returncode": not ok, "stdout": json.dumps([ROW]), "stderr": "out of memory"})

    monkeypatch.setattr(kernels.subprocess, "run", run)
    monkeypatch.setattr(kernels.report, "this_machine", lambda: "gpu")
    monkeypatch.setattr(kernels.importlib.metadata, "version", lambda name: "1")
    out = tmp_path / "out.json"
    assert kernels.main([str(out), "gemm", "rows"]) == 1
    found = json.loads(out.read_text())
    assert found["rows"] == [{"command": "python -m benchmarks.kernels OUT.json rows"} | ROW]
    assert list(found["failed"]) == ["gemm"] and "out of memory" in found["failed"]["gemm"]


def test_unknown_modules_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        kernels.main([str(tmp_path / "out.json"), "gem"])
    assert "unknown module gem; choose from gemm" in capsys.readouterr().err


def test_a_process_of_its_own_runs_under_the_flags_asked_for():
    assert separate.call("native", "gemm", "tflops", 1000, 1000, 1000, 2.0) == 1000.0
    with pytest.raises(RuntimeError, match="gemm.nothing under iso flags"):
        separate.call("iso", "gemm", "nothing")


def test_one_process_measures_at_a_time(tmp_path, monkeypatch):
    def taken() -> bool:
        with open(tmp_path / "lock", "w") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    seen = lambda x: jax.pure_callback(lambda x: (during.append(taken()), x)[1], jax.ShapeDtypeStruct((), "float32"), x)  # noqa: E731
    during: list[bool] = []
    x = jnp.float32(1)
    timing.device_us(seen, x, iterations=1)  # no lock is named: nobody to wait for
    assert during and not any(during)
    monkeypatch.setenv("ISOMODEL_GPU_LOCK", str(tmp_path / "lock"))
    for measure in (
        lambda: timing.device_us(seen, x, iterations=1),
        lambda: timing.loop_us(lambda i, x: seen(x), x, trips=2),
    ):
        during.clear()
        measure()
        assert during and all(during)
    assert not taken()


def test_the_row_kernels_that_are_tuned_lower_for_a_gpu(monkeypatch):
    monkeypatch.setattr(tune_rows, "make", lambda seed, *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    names = []
    for work in (tune_rows.norms, tune_rows.ropes, tune_rows.silus):
        for name, call, args, picked, plans in work():
            names.append(name)
            if name.startswith(("norm 256x4096", "rope 256x8x6x128", "silu 256x2x3072")):
                run = jax.jit(functools.partial(call, plan=picked))
                assert "mosaic_gpu" in run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
                assert len(plans) > 5
    assert len(names) == len(set(names)) == 2 * (4 * 3 + 3 * 2 + 2 * 2)


def test_a_schedule_with_other_bits_is_refused(monkeypatch, capsys):
    x = jnp.ones(8, jnp.bfloat16)
    work = lambda: [("silu 1", lambda x, plan: x * plan, (x,), 1, [1, bad])]  # noqa: E731
    monkeypatch.setattr(tune_rows, "silus", work)
    monkeypatch.setattr(tune_rows.timing, "kernel_us", lambda run, *args, iterations: 2.0)
    bad = 1
    tune_rows.main(["silu"])
    assert "no schedule was faster" in capsys.readouterr().out
    bad = 2
    with pytest.raises(SystemExit, match="schedule 2 has other bits"):
        tune_rows.main(["silu"])

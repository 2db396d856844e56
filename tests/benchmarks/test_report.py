"""RESULTS.md comes from results.jsonl alone: newest wins, misses are told with their reason, wrong lines are named."""

from __future__ import annotations

import json
import pathlib

import pytest

from benchmarks import report

ROW = dict(
    id="gemm-1024", area="CPU", work="GEMM, T 1024", metric="ms", ours=12.0, baseline=8.0, baseline_name="plain jnp",
    target="<= 3", command="python -m benchmarks.cpu", gpu="none; some CPU", versions={"jax": "0.11.2"}, commit="abc1234", date="2026-11-30",
)  # fmt: skip


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / "results.jsonl"


def test_ratio_and_met_follow_from_the_figures(path):
    result = report.record(path, **ROW)
    assert (result.ratio, result.met) == (1.5, True)
    assert json.loads(path.read_text()) == ROW | {"ratio": 1.5, "met": True, "reason": None}
    assert report.record(path, **ROW | {"target": "< 1.5", "reason": "small tiles"}).met is False
    alone = report.record(path, **ROW | {"baseline": None, "baseline_name": None, "target": "== 0", "ours": 0})
    assert (alone.ratio, alone.met) == (None, True)


def test_newest_wins_and_keeps_its_place(path):
    report.record(path, **ROW)
    report.record(path, **ROW | {"id": "other"})
    report.record(path, **ROW | {"ours": 16.0})
    assert [(r.id, r.ours) for r in report.load(path)] == [("gemm-1024", 16.0), ("other", 12.0)]


def test_page_lists_each_area_and_every_miss_with_its_reason(path):
    report.record(path, **ROW)
    slow = {"id": "decode", "area": "Decode", "work": "16 sequences", "ours": 40.0, "reason": "tiles"}
    report.record(path, **ROW | slow)
    page = report.render(report.load(path))
    assert "| GEMM, T 1024 | 12 ms | 8 ms (plain jnp) | 1.5 | <= 3 | yes |" in page
    assert "| 16 sequences | 40 ms | 8 ms (plain jnp) | 5 | <= 3 | **no** |" in page
    assert page.endswith("## Short of target\n\n- 16 sequences: 5 against <= 3. tiles\n")
    assert "None." in report.render(report.load(path)[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "about 3"}, "target is 'about 3'"),
        ({"ours": 40.0}, "misses its target <= 3 and gives no reason"),
        ({"ours": "fast"}, "ours is 'fast', no number"),
        ({"date": "yesterday"}, "date is 'yesterday'"),
        ({"baseline_name": None}, "a baseline needs baseline_name"),
        ({"baseline": 0}, "baseline is 0"),
        ({"speed": 3}, "unexpected keyword argument 'speed'"),
        ({"work": ""}, "work is empty"),
    ],
)
def test_wrong_fields_are_refused_and_nothing_is_written(path, change, message):
    with pytest.raises(report.ResultsError, match=message):
        report.record(path, **ROW | change)
    assert not path.exists()


def test_wrong_lines_are_all_named(path):
    path.write_text("\n".join([json.dumps(ROW), "{", "3", json.dumps(ROW | {"met": False}), json.dumps({"id": "x"})]))
    with pytest.raises(report.ResultsError) as e:
        report.load(path)
    assert [line.split(":")[0] for line in str(e.value).splitlines()[1:]] == [f"  - line {n}" for n in (2, 3, 4, 5)]
    assert "met is False, and its figures give True" in str(e.value)


def test_command_line(path, tmp_path, capsys):
    page, readme = tmp_path / "RESULTS.md", tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}old{report.END}\nafter\n")
    arguments = ["--results", str(path), "--page", str(page), "--readme", str(readme)]
    assert report.main(arguments) == 2
    report.record(path, **ROW)
    assert report.main([*arguments, "--check"]) == 1 and not page.exists()
    assert report.main(arguments) == 0 and "GEMM" in page.read_text()
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| GEMM, T 1024 | 12 ms | 8 ms (1.5x) | <= 3 | yes |" in text
    assert report.main([*arguments, "--check"]) == 0
    readme.write_text(text.replace("12 ms", "11 ms"))
    assert report.main([*arguments, "--check"]) == 1, "a figure typed by hand"
    assert report.main(arguments) == 0 and readme.read_text() == text
    report.record(path, **ROW | {"ours": 9.0})
    assert report.main([*arguments, "--check"]) == 1
    readme.write_text("no marks")
    assert report.main(arguments) == 2 and readme.read_text() == "no marks"


def test_tables_of_the_gpu_gate(path, tmp_path):
    report.record(path, **ROW)
    gate = {"commit": "abc", "date": "2026-11-30 11:49 UTC", "gpu": "NVIDIA H200", "seconds": 332, "passed": 2, "skipped": {"no model": 3},
            "failed": ["tests/gpu/test_gemm.py::test_x"], "bits": {"gemm": {"a row alone": [4, 1234567, 1]}}, "accuracy": {"gemm": {"chain": [1.5e-3, 2e-3]}}}  # fmt: skip
    page = report.render(report.load(path), gate)
    assert "abc, NVIDIA H200, 332 s, 2 passed, 1 failed, 3 skipped" in page and "- failed: `tests/gpu/test_gemm.py::test_x`" in page
    assert "### tests/gpu/test_gemm.py" in page and "| a row alone | 4 | 1,234,567 | 1 |" in page
    assert "| gemm | chain | 0.0015 | 0.002 |" in page
    assert "Bits on the GPU" not in report.render(report.load(path))


def test_the_committed_page_is_up_to_date():
    assert report.main(["--check"]) == 0

"""GPU gates: what they ran on and how they ended goes to benchmarks/gpu_gate.json (or $ISOMODEL_GPU_GATE), to be committed.

    ISOMODEL_TEST_GPU=1 pytest tests/gpu -n 14 --dist loadgroup

Most of the time goes to compiling kernels, each process its own: tests that share kernels share a process (a group), and
the groups of whole models, the longest, start first. A run of some of the tests (`-k`, a path below tests/gpu) writes nothing: the file always speaks of all of them.
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import pathlib
import subprocess
import time

import pytest

from tests.pallas_kernels import base

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]

# Several test processes share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _commit() -> str:
    """Of the checkout; $ISOMODEL_COMMIT where the tests run on a copy without .git. A trailing + says: with changes."""
    if "ISOMODEL_COMMIT" in os.environ:
        return os.environ["ISOMODEL_COMMIT"]
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()  # noqa: E731
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "--porcelain") else "")


def _reason(report) -> str:
    """Why a test was skipped: the first clause is enough to count by."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ").partition(": ")[0].splitlines()[0]


def pytest_collection_modifyitems(items):
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}.{item.originalname}"))
    items.sort(key=lambda item: item.path.stem != "test_model")  # a stable sort


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Notes what the test compared by bits: values that were equal, and comparisons where some were not. A test that passes
    has those as controls."""
    compared, accuracy = len(base.COMPARED), len(base.ACCURACY)
    result = yield
    mine = base.COMPARED[compared:]
    equal = sum(values for values, different in mine if not different)
    item.user_properties.append(("bits", [equal, sum(different > 0 for _, different in mine)]))
    item.user_properties.append(("accuracy", base.ACCURACY[accuracy:]))
    return result


def _bit_table(passed) -> dict[str, dict[str, list[int]]]:
    """By file and test: cases, values that were equal, comparisons that were to differ and did."""
    table: dict[str, dict[str, list[int]]] = {}
    for report in passed:
        noted = dict(report.user_properties)
        path, _, name = report.nodeid.partition("::")
        row = noted.get("row") or name.partition("[")[0].partition("@")[0].removeprefix("test_").replace("_", " ")
        if any(noted.get("bits", [])):
            cells = table.setdefault(pathlib.Path(path).stem.removeprefix("test_"), {}).setdefault(row, [0, 0, 0])
            cells[:] = [a + b for a, b in zip(cells, [1, *noted["bits"]], strict=True)]
    return {name: dict(sorted(rows.items())) for name, rows in sorted(table.items())}


def _accuracy(passed) -> dict[str, dict[str, list[float]]]:
    """By file and what was computed: our relative error against float64 results, and the library's."""
    table: dict[str, dict[str, list[float]]] = {}
    for report in passed:
        for what, *errors in dict(report.user_properties).get("accuracy", []):
            name = pathlib.Path(report.nodeid.partition("::")[0]).stem.removeprefix("test_")
            table.setdefault(name, {})[what] = [float(f"{x:.4g}") for x in errors]
    return {name: dict(sorted(rows.items())) for name, rows in sorted(table.items())}


class Gate:
    """Writes the file anew after each test, so that a run that is killed leaves what it found."""

    def __init__(self, config):
        from pallas_kernels import environment

        facts = environment.describe()
        self.reports, self.started = [], time.time()
        self.path = pathlib.Path(os.environ.get("ISOMODEL_GPU_GATE", ROOT / "benchmarks" / "gpu_gate.json"))
        self.facts = {
            "commit": _commit(),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "gpu": facts.get("gpu", {}).get("device", facts["platform"]),
            "versions": {"jax": facts["jax"], "jaxlib": facts["jaxlib"]} | facts.get("gpu", {}),
        }

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.reports.append(report)
            self.write(interrupted=True)

    def pytest_collectreport(self, report):
        if report.failed:
            self.reports.append(report)

    def pytest_terminal_summary(self, terminalreporter, exitstatus):
        self.write(interrupted=exitstatus == pytest.ExitCode.INTERRUPTED)
        terminalreporter.write_line(f"wrote {self.path}")

    def write(self, interrupted: bool):
        passed = [r for r in self.reports if r.passed]
        gate = self.facts | {
            "passed": len(passed),
            "failed": sorted({r.nodeid.partition("@")[0] for r in self.reports if r.failed}),
            "skipped": dict(sorted(collections.Counter(_reason(r) for r in self.reports if r.skipped).items())),
            "interrupted": interrupted,
            "seconds": round(time.time() - self.started),
            "bits": _bit_table(passed),
            "accuracy": _accuracy(passed),
        }
        self.path.write_text(json.dumps(gate, indent=1) + "\n")


def pytest_sessionstart(session):
    config = session.config
    everything = [pathlib.Path(a.split("::")[0]).resolve() for a in config.args] == [HERE] and not config.option.keyword
    mine = not hasattr(config, "workerinput")  # a worker's reports come to the process that started it
    if os.environ.get("ISOMODEL_TEST_GPU") == "1" and mine and everything and not config.option.collectonly:
        config.pluginmanager.register(Gate(config), "gpu-gate")

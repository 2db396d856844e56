"""What `make demo` gives, measured: reward before and after, parity over all tokens, time.

    python -m benchmarks.demo [--reason TEXT]    (TEXT: why a target is missed, if one is)
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks import report

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "demo.yaml"
NATIVE_STEPS = 20
LAST = 10
"""Steps whose mean reward stands for the end of the run."""


def run(folder: str, name: str, *overrides: str) -> tuple[list[dict], float]:
    """(rows of metrics.jsonl, wall seconds, compilation included) of one run in a process of its own, on the CPU.

    Raises:
      subprocess.CalledProcessError: the run failed.
    """
    command = [sys.executable, "-m", "isomodel.cli", "train", str(CONFIG), f"run_dir={folder}", f"name={name}", *overrides]
    start = time.perf_counter()
    subprocess.run(command, check=True, cwd=CONFIG.parent.parent, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    seconds = time.perf_counter() - start
    lines = (pathlib.Path(folder) / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reason", help="why a target is missed, if one is")
    reason = parser.parse_args().reason
    with tempfile.TemporaryDirectory() as folder:
        rows, seconds = run(folder, "demo")
        native, _ = run(folder, "demo_native", "numerics=native", f"train.steps={NATIVE_STEPS}")
    tokens = sum(int(row["parity/tokens"]) for row in rows)
    first, last = rows[0]["reward/mean"], sum(row["reward/mean"] for row in rows[-LAST:]) / LAST

    def record(id: str, work: str, metric: str, ours: float, target: str, **baseline) -> None:
        result = report.record(
            id=id, area="foundation", work=work, metric=metric, ours=ours, target=target, reason=reason,
            command="python -m benchmarks.demo", **baseline,
        )  # fmt: skip
        print(f"{id}: {result.ours:.4g} {metric}, target {target}: {'met' if result.met else 'missed'}")

    record("demo-seconds", f"{len(rows)} steps from random weights, compilation included", "s", round(seconds, 1), "<= 300")
    record("demo-parity", f"largest difference of a log-probability, {tokens:,} tokens", "nats",
           max(row["parity/max_abs"] for row in rows), "== 0")  # fmt: skip
    record("demo-reward", f"mean reward of the last {LAST} steps, of at most 1", "of 1", round(last, 4), "> 0.6")
    record("demo-reward-gain", "the same against the first step's", "of 1", round(last, 4), ">= 2",
           baseline=round(first, 4), baseline_name="first step")  # fmt: skip
    record("demo-native-parity", f"largest difference in native numerics, {NATIVE_STEPS} steps", "nats",
           max(row["parity/max_abs"] for row in native), "> 0")  # fmt: skip


if __name__ == "__main__":
    main()

"""The demo: trains configs/demo.yaml in iso numerics, its first steps again in native numerics, draws both, and sums up.

    python scripts/demo.py [--native-steps 20] [--run-dir runs] [--fresh] [key=value ...]

Each run is a process of its own: XLA reads its flags once, and iso and native want different ones. A run that is there is
continued (a finished one is only summed up); --fresh removes it first. Exit 1 when the demo does not show what it should.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # also where the project is not installed

from trainer.metrics import read_metrics  # noqa: E402

CONFIG = ROOT / "configs" / "demo.yaml"
ISO, NATIVE = "demo", "demo_native"
ENOUGH = 0.6  # of the largest reward, 1


def train(name: str, run_dir: pathlib.Path, *overrides: str) -> float:
    """Runs `isomodel train` in a process of its own; returns its seconds."""
    command = [sys.executable, "-m", "isomodel.cli", "train", str(CONFIG), f"name={name}", f"run_dir={run_dir}", *overrides]
    environ = {k: v for k, v in os.environ.items() if k != "ISOMODEL_NUMERICS"} | {"JAX_PLATFORMS": "cpu"}
    print(f"\n$ isomodel {' '.join(command[3:])}", flush=True)
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environ, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return time.monotonic() - start


def summary(run: pathlib.Path) -> dict[str, str]:
    """What a run showed, as text by name."""
    rows = read_metrics(run)
    held_out = [row["eval/reward_mean"] for row in read_metrics(run / "evaluations.jsonl")]
    tokens, different = (int(sum(row[k] for row in rows)) for k in ("parity/tokens", "parity/mismatched_tokens"))
    steps_with = sum(row["parity/mismatched_tokens"] > 0 for row in rows)
    return {
        "steps": str(len(rows)),
        "reward, first 5 and last 5 steps": f"{mean(rows[:5]):.3f} -> {mean(rows[-5:]):.3f}",
        "held-out reward, before and after": f"{held_out[0]:.3f} -> {held_out[-1]:.3f}",
        "tokens compared": f"{tokens:,}",
        "tokens whose bits differ": f"{different:,}",
        "steps with a difference": str(steps_with),
        "max |difference| of log-probability": f"{max(row['parity/max_abs'] for row in rows):.3g}",
        "max ratio": f"{max(row['ratio/max'] for row in rows):.9g}",
    }


def mean(rows: list[dict[str, float]]) -> float:
    return sum(row["reward/mean"] for row in rows) / len(rows)


def table(columns: dict[str, dict[str, str]]) -> str:
    """Runs side by side."""
    names = list(next(iter(columns.values())))
    width = max(map(len, names))
    widths = {title: max(len(title), *(len(cells[n]) for n in names)) for title, cells in columns.items()}
    lines = [" " * width + "  " + "  ".join(f"{title:>{widths[title]}}" for title in columns)]
    lines += [
        f"{n:<{width}}  " + "  ".join(f"{cells[n]:>{widths[title]}}" for title, cells in columns.items()) for n in names
    ]
    return "\n".join(lines)


def faults(iso: pathlib.Path) -> list[str]:
    """What the iso run should have shown, and did not."""
    rows = read_metrics(iso)
    held_out = [row["eval/reward_mean"] for row in read_metrics(iso / "evaluations.jsonl")]
    found = []
    unequal = [row["step"] for row in rows if row["parity/max_abs"] != 0 or row["parity/mismatched_tokens"] or not row["parity/tokens"]]
    if unequal:
        found.append(f"parity is not 0 in steps {unequal}")
    for what, before, after in (
        ("reward", mean(rows[:5]), mean(rows[-5:])),
        ("held-out reward", held_out[0], held_out[-1]),
    ):
        if not (after > ENOUGH and after >= 2 * before) or math.isnan(after):
            found.append(f"{what} went from {before:.3f} to {after:.3f}: it should double and pass {ENOUGH}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native-steps", type=int, default=20, help="steps in native numerics; 0 leaves them out")
    parser.add_argument("--run-dir", type=pathlib.Path, default=ROOT / "runs")
    parser.add_argument("--fresh", action="store_true", help="remove the demo's runs first")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for both runs")
    args = parser.parse_args()
    run_dir = args.run_dir.resolve()
    if args.fresh:
        for name in (ISO, NATIVE):
            shutil.rmtree(run_dir / name, ignore_errors=True)
    seconds = {ISO: train(ISO, run_dir, *args.overrides)}
    columns = {"iso": summary(run_dir / ISO)}
    runs = [run_dir / ISO]
    if args.native_steps:
        native = ["numerics=native", f"train.steps={args.native_steps}", *args.overrides]
        seconds[NATIVE] = train(NATIVE, run_dir, *native)
        columns["native"] = summary(run_dir / NATIVE)
        runs.append(run_dir / NATIVE)
    picture = run_dir / ISO / "plot.png"
    subprocess.run([sys.executable, "-m", "isomodel.cli", "plot", *map(str, runs), "-o", str(picture)], cwd=ROOT, check=True)
    print(f"\n{table(columns)}")
    print("\n" + ", ".join(f"{name}: {s:.0f} s" for name, s in seconds.items()) + f" in all, compiling included; plot: {picture}")
    found = faults(run_dir / ISO)
    print("\n".join(f"NOT SHOWN: {f}" for f in found) or "every rollout log-probability had the trainer's bits, and the model learned")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Kills a run many times at random moments, and compares what comes out with a run that was never killed.

    python -m tests.trainer.kill_many [--kills 20] [--steps 200] [--seed 0]

Each life of the run is a process of its own, killed by SIGKILL after a random time: while it starts, while it samples,
trains, or writes a checkpoint (one is written after every step). Prints a JSON report; exit 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import warnings

import jax
import numpy as np

from tests.trainer import tiny
from trainer.checkpoint import COMMIT, STATE, CheckpointStore
from trainer.metrics import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
CHILD = "import sys; from trainer.config import TrainConfig; from trainer.loop import train; train(TrainConfig.load(sys.argv[1]))"
TIMING = ("time/", "tokens_per_s/")


def rows(path: pathlib.Path) -> list[dict]:
    """Rows of a JSONL file less what measures time; of metrics.jsonl, NaN as text (it equals nothing)."""
    given = read_metrics(path) if path.exists() else []
    return [{k: repr(v) for k, v in row.items() if not k.startswith(TIMING)} | {"step": row["step"]} for row in given]


def arrays(run: pathlib.Path) -> tuple[int, dict[str, np.ndarray]]:
    """(step, arrays by name) of a run's newest checkpoint."""
    import orbax.checkpoint as ocp

    found, _ = CheckpointStore(run / "checkpoints", keep=2).latest()
    names = json.loads((found.path / COMMIT).read_text())["arrays"]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # shardings come from the checkpoint's own file, on the machine that wrote it
        tree = checkpointer.restore(found.path / STATE)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    stored = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
    if len(stored) != len(names):
        raise ValueError(f"{found.path} has {len(stored)} arrays, and its COMMIT names {len(names)}")
    return found.step, stored


def differences(a: pathlib.Path, b: pathlib.Path) -> list[str]:
    """What differs between two runs' newest checkpoints (to the bit), metrics (timings left out) and samples."""
    found = []
    (step_a, arrays_a), (step_b, arrays_b) = arrays(a), arrays(b)
    if step_a != step_b:
        found.append(f"newest checkpoint: step {step_a} and {step_b}")
    for name in arrays_a | arrays_b:
        if name not in arrays_a or name not in arrays_b or arrays_a[name].tobytes() != arrays_b[name].tobytes():
            found.append(f"array {name}")
    for file in ("metrics.jsonl", "evaluations.jsonl"):
        rows_a, rows_b = rows(a / file), rows(b / file)
        if len(rows_a) != len(rows_b):
            found.append(f"{file}: {len(rows_a)} and {len(rows_b)} rows")
        for x, y in zip(rows_a, rows_b, strict=False):
            if x != y:
                found.append(f"{file}, step {x['step']}: {[k for k in x | y if x.get(k) != y.get(k)]}")
    samples = [{p.name: p.read_bytes() for p in (run / "samples").glob("*.jsonl")} for run in (a, b)]
    found += [f"samples/{n}" for n in samples[0] | samples[1] if samples[0].get(n) != samples[1].get(n)]
    return found


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Of a child: the CPU, and compiled programs kept between lives, so that a life is mostly training."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return dict(os.environ) | cache | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def run(folder: pathlib.Path, *, kills: int, steps: int, seed: int) -> dict:
    """Does it; returns the report.

    Raises:
      RuntimeError: a life that was not killed failed; with what it said.
    """
    settings = dict(train__steps=steps, checkpoint__every=1, eval__every=7, log__samples_every=3)
    commands = {}
    for name in ("straight", "killed"):
        path = folder / f"{name}.yaml"
        path.write_text(tiny.run_config(folder, name=name, **settings).to_yaml())
        commands[name] = [sys.executable, "-c", CHILD, str(path)]
    environ = environment(folder)
    start = time.monotonic()
    _live(commands["straight"], environ)
    rng = random.Random(seed)
    lives = []
    store = CheckpointStore(folder / "runs/killed/checkpoints", keep=2)
    while len(lives) < kills:
        process = subprocess.Popen(
            commands["killed"], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        # One life in five may die while it starts; the others are waited for until their first step.
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0, 4))
        else:
            for line in process.stdout:
                if line.startswith("step "):
                    break
            time.sleep(rng.uniform(0, 1.0))
        finished = process.poll() is not None
        process.kill()
        output = process.communicate()[0]
        if finished:
            if process.returncode:
                raise RuntimeError(f"a life ended by itself with {process.returncode}:\n{output}")
            break  # all steps are done: no life is left to take
        found, torn = store.latest()
        leftovers = [p.name for p in store.folder.glob(".step_*")] if store.folder.is_dir() else []
        lives.append({"saved": found.step if found else 0, "torn": torn, "unfinished_writes": len(leftovers)})
    _live(commands["killed"], environ)
    return {
        "kills": len(lives),
        "steps": steps,
        "saved_after_each_kill": [x["saved"] for x in lives],
        "killed_while_writing": sum(bool(x["unfinished_writes"]) for x in lives),
        "torn_checkpoints_seen": sum(len(x["torn"]) for x in lives),
        "differences": differences(folder / "runs/straight", folder / "runs/killed"),
        "seconds": round(time.monotonic() - start, 1),
    }


def _live(command: list[str], environ: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(pathlib.Path(folder), kills=args.kills, steps=args.steps, seed=args.seed)
    print(json.dumps(report, indent=1))
    return 1 if report["differences"] or report["kills"] < args.kills else 0


if __name__ == "__main__":
    sys.exit(main())

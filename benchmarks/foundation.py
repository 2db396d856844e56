"""What the whole does on a CPU, measured: the demo, SmolLM2's training, the bit gates on SmolLM2, kills and resumes.

    python -m benchmarks.foundation [demo smollm2 verify kills] [--reason TEXT]

Each is run by the command that a user would type, in a process of its own; rows are appended to benchmarks/results.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks import report

ROOT = pathlib.Path(__file__).parent.parent
NATIVE_STEPS = 20
KILLS = 20
LAST = 10
"""Steps whose mean reward stands for the end of the run."""
COMMAND = "python -m benchmarks.foundation"

record = functools.partial(report.record, area="foundation")


def isomodel(*words: str) -> float:
    """Runs an isomodel command on the CPU; returns its wall seconds, compilation included.

    Raises:
      subprocess.CalledProcessError: it failed.
    """
    start = time.perf_counter()
    command = [sys.executable, "-m", "isomodel.cli", *words]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return time.perf_counter() - start


def train(folder: str, config: str, name: str, *overrides: str) -> tuple[list[dict], float]:
    """(rows of metrics.jsonl, wall seconds) of a training run."""
    seconds = isomodel("train", f"configs/{config}.yaml", f"run_dir={folder}", f"name={name}", *overrides)
    lines = (pathlib.Path(folder) / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], seconds


def parity(rows: list[dict]) -> tuple[float, int]:
    """(largest difference of a log-probability in nats, tokens compared); a step that compared nothing is an error."""
    if not rows or not all(row["parity/tokens"] for row in rows):
        raise RuntimeError("a step compared no token")
    return max(row["parity/max_abs"] for row in rows), int(sum(row["parity/tokens"] for row in rows))


def demo(folder: str, **common) -> None:
    """The demo's run, and its first steps in native numerics."""
    common |= {"command": f"{COMMAND} demo"}
    rows, seconds = train(folder, "demo", "demo")
    native, _ = train(folder, "demo", "demo_native", "numerics=native", f"train.steps={NATIVE_STEPS}")
    worst, tokens = parity(rows)
    first, last = rows[0]["reward/mean"], sum(row["reward/mean"] for row in rows[-LAST:]) / LAST
    steps = f"{len(rows)} GRPO steps of the demo from random weights"
    record(id="demo-seconds", work=f"{steps}, compilation included", metric="s", ours=round(seconds, 1),
           target="<= 300", **common)  # fmt: skip
    record(id="demo-parity", work=f"rollout against trainer, largest difference of a log-probability, {tokens:,} tokens",
           metric="nats", ours=worst, target="== 0", **common)  # fmt: skip
    record(id="demo-reward", work=f"mean reward of the demo's last {LAST} steps, of at most 1", metric="reward",
           ours=round(last, 4), target="> 0.6", **common)  # fmt: skip
    record(id="demo-reward-gain", work="the same against the first step's", metric="reward", ours=round(last, 4),
           target=">= 2", baseline=round(first, 4), baseline_name="first step", **common)  # fmt: skip
    worst, tokens = parity(native)
    different = int(sum(row["parity/mismatched_tokens"] for row in native))
    record(id="demo-native-parity", work=f"the same in native numerics, {NATIVE_STEPS} steps, {different} of {tokens:,} tokens "
           "differ", metric="nats", ours=worst, target="> 0", **common)  # fmt: skip


def smollm2(folder: str, **common) -> None:
    """configs/smollm2_cpu.yaml as it stands."""
    common |= {"command": f"{COMMAND} smollm2"}
    rows, seconds = train(folder, "smollm2_cpu", "smollm2_cpu")
    worst, tokens = parity(rows)
    record(id="smollm2-parity", work=f"SmolLM2-135M GRPO, {len(rows)} steps on a CPU in {seconds:.0f} s, {tokens} tokens: largest "
           "difference of a log-probability", metric="nats", ours=worst, target="== 0", **common)  # fmt: skip


def verify(folder: str, **common) -> None:
    """isomodel verify smollm2; a gate that fails ends this with an error."""
    out = pathlib.Path(folder) / "verify.json"
    seconds = isomodel("verify", "smollm2", "--json", str(out))
    gates = json.loads(out.read_text())
    record(id="verify-smollm2", work=f"isomodel verify smollm2: {len(gates)} gates, {sum(g['compared'] for g in gates):,} values, "
           f"{seconds:.0f} s: values whose bits differ", metric="values", ours=sum(g["differing"] for g in gates),
           target="== 0", command=f"{COMMAND} verify", **common)  # fmt: skip


def kills(folder: str, **common) -> None:
    """20 SIGKILLs at random moments against a run that was never killed."""
    del folder
    done = subprocess.run([sys.executable, "-m", "tests.trainer.kill_many", "--kills", str(KILLS)], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    if "{" not in done.stdout:
        raise RuntimeError(f"tests.trainer.kill_many ended with {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout[done.stdout.index("{") :])
    if found["kills"] != KILLS:
        raise RuntimeError(f"only {found['kills']} of {KILLS} kills: the run ended before; give kill_many more --steps")
    record(id="kills", work=f"{found['kills']} SIGKILLs at random moments, {found['killed_while_writing']} with a checkpoint half written: "
           "differences from the run that was never killed", metric="differences", ours=len(found["differences"]),
           target="== 0", command=f"{COMMAND} kills", **common)  # fmt: skip


PARTS = {f.__name__: f for f in (demo, smollm2, verify, kills)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--reason", help="why a target is missed, if one is")
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"unknown part {unknown.pop()!r}; choose of {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts or PARTS:
            PARTS[part](folder, reason=args.reason)


if __name__ == "__main__":
    main()

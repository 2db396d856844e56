"""`python -m benchmarks.kernels OUT.json [MODULE ...]` measures on a GPU; `--record OUT.json` enters it in results.jsonl.

Two steps, because the machine with the GPU may be another than the one with the repository. Each module runs in a process
of its own; what one measured is kept when another fails. They compile side by side and measure in turn (`timing.alone`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading

from benchmarks import report
from benchmarks.kernels.reasons import REASONS

MODULES = ("gemm", "gemm_small", "attention", "attention_backward", "rows", "logprob", "stack", "constants")
LARGE = ("logprob", "stack")
"""Those that take much of the GPU's memory: one after the other."""
AREA = "kernels"


def measure(out: pathlib.Path, modules: list[str], seconds: int) -> int:
    """Runs the modules side by side, their measurements one at a time, and writes {"facts", "rows", "failed"} as each
    ends; returns how many failed."""
    found = {"facts": report.facts(), "rows": [], "failed": {}}

    def one(module: str, environ: dict[str, str]) -> tuple[list[dict], str | None]:
        command = [sys.executable, "-m", "benchmarks.kernels", "--one", module]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environ)
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            rows = json.loads(done.stdout.splitlines()[-1])
            return [{"command": f"python -m benchmarks.kernels OUT.json {module}"} | row for row in rows], None
        except (RuntimeError, ValueError, IndexError, subprocess.TimeoutExpired) as e:
            return [], f"{type(e).__name__}: {e}"

    # Most of the time is the compiler's, and it has many cores. None of the processes takes the GPU's memory at its start.
    queues = [[m for m in modules if m in LARGE], *([m] for m in modules if m not in LARGE)]
    queues = [q for q in queues if q]
    with tempfile.NamedTemporaryFile() as lock, concurrent.futures.ThreadPoolExecutor(len(queues)) as pool:
        environ = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "ISOMODEL_GPU_LOCK": lock.name}
        writing = threading.Lock()

        def one_after_another(queue: list[str]) -> None:
            for module in queue:
                rows, error = one(module, environ)
                with writing:
                    found["rows"] += rows
                    if error:
                        found["failed"][module] = error
                    out.write_text(json.dumps(found, indent=1) + "\n")
                    print(module, error or "measured", flush=True)

        list(pool.map(one_after_another, queues))
    return len(found["failed"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=pathlib.Path)
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    parser.add_argument("--record", type=pathlib.Path, metavar="OUT.json")
    parser.add_argument("--one", choices=MODULES, help="print one module's rows as JSON, in this process")
    parser.add_argument("--seconds", type=int, default=500, help="longest time for one module (default: 500)")
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(importlib.import_module(f"benchmarks.kernels.{args.one}").rows()))
        return 0
    if args.record:
        return report.enter(args.record, AREA, REASONS)
    if args.out is None:
        parser.error("name the file to write")
    if unknown := set(args.modules) - set(MODULES):
        parser.error(f"unknown module {', '.join(sorted(unknown))}; choose from {', '.join(MODULES)}")
    return int(measure(args.out, args.modules or list(MODULES), args.seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())

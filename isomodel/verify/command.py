"""`isomodel verify MODEL`: runs the gates and prints their table; exit 1 on any differing bit."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import json
import os
import sys
import time

import jax
import rich.console
import rich.table

from isomodel import fetch, specs, weights
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.verify import gates
from isomodel.verify.subject import GateResult, Subject
from pallas_kernels import environment


def add_commands(subparsers: argparse._SubParsersAction) -> None:
    """Adds `verify` to the command line; it sets `run`, a function of the parsed arguments that returns the exit code."""
    parser = subparsers.add_parser("verify", help="run the bit gates on a model; exit 1 on any differing bit")
    parser.add_argument("model", help="Hugging Face folder, a name that `isomodel fetch` knows, or a hub id")
    parser.add_argument("--numerics", choices=environment.MODES, default="iso", help="native is expected to fail")
    parser.add_argument("--backend", choices=("auto", "reference", "hopper"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=8, help="tokens sampled for each prompt (default: 8)")
    parser.add_argument(
        "--random-weights", type=int, metavar="SEED", help="random weights: MODEL needs no more than a config.json"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="gates side by side (default: half the cores with a GPU, 1 without)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--digest", action="store_true", help="only print a hash of what the model samples here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the gates on args.model; returns 1 if one fails."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share a GPU's memory
    environment.use(args.numerics)
    numerics = Numerics(args.numerics, args.backend, args.dtype)
    numerics.impl  # noqa: B018  (refuses a backend that cannot serve before anything is loaded)
    if args.tokens < 2:
        raise ValueError(f"--tokens {args.tokens}: a gate needs at least 2 sampled tokens")
    if args.jobs < 0:
        raise ValueError(f"--jobs {args.jobs}: give 1 or more, or 0 for the default")
    folder = fetch.resolve(args.model)
    cfg = ModelConfig.load(folder)
    if args.random_weights is None:
        params = weights.load(folder, cfg, args.dtype)
    else:
        params = specs.init_params(cfg, args.random_weights, args.dtype)
    subject = Subject(cfg, numerics, params, tokens=args.tokens)
    if args.digest:
        print(gates.digest(subject))
        return 0
    same = [str(folder), "--numerics", args.numerics, "--backend", args.backend, "--dtype", args.dtype]
    if args.random_weights is not None:
        same += ["--random-weights", str(args.random_weights)]
    command = gates.digest_command([*same, "--tokens", str(args.tokens)])
    done = lambda r, s: print(f"{_mark(r)} {r.gate} ({s:.0f} s)", file=sys.stderr)  # noqa: E731
    results = list(run_gates(subject, command, done, jobs=args.jobs or _default_jobs()))
    print_table(results, rich.console.Console())
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump([vars(r) | {"passed": r.passed} for r in results], f, indent=1)
    return int(not all(r.passed for r in results))


def _default_jobs() -> int:
    """Programs for a GPU compile on a core each; those for a CPU compile, and run, on all of them."""
    return 1 if jax.default_backend() == "cpu" else max(1, (os.cpu_count() or 1) // 2)


def run_gates(subject: Subject, command: list[str] | None = None, done=lambda result, seconds: None, jobs: int = 1):
    """Yields each gate's result in the gates' order; `done` is called with it and its seconds.

    Args:
      command: of the second process (`gates.digest_command`); None: no such gate.
      jobs: gates that run side by side: most of their time goes to compiling, each its own programs.
    """

    def run(gate) -> tuple[GateResult, float]:
        start = time.perf_counter()
        return gate(), time.perf_counter() - start

    with gates.SecondProcess(command) if command else contextlib.nullcontext() as second:
        todo = [functools.partial(gate, subject) for gate in gates.ALL]
        if second:
            todo.append(functools.partial(gates.fresh_process, subject, second))
        subject.alone  # noqa: B018  (computed once, before threads ask for it)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for result, seconds in pool.map(run, todo):
                done(result, seconds)
                yield result


def _mark(result: GateResult) -> str:
    return "pass" if result.passed else "FAIL"


def print_table(results: list[GateResult], console: rich.console.Console) -> None:
    """One row a gate, and a line that says whether all passed."""
    table = rich.table.Table(header_style="bold")
    for heading in ("gate", "claim", "values", "differ", "max |dlogprob|", "hazard", ""):
        table.add_column(heading, justify="right" if heading in ("values", "differ") else "left")
    for r in results:
        table.add_row(r.gate, r.regime, f"{r.compared:,}", f"{r.differing:,}", f"{r.max_abs:.3g}", r.hazard, _mark(r))
    console.print(table)
    failed = sum(not r.passed for r in results)
    console.print(f"{len(results)} gates: {len(results) - failed} passed, {failed} failed")

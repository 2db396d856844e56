"""The command line of benchmarks that measure models beside vLLM: one file of rows, whatever fails on the way."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Collection, Mapping

from benchmarks import report
from isomodel.bench import arm

AREA = "engine"
VLLM = "stock vLLM 0.24, CUDA graphs, prefix caching, its own defaults"


def parser(doc: str, models: Collection[str]) -> argparse.ArgumentParser:
    """The options that each has; `doc`: of its module."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("out", nargs="?", type=pathlib.Path)
    made.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(models))
    made.add_argument("--record", type=pathlib.Path, metavar="OUT.json")
    made.add_argument("--python", default=sys.executable, help="interpreter that has vLLM (default: this one)")
    made.add_argument("--seconds", type=float, default=500, help="longest time for one process of an engine (default: 500)")
    made.add_argument("--repeats", type=int, default=3, help="measured runs; their median counts (default: 3)")
    return made


def run(
    made: argparse.ArgumentParser,
    args: argparse.Namespace,
    models: Collection[str],
    reasons: Mapping[str, str],
    measure: Callable[[str], list[dict]],
) -> int:
    """Writes {"facts", "rows", "failed"} to args.out as each model ends, or enters args.record; returns the exit code.

    Args:
      models: that there are; args.models are those asked for, none of them all.
      reasons: why targets are missed, by a row's id.
      measure: rows of a model (benchmarks.report.record's fields). ArmFailed and RuntimeError are noted as failures.
    """
    if args.record:
        return report.enter(args.record, AREA, reasons)
    if args.out is None:
        made.error("name the file to write")
    if unknown := set(args.models) - set(models):
        made.error(f"unknown model {', '.join(sorted(unknown))}; choose from {', '.join(models)}")
    found = {"facts": report.facts(), "rows": [], "failed": {}}
    for model in args.models or models:
        try:
            found["rows"] += measure(model)
        except (RuntimeError, arm.ArmFailed) as e:
            found["failed"][model] = str(e)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(model, found["failed"].get(model, "measured"), flush=True)
    return int(bool(found["failed"]))

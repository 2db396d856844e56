"""`isomodel contract show` and `isomodel contract diff`."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import rich.console
import rich.markup
import rich.table

from isomodel import fetch
from isomodel.config import ModelConfig
from isomodel.contract.canonical import digest, readable
from isomodel.contract.cases import trace_cases
from isomodel.contract.contract import CASES, FILE, Contract, ContractError, derive
from isomodel.contract.diff import diff, render
from isomodel.numerics import Numerics
from pallas_kernels import environment

_BRIEF = ("implementation", "accumulate", "inside", "order", "round")


def add_commands(subparsers: argparse._SubParsersAction) -> None:
    """Adds `contract` with `show` and `diff` to the command line; each sets `run`, a function of the parsed arguments
    that returns the exit code."""
    parser = subparsers.add_parser("contract", help="what reaches the bits of a model here, as data")
    commands = parser.add_subparsers(dest="contract_command", required=True)
    show = commands.add_parser("show", help="print a model's contract, regions by cases")
    show.add_argument("model", help="model name or folder, run folder, or contract file")
    show.add_argument("--json", action="store_true", help="print the contract file instead of the table")
    show.add_argument("--save", metavar="FILE", help="write the contract file too")
    show.set_defaults(run=run_show)
    compare = commands.add_parser("diff", help="compare two contracts; exit 1 when they differ")
    compare.add_argument("a", help="model name or folder, run folder, or contract file")
    compare.add_argument("b", help="the other one")
    compare.set_defaults(run=run_diff)
    for command in (show, compare):
        command.add_argument("--numerics", choices=("iso", "native"), default="iso", help="for models (default: iso)")
        command.add_argument("--backend", choices=("auto", "reference", "hopper"), default="auto", help="for models")
        command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="for models")


def load_or_derive(name: str, numerics: Numerics) -> Contract:
    """The contract that `name` stands for.

    Args:
      name: a contract file, a folder with one (a run), or a model's folder or name, whose contract is derived for this
        machine by tracing it.
      numerics: how a model is to compute; contracts on file have their own.

    Raises:
      ContractError: a file or folder that is neither.
      fetch.FetchError: a name that stands for no model.
      environment.EnvironmentFault: this process cannot compute in `numerics`.
    """
    path = pathlib.Path(name)
    if path.is_file():
        return Contract.load(path)
    if (path / FILE).is_file():
        return Contract.load(path / FILE)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ContractError(f"{name} has neither {FILE} (a run folder) nor config.json (a model folder)")
    environment.use(numerics.mode)
    cfg = ModelConfig.load(fetch.resolve(name))
    return derive(cfg, numerics, trace_cases(cfg, numerics))


def _numerics(args: argparse.Namespace) -> Numerics:
    return Numerics(args.numerics, args.backend, args.dtype)


def run_show(args: argparse.Namespace) -> int:
    """Prints the contract of args.model; returns 0."""
    contract = load_or_derive(args.model, _numerics(args))
    if args.save:
        contract.save(args.save)
    if args.json:
        json.dump(contract.to_json(), sys.stdout, indent=1)
        print()
    else:
        print_table(contract, rich.console.Console())
    return 0


def run_diff(args: argparse.Namespace) -> int:
    """Prints what differs between args.a and args.b, the first entry that differs first; returns 1 if anything does."""
    differences = diff(load_or_derive(args.a, _numerics(args)), load_or_derive(args.b, _numerics(args)))
    print(render(differences))
    return int(bool(differences))


def print_table(contract: Contract, console: rich.console.Console) -> None:
    """Regions by cases, an entry as the first digits of its hash: equal digits across a row are parity. Then the
    identities, claims and the environment."""
    cases = [case for case in CASES if case in contract.cases]
    table = rich.table.Table(title="regions and cases", title_justify="left", header_style="bold")
    for heading in ("region", *cases):
        table.add_column(heading, no_wrap=True)
    table.add_column("how")
    for region, by_case in contract.entries.items():
        entry = next(iter(by_case.values()))
        brief = [rich.markup.escape(readable(entry[key])) for key in _BRIEF if key in entry]
        marks = [digest(by_case[case])[:6] if case in by_case else "-" for case in cases]
        table.add_row(region, *marks, "; ".join(brief))
    console.print(table)
    facts = rich.table.Table.grid(padding=(0, 2))
    for name in ("semantic", "numerical", "deployment"):
        facts.add_row(f"{name} identity", getattr(contract.identities, name))
    facts.add_row("numerics", readable(contract.numerics))
    facts.add_row("invariant over", readable(contract.claims))
    facts.add_row("dropped on update", ", ".join(contract.dropped_on_update))
    for name, value in contract.environment.items():
        facts.add_row(name, rich.markup.escape(readable(value)))
    console.print(facts)

"""The `isomodel` command: finds the commands, runs one, and turns an error of the user's into one clear message.

A module with a command has `add_commands(subparsers)`, which sets `run` of the command's parser to a function of the parsed
arguments that returns the exit code. Packages above isomodel offer theirs as entry points of the group `isomodel.commands`
(the entry point's name is the command's). Only the module of the command that is asked for is imported: JAX, and
whatever else a command needs, costs nothing to `isomodel --help`.

Exit codes: 0 done; 1 a difference or fault was found in what was examined; 2 wrong usage or input; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import pathlib
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterable, Sequence

COMMANDS = {
    "fetch": ("isomodel.fetch", "get a small model, converted to a Hugging Face folder"),
    "generate": ("isomodel.rollout.command", "sample completions of prompts, to JSON lines"),
    "serve": ("isomodel.rollout.server.command", "serve a model over HTTP: OpenAI's API, and token ids in and out"),
    "convert": ("isomodel.convert", "make a Hugging Face folder from a GGUF file or another folder"),
    "contract": ("isomodel.contract.cli", "what reaches the bits of a model here, as data: show, diff"),
    "verify": ("isomodel.verify", "run the bit gates on a model; exit 1 on any differing bit"),
    "bench": ("isomodel.bench", "measure speed: rollouts, beside vLLM's"),
}
"""Command -> (module with its `add_commands`, help)."""

GROUP = "isomodel.commands"

PACKAGES = ("isomodel", "pallas_kernels", "trainer", "serving_bridge")
"""Errors whose class one of these packages defines are meant for a user's eyes, as ValueError and OSError are."""

AddCommands = Callable[[argparse._SubParsersAction], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    try:
        args = _parse([arg for arg in argv if arg != "--debug"])
        code = args.run(args)
        sys.stdout.flush()
        return code or 0
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone. What is still buffered has no place to go to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as e:
        if debug or not is_users(e):
            raise
        print(f"isomodel: {describe(e)}", file=sys.stderr)
        return getattr(e, "exit_code", 2)


def is_users(error: BaseException) -> bool:
    """Whether an error is one that its message alone explains, rather than a fault of the program."""
    ours = any((type(error).__module__ or "").split(".")[0] == package for package in PACKAGES)
    return ours or isinstance(error, ValueError | OSError)


def describe(error: BaseException) -> str:
    """An error's message; its class's name where it has none."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return str(error) or type(error).__name__


def _version() -> str:
    try:
        return importlib.metadata.version("isomodel")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path, as on a machine that only borrows it
        return "not installed"


def _entry_points() -> Iterable[importlib.metadata.EntryPoint]:
    """Commands of the packages above: those that are installed; in a checkout on the path alone, those it would install."""
    found = importlib.metadata.entry_points(group=GROUP)
    checkout = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    if found or not checkout.is_file():
        return found
    offered = tomllib.loads(checkout.read_text())["project"]["entry-points"][GROUP]
    return [importlib.metadata.EntryPoint(name, value, GROUP) for name, value in offered.items()]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="isomodel", description="Bit-exact RL for language models: rollout and trainer give one log-probability."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((arg for arg in argv if not arg.startswith("-")), None)
    for name, (module, help_) in COMMANDS.items():
        if name == asked:
            importlib.import_module(module).add_commands(subparsers)
        else:
            subparsers.add_parser(name, help=help_)
    for entry in sorted(_entry_points(), key=lambda e: e.name):
        entry.load()(subparsers)
    args, rest = parser.parse_known_args(argv)
    # argparse takes a list of positionals in one piece only; overrides may stand behind an option too.
    unknown = [word for word in rest if word.startswith("-") or not hasattr(args, "overrides")]
    if unknown:
        subparsers.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


if __name__ == "__main__":
    sys.exit(main())

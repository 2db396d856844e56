"""`isomodel train` and `isomodel plot`. Every `isomodel` command imports this module, so it imports the rest when run."""

from __future__ import annotations

import argparse
import sys


def add_train(subparsers: argparse._SubParsersAction) -> None:
    """Adds `isomodel train CONFIG [key=value ...]`."""
    parser = subparsers.add_parser(
        "train",
        help="train a model by GRPO from a YAML config",
        description="Trains a model as CONFIG says, into the folder run_dir/name; a run that is there is continued.",
    )
    parser.add_argument("config", help="YAML file; see configs/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="change a setting: train.steps=10 numerics=native"
    )
    parser.add_argument(
        "--allow-config-change", action="store_true", help="continue a run whose saved config differs where it matters"
    )
    parser.add_argument("--check", action="store_true", help="only check the config, and print it with every default")
    parser.add_argument(
        "--allow-numerical-change",
        action="store_true",
        help="continue a run whose contract has other arithmetic (another machine, another version): the bits will differ",
    )
    parser.set_defaults(run=run_train)


def add_plot(subparsers: argparse._SubParsersAction) -> None:
    """Adds `isomodel plot RUN...`."""
    parser = subparsers.add_parser(
        "plot",
        help="draw reward, parity, ratio and timing of runs",
        description="Draws reward, parity, importance ratio and timing of one or several runs into one picture.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder or metrics.jsonl")
    parser.add_argument(
        "-o", "--output", help="file to write: .png, .svg or .pdf (default: plot.png in the first run's folder)"
    )
    parser.add_argument(
        "--smooth", type=int, default=0, metavar="N", help="steps of the moving mean (default: by length)"
    )
    parser.set_defaults(run=run_plot)


def run_train(args: argparse.Namespace) -> int:
    from pallas_kernels import environment
    from trainer.config import TrainConfig

    config = TrainConfig.load(args.config, args.overrides)
    if args.check:
        sys.stdout.write(config.to_yaml())
        return 0
    environment.use(config.numerics.mode)  # before JAX computes anything: one process has one numerics
    from trainer.loop import train

    result = train(
        config, allow_config_change=args.allow_config_change, allow_numerical_change=args.allow_numerical_change
    )
    return 128 + result.interrupted if result.interrupted else 0


def run_plot(args: argparse.Namespace) -> int:
    import pathlib

    from trainer.plot import plot

    first = pathlib.Path(args.runs[0])
    output = args.output or (first if first.is_dir() else first.parent) / "plot.png"
    print(plot(args.runs, output, smooth=args.smooth))
    return 0

"""`isomodel train`, `plot` and `export`. Every `isomodel` command imports this module, so it imports the rest when run."""

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


def add_export(subparsers: argparse._SubParsersAction) -> None:
    """Adds `isomodel export RUN FOLDER`."""
    parser = subparsers.add_parser(
        "export",
        help="write a run's trained model as a Hugging Face folder",
        description="Writes config, weights and tokenizer of a run's checkpoint into FOLDER, whole or not at all.",
    )
    parser.add_argument("run_folder", metavar="RUN", help="folder of the run")
    parser.add_argument("folder", metavar="FOLDER", help="folder to make")
    parser.add_argument("--step", type=int, help="checkpoint of this step (default: the newest)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the weights (default: the run's compute dtype)")
    parser.add_argument("--overwrite", action="store_true", help="replace a model folder that is there")
    parser.set_defaults(run=run_export)


def run_train(args: argparse.Namespace) -> int:
    from pallas_kernels import environment
    from trainer.config import TrainConfig

    config = TrainConfig.load(args.config, args.overrides)
    if args.check:
        sys.stdout.write(config.to_yaml())
        return 0
    environment.use(config.numerics.mode)  # before JAX computes anything: one process has one numerics
    from isomodel import program_cache
    from trainer.loop import train

    program_cache.keep()
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


def run_export(args: argparse.Namespace) -> int:
    from trainer.export import export

    found = export(args.run_folder, args.folder, step=args.step, dtype=args.dtype, overwrite=args.overwrite)
    print(f"step {found.step} of {args.run_folder} is in {args.folder}")
    return 0

"""`isomodel bench engine MODEL`: the same rollouts on this engine and on vLLM, one after the other on one GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from isomodel import fetch
from isomodel.bench import arm
from isomodel.bench.work import SHAPES, Work
from isomodel.config import ModelConfig
from isomodel.rollout import SamplingParams
from isomodel.rollout.jsonl import read_prompts, token_ids
from isomodel.tokenizer import Tokenizer


def add_commands(subparsers: argparse._SubParsersAction) -> None:
    """Adds `bench` to the command line; it sets `run`, a function of the parsed arguments that returns the exit code."""
    parser = subparsers.add_parser("bench", help="measure speed: rollouts, beside vLLM's")
    parser.add_argument("what", choices=("engine",), help="engine: rollouts")
    parser.add_argument("model", help=f"a model, or {' or '.join(SHAPES)}: that shape with random weights")
    parser.add_argument("--arms", default="iso", help=f"engines, with commas: {', '.join(arm.ARMS)} (default: iso)")
    parser.add_argument("--prompts", type=int, default=256, help="prompts (default: 256)")
    parser.add_argument("--samples", type=int, default=1, help="samples of each prompt (default: 1)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="length of a prompt (default: 128)")
    parser.add_argument("--max-tokens", type=int, default=512, help="sampled tokens of each sequence (default: 512)")
    parser.add_argument("--prompts-from", metavar="FILE", help="prompts as `generate` reads them, and end tokens end samples")
    parser.add_argument("--no-logprobs", action="store_true", help="do not ask for log-probabilities")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs; their median counts (default: 3)")
    parser.add_argument("--seconds", type=float, default=600, help="longest time for one engine (default: 600)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM (default: this one)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="ARM.NAME=VALUE",
        help="a setting of an engine: iso.decode_steps=32, vllm.max_num_batched_tokens=8192",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures each arm; returns 1 if one failed: it is reported as not run, never as equal."""
    arms = args.arms.split(",")
    if unknown := [name for name in arms if name not in arm.ARMS]:
        raise ValueError(f"unknown arm {', '.join(unknown)}; choose from {', '.join(arm.ARMS)}")
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: give 1 or more")
    options = parse_options(args.option, arms)
    with tempfile.TemporaryDirectory() as scratch:
        folder, random_weights = Path(scratch), args.model in SHAPES
        if random_weights:
            (folder / "config.json").write_text(json.dumps(SHAPES[args.model].to_hf()))
        else:
            folder = fetch.resolve(args.model)
        cfg = ModelConfig.load(folder)
        work = Work(args.prompts, args.samples, args.prompt_tokens, args.max_tokens, logprobs=not args.no_logprobs)
        if args.prompts_from:
            work = of_file(args.prompts_from, folder, Path(scratch) / "prompts.json", work)
        if work.length > cfg.max_positions:
            raise ValueError(f"{work.length} tokens a sequence, and the model has {cfg.max_positions} positions")
        found: dict[str, Any] = {}
        for name in arms:
            print(f"{name} ...", file=sys.stderr, flush=True)
            try:
                found[name] = arm.measure(
                    name,
                    args.python if name == "vllm" else sys.executable,
                    args.seconds,
                    folder=str(folder),
                    random_weights=random_weights,
                    works=[vars(work)],
                    repeats=args.repeats,
                    options=options[name],
                )[0]
            except arm.ArmFailed as e:
                print(e, file=sys.stderr)
                found[name] = {"failed": str(e)}
    print_table(args.model, cfg, work, found, rich.console.Console())
    if args.json:
        whole = {"model": args.model, "work": vars(work), "options": options, "arms": found}
        Path(args.json).write_text(json.dumps(whole, indent=1) + "\n")
    return int(any("failed" in result for result in found.values()))


def of_file(path: str, model_folder: Path, to: Path, work: Work) -> Work:
    """The same with the prompts of a file (rollout.jsonl), texts through the chat template if there is one; their token ids
    are written to `to`.

    Raises:
      ValueError: the file cannot be used.
    """
    lines = read_prompts(path, SamplingParams())
    tokenizer = Tokenizer(model_folder) if any(line.kind != "prompt_ids" for line in lines) else None

    raw = tokenizer is not None and not tokenizer.has_chat_template
    prompts = [list(map(int, token_ids(line, tokenizer, raw=raw))) for line in lines]
    to.write_text(json.dumps(prompts))
    return dataclasses.replace(work, file=str(to), prompts=len(prompts), prompt_tokens=max(map(len, prompts)))


def parse_options(texts: list[str], arms: list[str]) -> dict[str, dict[str, Any]]:
    """Settings of each arm.

    Raises:
      ValueError: not ARM.NAME=VALUE of an arm that runs.
    """
    options: dict[str, dict[str, Any]] = {name: {} for name in arms}
    for text in texts:
        key, equals, value = text.partition("=")
        name, dot, field = key.partition(".")
        if not equals or not dot or not field or name not in options:
            raise ValueError(f"--option {text!r} must be ARM.NAME=VALUE, ARM one of {', '.join(arms)}")
        try:
            options[name][field] = json.loads(value)
        except ValueError:
            options[name][field] = value
    return options


def print_table(model: str, cfg: ModelConfig, work: Work, found: dict[str, Any], console: rich.console.Console) -> None:
    """One row an engine: tokens a second, a step's time, the first token's, and the time of reading what a step reads."""
    table = rich.table.Table(header_style="bold")
    table.add_column("engine")
    for heading in ("tokens/s", "ms a step", "x the floor", "first token, ms", "start, s"):
        table.add_column(heading, justify="right")
    rate = next((r["copy_tb_per_s"] * 1e12 for r in found.values() if "copy_tb_per_s" in r), None)
    for name, result in found.items():
        if "failed" in result:
            table.add_row(name, "not run", *[""] * 4)
            continue
        rate_of_runs = [n / s for n, s in zip(result["tokens"], result["seconds"], strict=True)]
        seconds = statistics.median(result["seconds"])
        floor = f"{seconds / work.floor_s(cfg, rate):.2f}" if rate else "-"
        table.add_row(
            name,
            f"{statistics.median(rate_of_runs):,.0f}",
            f"{seconds / work.max_tokens * 1e3:.2f}",
            floor,
            f"{statistics.median(result['ttft_s']) * 1e3:.1f}",
            f"{result['start_s']:.0f}",
        )
    title = f"{model}: {work.prompts} prompts of {work.prompt_tokens}, {work.samples} x {work.max_tokens} sampled"
    console.print(title)
    console.print(table)
    if rate:
        floor_ms = work.floor_s(cfg, rate) / work.max_tokens * 1e3
        weights, kv = (b / 1e9 for b in work.step_bytes(cfg))
        console.print(f"floor: {floor_ms:.2f} ms a step ({weights:.2f} GB of weights, {kv:.2f} GB of keys and values)")

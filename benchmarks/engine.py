"""Rollouts on this engine and on stock vLLM, one process after the other on one GPU: the rows of area `engine`.

    python -m benchmarks.engine OUT.json [MODEL ...]    measures (a machine with a GPU and vLLM)
    python -m benchmarks.engine --record OUT.json       enters the file in results.jsonl

`isomodel bench engine MODEL` prints one of these comparisons for any model.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any

from benchmarks import beside_vllm
from benchmarks.beside_vllm import VLLM
from isomodel import fetch
from isomodel.bench import arm, command
from isomodel.bench.work import SHAPES, Work
from isomodel.config import ModelConfig

LONG = Work()
WITHOUT = dataclasses.replace(LONG, logprobs=False)
GROUPS = Work(prompts=16, samples=16, prompt_tokens=2048)
WORKS = {
    "qwen3-0.6b": {"rollouts": (LONG, 2.0)},
    "qwen3-8b": {"rollouts": (LONG, 1.25), "groups": (GROUPS, 1.25)},
    "smollm2": {"rollouts": (dataclasses.replace(LONG, prompt_tokens=1), 3.0)},  # its prompts are ARITHMETIC's
}
"""Model -> work -> (what is run, least ratio of tokens a second to vLLM's)."""
ARITHMETIC = dict(name="chain_sum", min_terms=2, max_terms=6, min_digits=1, max_digits=3)
"""reasoning-gym's task whose prompts SmolLM2 answers."""
REASONS: dict[str, str] = {
    "engine-qwen3-0.6b-rollouts": (
        "Of a step of 5.2 ms, as far as profiles of parts tell: attention 3.3 (its keys and values at a copy's rate 2.8), the other kernels of "
        "layers 1.1, at 1 us a node of a CUDA graph and more, logits, sampling and log-probabilities 0.36, host and prompts 0.35 (docs/engine.md)."
    ),
    "engine-qwen3-8b-rollouts": (
        "An estimate of what our GEMMs allow: of 256 rows they take 6.2 ms of a step (profile), keys and values at a copy's rate 3.5, logits 0.5, and "
        "prompts some 0.8 s of each run: 6.1 s, which would be 1.25. We take 7.0 s (docs/engine.md)."
    ),
    "engine-smollm2-rollouts": "Bound by latency: a step of 16 samples takes 1.1 ms, and its weights are read in 0.07; 33 us a layer in 11 kernels of 1 to 4 us, attention "
    "8.5 (docs/engine.md). How many steps of a run are so small was not counted.",
}
"""Why a target is missed, by the row's id."""


def arithmetic(folder: pathlib.Path, to: pathlib.Path, count: int = LONG.prompts) -> Work:
    """SmolLM2's work: `count` prompts of ARITHMETIC through the chat template; end tokens end a sample."""
    import reasoning_gym

    task = reasoning_gym.create_dataset(**ARITHMETIC, size=count, seed=0)
    lines = to / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": task[i]["question"]}) + "\n" for i in range(count)))
    return command.of_file(str(lines), folder, to / "ids.json", LONG)


def rates(result: dict[str, Any]) -> float:
    """Median tokens a second of the runs."""
    return statistics.median(n / s for n, s in zip(result["tokens"], result["seconds"], strict=True))


def measure(model: str, python: str, seconds: float, repeats: int, options: dict[str, dict[str, Any]]) -> list[dict]:
    """The rows of a model (benchmarks.report.record's fields).

    Args:
      python: interpreter that has vLLM.
      seconds: longest time for one engine's process.
      options: EngineConfig's fields for "iso" and vllm.LLM's for "vllm", where they are to differ.

    Raises:
      ArmFailed: a process failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder, shape = pathlib.Path(scratch), SHAPES.get(model)
        if shape:
            (folder / "config.json").write_text(json.dumps(shape.to_hf()))
        else:
            folder = pathlib.Path(fetch.resolve(model))
        cfg = ModelConfig.load(folder)
        works = {name: work if shape else arithmetic(folder, pathlib.Path(scratch)) for name, (work, _) in WORKS[model].items()}
        common = dict(folder=str(folder), random_weights=shape is not None, repeats=repeats)
        ask = [vars(work) for work in works.values()]
        without = [vars(WITHOUT)] if shape else []
        ours = arm.measure("iso", sys.executable, seconds, works=ask + without, options=options["iso"], **common)
        theirs = arm.measure("vllm", python, seconds, works=ask, options=options["vllm"], **common)
    rows = []
    for (name, work), a, b in zip(works.items(), ours, theirs, strict=False):
        rows += _rows(model, name, work, cfg, a, b, options["vllm"])
    if without:
        cost = [statistics.median(result["seconds"]) for result in (ours[0], ours[-1])]
        rows.append(
            {
                "id": f"engine-{model}-logprobs",
                "work": f"{model}'s shape, {_sizes(LONG)}: with log-probabilities, and without",
                "metric": "s",
                "ours": cost[0],
                "baseline": cost[1],
                "baseline_name": "the same engine made without them",
                "target": "< 1.03",
            }
        )
    settings = [(f"{of}.{name}", json.dumps(value, separators=(",", ":"))) for of in options for name, value in options[of].items()]
    typed = "".join(f" --option {name}={value}" for name, value in settings)
    return [{"command": f"python -m benchmarks.engine OUT.json {model}{typed}"} | row for row in rows]


def _sizes(work: Work) -> str:
    of = f"{work.prompts} prompts of {work.prompt_tokens} tokens" if work.file is None else f"{work.prompts} arithmetic prompts"
    return f"{of}, {work.samples} x {work.max_tokens} sampled of each" if work.file is None else f"{of}, up to {work.max_tokens}"


def _rows(model: str, name: str, work: Work, cfg: ModelConfig, ours: dict, theirs: dict, theirs_set: dict) -> list[dict]:
    _, target = WORKS[model][name]
    vllm = VLLM + " but " * bool(theirs_set) + ", ".join(f"{field}={value}" for field, value in theirs_set.items())
    what = f"{model}{'' if work.file else ' shape'}, {_sizes(work)}"
    rows = [
        {
            "id": f"engine-{model}-{name}",
            "work": f"rollouts with log-probabilities, {what}",
            "metric": "tokens/s",
            "ours": rates(ours),
            "baseline": rates(theirs),
            "baseline_name": vllm,
            "target": f">= {target}",
        }
    ]
    if work.file is not None:
        steps = ours["stats"]["decode_steps"] / (len(ours["seconds"]) + 1)  # the unmeasured run's too
        of_step = statistics.median(ours["tokens"]) / steps
        rows.append(
            {
                "id": f"engine-{model}-{name}-floor",
                "work": f"the same, a decode step on average, {steps:.0f} a run, {of_step:.0f} samples in each; its weights over a copy's bandwidth: {what}",
                "metric": "ms",
                "ours": statistics.median(ours["seconds"]) / steps * 1e3,
                "baseline": work.step_bytes(cfg)[0] / ours["copy_tb_per_s"] / 1e12 * 1e3,
                "baseline_name": "weights of a step",
            }
        )
    else:
        rows.append(
            {
                "id": f"engine-{model}-{name}-floor",
                "work": f"the same, a decode step on average, prompts included; what it reads over a copy's bandwidth: {what}",
                "metric": "ms",
                "ours": statistics.median(ours["seconds"]) / work.max_tokens * 1e3,
                "baseline": work.floor_s(cfg, ours["copy_tb_per_s"] * 1e12) / work.max_tokens * 1e3,
                "baseline_name": "weights, keys and values of a step in the middle",
            }
        )
        rows.append(
            {
                "id": f"engine-{model}-{name}-first-token",
                "work": f"time to first token of one request, {model} shape, prompt of {work.prompt_tokens} tokens",
                "metric": "ms",
                "ours": statistics.median(ours["ttft_s"]) * 1e3,
                "baseline": statistics.median(theirs["ttft_s"]) * 1e3,
                "baseline_name": vllm,
                "target": "<= 1" if work is GROUPS else None,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = beside_vllm.parser(__doc__, WORKS)
    parser.add_argument("--option", action="append", default=[], metavar="ARM.NAME=VALUE", help="of iso or vllm, as of `isomodel bench`")
    args = parser.parse_args(argv)
    options = command.parse_options(args.option, ["iso", "vllm"])
    rows_of = lambda model: measure(model, args.python, args.seconds, args.repeats, options)  # noqa: E731
    return beside_vllm.run(parser, args, WORKS, REASONS, rows_of)


if __name__ == "__main__":
    sys.exit(main())

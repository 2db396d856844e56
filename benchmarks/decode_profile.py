"""Where a decode step's time goes inside the engine: each kernel of a layer and of the rest of a step, and the gaps between.

    python -m benchmarks.decode_profile OUT.json [MODEL ...]     measures (a machine with a GPU)
    python -m benchmarks.decode_profile --record OUT.json        enters the file in results.jsonl

One loop of 32 steps is traced by jax.profiler, in the middle of 256 sequences (`--sequences`) of some 380 tokens.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import re
import statistics
import sys
import tempfile

from benchmarks import report
from benchmarks.beside_vllm import AREA
from isomodel.bench import command
from isomodel.bench.work import SHAPES, Work

STEPS = 32
SAMPLING = "sample_scan"
"""The kernel that runs once a step."""
CONTEXT = 330
"""Tokens of a sequence before the first loop; the second one is traced."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch: when it started and how long it ran, in us, and its name."""

    start: float
    duration: float
    name: str


def trace(model: str, sequences: int, options: dict) -> list[Kernel]:
    """The kernels of one loop of decode steps, in the order in which they ran.

    Args:
      model: of SHAPES, random weights.
      sequences: that decode.
      options: EngineConfig's fields, where they are to differ.

    Raises:
      RuntimeError: the trace shows no kernels of a GPU.
    """
    import jax

    from isomodel import specs
    from isomodel.numerics import Numerics
    from isomodel.rollout import Engine, EngineConfig, SamplingParams

    cfg, numerics = SHAPES[model], Numerics()
    params = jax.jit(lambda: specs.init_params(cfg, 0, numerics.dtype))()
    max_tokens = 3 * STEPS + 1
    config = dict(
        max_seqs=sequences,
        max_model_len=640,
        num_pages=sequences * 40,
        decode_steps=STEPS,
        look_s=60.0,
        seq_buckets=(sequences,),
        token_buckets=(4096 + sequences,),
        prompt_logprobs=False,
    )
    engine = Engine(cfg, params, numerics, EngineConfig(**config | options))
    work, sampling = Work(prompts=sequences, prompt_tokens=CONTEXT), SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.generate(work.token_ids(cfg.vocab_size, 0), sampling)
    runner, calls = engine._runner, 0
    start = runner.start

    with tempfile.TemporaryDirectory() as folder:

        def traced(plan, after=None):
            nonlocal calls
            calls += not plan.chunks
            if plan.chunks or calls != 2:
                return start(plan, after)
            if after is not None:
                jax.block_until_ready(after.brings)
            with jax.profiler.trace(folder):
                return jax.block_until_ready(start(plan, after))

        runner.start = traced
        engine.generate(work.token_ids(cfg.vocab_size, 1), sampling)
        (path,) = pathlib.Path(folder).glob("**/*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
    streams = [line for plane in planes if "GPU" in plane.name for line in plane.lines if "Stream" in line.name]
    kernels = [Kernel(e.start_ns / 1e3, e.duration_ns / 1e3, e.name) for line in streams for e in line.events]
    kernels = [k for k in kernels if not k.name.startswith(("Memcpy", "Memset"))]
    if not kernels:
        raise RuntimeError("the trace has no kernels of a GPU")
    return sorted(kernels, key=lambda k: k.start)


def steps_of(kernels: list[Kernel]) -> list[list[Kernel]]:
    """The kernels of each step, which ends with its sampling. CUPTI shows a loop in a CUDA graph only once: then all are one step's.

    Raises:
      RuntimeError: nothing was sampled.
    """
    ends = [i + 1 for i, k in enumerate(kernels) if short(k.name) == SAMPLING]
    if not ends:
        raise RuntimeError(f"the trace has no kernel {SAMPLING}")
    if len(ends) < 3:
        return [kernels]
    return [kernels[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


def summary(kernels: list[Kernel], layers: int) -> dict:
    """Times of a step, in us, medians over the steps of a trace.

    Kernels that run `layers` times or more in a step are a layer's; of one name, such as the GEMMs, the first of a layer is told from
    the second.

    Returns:
      {"layer": {name: us}, "rest": {name: us, of all its runs in a step}, "step": from first start to last end, "layer_us": sum of a
       layer's kernels, "layer_kernels": how many, "launches": of a step, "gap_us": from the end of a kernel to the start of the next,
       mean, "idle": share of the time in which no kernel runs}. Of a loop that is shown once "step", "gap_us" and "idle" are None: the
       profiler stands between its kernels.

    Raises:
      RuntimeError: nothing was sampled.
    """
    layer, rest = collections.defaultdict(list), collections.defaultdict(list)
    spans, gaps, launches = [], [], []
    steps = steps_of(kernels)
    for step in steps:
        stops = [k.start + k.duration for k in step]
        gaps += [max(0.0, k.start - stop) for k, stop in zip(step[1:], stops, strict=False)]
        spans.append(stops[-1] - step[0].start)
        launches.append(len(step))
        runs = {n: count // layers for n, count in collections.Counter(short(k.name) for k in step).items()}
        seen, others = collections.Counter(), collections.Counter()
        for kernel in step:
            name = short(kernel.name)
            if seen[name] < layers * runs[name]:
                which = seen[name] % runs[name]
                layer[name if runs[name] == 1 else f"{name} ({which + 1})"].append(kernel.duration)
                seen[name] += 1
            else:
                others[name] += kernel.duration
        for name, duration in others.items():
            rest[name].append(duration)
    middle = {n: round(statistics.median(d), 2) for n, d in layer.items()}
    after = {n: round(statistics.median(d), 2) for n, d in sorted(rest.items(), key=lambda item: -statistics.median(item[1]))}
    whole = {"step": statistics.median(spans), "gap_us": statistics.mean(gaps), "idle": sum(gaps) / sum(spans)}
    return {
        "layer": middle,
        "rest": after,
        "layer_us": sum(middle.values()),
        "layer_kernels": len(middle),
        "launches": statistics.median(launches),
        **(whole if len(steps) > 1 else dict.fromkeys(whole)),
    }


def short(name: str) -> str:
    """A kernel's name without what differs between compilations of the same."""
    return re.sub(r"(_mosaic_gpu_kernel|_\d+)+$", "", name)


def rows(model: str, sequences: int, found: dict) -> list[dict]:
    """Rows of area `engine` (benchmarks.report.record's fields)."""
    what = f"decode step of {sequences} sequences of some 380 tokens, {model} shape"
    table = (
        ("layer-kernels", "kernels of a layer", "kernels", found["layer_kernels"]),
        ("layer", "kernels of a layer, time", "us", found["layer_us"]),
        ("step", "from step to step", "us", found["step"]),
        ("gap", "mean gap between kernels", "us", found["gap_us"]),
    )
    return [
        {
            "id": f"decode-{model}-{sequences}-{name}",
            "work": f"{part}; {what}",
            "metric": metric,
            "ours": ours,
            "command": f"python -m benchmarks.decode_profile OUT.json {model} --sequences {sequences}",
        }
        for name, part, metric, ours in table
        if ours is not None
    ]


def table(model: str, found: dict) -> str:
    """The times as text."""
    lines = [f"{model}: {found['launches']:.0f} launches a step"]
    if found["step"] is not None:
        lines[0] += f", {found['step']:.0f} us, idle {found['idle']:.1%}"
    for heading in ("layer", "rest"):
        lines += [f"  {heading}: {sum(found[heading].values()):.1f} us"]
        lines += [f"    {us:8.2f} us  {name}" for name, us in found[heading].items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=pathlib.Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(SHAPES))
    parser.add_argument("--record", type=pathlib.Path, metavar="OUT.json")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--option", action="append", default=[], metavar="iso.NAME=VALUE", help="as of `isomodel bench`")
    args = parser.parse_args(argv)
    if args.record:
        return report.enter(args.record, AREA, {})
    if args.out is None:
        parser.error("name the file to write")
    if unknown := set(args.models) - set(SHAPES):
        parser.error(f"unknown model {', '.join(sorted(unknown))}; choose from {', '.join(SHAPES)}")
    options = command.parse_options(args.option, ["iso"])["iso"]
    result = {"facts": report.facts(), "rows": [], "failed": {}, "profiles": {}}
    for model in args.models or SHAPES:
        found = summary(trace(model, args.sequences, options), SHAPES[model].num_layers)
        result["profiles"][model] = found
        result["rows"] += rows(model, args.sequences, found)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(table(model, found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

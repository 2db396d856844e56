"""A whole GRPO step against its two halves elsewhere: stock vLLM generates, the trainer in native numerics trains.

    python -m benchmarks.grpo_step OUT.json [MODEL ...]    measures (a machine with a GPU and vLLM)
    python -m benchmarks.grpo_step --record OUT.json       enters the file in results.jsonl

The baseline trains on as many tokens as we do, after a pass over them for the old log-probabilities, which vLLM's are too far
from to be used. Each of the three is a process of its own, one after the other on one GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time

from benchmarks import beside_vllm
from benchmarks.kernels import separate
from isomodel.bench import arm
from isomodel.bench.work import SHAPES, Work
from isomodel.config import ModelConfig

WORK = Work(prompts=32, samples=8)
MODELS = {"qwen3-0.6b": (None, 0.5), "qwen3-8b": (8, 0.8)}
"""Model -> (layers, None for all; most of vLLM's time that generation may take)."""
MICROBATCH_TOKENS = 13 * (WORK.length - 1)
"""13 sequences: 256 of them fill twenty microbatches but for 4. With 26, native numerics need 96 GB of scratch at 0.6B."""
REASONS: dict[str, str] = {}
"""Why a target is missed, by the row's id."""


def shape(model: str) -> ModelConfig:
    """The model's config, with the layers that are run."""
    layers, _ = MODELS[model]
    return dataclasses.replace(SHAPES[model], num_layers=layers or SHAPES[model].num_layers)


def measure(mode: str, model: str, repeats: int) -> dict[str, list[float]]:
    """Steps of one trainer, in this process; the first is not counted.

    Returns:
      Seconds of each step: "train" (native: on random tokens), "score" (native: the pass for old log-probabilities),
      "generate" and "sync" (iso).

    Raises:
      ParityError: a log-probability of training is not the rollout's.
    """
    return steps(mode, shape(model), WORK, MICROBATCH_TOKENS, repeats)


def steps(mode: str, cfg: ModelConfig, work: Work, microbatch_tokens: int, repeats: int) -> dict[str, list[float]]:
    """As `measure`, of any config and work."""
    import jax
    import numpy as np

    from isomodel.rollout import Engine, EngineConfig, SamplingParams
    from isomodel.specs import init_params
    from isomodel.yaml_config import from_mapping
    from trainer.config import TrainConfig
    from trainer.packing import make_buckets, pack
    from trainer.sampler import Rollout
    from trainer.step import TrainStep
    from trainer.trajectory import Segment, Trajectory, from_completion
    from trainer.updater import Updater

    native = mode == "native"
    config = from_mapping(
        TrainConfig,
        {
            "model": {"config": cfg.to_hf(), "tokenizer": "none"},
            "data": {"source": "task:add", "max_prompt_tokens": work.prompt_tokens},
            "numerics": mode,
            "rollout": {
                "prompts_per_step": work.prompts,
                "samples_per_prompt": work.samples,
                "max_tokens": work.max_tokens,
            },
            "train": {"microbatch_tokens": microbatch_tokens, "remat": False},
            "parity": {"check": "off" if native else "first"},
        },
    )
    numerics, n = config.numerics, work.sequences
    step = TrainStep(cfg, numerics, config.objective, config.optimizer)
    buckets = make_buckets([microbatch_tokens], sequences=n, max_tokens=work.length, page_size=config.train.page_size)
    step.compile(buckets, score=native)
    state = step.init(jax.jit(lambda: init_params(cfg, 0))())
    updater = Updater(config, step, buckets, reference=None, dump=pathlib.Path(tempfile.gettempdir()) / "parity_failure.json")
    engine = None
    if not native:
        pages = n * -(-work.length // 16)
        sizes = EngineConfig(max_seqs=n, max_model_len=work.length, num_pages=pages, prompt_logprobs=False, seq_buckets=(n,))
        engine = Engine(cfg, state.params, numerics, sizes)
    rng = np.random.default_rng(0)
    sampling = SamplingParams(n=work.samples, max_tokens=work.max_tokens, ignore_eos=True)
    found: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def timed(name: str):
        start = time.perf_counter()
        yield
        found.setdefault(name, []).append(time.perf_counter() - start)

    def random_trajectory(prompt) -> Trajectory:
        sampled = rng.integers(0, cfg.vocab_size, work.max_tokens), -rng.exponential(2.0, work.max_tokens)
        return Trajectory((Segment.context(prompt, 0), Segment.sampled(*sampled, 0, np.float32(1))))

    for number in range(repeats + 1):
        prompts = work.token_ids(cfg.vocab_size, number)
        if engine is None:
            trajectories = [random_trajectory(p) for p in prompts for _ in range(work.samples)]
            parts = pack(trajectories, np.zeros(n), np.zeros(n), buckets)
            with timed("score"):
                for part in parts:
                    jax.device_get(step.score(state.params, part))
        else:
            with timed("generate"):
                completions = engine.generate(prompts, sampling)
            trajectories = [from_completion(c) for c in completions]
        rollout = Rollout(trajectories, rng.standard_normal(n), {}, [])
        with timed("train"):
            state = updater.update(state, rollout, step=number + 1, version=number, updates=number).state
        if engine is not None:
            with timed("sync"):
                engine.update_weights(state.params, number + 1)
    return {name: values[1:] for name, values in found.items()}


def rows(model: str, ours: dict[str, list[float]], native: dict[str, list[float]], vllm: dict) -> list[dict]:
    """The rows of a model (benchmarks.report.record's fields)."""
    middle = statistics.median
    layers, generation = MODELS[model]
    what = f"{model} shape{f', {layers} layers' if layers else ''}, {WORK.prompts} x {WORK.samples} samples, {WORK.prompt_tokens} + {WORK.max_tokens} tokens"
    train, theirs, score = middle(ours["train"]), middle(native["train"]), middle(native["score"])
    generate, elsewhere = middle(ours["generate"]), middle(vllm["seconds"])
    whole = generate + train + middle(ours["sync"])
    table = (
        ("generation", "generation", generate, elsewhere, beside_vllm.VLLM, f"<= {generation}"),
        ("training", "forward, gate, backward and optimizer", train, theirs, "native numerics, no pass for old log-probabilities", "<= 1.03"),
        ("training-with-pass", "the same", train, theirs + score, "native numerics with that pass", "< 1"),
        ("step", "the whole step, weights handed over", whole, elsewhere + theirs + score, "vLLM's generation and native training with that pass", "<= 0.9"),
    )  # fmt: skip
    return [
        {
            "id": f"grpo-{model}-{name}",
            "work": f"GRPO step: {part}; {what}",
            "metric": "s",
            "ours": a,
            "baseline": b,
            "baseline_name": other,
            "target": target,
            "command": f"python -m benchmarks.grpo_step OUT.json {model}",
        }
        for name, part, a, b, other, target in table
    ]


def compare(model: str, python: str, seconds: float, repeats: int) -> list[dict]:
    """The rows of a model, its three processes run one after the other.

    Args:
      python: interpreter that has vLLM. seconds: longest time for vLLM's process. repeats: measured steps.

    Raises:
      RuntimeError, ArmFailed: a process failed.
    """
    ours, native = (separate.call(mode, "benchmarks.grpo_step", "measure", mode, model, repeats) for mode in ("iso", "native"))
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(shape(model).to_hf()))
        common = dict(folder=folder, random_weights=True, works=[vars(WORK)], repeats=repeats, options={})
        (vllm,) = arm.measure("vllm", python, seconds, **common)
    print(model, json.dumps({"iso": ours, "native": native, "vllm": vllm}), flush=True)
    return rows(model, ours, native, vllm)


def main(argv: list[str] | None = None) -> int:
    parser = beside_vllm.parser(__doc__, MODELS)
    args = parser.parse_args(argv)
    rows_of = lambda model: compare(model, args.python, args.seconds, args.repeats)  # noqa: E731
    return beside_vllm.run(parser, args, MODELS, REASONS, rows_of)


if __name__ == "__main__":
    sys.exit(main())

"""The arm of a benchmark that is this project's engine: in a process of its own, under its numerics' XLA flags."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from isomodel import specs, weights
from isomodel.bench.work import Work
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.rollout import Engine, EngineConfig, SamplingParams

COPY_BYTES = 2**31
COPIES = 20
"""In one program: the host's part of a launch is none of the device's bandwidth."""


def run(
    folder: str, random_weights: bool, works: list[Work], repeats: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measures each work on an engine of its own, one after the other.

    Args:
      folder: of the model; with random_weights no more than its config.json is read.
      works: what to run.
      repeats: measured runs, after one that is not.
      options: `mode` of numerics ("iso"), `backend` ("auto"), and EngineConfig's fields where they are to differ.

    Returns:
      For each work {"tokens": [sampled in each run], "seconds": [of each run], "ttft_s": [from one request to its first
       token], "start_s": to load and compile, "peak_gb", "copy_tb_per_s", "stats": EngineStats of the whole}.

    Raises:
      ValueError, TypeError: `options` that EngineConfig or Numerics does not take.
      RuntimeError: a completion has fewer tokens than were asked for.
    """
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    numerics = Numerics(options.pop("mode", "iso"), options.pop("backend", "auto"))
    start = time.perf_counter()
    cfg = ModelConfig.load(folder)
    params = (
        jax.jit(lambda: specs.init_params(cfg, 0, numerics.dtype))()
        if random_weights
        else weights.load(folder, cfg, numerics.compute_dtype)
    )
    loaded = time.perf_counter() - start
    return [_measure(cfg, params, numerics, work, repeats, options) | {"load_s": loaded} for work in works]


def _measure(cfg, params, numerics, work: Work, repeats: int, options: dict[str, Any]) -> dict[str, Any]:
    size = options.get("page_size", 16)
    config = dict(
        max_seqs=work.sequences,
        max_model_len=work.length,
        num_pages=work.prompts * -(-work.prompt_tokens // size) + work.sequences * (-(-work.max_tokens // size) + 1),
        page_size=size,
        logprobs=work.logprobs,
        prompt_logprobs=False,
    )
    start = time.perf_counter()
    engine = Engine(cfg, params, numerics, EngineConfig(**config | options))
    started = time.perf_counter() - start
    sampling = SamplingParams(
        n=work.samples,
        max_tokens=work.max_tokens,
        temperature=work.temperature,
        logprobs=work.logprobs,
        ignore_eos=work.file is None,
    )
    tokens, seconds, first = [], [], []
    for repeat in range(repeats + 1):
        prompts = work.token_ids(cfg.vocab_size, repeat)  # new ones: the prefix cache must not serve a whole run
        engine.reset_prefix_cache()
        sampled, elapsed = _timed(engine, prompts, sampling)
        tokens.append(sampled)
        seconds.append(elapsed)
        engine.reset_prefix_cache()
        one = work.token_ids(cfg.vocab_size, repeats + 1 + repeat)[:1]
        first.append(_timed(engine, one, SamplingParams(max_tokens=1, ignore_eos=True, logprobs=work.logprobs))[1])
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "tokens": tokens[1:],
        "seconds": seconds[1:],
        "ttft_s": first[1:],
        "start_s": started,
        "peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
        "copy_tb_per_s": _copy_rate() / 1e12,
        "stats": vars(engine.stats()),
    }


def _timed(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> tuple[int, float]:
    """(tokens sampled, seconds)."""
    start = time.perf_counter()
    completions = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - start
    short = [c for c in completions if len(c.token_ids) != sampling.max_tokens]
    if short and sampling.ignore_eos:
        raise RuntimeError(f"{len(short)} of {len(completions)} completions ended early: {short[0].finish_reason}")
    return sum(len(c.token_ids) for c in completions), seconds


def _copy_rate() -> float:
    """Bytes a second of a large copy on the device, read and written."""
    size = COPY_BYTES if jax.default_backend() != "cpu" else 2**24
    x = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    copies = jax.jit(lambda x: lax.fori_loop(0, COPIES, lambda i, x: x ^ i.astype(jnp.uint32), x), donate_argnums=0)
    x = copies(x).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        x = copies(x).block_until_ready()
        times.append((time.perf_counter() - start) / COPIES)
    return 2 * x.nbytes / sorted(times)[len(times) // 2]

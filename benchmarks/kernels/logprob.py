"""Log-probability and sampling: training against the unfused library version, decode against copy bandwidth and jitted XLA.

`python -m benchmarks.kernels.logprob` prints the rows. The library's training runs under XLA's default flags and under ours,
each in a process of its own; its faster figure is the baseline.
"""

from __future__ import annotations

import concurrent.futures
import json
import os

import jax
import jax.numpy as jnp

from benchmarks.kernels import separate, timing
from pallas_kernels import logprob, sample
from pallas_kernels.logprob import hopper_blocks

T, V, D = 16384, 151936, 4096
B = 256
V8 = logprob.padded_vocab(V)


def head() -> tuple[jax.Array, ...]:
    """Hidden rows, weight, targets, inverse temperatures and the gradient of the log-probabilities, of Qwen3-8B's shape."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (T, D), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (V, D)) * 0.03).astype(jnp.bfloat16)
    targets = jax.random.randint(keys[2], (T,), 0, V, jnp.int32)
    return x, w, targets, jnp.full(T, 1 / 0.9, jnp.float32), jax.random.normal(keys[3], (T,))


def ours(x, w, targets, inv_temp):
    return logprob.logprob(x, w, targets, inv_temp, regions=("a", "b"), impl="hopper")


def unfused(x, w, targets, inv_temp):
    """What a user would write: fp32 logits of all rows in memory, log_softmax."""
    z = jnp.einsum("td,vd->tv", x, w, preferred_element_type=jnp.float32) * inv_temp[:, None]
    return jnp.take_along_axis(jax.nn.log_softmax(z, axis=1), targets[:, None], axis=1)[:, 0]


@jax.custom_vjp
def unfused_bf16(x, w, targets, inv_temp):
    """`unfused`, but the gradient of the logits is rounded to bf16 before the library multiplies it."""
    return unfused(x, w, targets, inv_temp)


def _forward(x, w, targets, inv_temp):
    z = jnp.einsum("td,vd->tv", x, w, preferred_element_type=jnp.float32) * inv_temp[:, None]
    lse = jax.nn.logsumexp(z, axis=1)
    return jnp.take_along_axis(z, targets[:, None], axis=1)[:, 0] - lse, (x, w, targets, inv_temp, z, lse)


def _backward(saved, g):
    x, w, targets, inv_temp, z, lse = saved
    onehot = jnp.arange(z.shape[1])[None] == targets[:, None]
    dz = ((onehot - jnp.exp(z - lse[:, None])) * (g * inv_temp)[:, None]).astype(x.dtype)
    return dz @ w, jnp.einsum("tv,td->vd", dz, x), None, None


unfused_bf16.defvjp(_forward, _backward)


def train(fn) -> tuple[float, float]:
    """(milliseconds, GB of memory beyond arguments and results) of forward and backward."""
    x, w, targets, inv_temp, g = head()
    run = jax.jit(jax.grad(lambda x, w: jnp.sum(fn(x, w, targets, inv_temp) * g), (0, 1)))
    run = timing.compiled(run, x, w)
    extra = run.memory_analysis().temp_size_in_bytes
    return timing.device_us(run, x, w, iterations=2) / 1e3, extra / 1e9


def library() -> dict[str, list[float]]:
    return {"autodiff": train(unfused), "gradient of the logits in bf16": train(unfused_bf16)}


def rows() -> list[dict]:
    """One row a measurement (benchmarks.report.record's fields)."""
    modes = {"XLA's default flags": "native", "our flags": "iso"}
    with concurrent.futures.ThreadPoolExecutor(len(modes)) as pool:
        running = {flags: pool.submit(separate.call, mode, "logprob", "library") for flags, mode in modes.items()}
        ms, extra = train(ours)
        by_flags = {flags: found.result() for flags, found in running.items()}
    work = f"log-probability, {T} tokens, vocabulary {V}, width {D}, bf16, forward + backward"

    def against(name: str, what: str) -> dict:
        flags = min(by_flags, key=lambda flags: by_flags[flags][name][0])
        theirs, gigabytes = by_flags[flags][name]
        return {
            "metric": "ms",
            "ours": ms,
            "baseline": theirs,
            "baseline_name": f"{what}, {gigabytes:.0f} GB extra, under {flags}",
        }

    plain = against("autodiff", "XLA dot, log_softmax, autodiff")
    by_hand = against("gradient of the logits in bf16", "three XLA dots, the logits' gradient rounded to bf16 by hand")
    return [
        {"id": "logprob-train", "work": work, **plain, "target": "<= 1"},
        {"id": "logprob-train-by-hand", "work": f"{work}, against a library that makes no logits again", **by_hand},
        {
            "id": "logprob-train-memory",
            "work": work,
            "metric": "GB beyond arguments and gradients",
            "ours": extra,
            "target": "< 2",
        },
        *decode(),
    ]


def decode() -> list[dict]:
    z = jnp.where(jnp.arange(V8) < V, jax.random.normal(jax.random.key(0), (B, V8)) * 3, -jnp.inf)
    targets, inv_temp = jnp.arange(B, dtype=jnp.int32) * 500, jnp.full(B, 1 / 0.9, jnp.float32)
    keys, positions = jax.random.bits(jax.random.key(1), (B, 2), jnp.uint32), jnp.arange(B, dtype=jnp.int32)
    all_kept = jnp.zeros(B, jnp.int32), jnp.ones(B), jnp.zeros(B)

    def log_softmax(z, targets, inv_temp):
        return jnp.take_along_axis(jax.nn.log_softmax(z * inv_temp[:, None], axis=1), targets[:, None], axis=1)[:, 0]

    def gumbel_argmax(z, keys, positions, inv_temp):
        key = lambda k, p: jax.random.fold_in(jax.random.wrap_key_data(k, impl="threefry2x32"), p)  # noqa: E731
        noise = jax.vmap(lambda k, p: jax.random.gumbel(key(k, p), (V8,)))(keys, positions)
        tokens = jnp.argmax(z * inv_temp[:, None] + noise, axis=1)
        return tokens, log_softmax(z, tokens, inv_temp)

    def nucleus(z, key, inv_temp):
        z = -jnp.sort(-z * inv_temp[:, None], axis=1)
        p = jax.nn.softmax(z, axis=1)
        kept = jnp.where(jnp.cumsum(p, axis=1) - p < 0.9, z, -jnp.inf)
        return jax.random.categorical(key, kept)  # a place in the order: a user looks its token up besides

    reduce = lambda *a: logprob.from_logits(*a, region="b", impl="hopper")  # noqa: E731
    draw = lambda *a: sample.sample(*a, regions=("c", "b"), impl="hopper")  # noqa: E731
    stats_us = timing.kernel_us(hopper_blocks.block_stats, z, inv_temp)
    work = f"{B} rows of {V} logits"
    return [
        {
            "id": "logprob-block-sums",
            "work": f"block sums of {work}",
            "metric": "TB/s",
            "ours": z.nbytes / stats_us / 1e6,
            "baseline": timing.copy_bandwidth() / 1e12,
            "baseline_name": "a large copy, bytes read and written",
            "target": ">= 0.85",
        },
        {
            "id": "logprob-decode",
            "work": f"log-probability from {work}",
            "metric": "us",
            "ours": timing.kernel_us(reduce, z, targets, inv_temp),
            "baseline": timing.kernel_us(log_softmax, z, targets, inv_temp),
            "baseline_name": "jitted XLA, log_softmax",
            "target": "<= 1",
        },
        {
            "id": "sample-decode",
            "work": f"sampling from {work}, no truncation: a token and its log-probability",
            "metric": "us",
            "ours": timing.device_us(draw, z, keys, positions, inv_temp, *all_kept),
            "baseline": timing.device_us(gumbel_argmax, z, keys, positions, inv_temp),
            "baseline_name": "jitted XLA, jax.random.gumbel, argmax, log_softmax",
            "target": "<= 1",
        },
        {
            "id": "sample-decode-top-p",
            "work": f"sampling from {work}, top-p 0.9; ours gives a log-probability too",
            "metric": "us",
            "ours": timing.device_us(draw, z, keys, positions, inv_temp, all_kept[0], jnp.full(B, 0.9), all_kept[2]),
            "baseline": timing.device_us(nucleus, z, jax.random.key(2), inv_temp),
            "baseline_name": "jitted XLA, sort, cumulative sum, jax.random.categorical",
            "target": "<= 1",
        },
    ]


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    print(json.dumps(rows(), indent=1))

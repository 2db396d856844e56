"""Attention forward and backward against cuDNN's, each in a process of its own: ours under the contract's XLA flags, cuDNN
under XLA's defaults, where its backward adds with atomics.

`python -m benchmarks.kernels.attention_backward` prints the rows.
"""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp

from benchmarks.kernels import separate, timing
from pallas_kernels import attention

H, K, D, PAGE = 32, 8, 128, 128
"""Qwen3-8B's heads."""
WORK = {"8x2k": (8, 2048), "2x8k": (2, 8192), "1x32k": (1, 32768)}
TARGET = 0.85


def _draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _ours(S: int, L: int):
    """(attention of q and pages, its arguments, cotangent)."""
    pages = L // PAGE
    where = (
        jnp.arange(S + 1, dtype=jnp.int32) * L,
        jnp.full((S,), L, jnp.int32),
        jnp.arange(S * pages, dtype=jnp.int32).reshape(S, pages),
    )
    run = lambda q, k, v: attention.attention(q, k, v, *where, region="benchmark", impl="hopper")  # noqa: E731
    k, v = (_draw(i, S * pages, PAGE, K, D) for i in (1, 2))
    return run, (_draw(0, S * L, H, D), k, v), _draw(3, S * L, H, D)


def _cudnn(S: int, L: int):
    run = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return run, (_draw(0, S, L, H, D), *(_draw(i, S, L, K, D) for i in (1, 2))), _draw(3, S, L, H, D)


def measure(mode: str) -> dict[str, float]:
    """Microseconds of the forward, and of forward and backward, of each piece of work."""
    found = {}
    for name, (S, L) in WORK.items():
        run, inputs, cotangent = (_ours if mode == "iso" else _cudnn)(S, L)

        def both(inputs, cotangent, run=run):
            out, pull = jax.vjp(run, *inputs)
            return out, pull(cotangent)

        found[f"{name}-forward"] = timing.device_us(jax.jit(run), *inputs, iterations=10)
        found[name] = timing.device_us(jax.jit(both), inputs, cotangent, iterations=5)
    return found


def rows() -> list[dict]:
    """One row a piece of work (benchmarks.report.record's fields)."""
    ours, cudnn = (separate.call(mode, "attention_backward", "measure", mode) for mode in ("iso", "native"))
    rows = []
    for name, (S, L) in WORK.items():
        flops = 3.5 * 2 * S * H * L * L * D  # causal: two products forward, five backward, half of each
        rate = {side: flops / found[name] / 1e6 for side, found in (("ours", ours), ("cudnn", cudnn))}
        ratio = cudnn[name] / ours[name]
        backward = {side: found[name] - found[f"{name}-forward"] for side, found in (("ours", ours), ("cudnn", cudnn))}
        reason = f"backward {backward['ours']:.0f} us, cuDNN's {backward['cudnn']:.0f} us; the rest is the forward"
        rows.append(
            {
                "id": f"attention-forward-backward-{name}",
                "work": f"causal attention, forward and backward, {S} x {L} tokens, {H} query and {K} KV heads, D {D}, "
                "deterministic",
                "metric": "TFLOP/s",
                "ours": rate["ours"],
                "baseline": rate["cudnn"],
                "baseline_name": "cuDNN (atomics), XLA's default flags, own process",
                "ratio": ratio,
                "target": f">= {TARGET}",
                "met": ratio >= TARGET,
            }
            | ({} if ratio >= TARGET else {"reason": reason})
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(rows(), indent=1))

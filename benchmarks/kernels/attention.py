"""Attention: the causal forward against cuDNN's, in a process under XLA's default flags; decode against the memory's bandwidth.

`python -m benchmarks.kernels.attention` prints the rows.
"""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import separate, timing
from pallas_kernels import attention

H, K, D, PAGE = 32, 8, 128, 128
"""Qwen3-8B's heads."""
FORWARD = {"2k": (8, 2048), "8k": (2, 8192), "32k": (1, 32768)}
DECODE = {
    "256x2k-8k": np.random.default_rng(0).integers(2048, 8193, 256),
    "4x32k": np.full(4, 32768),
}
"""KV lengths of sequences that decode one token each."""
DECODE_PAGE, LAYERS = 64, 2
LOOP_BYTES = 10**11
"""Of K and V in one loop, so long that the start of a call does not count."""
FORWARD_TARGET, DECODE_TARGET = 0.95, 0.80


def _draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _ours(q, k, v, *where):
    return attention.attention(q, k, v, *where, region="benchmark", impl="hopper")


def _forward(mode: str, S: int, L: int) -> float:
    """Microseconds."""
    iterations = max(2, 2**16 // L)
    if mode == "native":
        cudnn = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"))
        return timing.device_us(
            cudnn, _draw(0, S, L, H, D), *(_draw(i, S, L, K, D) for i in (1, 2)), iterations=iterations
        )
    pages = S * L // PAGE
    where = (
        jnp.arange(S + 1, dtype=jnp.int32) * L,
        jnp.full((S,), L, jnp.int32),
        jnp.arange(pages, dtype=jnp.int32).reshape(S, -1),
    )
    paged = (_draw(i, pages, PAGE, K, D) for i in (1, 2))
    return timing.device_us(jax.jit(_ours), _draw(0, S * L, H, D), *paged, *where, iterations=iterations)


def _decode(lengths: np.ndarray) -> float:
    """Bytes of K and V a second, in a loop over layers on the device, as an engine's step has it: the next layer's queries
    are this one's outputs, and what depends on lengths alone is computed once, before the loop."""
    S = len(lengths)
    need = -(-lengths // DECODE_PAGE)
    tables = np.zeros((S, need.max()), np.int32)
    pages = np.random.default_rng(1).permutation(int(need.sum()))
    tables[np.arange(need.max())[None] < need[:, None]] = pages
    where = (jnp.arange(S + 1, dtype=jnp.int32), jnp.asarray(lengths, jnp.int32), jnp.asarray(tables))
    paged = [_draw(i, LAYERS, len(pages), DECODE_PAGE, K, D) for i in (1, 2)]

    def layer(i, q, k, v, *where_and_work):
        *where, work = where_and_work
        options = dict(layer=jnp.int32(i % LAYERS), work=work, region="benchmark", impl="hopper")
        return attention.attention(q, k, v, *where, **options)

    def once(q, k, v, *where):
        return attention.work_list(q, k, *where, impl="hopper")

    size = int(lengths.sum()) * 2 * K * D * 2
    trips = -(-LOOP_BYTES // size)
    us = timing.loop_us(layer, _draw(0, S, H, D), *paged, *where, once=once, trips=trips)
    return size / (us * 1e-6)


def measure(mode: str) -> dict[str, float]:
    """Microseconds of each forward; of ours also the bandwidth of each decode and of a copy."""
    found = {name: _forward(mode, *work) for name, work in FORWARD.items()}
    if mode == "iso":
        found |= {name: _decode(lengths) for name, lengths in DECODE.items()} | {"copy": timing.copy_bandwidth()}
    return found


def rows() -> list[dict]:
    """One row a piece of work (benchmarks.report.record's fields)."""
    ours, cudnn = (separate.call(mode, "attention", "measure", mode) for mode in ("iso", "native"))
    rows = []
    for name, (S, L) in FORWARD.items():
        flops = 2 * S * H * L * L * D  # causal: half of two products
        rows.append(
            {
                "id": f"attention-forward-{name}",
                "work": f"causal attention forward, {S} x {L} tokens, {H} query and {K} KV heads, D {D}",
                "metric": "TFLOP/s",
                "ours": flops / ours[name] / 1e6,
                "baseline": flops / cudnn[name] / 1e6,
                "baseline_name": "cuDNN, XLA's default flags, own process",
                "ratio": cudnn[name] / ours[name],
                "target": f">= {FORWARD_TARGET}",
                "met": cudnn[name] / ours[name] >= FORWARD_TARGET,
            }
        )
    for name, lengths in DECODE.items():
        share = ours[name] / ours["copy"]
        rows.append(
            {
                "id": f"attention-decode-{name}",
                "work": f"decode attention, {len(lengths)} sequences of {lengths.min()} to {lengths.max()} positions, "
                f"{H} query and {K} KV heads, D {D}, pages of {DECODE_PAGE}, in a loop over layers",
                "metric": "TB/s of K and V",
                "ours": ours[name] / 1e12,
                "baseline": ours["copy"] / 1e12,
                "baseline_name": "copy bandwidth, read and written",
                "ratio": share,
                "target": f">= {DECODE_TARGET}",
                "met": share >= DECODE_TARGET,
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(rows(), indent=1))

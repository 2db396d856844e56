"""GEMM of few tokens on layers of a stack, as decode runs it: each kernel's own time, a layer in a loop, what leaves would give.

`python -m benchmarks.kernels.gemm_small` prints the rows.
"""

from __future__ import annotations

import json
import statistics

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from benchmarks.kernels import separate, timing
from pallas_kernels.gemm import hopper

LAYER = {"qkv": (6144, 4096, 1), "o": (4096, 4096, 8), "gate_up": (24576, 4096, 1), "down": (4096, 12288, 8)}
"""N, K and leaves of the GEMMs of one Qwen3-8B layer."""
LAYERS = {"qkv": 8, "o": 8, "gate_up": 4, "down": 4}
"""Layers of a stack: none is still in the L2 cache when its turn comes again."""
TRIPS = 48
WITH_LEAVES = {
    "qkv": (6144, 4096, (1, 4)),
    "o": (4096, 4096, (1, 8)),
    "gate_up": (24576, 4096, (1, 4)),
    "down": (4096, 12288, (1, 8)),
    "qkv of TP 8": (768, 4096, (1, 4, 8)),
    "o of TP 8": (4096, 512, (1, 2)),
    "gate_up of TP 8": (3072, 4096, (1, 4)),
    "down of TP 8": (4096, 1536, (1, 2)),
}
"""N, K and leaves of each region of a Qwen3-8B layer and of one of 8 tensor-parallel ranks' slices: as the contract has them
(chains for columns, 8 leaves or a rank's one of them for rows), and as they would be."""
TRAINING_TOKENS = 16384


def stack(L: int, N: int, K: int) -> jax.Array:
    """[L, N, K] bf16."""
    return jax.jit(lambda key: jax.random.normal(key, (L, N, K), jnp.bfloat16) * jnp.bfloat16(0.02))(jax.random.key(1))


def multiply(x_TK: jax.Array, w_LNK: jax.Array, layer: jax.Array, leaves: int) -> jax.Array:
    """A layer's GEMM by whichever kernel the op picks."""
    return hopper.gemm(x_TK, w_LNK, layer, leaves, "row", jnp.bfloat16)


def kernel_us(T: int, w_LNK: jax.Array, leaves: int) -> float:
    """Median time of the op's kernel over layers of a stack, by CUPTI: without the gap before it."""
    L, N, K = w_LNK.shape
    x_TK = jax.random.normal(jax.random.key(2), (T, K), jnp.bfloat16)

    def loop(x_TK, w_LNK):
        step = lambda i, _: multiply(x_TK, w_LNK, lax.rem(i, L), leaves)  # noqa: E731
        return lax.fori_loop(0, TRIPS, step, jnp.zeros((T, N), jnp.bfloat16))

    run = timing.compiled(loop, x_TK, w_LNK)
    with timing.alone():
        _, kernels = profiler.measure(run, aggregate=False)(x_TK, w_LNK)
    return statistics.median(ms for name, ms in kernels if "mosaic" in name) * 1e3


def library_us(T: int) -> dict[str, float]:
    """The same of XLA's dot on plain matrices, whose slices of a stack would be copies."""
    found = {}
    for name, (N, K, _) in LAYER.items():
        weights = list(stack(4, N, K))
        x_TK = jax.random.normal(jax.random.key(2), (T, K), jnp.bfloat16)
        dots = jax.jit(lambda x, *weights: [jnp.dot(x, w.T) for w in weights])
        found[name] = timing.kernel_us(dots, x_TK, *weights) / len(weights)
    return found


def layer_us(T: int) -> float:
    """Time of one layer's four GEMMs in a loop over layers of stacks, gaps and loop counters with them."""
    weights = [stack(4, N, K) for N, K, _ in LAYER.values()]
    xs = [jax.random.normal(jax.random.key(2), (T, K), jnp.bfloat16) for _, K, _ in LAYER.values()]

    def step(i, ys, weights, xs):
        del ys
        operands = zip(xs, weights, LAYER.values(), strict=True)
        return [multiply(x, w, lax.rem(i, 4), leaves) for x, w, (_, _, leaves) in operands]

    ys = [jnp.zeros((T, N), jnp.bfloat16) for N, _, _ in LAYER.values()]
    return timing.loop_us(step, ys, weights, xs, trips=250)


def rows() -> list[dict]:
    """One row a measurement (benchmarks.report.record's fields)."""
    copy = timing.copy_bandwidth() / 1e12
    memory = {
        "baseline": copy,
        "baseline_name": "a large copy, bytes read and written",
        "metric": "TB/s of the weights",
    }
    library = separate.call("native", "gemm_small", "library_us", 256)
    found = []
    for name, (N, K, leaves) in LAYER.items():
        w_LNK = stack(LAYERS[name], N, K)
        for T in (8, 64):
            found.append(
                {
                    "id": f"gemm-kernel-{T}-tokens-{name}",
                    "work": f"{T} tokens, {name} {N}x{K} of a stack, the kernel alone",
                    "ours": N * K * 2 / kernel_us(T, w_LNK, leaves) / 1e6,
                    "target": ">= 0.75",
                }
                | memory
            )
        found.append(
            {
                "id": f"gemm-kernel-256-tokens-{name}",
                "work": f"256 tokens, {name} {N}x{K} of a stack, the kernel alone",
                "metric": "us",
                "ours": kernel_us(256, w_LNK, leaves),
                "baseline": library[name],
                "baseline_name": "XLA dot (cuBLAS) on a plain matrix, XLA's default flags",
                "target": "<= 1",
            }
        )
    size = sum(N * K * 2 for N, K, _ in LAYER.values())
    found.append(
        {
            "id": "gemm-64-tokens-layer",
            "work": "64 tokens, the four GEMMs of a Qwen3-8B layer, in a loop over a stack on the device",
            "ours": size / layer_us(64) / 1e6,
            "target": ">= 0.75",
        }
        | memory
    )
    return found + leaves_rows()


def training_us(N: int, K: int, leaves: int) -> float:
    """Time of a training batch's GEMM with so many leaves."""
    x_TK = jax.random.normal(jax.random.key(2), (TRAINING_TOKENS, K), jnp.bfloat16)
    return timing.device_us(lambda x, w: multiply(x, w, None, leaves), x_TK, stack(1, N, K)[0])


def leaves_rows() -> list[dict]:
    """What leaves of a region give at 64 tokens and cost at a training batch's."""
    found = []
    for name, (N, K, choices) in WITH_LEAVES.items():
        w_LNK = stack(max(4, -(-(1 << 28) // (N * K * 2))), N, K)
        for leaves in choices:
            of = f"{name} {N}x{K}"
            row = {"id": f"gemm-leaves-{leaves}-{name.replace(' ', '-')}", "metric": "us"}
            work = f"64 tokens, {of} of a stack with {leaves} leaves, the kernel alone"
            found.append(row | {"work": work, "ours": kernel_us(64, w_LNK, leaves)})
            if name in LAYER:
                work = f"{TRAINING_TOKENS} tokens, {of} with {leaves} leaves"
                found.append(row | {"id": f"{row['id']}-training", "work": work, "ours": training_us(N, K, leaves)})
    return found


if __name__ == "__main__":
    print(json.dumps(rows(), indent=1))

"""Norms, rope and silu * up: bytes a second against a large copy, forward and backward, and time against jitted XLA.

`python -m benchmarks.kernels.rows` prints the rows.
"""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp

from benchmarks.kernels import timing
from pallas_kernels import qk_norm_rope, rms_norm, silu_mul

EPS, THETA, MOST = 1e-6, 1e6, 40960
TRAIN, DECODE = 16384, (1, 64, 256)
HIDDEN, HEADS, INTERMEDIATE = 4096, (8, 6, 128), 12288
"""Qwen3-8B's."""


def norm(impl: str, x, w):
    return rms_norm.rms_norm(x, w, eps=EPS, region="benchmark", impl=impl)


def add_norm(impl: str, x, residual, w):
    return rms_norm.add_rms_norm(x, residual, w, eps=EPS, region="benchmark", impl=impl)


def rope(impl: str, qkv, positions, q_norm, k_norm):
    return qk_norm_rope.qk_norm_rope(
        qkv, positions, q_norm, k_norm, eps=EPS, theta=THETA, max_positions=MOST, region="benchmark", impl=impl
    )


def silu(impl: str, gate_up):
    return silu_mul.silu_mul(gate_up, region="benchmark", impl=impl)


def work(T: int) -> dict[str, tuple]:
    """{op: (function of impl and arrays, arrays of T rows, which of them have gradients)}."""
    make = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)  # noqa: E731
    x, residual, w = make(0, T, HIDDEN), make(1, T, HIDDEN), make(2, HIDDEN)
    positions = jax.random.randint(jax.random.key(3), (T,), 0, MOST, jnp.int32)
    d = HEADS[-1]
    return {
        f"rms-norm-{T}x{HIDDEN}": (norm, (x, w), (0, 1)),
        f"add-rms-norm-{T}x{HIDDEN}": (add_norm, (x, residual, w), (0, 2)),
        f"qk-norm-rope-{T}x{'x'.join(map(str, HEADS))}": (
            rope,
            (make(4, T, *HEADS), positions, make(5, d), make(6, d)),
            (0, 2, 3),
        ),
        f"silu-mul-{T}x2x{INTERMEDIATE}": (silu, (make(7, T, 2 * INTERMEDIATE),), (0,)),
    }


def size(*trees) -> int:
    """Bytes of all arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


def backward(f, arrays, gradients: tuple[int, ...]):
    """(function that gives the gradients of those arrays, its arguments, bytes that it must move)."""
    keys = iter(range(100))

    def run(*wanted):
        full = list(arrays)
        for i, x in zip(gradients, wanted, strict=True):
            full[i] = x
        return f("hopper", *full)

    wanted = [arrays[i] for i in gradients]
    out, pull = jax.vjp(run, *wanted)
    cotangent = jax.tree.map(lambda y: jax.random.normal(jax.random.key(next(keys)), y.shape, y.dtype), out)
    return (lambda pull, cotangent: pull(cotangent)), (pull, cotangent), size(pull, cotangent, wanted)


def rows() -> list[dict]:
    """One row a measurement (benchmarks.report.record's fields)."""
    copy = timing.copy_bandwidth() / 1e12
    against_copy = {
        "metric": "TB/s, bytes read and written",
        "baseline": copy,
        "baseline_name": "a large copy, bytes read and written",
    }
    found = []
    for name, (f, arrays, gradients) in work(TRAIN).items():
        run = {impl: functools.partial(f, impl) for impl in ("hopper", "native")}
        us = {impl: timing.kernel_us(g, *arrays) for impl, g in run.items()}
        moved = size(arrays, jax.eval_shape(run["hopper"], *arrays))
        found.append(
            {
                "id": name,
                "work": f"{name}, bf16, forward, kernel time",
                "ours": moved / us["hopper"] / 1e6,
                "target": ">= 0.85",
            }
            | against_copy
        )
        found.append(
            {
                "id": f"{name}-xla",
                "work": f"{name}, bf16, forward, kernel time",
                "metric": "us",
                "ours": us["hopper"],
                "baseline": us["native"],
                "baseline_name": "jitted XLA",
            }
        )
        run, args, moved = backward(f, arrays, gradients)
        found.append(
            {
                "id": f"{name}-backward",
                "work": f"{name}, bf16, backward alone, kernel time",
                "ours": moved / timing.kernel_us(run, *args) / 1e6,
            }
            | against_copy
        )
    for T in DECODE:
        for name, (f, arrays, _) in work(T).items():
            us = {impl: timing.kernel_us(functools.partial(f, impl), *arrays) for impl in ("hopper", "native")}
            found.append(
                {
                    "id": f"{name}-xla",
                    "work": f"{name}, bf16, kernel time",
                    "metric": "us",
                    "ours": us["hopper"],
                    "baseline": us["native"],
                    "baseline_name": "jitted XLA",
                }
            )
    return found


if __name__ == "__main__":
    print(json.dumps(rows(), indent=1))

"""GEMM: many rows against cuBLAS, one and 256 tokens through whichever kernel the op picks, the backward's library dots.

`python -m benchmarks.kernels.gemm` prints the rows.

Many rows: the GPU is at its power limit, as in training, so that its clock depends on what runs and on what ran before. Both
sides are therefore measured in one process and take turns, in slices of 10 ms, after 0.3 s of the same turns; every second turn
is in the other order. So neither has the cooler GPU. XLA's flags reach the library alone: under XLA's defaults, in a process of
its own, it tries its algorithms on the GPU and takes the fastest, under ours it takes its first guess. Ours and the library are
measured under both; the row is where the library is faster.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.kernels import separate, timing
from pallas_kernels.gemm import hopper

CHAIN = ((8192, 8192, 8192), (16384, 4096, 4096), (4096, 12288, 4096), (16384, 4096, 12288))
TREE = ((16384, 4096, 4096), (16384, 4096, 12288))
WEIGHTS = {
    "4096x4096": ((4096, 4096, 8),),
    "6144x4096": ((6144, 4096, 1), (4096, 6144, 8)),
    "12288x4096": ((12288, 4096, 1), (4096, 12288, 8)),
    "24576x4096": ((24576, 4096, 1), (4096, 24576, 8)),
}
"""N, K and leaves of GEMMs that run one after the other, each the next one's input; every weight has 30 MB or more."""
ROUNDS = 16
SLICE_US = 10_000
WARM_S = 0.3
TRIPS = 300
"""Of a loop on the device with few tokens: starting a program costs about 0.5 ms, which is to be 2 % at most."""


def operands(M: int, N: int, K: int) -> tuple[jax.Array, jax.Array]:
    """x [M, K], w [N, K], whose product has values of the same size as x."""
    x_MK = jax.random.normal(jax.random.key(0), (M, K), jnp.bfloat16)
    return x_MK, (jax.random.normal(jax.random.key(1), (N, K)) * K**-0.5).astype(jnp.bfloat16)


def library(x_MK: jax.Array, w_NK: jax.Array, out_dtype=jnp.bfloat16) -> jax.Array:
    """XLA's dot."""
    return lax.dot_general(x_MK, w_NK, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)


def ours(x_MK: jax.Array, w_NK: jax.Array, leaves: int) -> jax.Array:
    """The op's kernel, under any flags."""
    return hopper.gemm(x_MK, w_NK, None, leaves, "row", jnp.bfloat16)


def in_turn(calls: dict) -> dict[str, float]:
    """Median microseconds of each (function, *arguments) over slices of calls that take turns; see the module's docstring."""
    run = {name: (timing.compiled(f, *args), args) for name, (f, *args) in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in run}

    def slice_us(name: str, count: int) -> float:
        f, args = run[name]
        start = time.perf_counter()
        jax.block_until_ready([f(*args) for _ in range(count)][-1])
        return (time.perf_counter() - start) / count * 1e6

    with timing.alone():
        for name in run:
            slice_us(name, 3)
        count = {name: max(round(SLICE_US / slice_us(name, 3)), 2) for name in run}
        warm = time.perf_counter() + WARM_S
        while time.perf_counter() < warm:
            for name in run:
                slice_us(name, count[name])
        for turn in range(ROUNDS):
            for name in list(run)[:: -1 if turn % 2 else 1]:
                times[name].append(slice_us(name, count[name]))
    return {name: statistics.median(t) for name, t in times.items()}


def tflops(M: int, N: int, K: int, us: float) -> float:
    return 2 * M * N * K / us / 1e6


def large() -> dict[str, tuple[float, float]]:
    """(ours, library) in TFLOP/s of `chain` and of `tree` at each shape of many rows."""
    found = {}
    for M, N, K in CHAIN:
        args = operands(M, N, K)
        for order, leaves in (("chain", 1), ("tree", 8)):
            if order == "chain" or (M, N, K) in TREE:
                us = in_turn({"ours": (functools.partial(ours, leaves=leaves), *args), "library": (library, *args)})
                found[f"{order}-{M}x{N}x{K}"] = tflops(M, N, K, us["ours"]), tflops(M, N, K, us["library"])
    return found


def few(T: int, name: str, multiply) -> tuple[float, float]:
    """(microseconds, bytes of weights) of one pass over WEIGHTS[name] with T tokens, in a loop on the device.

    There are weights enough that none is still in the cache when its turn comes again. One trip passes over all of them, so
    that the loop's counter, a kernel of 4 us with what lies between it and its neighbours, comes once in 268 MB or more.
    """
    shapes = WEIGHTS[name]
    size = sum(N * K * 2 for N, K, _ in shapes)
    copies = -(-(1 << 28) // size)
    weights = [operands(8, N, K)[1] for _ in range(copies) for N, K, _ in shapes]
    multiply = jax.jit(multiply, static_argnums=2)  # traced once for each shape

    def step(i, x, *weights):
        for w, (_, _, leaves) in zip(weights, shapes * copies, strict=True):
            x = multiply(x, w, leaves)
        return x

    return timing.loop_us(step, operands(T, 8, shapes[0][1])[0], *weights, trips=TRIPS) / copies, size


def backward() -> dict[str, float]:
    """TFLOP/s of dX and dW (fp32) of a 16384 x 4096 x 4096 GEMM, as `pallas_kernels.gemm` asks the library for them."""
    M, N, K = TREE[0]
    x_MK, w_NK = operands(M, N, K)
    dy_MN = operands(M, 8, N)[0]
    dx = lambda dy, w: lax.dot_general(dy, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)  # noqa: E731
    dw = lambda dy, x: lax.dot_general(dy, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)  # noqa: E731
    calls = {
        "dx": (lambda dy, w: dx(dy, w).astype(jnp.bfloat16), dy_MN, w_NK),
        "dw": (dw, dy_MN, x_MK),
        "forward": (library, x_MK, w_NK),
    }
    return {name: tflops(M, N, K, us) for name, us in in_turn(calls).items()}


def rows() -> list[dict]:
    """One row a measurement (benchmarks.report.record's fields)."""
    by_flags = {"XLA's default flags": separate.call("native", "gemm", "large"), "our flags": large()}
    rows = []
    for name in by_flags["our flags"]:
        order, shape = name.split("-")
        flags = max(by_flags, key=lambda flags: by_flags[flags][name][1])
        mine, theirs = by_flags[flags][name]
        rows.append(
            {
                "id": f"gemm-{name}",
                "work": f"{order}{'' if order == 'chain' else ' of 8 leaves'}, bf16, M x N x K = {shape}",
                "metric": "TFLOP/s",
                "ours": mine,
                "baseline": theirs,
                "baseline_name": f"XLA dot (cuBLAS) under {flags}",
                "target": ">= 0.97" if order == "chain" else ">= 0.92",
            }
        )
    for name, shapes in WEIGHTS.items():
        work = f"weights {name}{' and back' if len(shapes) > 1 else ''}, bf16, in a loop on the device"
        for tokens in ("1 token", "64 tokens"):
            us, size = few(int(tokens.split()[0]), name, ours)
            rows.append(
                {
                    "id": f"gemm-{tokens.replace(' ', '-')}-{name}",
                    "work": f"{tokens}, {work}",
                    "metric": "TB/s of the weights",
                    "ours": size / us / 1e6,
                    "baseline": timing.copy_bandwidth() / 1e12,
                    "baseline_name": "a large copy, bytes read and written",
                    "target": ">= 0.75",
                }
            )
        rows.append(
            {
                "id": f"gemm-256-tokens-{name}",
                "work": f"256 tokens, {work}",
                "metric": "us",
                "ours": few(256, name, ours)[0],
                "baseline": few(256, name, lambda x, w, leaves: library(x, w))[0],
                "baseline_name": "XLA dot (cuBLAS)",
                "target": "<= 1",
            }
        )
    rates = backward()
    for name in ("dx", "dw"):
        rows.append(
            {
                "id": f"gemm-backward-{name}",
                "work": f"{name} of a 16384 x 4096 x 4096 GEMM, fp32 accumulation, XLA dot under our flags",
                "metric": "TFLOP/s",
                "ours": rates[name],
                "baseline": rates["forward"],
                "baseline_name": "the forward as an XLA dot under our flags",
            }
        )
    return rows


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    print(json.dumps(rows(), indent=1))

"""Measures the large GEMM's schedules on a GPU and rewrites the table in pallas_kernels/gemm/schedules.py.

    python -m benchmarks.kernels.tune_gemm

A schedule whose bits differ from the canonical one's is refused, however fast it is.
"""

from __future__ import annotations

import functools
import pathlib
import re

import jax
import jax.numpy as jnp

from benchmarks.kernels.gemm import in_turn
from pallas_kernels.gemm import hopper_large, schedules
from pallas_kernels.gemm.schedules import Schedule

K = 4096
LEAVES = {"chain": 1, "tree": 8}
CANONICAL = Schedule(128, 128, steps=2, in_flight=0, in_shared=2)
CANDIDATES = {
    "chain": (
        Schedule(256, 128),
        Schedule(128, 256),
        Schedule(128, 128, steps=6),
        Schedule(64, 128, split="n", steps=8),
        Schedule(64, 64, split="n", steps=8),
    ),
    "tree": (
        Schedule(128, 128, steps=5, in_shared=1),
        Schedule(64, 128, split="n", steps=6),
        Schedule(64, 64, split="n", steps=8),
    ),
}


class BitsDiffer(RuntimeError):
    """A schedule reaches the bits."""


def multiply(x_TK: jax.Array, w_NK: jax.Array, leaves: int, schedule: Schedule, out_dtype=jnp.bfloat16) -> jax.Array:
    """y [T, N] by one schedule."""
    T, N = x_TK.shape[0], w_NK.shape[0]
    epilogue = hopper_large.store(T, N, leaves, out_dtype, schedule)
    return hopper_large.matmul(x_TK, w_NK, None, leaves, N, epilogue, schedule)[0]


def wide(key, *shape: int) -> jax.Array:
    """bf16 values over 16 binades, which reveal a change of order."""
    a, b = jax.random.split(key)
    return (jax.random.normal(a, shape) * jnp.exp2(jax.random.randint(b, shape, -8, 8))).astype(jnp.bfloat16)


def check(order: str, schedule: Schedule) -> None:
    """Raises BitsDiffer if one element of a GEMM of several tiles a program differs from the canonical schedule's."""
    x_TK, w_NK = wide(jax.random.key(0), 2056, 2048), wide(jax.random.key(1), 4104, 2048)
    run = jax.jit(multiply, static_argnums=(2, 3, 4))
    got, want = (run(x_TK, w_NK, LEAVES[order], s, jnp.float32).view(jnp.int32) for s in (schedule, CANONICAL))
    if differ := int((got != want).sum()):
        raise BitsDiffer(f"{order} {schedule}: {differ} of {got.size} elements differ from {CANONICAL}")


def fastest(order: str, T: int, N: int) -> Schedule:
    """The candidate with the least time at [T, K] x [N, K]; the first of equals within 1 %."""
    x_TK, w_NK = jax.random.normal(jax.random.key(0), (T, K), jnp.bfloat16), wide(jax.random.key(1), N, K)
    calls = {s: (functools.partial(multiply, leaves=LEAVES[order], schedule=s), x_TK, w_NK) for s in CANDIDATES[order]}
    times = in_turn(calls, iterations=5)
    print(f"{order} {T}x{N}: " + ", ".join(f"{s.tile_m}x{s.tile_n} {us:.0f} us" for s, us in times.items()), flush=True)
    return next(s for s, us in times.items() if us <= 1.01 * min(times.values()))


def source(table: dict) -> str:
    """TABLE as Python source."""
    lines = [f'    ("{order}", {T}, {N}): {s!r},' for (order, T, N), s in table.items()]
    return "TABLE: dict[tuple[str, int, int], Schedule] = {\n" + "\n".join(lines) + "\n}\n"


def main() -> None:
    for order, candidates in CANDIDATES.items():
        for schedule in candidates:
            check(order, schedule)
    table = {(order, T, N): fastest(order, T, N) for order in CANDIDATES for T in schedules.ROWS for N in schedules.COLUMNS}
    path = pathlib.Path(schedules.__file__)
    text, count = re.subn(r"TABLE: dict.*?\n}\n", lambda _: source(table), path.read_text(), flags=re.DOTALL)
    if count != 1:
        raise RuntimeError(f"{path} has {count} tables")
    path.write_text(text)
    print(source(table))


if __name__ == "__main__":
    main()

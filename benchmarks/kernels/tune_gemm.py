"""Measures the large GEMM's schedules on a GPU and rewrites the tables in pallas_kernels/gemm/schedules.py.

    python -m benchmarks.kernels.tune_gemm

A schedule whose bits differ from the canonical one's is refused, however fast it is.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp

from benchmarks.kernels import timing
from benchmarks.kernels.gemm import in_turn
from pallas_kernels.gemm import hopper_large, schedules
from pallas_kernels.gemm.hopper_small import small_gemm
from pallas_kernels.gemm.schedules import Schedule

K = 4096
LEAVES = {"chain": 1, "tree": 8}
CANONICAL = Schedule(128, 64, steps=2, in_flight=0)
CANDIDATES = {
    "chain": (
        Schedule(128, 256, cluster=(2, 1)),
        Schedule(128, 256, in_flight=0),
        Schedule(256, 128, cluster=(1, 2)),
        Schedule(128, 192, cluster=(2, 1)),
        Schedule(128, 128, steps=6, in_flight=0),
        Schedule(128, 64, steps=8, in_flight=0, cluster=(2, 1)),
    ),
    "tree": (
        Schedule(128, 112, steps=7),
        Schedule(128, 112, steps=7, in_flight=0, cluster=(2, 1)),
        Schedule(128, 128, steps=5, in_flight=0, in_shared=True),
        Schedule(128, 96, steps=7, cluster=(2, 1)),
        Schedule(128, 64, steps=8),
    ),
}
QUEUED_ROWS = 2048
"""Rows up to which a call may be shorter than its dispatch, so that the kernel's own time is what counts."""


class BitsDiffer(RuntimeError):
    """A schedule reaches the bits."""


def multiply(x_TK: jax.Array, w_NK: jax.Array, leaves: int, schedule: Schedule, out_dtype=jnp.bfloat16) -> jax.Array:
    """y [T, N] by one schedule."""
    T, N = x_TK.shape[0], w_NK.shape[0]
    epilogue = hopper_large.store(T, N, out_dtype, schedule)
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


def measure(order: str, T: int, N: int) -> tuple[Schedule, float, float | None]:
    """(fastest candidate, the first of equals within 1 %; its microseconds; those of the kernel for few tokens)."""
    x_TK, w_NK = jax.random.normal(jax.random.key(0), (T, K), jnp.bfloat16), wide(jax.random.key(1), N, K)
    leaves = LEAVES[order]
    calls = {s: (functools.partial(multiply, leaves=leaves, schedule=s), x_TK, w_NK) for s in CANDIDATES[order]}
    if T <= QUEUED_ROWS:
        times = {s: timing.kernel_us(*call) for s, call in calls.items()}
    else:
        times = in_turn(calls, iterations=5)
    print(f"{order} {T}x{N}: " + ", ".join(f"{compact(s)} {us:.0f} us" for s, us in times.items()), flush=True)
    best = next(s for s, us in times.items() if us <= 1.01 * min(times.values()))
    if T > schedules.ROWS[0]:
        return best, times[best], None
    few = timing.kernel_us(lambda x, w: small_gemm(x, w, None, leaves, jnp.bfloat16), x_TK, w_NK)
    print(f"  few tokens' kernel {few:.0f} us", flush=True)
    return best, times[best], few


def compact(schedule: Schedule) -> str:
    """The schedule as source, without what is its default."""
    fields = [(f.name, getattr(schedule, f.name), f.default) for f in dataclasses.fields(schedule)]
    return f"Schedule({', '.join(f'{name}={value!r}' for name, value, default in fields if value != default)})"


def source(few: dict, table: dict) -> str:
    """FEW and TABLE as Python source."""
    few_lines = "\n".join(f'    ("{order}", {N}): {T},' for (order, N), T in few.items())
    lines = "\n".join(f'    ("{order}", {T}, {N}): {compact(s)},' for (order, T, N), s in table.items())
    return (
        f'FEW = {{\n{few_lines}\n}}\n"""Rows up to which the kernel for few tokens serves."""\n\n'
        f"TABLE: dict[tuple[str, int, int], Schedule] = {{\n{lines}\n}}\n"
    )


def main() -> None:
    for order, candidates in CANDIDATES.items():
        for schedule in candidates:
            check(order, schedule)
    few, table = {}, {}
    for order in CANDIDATES:
        for N in schedules.COLUMNS:
            for T in schedules.ROWS:
                best, us, few_us = measure(order, T, N)
                table[order, T, N] = best
                if few_us is not None:
                    few[order, N] = T if few_us <= us else T // 2
    path = pathlib.Path(schedules.__file__)
    tables = source(few, dict(sorted(table.items())))
    text, count = re.subn(r"FEW = .*\n}\n(?=\n\ndef)", lambda _: tables, path.read_text(), flags=re.DOTALL)
    if count != 1:
        raise RuntimeError(f"{path} holds the tables {count} times")
    path.write_text(text)
    print(tables)


if __name__ == "__main__":
    main()

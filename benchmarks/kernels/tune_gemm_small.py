"""Measures the few-token GEMM's schedules on a GPU and rewrites TABLE in pallas_kernels/gemm/hopper_small.py.

    python -m benchmarks.kernels.tune_gemm_small

An entry stays unless another schedule takes 1 % less time, and a schedule whose bits differ from a plain one's is refused,
however fast it is. All of it takes two minutes and a half beside 16 CPU cores.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import os
import pathlib
import re
import statistics

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from benchmarks.kernels import timing
from benchmarks.kernels.tune_gemm import compact, wide
from pallas_kernels import mosaic
from pallas_kernels.gemm import hopper_small
from pallas_kernels.gemm.hopper_small import TABLE, Schedule, small_gemm

K = 4096
LEAVES = {"chain": 1, "tree": 8}
COLD_BYTES = 1 << 28
"""Of a stack of weights: none is in the L2 cache when its turn comes again."""
TRIPS, ROUNDS = 24, 3
KEEPS = 1.01
"""An entry stays that takes no more than so much of the fastest schedule's time."""
MOST_STAGES = 20
"""More than fit: a schedule has as many as do."""
PLAIN = Schedule(64, 64, 64, 2)
CHECKED = (1096, 2048)
"""N, K of the weight that bits are compared on."""
Cell = tuple[str, int, int]
"""Order, tokens and largest number of 64-row tiles (0: any) of an entry."""


def cells() -> dict[Cell, Schedule]:
    """TABLE's entries."""
    return {(*key, limit): schedule for key, entries in TABLE.items() for limit, schedule in entries}


def columns(cell: Cell) -> int:
    """Rows of the weight that stands for an entry: as many as it serves, or twice the last limit."""
    order, tokens, limit = cell
    tiles = limit or 2 * max(limit for limit, _ in TABLE[order, tokens])
    return tiles * 64 if tiles < 16 else tiles // 16 * 1024


def candidates(cell: Cell) -> list[Schedule]:
    """What is worth a measurement: one wave of programs that fills half of the SMs at least, or programs that walk."""
    order, tokens, _ = cell
    N = columns(cell)
    found = []
    for rows, width, split in itertools.product((32, 48, 64, 128, 192), {tokens, min(tokens, 128)}, (1, 2, 4, 8)):
        for join in (1, 2) if width < tokens and split == 1 else (1,):
            k_tile = 128 if rows <= 64 and width <= 64 else 64
            wave = -(-N // rows) * split * (tokens // width)
            walks = wave > mosaic.SMS
            unlikely = (rows < 64 and (walks or tokens == 256)) or (rows == 192 and order == "tree") or rows * width > 192 * 128
            if split > LEAVES[order] or (walks and split > 1) or unlikely:
                continue
            if wave * 2 >= mosaic.SMS or split == LEAVES[order]:
                found.append(Schedule(rows, width, k_tile, MOST_STAGES, split, join, mosaic.SMS * width // tokens if walks else 0))
    out = jnp.dtype(jnp.bfloat16)
    fits = lambda s: not hopper_small.fault(tokens, N, K, LEAVES[order], N, s, out)  # noqa: E731
    return [s for s in (hopper_small.fitted(s, LEAVES[order], out) for s in found) if fits(s)]


@functools.cache
def stack(N: int) -> jax.Array:
    """[L, N, K] bf16."""
    L = max(2, -(-COLD_BYTES // (N * K * 2)))
    return jax.jit(lambda key: jax.random.normal(key, (L, N, K), jnp.bfloat16) * jnp.bfloat16(0.02))(jax.random.key(1))


@functools.cache
def rows(tokens: int) -> jax.Array:
    """[tokens, K] bf16."""
    return jax.random.normal(jax.random.key(2), (tokens, K), jnp.bfloat16)


def looped(cell: Cell, schedule: Schedule) -> jax.stages.Lowered:
    """Layers of a stack in turn."""
    order, tokens, _ = cell
    shape = stack(columns(cell)).shape

    def loop(x_TK, w_LNK):
        multiply = lambda i: small_gemm(x_TK, w_LNK, lax.rem(i, shape[0]), LEAVES[order], jnp.bfloat16, schedule=schedule)  # noqa: E731
        return lax.fori_loop(0, TRIPS, lambda i, _: multiply(i), jnp.zeros((tokens, shape[1]), jnp.bfloat16))

    return jax.jit(loop).lower(rows(tokens), stack(columns(cell)))


def checked(order: str, schedule: Schedule) -> jax.stages.Lowered:
    """One GEMM in fp32 that bits are compared on."""
    N, K = CHECKED
    multiply = lambda x, w: small_gemm(x, w, None, LEAVES[order], jnp.float32, schedule=schedule)  # noqa: E731
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    return jax.jit(multiply).lower(shape(schedule.tokens * schedule.join, K), shape(N, K))


def times_us(cell: Cell, runs: dict[Schedule, jax.stages.Compiled]) -> dict[Schedule, float]:
    """Median time of each schedule's kernel by CUPTI, measured in turn."""
    found: dict[Schedule, list[float]] = {schedule: [] for schedule in runs}
    args = rows(cell[1]), stack(columns(cell))
    with timing.alone():
        for _, (schedule, run) in itertools.product(range(ROUNDS), runs.items()):
            _, kernels = profiler.measure(run, aggregate=False)(*args)
            found[schedule].append(statistics.median(ms for name, ms in kernels if "mosaic" in name) * 1e3)
    return {schedule: statistics.median(times) for schedule, times in found.items()}


def choice(times: dict[Schedule, float], present: Schedule, refused: set[Schedule]) -> Schedule:
    """The present entry, or a schedule that takes 1 % less time than it.

    Raises:
      RuntimeError: no schedule is left.
    """
    left = {s: us for s, us in times.items() if s not in refused}
    if not left:
        raise RuntimeError(f"no schedule's bits are right: {sorted(times, key=times.get)}")
    best = min(left, key=left.get)
    return present if present in left and left[present] <= KEEPS * left[best] else best


def source(chosen: dict[Cell, Schedule]) -> str:
    """TABLE as Python source."""
    lines = []
    for key, entries in TABLE.items():
        lines.append(f'    ("{key[0]}", {key[1]}): (')
        lines += [f"        ({limit}, {compact(chosen[*key, limit])})," for limit, _ in entries]
        lines.append("    ),")
    return "TABLE: dict[tuple[str, int], tuple[tuple[int, Schedule], ...]] = {\n" + "\n".join(lines) + "\n}\n"


def measured(pool: concurrent.futures.Executor) -> dict[Cell, dict[Schedule, float]]:
    """Time of each entry and of its candidates, in microseconds."""
    runs = {
        cell: {s: pool.submit(looped(cell, s).compile) for s in dict.fromkeys((present, *candidates(cell)))}
        for cell, present in cells().items()
    }
    found = {}
    for cell, compiling in runs.items():
        found[cell] = times_us(cell, {s: run.result() for s, run in compiling.items()})
        fastest = sorted(found[cell].items(), key=lambda item: item[1])
        print(cell, columns(cell), ", ".join(f"{us:.2f} us {compact(s)}" for s, us in fastest), flush=True)
    return found


def differing(pool: concurrent.futures.Executor, order: str, schedules: list[Schedule]) -> set[Schedule]:
    """Those of some schedules with an element whose bits are not those of one plain schedule."""
    N, K = CHECKED
    x_TK, w_NK = wide(jax.random.key(0), hopper_small.MAX_TOKENS, K), wide(jax.random.key(1), N, K)
    runs = {s: pool.submit(checked(order, s).compile) for s in (PLAIN, *schedules)}

    def blocks(s: Schedule) -> list[jax.Array]:
        T = s.tokens * s.join
        run = runs[s].result()
        return [run(x_TK[i : i + T], w_NK).view(jnp.int32) for i in range(0, len(x_TK), T)]

    with timing.alone():
        want = jnp.concatenate(blocks(PLAIN))
    found = set()
    for s in schedules:
        runs[s].result()
        with timing.alone():
            if differ := int((jnp.concatenate(blocks(s)) != want).sum()):
                print(f"refused, {differ} elements of {want.size} differ: {order} {compact(s)}", flush=True)
                found.add(s)
    return found


def main() -> None:
    checked("chain", PLAIN).compile()  # loads Mosaic's runtime, which threads must not do at once
    with concurrent.futures.ThreadPoolExecutor(max(os.cpu_count() - 2, 1)) as pool:
        times = measured(pool)
        refused: dict[str, set[Schedule]] = {order: set() for order in LEAVES}
        passed: dict[str, set[Schedule]] = {order: set() for order in LEAVES}
        while True:
            chosen = {cell: choice(times[cell], present, refused[cell[0]]) for cell, present in cells().items()}
            new = {order: list({s for cell, s in chosen.items() if cell[0] == order} - passed[order]) for order in LEAVES}
            if not any(new.values()):
                break
            for order, schedules in new.items():
                refused[order] |= differing(pool, order, schedules)
                passed[order] |= set(schedules) - refused[order]
    path = pathlib.Path(hopper_small.__file__)
    text, count = re.subn(r"TABLE: dict.*?\n}\n", lambda _: source(chosen), path.read_text(), flags=re.DOTALL)
    if count != 1:
        raise RuntimeError(f"{path} holds the table {count} times")
    path.write_text(text)
    for cell, present in cells().items():
        if chosen[cell] != present:
            us = {s: times[cell][s] for s in (chosen[cell], present)}
            print(f"{cell}: " + ", was ".join(f"{compact(s)} {us[s]:.2f} us" for s in us), flush=True)


if __name__ == "__main__":
    main()

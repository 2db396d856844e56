"""Measures the few-token GEMM's schedules on a GPU and rewrites TABLE in pallas_kernels/gemm/hopper_small.py.

    python -m benchmarks.kernels.tune_gemm_small

An entry stays unless another schedule takes 1 % less time, and a schedule whose bits differ from a plain one's is refused,
however fast it is. Processes lower and compile side by side, since lowering holds Python's lock, and measure in turn.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import pathlib
import re
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from benchmarks.kernels import separate, timing
from benchmarks.kernels.tune_gemm import compact, wide
from pallas_kernels import mosaic
from pallas_kernels.gemm import hopper_small
from pallas_kernels.gemm.hopper_small import MAX_TOKENS, TABLE, Schedule, small_gemm

K = 4096
LEAVES = {"chain": 1, "tree": 8}
COLD_BYTES = 1 << 28
"""Of a stack of weights: none is in the L2 cache when its turn comes again."""
TRIPS, ROUNDS = 24, 3
PROCESSES, THREADS = 8, 2
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


def alone(f: Callable, *args):
    """jit(f)(*args), of which only the execution has the GPU to itself."""
    run = jax.jit(f).lower(*args).compile()
    with timing.alone():
        return jax.block_until_ready(run(*args))


@functools.cache
def normal(*shape: int) -> jax.Array:
    """bf16."""
    return alone(lambda key: jax.random.normal(key, shape, jnp.bfloat16), jax.random.key(len(shape)))


def operands_of(cell: Cell) -> tuple[jax.Array, jax.Array]:
    """x [tokens, K] and a stack of weights [L, N, K]."""
    N = columns(cell)
    return normal(cell[1], K), normal(max(2, -(-COLD_BYTES // (N * K * 2))), N, K)


def looped(cell: Cell, schedule: Schedule) -> jax.stages.Lowered:
    """Layers of a stack in turn."""
    args = operands_of(cell)

    def loop(x_TK, w_LNK):
        L, N, _ = w_LNK.shape
        y = jnp.zeros((len(x_TK), N), jnp.bfloat16)
        multiply = lambda i, _: small_gemm(x_TK, w_LNK, lax.rem(i, L), LEAVES[cell[0]], y.dtype, schedule=schedule)  # noqa: E731
        return lax.fori_loop(0, TRIPS, multiply, y)

    return jax.jit(loop).lower(*args)


def times_us(cell: Cell, runs: dict[Schedule, jax.stages.Compiled]) -> dict[Schedule, float]:
    """Median time of each schedule's kernel by CUPTI, measured in turn."""
    found: dict[Schedule, list[float]] = {schedule: [] for schedule in runs}
    args = operands_of(cell)
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


@functools.cache
def wide_operands() -> tuple[jax.Array, jax.Array]:
    """x, w that bits are compared on."""
    N, K = CHECKED
    return tuple(alone(lambda key, s=shape: wide(key, *s), jax.random.key(i)) for i, shape in enumerate(((MAX_TOKENS, K), (N, K))))


def bits(order: str, schedule: Schedule) -> jax.Array:
    """Of the fp32 product of `wide_operands`, [MAX_TOKENS, N] int32."""
    leaves, T = LEAVES[order], schedule.tokens * schedule.join
    multiply = jax.jit(lambda x, w: small_gemm(x, w, None, leaves, jnp.float32, schedule=schedule))  # lowered once
    product = lambda x, w: jnp.concatenate([multiply(x[i : i + T], w) for i in range(0, len(x), T)]).view(jnp.int32)  # noqa: E731
    return alone(product, *wide_operands())


canonical = functools.cache(lambda order: bits(order, PLAIN))
"""Bits of one plain schedule, by order."""


def tuned(share: list[Cell]) -> list[dict]:
    """The entry of each of some cells, as JSON values, and a line on its candidates' times."""
    for order in LEAVES:
        canonical(order)  # the first kernel loads Mosaic's runtime, which threads must not do at once
    found = []
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        runs = {}
        for cell in map(tuple, share):
            schedules = dict.fromkeys((cells()[cell], *candidates(cell)))
            runs[cell] = {s: pool.submit(looped(cell, s).compile) for s in schedules}
        for cell, compiling in runs.items():
            times = times_us(cell, {s: run.result() for s, run in compiling.items()})
            text = ", ".join(f"{us:.2f} us {compact(s)}" for s, us in sorted(times.items(), key=lambda item: item[1]))
            refused: set[Schedule] = set()
            while differ := int((bits(cell[0], s := choice(times, cells()[cell], refused)) != canonical(cell[0])).sum()):
                text += f"; refused, {differ} elements differ: {compact(s)}"
                refused.add(s)
            found.append({"cell": cell, "schedule": dataclasses.asdict(s), "text": text})
    return found


def main() -> None:
    shares = [list(cells())[i::PROCESSES] for i in range(PROCESSES)]
    chosen = {}
    with separate.taking_turns(), concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        running = [pool.submit(separate.call, "iso", "tune_gemm_small", "tuned", share) for share in shares]
        for done in concurrent.futures.as_completed(running):
            for entry in done.result():
                cell, schedule = tuple(entry["cell"]), Schedule(**entry["schedule"])
                chosen[cell] = schedule
                kept = "kept" if schedule == cells()[cell] else f"now {compact(schedule)}"
                print(f"{cell} N {columns(cell)}, {kept}: {entry['text']}", flush=True)
    path = pathlib.Path(hopper_small.__file__)
    text, count = re.subn(r"TABLE: dict.*?\n}\n", lambda _: source(chosen), path.read_text(), flags=re.DOTALL)
    if count != 1:
        raise RuntimeError(f"{path} holds the table {count} times")
    path.write_text(text)


if __name__ == "__main__":
    main()

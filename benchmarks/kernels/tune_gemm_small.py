"""Measures the few-token GEMM's schedules on a GPU and rewrites TABLE in pallas_kernels/gemm/hopper_small.py.

    python -m benchmarks.kernels.tune_gemm_small

An entry stays unless another schedule takes 1 % less time, and a schedule whose bits differ from a plain one's is refused,
however fast it is. Processes lower and compile side by side, since lowering holds Python's lock, and measure in turn.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import pathlib
import re
import statistics

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
PROCESSES, THREADS = 12, 2
KEEPS = 1.01
"""An entry stays that takes no more than so much of the fastest schedule's time."""
FILLED = 1.4
"""Programs of one wave are at least the number of SMs over this."""
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
    """What is worth a measurement: one wave of programs that fills most SMs, or programs that walk; as many stages as fit."""
    order, tokens, _ = cell
    N, leaves, out = columns(cell), LEAVES[order], jnp.dtype(jnp.bfloat16)
    found = []
    widths = (tokens,) if tokens < MAX_TOKENS else (64, 128) if N <= 2048 else (128,)
    for rows, width, k_tile, split in itertools.product((32, 48, 64, 128, 192), widths, (64, 128), (1, 2, 4, 8)):
        if split > leaves or (k_tile != (128 if max(rows, width) <= 64 else 64) and not rows == width == 64):
            continue
        wave = -(-N // rows) * split * (tokens // width)
        walks = wave > mosaic.SMS
        unlikely = rows * width > 192 * 128 or (rows == 192 and order == "tree") or (rows < 64 and tokens > 64)
        if unlikely or (walks and (split > 1 or rows < 64)) or wave * FILLED < mosaic.SMS:
            continue
        for join in (1, 2) if tokens > width and split == 1 else (1,):
            s = Schedule(rows, width, k_tile, MOST_STAGES, split, join, mosaic.SMS * width // tokens if walks else 0)
            s = hopper_small.fitted(s, leaves, out)
            if not hopper_small.fault(tokens, N, K, leaves, N, s, out):
                found.append(s)
    return found


def shapes(cell: Cell) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """x [tokens, K] and a stack of weights [L, N, K]."""
    N = columns(cell)
    L = max(2, -(-COLD_BYTES // (N * K * 2)))
    return jax.ShapeDtypeStruct((cell[1], K), jnp.bfloat16), jax.ShapeDtypeStruct((L, N, K), jnp.bfloat16)


def looped(cell: Cell, schedule: Schedule) -> jax.stages.Lowered:
    """Layers of a stack in turn."""

    def loop(x_TK, w_LNK):
        L, N, _ = w_LNK.shape
        y = jnp.zeros((len(x_TK), N), jnp.bfloat16)
        multiply = lambda i, _: small_gemm(x_TK, w_LNK, lax.rem(i, L), LEAVES[cell[0]], y.dtype, schedule=schedule)  # noqa: E731
        return lax.fori_loop(0, TRIPS, multiply, y)

    return jax.jit(loop).lower(*shapes(cell))


def bits(order: str, schedule: Schedule) -> jax.stages.Lowered:
    """Those of an fp32 product, [MAX_TOKENS, N] int32, of operands that reveal a change of order."""
    (N, K), leaves, T = CHECKED, LEAVES[order], schedule.tokens * schedule.join
    multiply = jax.jit(lambda x, w: small_gemm(x, w, None, leaves, jnp.float32, schedule=schedule))  # lowered once

    def product(key):
        x_TK, w_NK = wide(key, MAX_TOKENS, K), wide(jax.random.fold_in(key, 1), N, K)
        return jnp.concatenate([multiply(x_TK[i : i + T], w_NK) for i in range(0, MAX_TOKENS, T)]).view(jnp.int32)

    return jax.jit(product).lower(jax.random.key(0))


def times_us(runs: dict[Schedule, jax.stages.Compiled], *args: jax.Array) -> dict[Schedule, float]:
    """Median time of each schedule's kernel by CUPTI, measured in turn."""
    found: dict[Schedule, list[float]] = {schedule: [] for schedule in runs}
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


def tuned(share: list[Cell]) -> list[dict]:
    """The entry of each of some cells, as JSON values, and a line on its candidates' times."""
    share = [tuple(cell) for cell in share]
    key = jax.random.key(0)
    fill = lambda shape: jax.jit(lambda key: jax.random.normal(key, shape.shape, shape.dtype)).lower(key)  # noqa: E731
    product = {(order, PLAIN): bits(order, PLAIN).compile() for order in LEAVES}  # threads must not load Mosaic's runtime at once
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        fills = {shape: pool.submit(fill(shape).compile) for cell in share for shape in shapes(cell)}
        runs = {}
        for cell in share:
            rivals = dict.fromkeys((cells()[cell], *candidates(cell)))
            runs[cell] = {s: pool.submit(looped(cell, s).compile) for s in rivals}
        runs = {cell: {s: run.result() for s, run in of.items()} for cell, of in runs.items()}
        fills = {shape: run.result() for shape, run in fills.items()}
        times = {}
        for cell in share:
            with timing.alone():
                times[cell] = times_us(runs[cell], *jax.block_until_ready([fills[shape](key) for shape in shapes(cell)]))
        differ: dict[tuple[str, Schedule], int] = {}
        while True:
            refused = {s for (_, s), elements in differ.items() if elements}
            chosen = {cell: choice(times[cell], cells()[cell], refused) for cell in share}
            new = {(cell[0], s) for cell, s in chosen.items()} - differ.keys()
            if not new:
                break
            compiling = {of: pool.submit(bits(*of).compile) for of in new}
            product |= {of: run.result() for of, run in compiling.items()}
            with timing.alone():
                differ |= {of: int((product[of](key) != product[of[0], PLAIN](key)).sum()) for of in new}
    lines = {cell: [f"{us:.2f} us {compact(s)}" for s, us in sorted(of.items(), key=lambda item: item[1])] for cell, of in times.items()}
    for (order, s), elements in differ.items():
        for cell in share:
            if elements and cell[0] == order and s in times[cell]:
                lines[cell].append(f"refused, {elements} elements differ: {compact(s)}")
    return [{"cell": cell, "schedule": dataclasses.asdict(chosen[cell]), "text": ", ".join(lines[cell])} for cell in share]


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

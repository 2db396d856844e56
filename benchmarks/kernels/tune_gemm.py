"""Measures the large GEMM's schedules on a GPU and rewrites the tables in pallas_kernels/gemm/schedules.py.

    python -m benchmarks.kernels.tune_gemm

An entry stays unless another schedule takes 1 % less time. A schedule whose bits differ from the canonical one's stops it,
however fast it is. Processes compile side by side and measure in turn, in two minutes beside 16 CPU cores.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import difflib
import functools
import itertools
import math
import os
import pathlib
import re
import statistics
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from benchmarks.kernels import separate, timing
from pallas_kernels import mosaic
from pallas_kernels.gemm import hopper_large, schedules
from pallas_kernels.gemm.hopper_small import small_gemm
from pallas_kernels.gemm.schedules import Schedule

K = 4096
Cell = tuple[str, int, int, int]
"""Order, T, N and K of a measurement."""
LONG: Cell = ("tree", 16384, 4096, 12288)
LONG_FROM = 8192
"""What LONG_TREE is if it has a use, and the cell that decides."""
LEAVES = {"chain": 1, "tree": 8}
CANONICAL = Schedule(128, 64, steps=2, in_flight=0)
CANDIDATES = {
    "chain": (
        Schedule(128, 256, cluster=(2, 1)),
        Schedule(256, 128, cluster=(1, 2)),
        Schedule(128, 256),
        Schedule(128, 192, steps=5, cluster=(2, 1)),
        Schedule(128, 192, steps=5),
        Schedule(128, 128, steps=6, cluster=(2, 1)),
        Schedule(128, 128, steps=6),
        Schedule(128, 96, steps=7, cluster=(2, 1)),
        Schedule(128, 64, steps=8, cluster=(2, 1)),
        Schedule(256, 192, steps=3, cluster=(1, 2)),
    ),
    "tree": (
        Schedule(128, 112, steps=6),
        Schedule(128, 112, steps=7, band_of="n"),
        Schedule(128, 128, steps=5, in_shared=True),
        Schedule(128, 128, steps=5, in_shared=True, band_of="n"),
        Schedule(128, 128, steps=5, in_shared=True, cluster=(2, 1)),
        Schedule(128, 96, steps=7, cluster=(2, 1)),
        Schedule(128, 64, steps=8),
        Schedule(128, 64, steps=8, cluster=(2, 1)),
    ),
}
SMALL_TILE, MOST_WAVES = 128 * 112, 16
"""Elements of a tile that is too small for so many waves of tiles: it is not measured."""
WAVES = (range(4225, 6337), range(8449, 12673), range(16897, 25345))
"""Columns that may have a schedule of their own at 129 to 256 rows: one wave of tiles of 128 x 96, one of 128 x 192, two."""
FEW_ROWS = schedules.ROWS[0]
ROUNDS, TRIPS = 3, 8
COLD_BYTES = 1 << 27
PROCESSES = 8
KEEPS = 1.01
"""What is there stays if it takes no more than so much of the fastest schedule's time."""


class BitsDiffer(RuntimeError):
    """A schedule reaches the bits."""


def multiply(
    x_TK: jax.Array,
    value: jax.Array,
    leaves: int,
    schedule: Schedule,
    out_dtype=jnp.bfloat16,
    layer: jax.Array | None = None,
) -> jax.Array:
    """y [T, N] by one schedule; value [N, K], or a layer of [L, N, K]."""
    T, N = x_TK.shape[0], value.shape[-2]
    epilogue = hopper_large.store(T, N, out_dtype, schedule)
    return hopper_large.matmul(x_TK, value, layer, leaves, N, epilogue, schedule)[0]


def wide(key, *shape: int) -> jax.Array:
    """bf16 values over 16 binades, which reveal a change of order."""
    a, b = jax.random.split(key)
    return (jax.random.normal(a, shape) * jnp.exp2(jax.random.randint(b, shape, -8, 8))).astype(jnp.bfloat16)


def compact(schedule: Schedule) -> str:
    """The schedule as source, without what is its default."""
    fields = [(f.name, getattr(schedule, f.name), f.default) for f in dataclasses.fields(schedule)]
    return f"Schedule({', '.join(f'{name}={value!r}' for name, value, default in fields if value != default)})"


def rivals(order: str) -> list[Schedule]:
    """The schedules of the tables and the candidates for "chain" or "tree"."""
    return list(dict.fromkeys((*schedules.every(order), *CANDIDATES[order])))


def measured(order: str, T: int, N: int) -> list[Schedule]:
    """Those that are measured on x [T, K] w [N, K]^T."""
    tiles = lambda s: -(-T // s.tile_m) * -(-N // s.tile_n)  # noqa: E731
    worth = lambda s: s.tile_m * s.tile_n >= SMALL_TILE or tiles(s) <= MOST_WAVES * mosaic.SMS  # noqa: E731
    present = schedules.TABLE[order, schedules.bucket(T, schedules.ROWS), schedules.bucket(N, schedules.COLUMNS)]
    return [s for s in rivals(order) if worth(s) or s == present]


def width(columns: range) -> int:
    """The width on which a range of WAVES is measured."""
    return columns[-1] // 1024 * 1024


def compiled(calls: dict[Hashable, Callable], *shapes: jax.ShapeDtypeStruct) -> dict[Hashable, jax.stages.Compiled]:
    """Each call compiled for these arguments, several at a time."""
    with concurrent.futures.ThreadPoolExecutor(max(os.cpu_count() // 4, 2)) as pool:
        running = {name: pool.submit(jax.jit(f).lower(*shapes).compile) for name, f in calls.items()}
        return {name: future.result() for name, future in running.items()}


def check(order: str) -> None:
    """Raises BitsDiffer if one element of a GEMM of several tiles a program differs from the canonical schedule's."""
    shapes = [jax.ShapeDtypeStruct(sizes, jnp.bfloat16) for sizes in ((2056, 2048), (4104, 2048))]
    calls = {
        s: functools.partial(multiply, leaves=LEAVES[order], schedule=s, out_dtype=jnp.float32)
        for s in (CANONICAL, *rivals(order))
    }
    runs = compiled(calls, *shapes)
    with timing.alone():
        args = [wide(jax.random.key(i), *shape.shape) for i, shape in enumerate(shapes)]
        want = runs.pop(CANONICAL)(*args).view(jnp.int32)
        for schedule, run in runs.items():
            if differ := int((run(*args).view(jnp.int32) != want).sum()):
                raise BitsDiffer(f"{order} {schedule}: {differ} of {want.size} elements differ from {CANONICAL}")


def times_us(order: str, T: int, N: int, K: int) -> dict[str, float]:
    """Median time by CUPTI of each schedule's kernel (by its source) and, at few rows, of the other kernel ("few"), in turn.

    A kernel walks the layers of a stack that the L2 cache cannot hold, as decode does: at few rows the weights' way from
    memory is what counts.
    """
    leaves = LEAVES[order]
    layers = max(COLD_BYTES // (N * K * 2), 2)
    calls: dict[str, Callable] = {
        compact(s): functools.partial(multiply, leaves=leaves, schedule=s) for s in measured(order, T, N)
    }
    if T <= FEW_ROWS:
        calls["few"] = lambda x, w, layer: small_gemm(x, w, layer, leaves, jnp.bfloat16)

    def looped(call: Callable) -> Callable:
        step = lambda x, w: lambda i, _: call(x, w, layer=lax.rem(i, layers))  # noqa: E731
        return lambda x, w: lax.fori_loop(0, TRIPS, step(x, w), jnp.zeros((T, N), jnp.bfloat16))

    shapes = jax.ShapeDtypeStruct((T, K), jnp.bfloat16), jax.ShapeDtypeStruct((layers, N, K), jnp.bfloat16)
    runs = compiled({name: looped(call) for name, call in calls.items()}, *shapes)
    found: dict[str, list[float]] = {name: [] for name in runs}
    with timing.alone():
        args = [jax.random.normal(jax.random.key(i), shape.shape, jnp.bfloat16) for i, shape in enumerate(shapes)]
        for _, (name, run) in itertools.product(range(ROUNDS), runs.items()):
            _, kernels = profiler.measure(run, aggregate=False)(*args)
            found[name] += [ms for kernel, ms in kernels if "mosaic" in kernel][1:]
    return {name: statistics.median(times) * 1e3 for name, times in found.items()}


def part(cells: list) -> list[dict[str, float]]:
    """The times of some cells, in a process of their own."""
    return [times_us(*cell) for cell in cells]


def pick(times: dict[str, float], among: list[Schedule], present: Schedule | None) -> Schedule:
    """The schedule that takes 1 % less time than what is there, or that."""
    best = min(among, key=lambda s: times[compact(s)])
    return best if present is None or times[compact(best)] * KEEPS < times[compact(present)] else present


def choose(us: dict[Cell, dict[str, float]]) -> dict[str, object]:
    """The tables by the times of `times_us` in each cell."""
    table = {key: pick(us[*key, K], measured(*key), present) for key, present in schedules.TABLE.items()}
    few = {}
    for (order, N), present in schedules.FEW.items():
        times = us[order, FEW_ROWS, N, K]
        few[order, N] = quicker(
            times["few"], times[compact(table[order, FEW_ROWS, N])], FEW_ROWS, FEW_ROWS // 2, present
        )
    waves, present_waves = [], dict(schedules.ONE_WAVE)
    for columns in WAVES:
        N = width(columns)
        times, there = us["chain", FEW_ROWS, N, K], present_waves.get(columns)
        schedule = pick(times, measured("chain", FEW_ROWS, N), there)
        end = schedules.bucket(N, schedules.COLUMNS)
        other = "few" if few["chain", end] == FEW_ROWS else compact(table["chain", FEW_ROWS, end])
        entry = [(columns, schedule)]
        waves += quicker(times[compact(schedule)], times[other], entry, [], entry if there else [])
    times = us[LONG]
    fewer, all_rows = (compact(table["tree", T, LONG[2]]) for T in (schedules.LONG_TREE_ROWS, schedules.ROWS[-1]))
    of = lambda name: times.get(name, math.inf)  # noqa: E731  (a tile too small for so many rows is not measured)
    long_tree = quicker(of(fewer), of(all_rows), LONG_FROM, None, schedules.LONG_TREE)
    return {"ONE_WAVE": tuple(waves), "LONG_TREE": long_tree, "FEW": few, "TABLE": table}


def quicker(us: float, other_us: float, choice, other, present):
    """What takes 1 % less time, or what is there."""
    return choice if us * KEEPS < other_us else other if other_us * KEEPS < us else present


def source(text: str, tables: dict[str, object]) -> str:
    """schedules.py's `text` with these tables."""
    waves = "".join(f"    ({columns!r}, {compact(s)}),\n" for columns, s in tables["ONE_WAVE"])
    few = "".join(f'    ("{order}", {N}): {T},\n' for (order, N), T in tables["FEW"].items())
    table = "".join(f'    ("{order}", {T}, {N}): {compact(s)},\n' for (order, T, N), s in tables["TABLE"].items())
    values = {
        "ONE_WAVE": f"(\n{waves})",
        "LONG_TREE": repr(tables["LONG_TREE"]),
        "FEW": f"{{\n{few}}}",
        "TABLE": f"{{\n{table}}}",
    }
    for name, value in values.items():
        text, count = re.subn(
            rf"^({name}(?:: [^\n]*?)?) = (?:[({{]\n.*?^[)}}]|[^\n({{]+)$",
            lambda found, value=value: f"{found[1]} = {value}",
            text,
            flags=re.DOTALL | re.MULTILINE,
        )
        if count != 1:
            raise RuntimeError(f"{name} stands {count} times in {schedules.__file__}")
    return text


def cells() -> list[Cell]:
    """All that is measured."""
    waves = [("chain", FEW_ROWS, width(columns), K) for columns in WAVES]
    return [*((*key, K) for key in schedules.TABLE), *waves, LONG]


def main() -> None:
    shares = [cells()[i::PROCESSES] for i in range(PROCESSES)]
    with separate.taking_turns(), concurrent.futures.ThreadPoolExecutor(PROCESSES + len(LEAVES)) as pool:
        checks = [pool.submit(separate.call, "iso", "tune_gemm", "check", order) for order in LEAVES]
        parts = [pool.submit(separate.call, "iso", "tune_gemm", "part", share) for share in shares]
        us = {
            cell: times
            for share, part in zip(shares, parts, strict=True)
            for cell, times in zip(share, part.result(), strict=True)
        }
        for future in checks:
            future.result()
    for (order, T, N, K_), times in us.items():
        print(
            f"{order} {T}x{N}x{K_}: "
            + ", ".join(f"{name} {t:.1f} us" for name, t in sorted(times.items(), key=lambda x: x[1]))
        )
    path = pathlib.Path(schedules.__file__)
    before = path.read_text()
    after = source(before, choose(us))
    path.write_text(after)
    print(
        "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), n=0))
        or "the tables stay as they are"
    )


if __name__ == "__main__":
    main()

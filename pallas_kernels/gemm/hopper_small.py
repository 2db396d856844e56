"""GEMM for at most 256 tokens on Hopper: weights are the M operand of wgmma and tokens its N operand.

Such a GEMM is bound by the bytes of its weight, so a schedule is a way to keep loads of all SMs in flight: how many weight
rows a program takes, whether the leaves of a tree are shared out over a cluster, who loads for whom. None of it reaches the
bits: each leaf of an element is one chain of wgmma over its K in order, whatever the shape of the instruction, and
leaves meet in one balanced tree of fp32 additions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.gemm import hopper_gated

MAX_TOKENS = 256
WGMMA_ROWS = 64
SMEM_BYTES = 227 * 1024
AXES = ("program", "part", "leaf", "block", "wg")
LOADER_REGISTERS = 24
CONSUMER_REGISTERS = {2: 240, 3: 160, 4: 112}
"""Registers of a thread by number of consumer warpgroups: 64 Ki a program, shared with the loader's warpgroup."""
WRITTEN_OUT = (32, 4)
"""Tokens, and leaves of a program, up to which a tree is written out; a larger one in registers is a loop, or they spill. At 32
tokens a loop took 1.3 us more, at 8, 16 and 64 none."""
TREE_REGISTERS = {1: 192, 2: 192, 3: 96, 4: 64}
"""Of a thread for sums of leaves, by number of consumer warpgroups; where a tree needs more, sums wait in shared memory."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How one small GEMM is cut into programs.

    Attributes:
      rows: weight rows of a program: 16, 32, 48, or a multiple of 64 (one consumer warpgroup for each 64).
      tokens: tokens of a program; a multiple of 8.
      k_tile: length of K of one load, a multiple of 64 that divides a leaf.
      stages: loads in flight.
      split: programs of a cluster that share out the leaves of a tree; a power of two that divides `leaves`.
      join: programs of a cluster with different tokens that share loads of the weight.
      programs: clusters launched, each of which walks over tiles; 0 launches one for each tile.
    """

    rows: int = 64
    tokens: int = 64
    k_tile: int = 64
    stages: int = 4
    split: int = 1
    join: int = 1
    programs: int = 0

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups of a program."""
        return -(-self.rows // WGMMA_ROWS)

    @property
    def owned(self) -> int:
        """Tokens whose sums a program finishes: all of its own, or a share where programs split the leaves."""
        return self.tokens // min(self.split, self.tokens // 8)

    @property
    def swaps(self) -> bool:
        """Whether two programs send each other one half of their sums and keep the other; more of them send all to all."""
        return self.split == 2 and self.owned < self.tokens

    @property
    def received(self) -> int:
        """Sums that a program which shares out leaves receives."""
        return 1 if self.swaps else self.split

    def waiting(self, leaves: int) -> int:
        """Levels of a program's tree whose sums wait in shared memory, if they do; the leaf before the last waits in
        registers."""
        levels = (leaves // self.split).bit_length()
        return 0 if levels * self.tokens // 2 <= TREE_REGISTERS[self.warpgroups] else max(levels - 2, 0)


TABLE: dict[tuple[str, int], tuple[tuple[int, Schedule], ...]] = {
    ("chain", 8): (
        (99, Schedule(rows=48, tokens=8, k_tile=128, stages=12)),
        (132, Schedule(tokens=8, k_tile=128, stages=10)),
        (264, Schedule(tokens=8, k_tile=128, stages=12, programs=132)),
        (396, Schedule(tokens=8, k_tile=128, stages=12, programs=132)),
        (0, Schedule(tokens=8, k_tile=128, stages=12, programs=132)),
    ),
    ("chain", 16): (
        (132, Schedule(tokens=16, k_tile=128, stages=9)),
        (264, Schedule(tokens=16, k_tile=128, stages=11, programs=132)),
        (396, Schedule(tokens=16, k_tile=128, stages=11, programs=132)),
        (0, Schedule(tokens=16, k_tile=128, stages=11, programs=132)),
    ),
    ("chain", 32): (
        (132, Schedule(tokens=32, k_tile=128, stages=8)),
        (264, Schedule(rows=128, tokens=32, stages=8)),
        (396, Schedule(tokens=32, k_tile=128, stages=9, programs=132)),
        (0, Schedule(tokens=32, k_tile=128, stages=9, programs=132)),
    ),
    ("chain", 64): (
        (132, Schedule(k_tile=128, stages=6)),
        (264, Schedule(rows=128, stages=8)),
        (396, Schedule(k_tile=128, stages=6, programs=132)),
        (0, Schedule(k_tile=128, stages=6, programs=132)),
    ),
    ("chain", 128): (
        (132, Schedule(tokens=128, stages=7)),
        (0, Schedule(rows=128, tokens=128, stages=6)),
    ),
    ("chain", 256): (
        (33, Schedule(k_tile=128, stages=6)),
        (66, Schedule(tokens=128, stages=8)),
        (0, Schedule(rows=128, tokens=128, stages=6, join=2, programs=66)),
    ),
    ("tree", 8): (
        (12, Schedule(tokens=8, k_tile=128, stages=10, split=8)),
        (28, Schedule(tokens=8, k_tile=128, stages=10, split=4)),
        (66, Schedule(tokens=8, k_tile=128, stages=10, split=2)),
        (132, Schedule(tokens=8, k_tile=128, stages=10)),
        (0, Schedule(tokens=8, k_tile=128, stages=10, programs=132)),
    ),
    ("tree", 16): (
        (12, Schedule(tokens=16, k_tile=128, stages=9, split=8)),
        (28, Schedule(tokens=16, k_tile=128, stages=9, split=4)),
        (66, Schedule(tokens=16, k_tile=128, stages=9, split=2)),
        (132, Schedule(tokens=16, k_tile=128, stages=9)),
        (0, Schedule(tokens=16, k_tile=128, stages=9, programs=132)),
    ),
    ("tree", 32): (
        (12, Schedule(tokens=32, k_tile=128, stages=8, split=8)),
        (28, Schedule(tokens=32, k_tile=128, stages=8, split=4)),
        (66, Schedule(tokens=32, k_tile=128, stages=9, split=2)),
        (132, Schedule(tokens=32, k_tile=128, stages=9)),
        (0, Schedule(tokens=32, k_tile=128, stages=9, programs=132)),
    ),
    ("tree", 64): (
        (12, Schedule(k_tile=128, stages=6, split=8)),
        (28, Schedule(k_tile=128, stages=6, split=4)),
        (66, Schedule(k_tile=128, stages=6, split=2)),
        (132, Schedule(k_tile=128, stages=6)),
        (0, Schedule(k_tile=128, stages=6, programs=132)),
    ),
    ("tree", 128): (
        (12, Schedule(tokens=128, stages=6, split=8)),
        (28, Schedule(tokens=128, stages=6, split=4)),
        (66, Schedule(tokens=128, stages=8, split=2)),
        (132, Schedule(tokens=128, stages=6)),
        (0, Schedule(tokens=128, stages=6, programs=132)),
    ),
    ("tree", 256): (
        (14, Schedule(k_tile=128, stages=6, split=2)),
        (33, Schedule(k_tile=128, stages=6)),
        (66, Schedule(rows=128, tokens=128, stages=6, split=2)),
        (0, Schedule(tokens=128, stages=6, programs=66)),
    ),
}
"""By order and tokens: numbers of 64-row tiles of the weight up to which a schedule serves (0: any), and the schedule.

One wave of programs on 132 SMs where that is possible, and then as many loads in flight as fit. Clusters of 4 and 8 stay
well below 132 programs: not every such cluster finds its SMs free side by side, and 128 programs took two waves.
`python -m benchmarks.kernels.tune_gemm_small` measures the candidates on a GPU and rewrites this table.
"""


def schedule_for(T: int, N: int, K: int, leaves: int) -> Schedule:
    """The table's schedule for x [T, K], w [N, K] and `leaves` leaves."""
    order = "chain" if leaves == 1 else "tree"
    tokens = next((tokens for tokens in (8, 16, 32, 64, 128) if T <= tokens), MAX_TOKENS)
    tiles = -(-N // WGMMA_ROWS)
    s = next(s for limit, s in TABLE[order, tokens] if tiles <= limit or not limit)
    if K // leaves % s.k_tile:
        s = dataclasses.replace(s, k_tile=64, stages=s.stages * s.k_tile // 64)
    return dataclasses.replace(s, split=min(s.split, leaves))


def fitted(s: Schedule, leaves: int, out_dtype, gated: bool = False) -> Schedule:
    """The schedule with as many of its stages as shared memory holds beside results of this dtype."""
    fits = lambda n: smem_bytes(s, leaves, out_dtype, n, gated) <= SMEM_BYTES  # noqa: E731
    return dataclasses.replace(s, stages=next((n for n in range(s.stages, 1, -1) if fits(n)), s.stages))


def fault(T, N, K, leaves, columns, s: Schedule, out_dtype, gated: bool = False) -> str | None:
    """Why the kernel cannot serve these shapes with this schedule; None if it can."""
    faults = {
        f"tokens must be 1..{MAX_TOKENS}": not 1 <= T <= MAX_TOKENS,
        "N and columns must be multiples of 8, columns N at least": N % 8 or columns % 8 or columns < N,
        "leaves must be a power of two": leaves < 1 or leaves & (leaves - 1),
        "k_tile must be a multiple of 64 that divides a leaf": s.k_tile % 64 or K % (leaves * s.k_tile),
        "rows must be 16, 32, 48 or a multiple of 64, at most 256": s.rows not in (16, 32, 48, 64, 128, 192, 256),
        "tokens of a program must be a multiple of 8, at most 256": s.tokens % 8 or not 8 <= s.tokens <= MAX_TOKENS,
        "split must be a power of two that divides leaves": s.split < 1 or leaves % s.split or s.split & (s.split - 1),
        "tokens must fall into whole eights for each program that owns some": s.split > 1 and s.tokens & (s.tokens - 1),
        "join must divide the eights of rows": min(s.rows, WGMMA_ROWS) // (16 if gated else 8) % s.join,
        "a cluster has 8 programs at most": s.split * s.join > 8,
        "a split program has one tile": s.split > 1 and s.programs,
        "not even two stages fit in shared memory": smem_bytes(s, leaves, out_dtype, s.stages, gated) > SMEM_BYTES,
        "gates and ups are whole chains rounded to bfloat16": gated and (leaves > 1 or columns > N or out_dtype != jnp.bfloat16),
        "out_dtype must be bfloat16 or float32": out_dtype not in (jnp.bfloat16, jnp.float32),
    }
    return next((text for text, holds in faults.items() if holds), None)


def smem_bytes(s: Schedule, leaves: int, out_dtype, stages: int, gated: bool = False) -> int:
    """Shared memory of a program: loads in flight, sums from other programs or else staged output, sums that wait, barriers."""
    rows = s.warpgroups * WGMMA_ROWS
    ring = stages * ((rows + s.tokens) * s.k_tile * 2 + 16)
    end = s.owned * (4 * s.received if s.split > 1 else jnp.dtype(out_dtype).itemsize)
    return ring + rows * (end // (2 if gated else 1) + 4 * s.waiting(leaves) * s.tokens) + 1024


def _tiles(width: int, itemsize: int) -> tuple:
    """Layout in shared memory of matrices in tiles of 8 rows and `width` columns."""
    swizzle = width * itemsize
    return (plgpu.TilingTransform((8, width)), *([plgpu.SwizzleTransform(swizzle)] if swizzle > 16 else []))


def _scratch(s: Schedule, leaves: int, columns: int, out_dtype, gated: bool) -> dict:
    """Shared memory and barriers of a program, by the names that the kernel's body gives them."""
    per_column = 2 if gated else 1
    # TMA stores whole tiles of the layout in shared memory.
    y_tiles = _tiles(math.gcd(columns, min(s.rows, WGMMA_ROWS) // per_column, 128 // out_dtype.itemsize), out_dtype.itemsize)
    w_s = plgpu.SMEM((s.stages, s.warpgroups * WGMMA_ROWS, s.k_tile), jnp.bfloat16, transforms=mosaic.TILED)
    scratch = {
        "x_s": plgpu.SMEM((s.stages, s.tokens, s.k_tile), jnp.bfloat16, transforms=mosaic.TILED),
        "w_s": hopper_gated.rows_of(s.stages, s.warpgroups, s.k_tile) if gated else w_s,
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=s.stages),
        # A slot is free when every program that shares one of its loads has read it.
        "empty": plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=s.warpgroups, num_barriers=s.stages),
    }
    if s.waiting(leaves):
        shape = (s.waiting(leaves), s.warpgroups, WGMMA_ROWS, s.tokens)
        scratch["waiting_s"] = plgpu.SMEM(shape, jnp.float32, transforms=_tiles(min(s.tokens, 32), 4))
    y_shape = lambda owned: (s.warpgroups, owned, WGMMA_ROWS // per_column)  # noqa: E731
    y_s = lambda owned: plgpu.SMEM(y_shape(owned), out_dtype, transforms=y_tiles)  # noqa: E731
    scratch["end_s"] = y_s(s.owned)
    if s.split > 1:
        # A warpgroup's output overwrites what it has received, so both are of one size.
        tiles = _tiles(min(s.owned, 32), 4)
        parts_s = plgpu.SMEM((s.warpgroups, s.received, WGMMA_ROWS, s.owned), jnp.float32, transforms=tiles)
        scratch["end_s"] = plgpu.RefUnion(y_s(s.received * s.owned * 4 // out_dtype.itemsize), parts_s)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=s.received, num_barriers=s.warpgroups)
    return scratch


def tree_of(parts: Iterable[jax.Array], put=lambda part, level: part, get=lambda held, level: held) -> jax.Array:
    """Sum in a balanced binary tree, lower index on the left, of a power of two of parts.

    A part, or a sum of 2**level of them, that waits for its right neighbour is what `put` makes of it, until `get`.
    """
    waiting: list[tuple[int, jax.Array]] = []
    for part in parts:
        level = 0
        while waiting and waiting[-1][0] == level:
            part, level = get(waiting.pop()[1], level) + part, level + 1
        waiting.append((level, put(part, level)))
    return get(waiting[0][1], waiting[0][0])


def small_gemm(
    x_TK: jax.Array,
    value: jax.Array,
    layer: jax.Array | None,
    leaves: int,
    out_dtype,
    *,
    columns: int | None = None,
    fill: float = 0.0,
    gate: Callable | None = None,
    schedule: Schedule | None = None,
) -> jax.Array:
    """y = x w^T for few tokens.

    Args:
      x_TK: [T, K] bf16, 1 <= T <= 256, K a multiple of 64.
      value: [N, K] bf16, or [L, N, K] of which `layer` is read; N a multiple of 8.
      layer: int32 scalar, given with a stack and only then.
      leaves: contiguous leaves of K, each a chain from zero; a power of two whose leaves are multiples of 64 long.
      out_dtype: bfloat16 or float32.
      columns: columns of the result, a multiple of 8, N or more; N by default.
      fill: what the columns from N on hold.
      gate: given with a weight [2, N, K] of gates and ups, or [L, 2, N, K], and only then: y is gate(gates, ups, layout), both
        bf16 [N, T] as the plain GEMM rounds them, in registers, and so is the result. Of a schedule's rows one half are gates.
      schedule: how to cut it; the table's choice by default.

    Returns:
      [T, columns].

    Raises:
      ValueError: shapes that this kernel or this schedule does not take.
    """
    T, K = x_TK.shape
    if T > 8 and T % 8:  # TMA moves whole tiles of 8 rows
        padded = small_gemm(
            jnp.pad(x_TK, ((0, -T % 8), (0, 0))),
            value,
            layer,
            leaves,
            out_dtype,
            columns=columns,
            fill=fill,
            gate=gate,
            schedule=schedule,
        )
        return padded[:T]
    N = value.shape[-2]
    columns = columns or N
    out_dtype = jnp.dtype(out_dtype)
    gated = gate is not None
    per_column = 2 if gated else 1  # rows of the weight
    s = fitted(schedule or schedule_for(T, N * per_column, K, leaves), leaves, out_dtype, gated)
    reason = fault(T, N, K, leaves, columns, s, out_dtype, gated)
    if reason:
        raise ValueError(f"small_gemm of {T} tokens, N {N}, K {K}, {leaves} leaves, {s}: {reason}")
    stacked = layer is not None
    blocks = -(-T // s.tokens)
    join = min(s.join, blocks)
    tiles = -(-columns // (s.rows // per_column))
    programs = min(s.programs or tiles, tiles)
    chains = leaves // s.split
    per_chain = K // leaves // s.k_tile
    steps = per_chain * chains
    rows = min(s.rows, WGMMA_ROWS)
    width, most_columns = rows // per_column, WGMMA_ROWS // per_column  # columns of y of a warpgroup
    owned = s.owned
    owners = s.tokens // owned
    waits_in_smem = range(1, 1 + s.waiting(leaves))  # levels of the tree

    def body(x_g, w_g, *rest):
        layer_g, y_g = rest if stacked else (None, rest[0])
        program, part, leaf, block, wg = (lax.axis_index(a) for a in AXES)
        first_token = (part * join + block) * s.tokens
        count = lax.div(tiles - program + programs - 1, programs)

        def tile(t):
            return (program + t * programs) * (s.rows // per_column)

        def scoped(x_s, w_s, full, empty, end_s, waiting_s=None, arrived=None):
            y_s, parts_s = end_s if s.split > 1 else (end_s, None)

            @pl.when(wg == s.warpgroups)
            def _load():
                if s.warpgroups > 1:
                    plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
                mosaic.after_last_kernel()
                index = (layer_g[0],) if stacked else ()

                def step(i, carry):
                    slot = lax.rem(i, s.stages)
                    at_k = pl.ds((leaf * steps + lax.rem(i, steps)) * s.k_tile, s.k_tile)

                    @pl.when(i >= s.stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    first = tile(lax.div(i, steps))
                    if gated:
                        source, target = hopper_gated.rows(w_g, index[0] if stacked else None, first, s.rows, at_k, w_s.at[slot])
                    else:
                        source = w_g.at[(*index, pl.ds(first, s.rows), at_k)]
                        target = w_s.at[slot] if s.rows >= WGMMA_ROWS else w_s.at[slot, pl.ds(0, rows)]
                    plgpu.copy_gmem_to_smem(
                        source,
                        target,
                        full.at[slot],
                        collective_axes="block" if join > 1 else None,
                        oob_mode=mosaic.STREAM,
                    )
                    plgpu.copy_gmem_to_smem(x_g.at[pl.ds(first_token, s.tokens), at_k], x_s.at[slot], full.at[slot])
                    return carry

                def drain(i, carry):
                    # A program must outlive the arrivals of its neighbours at its barriers.
                    @pl.when(i >= s.stages)
                    def _():
                        plgpu.barrier_wait(empty.at[lax.rem(i, s.stages)])

                    return carry

                @plgpu.warp_map
                def _(warp):  # one warp needs no barrier of the warpgroup for each load
                    @pl.when(warp == 0)
                    def _():
                        lax.fori_loop(0, count * steps, step, None)
                        lax.fori_loop(count * steps, count * steps + s.stages, drain, None)

            def chain(first):
                """One leaf: steps first.. of this program's loads, summed from zero."""

                def run(acc):
                    def step(j, carry):
                        slot = lax.rem(first + j, s.stages)
                        plgpu.barrier_wait(full.at[slot])
                        if gated:
                            w_tile = hopper_gated.operand(w_s.at[slot], wg)
                        else:
                            w_tile = w_s.at[slot, pl.ds(wg * WGMMA_ROWS, WGMMA_ROWS)]
                        plgpu.wgmma(acc, w_tile, x_s.at[slot].transpose((1, 0)))
                        plgpu.wgmma_wait(1)

                        @pl.when(j > 0)
                        def _():
                            plgpu.barrier_arrive(empty.at[lax.rem(first + j - 1, s.stages)])

                        return carry

                    lax.fori_loop(0, per_chain, step, None)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[lax.rem(first + per_chain - 1, s.stages)])
                    return mosaic.here(acc[...])

                return pl.run_scoped(run, plgpu.ACC((WGMMA_ROWS, s.tokens), jnp.float32))

            def subtree(first, n):
                """The sum of n leaves. Loops, for which the compiler finds registers; adding to -0 is exact."""
                if n == 1:
                    return chain(first)
                if n == 2:
                    left_NT = chain(first)
                    return left_NT + chain(first + per_chain)
                nothing_NT = plgpu.layout_cast(jnp.full((WGMMA_ROWS, s.tokens), -0.0, jnp.float32), plgpu.Layout.WGMMA)
                half = lambda i, sum_NT: sum_NT + subtree(first + i * (n // 2) * per_chain, n // 2)  # noqa: E731
                return lax.fori_loop(0, 2, half, nothing_NT)

            def store(y_NT, first, at_token):
                """Rounds, turns and writes one warpgroup's result, [64, tokens], to columns first.. of y."""
                tokens = y_NT.shape[1]
                if columns > N:
                    n_NT = plgpu.broadcasted_iota(jnp.int32, y_NT.shape, 0, layout=plgpu.Layout.WGMMA) + first
                    y_NT = jnp.where(n_NT < N, y_NT, jnp.float32(fill))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                y_w = y_s.at[wg, pl.ds(0, owned)]
                y_NT = plgpu.layout_cast(y_NT.astype(out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                if gated:
                    y_NT = gate(*hopper_gated.halves(y_NT), hopper_gated.LAYOUT)
                y_w.transpose((1, 0))[...] = y_NT
                plgpu.commit_smem()
                if width == most_columns:
                    plgpu.copy_smem_to_gmem(y_w, y_g.at[pl.ds(at_token, tokens), pl.ds(first, width)])
                    return
                for t in range(0, tokens, 8):  # in shared memory only 8 tokens of fewer columns than all are contiguous
                    plgpu.copy_smem_to_gmem(
                        y_s.at[wg, pl.ds(t, 8), pl.ds(0, width)], y_g.at[pl.ds(at_token + t, 8), pl.ds(first, width)]
                    )

            @pl.when(wg < s.warpgroups)
            def _multiply():
                if s.warpgroups > 1:
                    plgpu.set_max_registers(CONSUMER_REGISTERS[s.warpgroups], action="increase")

                def put(part, level):
                    if level not in waits_in_smem:
                        return part
                    waiting_s[level - 1, wg] = part

                def get(part, level):
                    if level not in waits_in_smem:
                        return part
                    return plgpu.layout_cast(waiting_s[level - 1, wg], plgpu.Layout.WGMMA)

                def swap(y_NT, first):
                    halves = y_NT[:, :owned], y_NT[:, owned:]
                    for me in range(2):

                        @pl.when(leaf == me)
                        def _(me=me):
                            plgpu.async_store_smem(
                                halves[1 - me],
                                parts_s.at[wg, 0],
                                arrived.at[wg],
                                cluster_idx=jnp.int32(1 - me),
                                cluster_dim="leaf",
                            )
                            plgpu.barrier_wait(arrived.at[wg])
                            received_NT = plgpu.layout_cast(parts_s[wg, 0], plgpu.Layout.WGMMA)
                            low_NT, high_NT = (received_NT, halves[1]) if me else (halves[0], received_NT)
                            store(low_NT + high_NT, first, first_token + me * owned)

                def walk(t, carry):
                    if waits_in_smem or (s.tokens <= WRITTEN_OUT[0] and chains <= WRITTEN_OUT[1]):
                        y_NT = tree_of((chain(t * steps + c * per_chain) for c in range(chains)), put, get)
                    else:
                        y_NT = subtree(t * steps, chains)
                    first = tile(t) + wg * most_columns
                    if s.split == 1:
                        store(y_NT, first, first_token)
                        return carry
                    if s.swaps:
                        swap(y_NT, first)
                        return carry
                    for owner in range(owners):
                        plgpu.async_store_smem(
                            y_NT[:, owner * owned : (owner + 1) * owned],
                            parts_s.at[wg, leaf],
                            arrived.at[wg],
                            cluster_idx=jnp.int32(owner),
                            cluster_dim="leaf",
                        )

                    @pl.when(leaf < owners)
                    def _():
                        plgpu.barrier_wait(arrived.at[wg])
                        y_NT = tree_of(plgpu.layout_cast(parts_s[wg, i], plgpu.Layout.WGMMA) for i in range(s.split))
                        store(y_NT, first, first_token + leaf * owned)

                    return carry

                lax.fori_loop(0, count, walk, None)
                plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(scoped, **_scratch(s, leaves, columns, out_dtype, gated), collective_axes="wg")

    y = mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T, columns), out_dtype),
        grid=(programs, -(-blocks // join)),
        grid_names=AXES[:2],
        cluster=(s.split, join),
        cluster_names=AXES[2:4],
        num_threads=s.warpgroups + 1,
        thread_name=AXES[4],
        # Only sums that wait in shared memory are read by other lanes than wrote them.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=not waits_in_smem),
    )
    return y(x_TK, hopper_gated.by_eights(value) if gated else value, *((jnp.reshape(layer, (1,)),) if stacked else ()))

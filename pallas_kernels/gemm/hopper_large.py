"""GEMM for many rows on Hopper: persistent, warp-specialised, tensor cores fed by TMA through one unbroken ring.

One warpgroup of a program loads, the others ("consumers") multiply. The loader walks the program's tiles K-step by K-step
without a pause, so that it is filling the ring for the next tile while consumers finish one. Tiles are walked in snaking
bands, so that programs at work at one time read the same operands from the L2 cache. A cluster of programs loads what its
programs share once (TMA multicast).

Consumers keep the tensor cores busy where a leaf or a tile ends, too. The next leaf's first products are issued before the
last leaf is complete, and sums of leaves are added under them. Where a tile's sum and the next tile's products fit in
registers together, a tile is stored under the next one's first products, piece by piece ("late"). Where they do not, the
consumers store in turns, so that one multiplies while the other stores.

Bits: an element is a chain of wgmma over K from zero in fp32 (or `leaves` such chains and a balanced tree of fp32 adds), in
any schedule. Rows and columns past the edge are loaded as zeros and never stored. A sum of leaves that waits for the leaves
it is added to waits in registers (of 8 leaves three and the products under way: tiles are narrow for it), or the half of the
tree waits in shared memory (`Schedule.in_shared`).

What becomes of a tile is an `Epilogue`: its `run(acc_mn, tile, inputs, outputs, scratch)` is traced once and called by
each consumer with its own piece of the tile:

  acc_mn: fp32 [wg_m, wg_n] (`Schedule.warpgroup_tile`), in registers, Layout.WGMMA.
  tile: `Tile(row, col, wg)`: int32 scalars, row and column of acc_mn[0, 0] in [T, N], and the consumer's index.
  inputs, outputs: refs in GMEM of `Epilogue.inputs` and `Epilogue.outputs`, whole.
  scratch: refs in SMEM of `Epilogue.scratch`, whole; shared by the program's consumers: give them a leading axis of
    `schedule.consumers` and index it by `tile.wg`. With `Schedule.in_shared` it is the memory of half a tree, too, so that a
    consumer's share must be the bytes of its share of that, and it holds nothing from one tile to the next.

The ring goes on while an epilogue runs, and consumers run it at different times: it must not synchronise them. A store from
SMEM may still be under way when it returns (wait for it at the next call before reusing the buffer); the kernel waits for
all of them at its end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.gemm import hopper_gated
from pallas_kernels.gemm.schedules import Schedule

STEP = 64
"""K of one step of the ring: 128 bytes of bf16, one swizzled row."""
LOADER_REGISTERS, CONSUMER_REGISTERS = 24, 240
"""Of a thread; for the three warpgroups together no more than 512, or they would wait for each other for ever."""
TILED32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
"""As mosaic.TILED, for 4-byte values: rows are multiples of 32 long."""
LATE_REGISTERS = 200
"""Of a consumer's thread, for a tile's sum and the next tile's products together."""
SHARED = 227 * 1024 - 1024
"""Bytes of shared memory that a program's ring and staging buffer may fill; barriers have the rest."""


class Tile(NamedTuple):
    """Where a consumer's piece of a tile lies: row and column of its first element, and which consumer it is."""

    row: jax.Array
    col: jax.Array
    wg: jax.Array


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What becomes of a tile; see the module's docstring.

    `parts`: what `run` does in short parts, each called as `run` is, between which products may be issued: () if that would
    not do. `barriers`: Mosaic puts a barrier of the warpgroup around each access to memory. False for an epilogue that needs
    none but those of commit_smem and wait_smem_to_gmem.
    """

    run: Callable[..., None]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    inputs: tuple[jax.Array, ...] = ()
    scratch: tuple[Any, ...] = ()
    parts: tuple[Callable[..., None], ...] = ()
    barriers: bool = True


def store(
    T: int,
    N: int,
    out_dtype,
    schedule: Schedule,
    filled_N: int | None = None,
    fill: float = 0.0,
    gate: Callable | None = None,
) -> Epilogue:
    """The plain epilogue: rounds once to `out_dtype` and stores [T, filled_N]; columns N.. are `fill`.

    With `gate`, of a tile's columns of gates and ups (`matmul`) gate(gates, ups, layout), both rounded and in registers, is
    stored: [T, N] for N of each.
    """
    wg_m, wg_n = schedule.warpgroup_tile
    per_column = 2 if gate else 1
    wg_n //= per_column
    width = filled_N or N
    itemsize = jnp.dtype(out_dtype).itemsize
    columns = math.gcd(128 // itemsize, wg_n)  # one swizzled row
    # TMA stores whole tiles of the layout in shared memory: a ragged width needs the narrowest.
    wide = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * itemsize))
    tiling = (plgpu.TilingTransform((8, 8)),) if width % columns else wide
    pieces = [(i, j) for i in range(0, wg_m, 64) for j in range(0, wg_n, columns)]
    left = (SHARED - schedule.steps * (schedule.tile_m + schedule.tile_n) * STEP * 2) // schedule.consumers
    slots = min(left // (64 * columns * itemsize), len(pieces))
    together = slots if slots == len(pieces) else max(slots // 2, 1)
    # Where the scratch is the memory of half a tree, too, each consumer's share of both is the same bytes.
    allocated = 4 * wg_m * wg_n // (64 * columns * itemsize) if schedule.in_shared else slots

    starts = tuple(range(0, len(pieces), together))

    def run(acc_mn, tile, inputs, outputs, scratch, starts=starts):
        del inputs
        (y_TN,), (staged,) = outputs, scratch
        for first in starts:
            group = [(staged.at[tile.wg, n % slots], *pieces[n]) for n in range(first, min(first + together, len(pieces)))]
            plgpu.wait_smem_to_gmem(slots - together if first else 0, wait_read_only=True)
            for slot, i, j in group:
                y_mn = acc_mn[i : i + 64, j : j + columns]
                if width > N:
                    n_mn = plgpu.broadcasted_iota(jnp.int32, y_mn.shape, 1, layout=plgpu.Layout.WGMMA) + (tile.col + j)
                    y_mn = jnp.where(n_mn < N, y_mn, fill)
                y_mn = y_mn.astype(out_dtype)
                if gate:
                    up_mn = acc_mn[i : i + 64, wg_n + j : wg_n + j + columns].astype(out_dtype)
                    y_mn = gate(y_mn, up_mn, plgpu.Layout.WGMMA)
                slot[...] = y_mn
            plgpu.commit_smem()
            col = pl.multiple_of(lax.div(tile.col, 2), wg_n) if gate else tile.col
            for slot, i, j in group:
                plgpu.copy_smem_to_gmem(slot, y_TN.at[pl.ds(tile.row + i, 64), pl.ds(col + j, columns)])

    return Epilogue(
        run,
        outputs=(jax.ShapeDtypeStruct((T, width), out_dtype),),
        scratch=(plgpu.SMEM((schedule.consumers, allocated, 64, columns), out_dtype, transforms=tiling),),
        parts=tuple(functools.partial(run, starts=(first,)) for first in starts),
        barriers=False,
    )


def _complete(acc) -> jax.Array:
    """What a wait has made complete in an accumulator."""
    return mosaic.here(plgpu.wgmma_accumulator_load(acc, wait_n=None))


def _added(sums: tuple, part_mn: jax.Array) -> tuple:
    """The sums (level, [m, n]) of 2**level leaves each that wait for their right neighbours, when the next leaf has come."""
    level = 0
    while sums and sums[-1][0] == level:
        part_mn, level, sums = mosaic.here(sums[-1][1] + part_mn), level + 1, sums[:-1]
    return (*sums, (level, part_mn))


def matmul(
    x_TK: jax.Array,
    value: jax.Array,
    layer: jax.Array | None,
    leaves: int,
    columns: int,
    epilogue: Epilogue,
    schedule: Schedule,
    gated: bool = False,
) -> tuple[jax.Array, ...]:
    """Runs `epilogue` on every tile of y = x w^T.

    Args:
      x_TK: bf16 [T, K]; K a multiple of 64 leaves; T at most 8 or a multiple of 8.
      value: bf16 [N, K], or [L, N, K] with `layer`; N a multiple of 8 (or at most 8).
      layer: int32 scalar, or None.
      leaves: chains that K is cut into, a power of two; 1 is one chain.
      columns: columns that tiles cover: N, or more (the weight's rows past N are zeros).
      epilogue: see the module's docstring.
      schedule: see `Schedule`.
      gated: the weight is [2, N / 2, K] of gates and ups, or [L, 2, N / 2, K], and the first half of a tile's columns are gates
        and the second their ups.

    Returns:
      The epilogue's outputs.

    Raises:
      ValueError: gates and ups with a schedule that gives them to two consumers, or not in eights.
    """
    T, K = x_TK.shape
    s = schedule
    if gated and (s.split == "n" or s.tile_n % 16):
        raise ValueError(f"no gates and ups with {s}: consumers must divide the rows, and half of tile_n be a multiple of 8")
    wg_m, wg_n = s.warpgroup_tile
    per_leaf = K // STEP // leaves
    per_tile = per_leaf * leaves
    across = (-(-T // (s.tile_m * s.cluster[0])), -(-columns // (s.tile_n * s.cluster[1])))
    clustered = math.prod(s.cluster) > 1
    programs = min(mosaic.SMS // math.prod(s.cluster), math.prod(across))
    halved = s.in_shared and leaves > 4
    late = bool(epilogue.parts) and s.in_flight > 0 and 2 * wg_m * wg_n // 128 <= LATE_REGISTERS
    turns = bool(epilogue.parts) and not late
    parts = (epilogue.run,) if halved else epilogue.parts  # the first part may write where the half lies

    def body(x_g, w_g, *refs):
        layer_g, refs = (refs[0], refs[1:]) if layer is not None else (None, refs)
        inputs, refs = refs[: len(epilogue.inputs)], refs[len(epilogue.inputs) :]
        outputs, refs = refs[: len(epilogue.outputs)], refs[len(epilogue.outputs) :]
        xs, ws, full, empty, *turn, (*half_s, scratch) = refs
        wg = lax.axis_index("wg")
        program = lax.axis_index("program")
        count = lax.div(math.prod(across) - 1 - program, programs) + 1

        def origin(i):
            m, n = plgpu.planar_snake(program + i * programs, across, 0 if s.band_of == "m" else 1, s.band)
            if clustered:
                m, n = m * s.cluster[0] + lax.axis_index("cm"), n * s.cluster[1] + lax.axis_index("cn")
            return m * s.tile_m, n * s.tile_n

        def after(slot):
            # A remainder by what is no power of two would take longer than the products of a step.
            return lax.select(slot == s.steps - 1, jnp.int32(0), slot + 1)

        @pl.when(wg == s.consumers)
        def _load():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            lead = () if layer_g is None else (layer_g[0],)

            def tile(i, slot):
                row, col = origin(i)

                def step(j, slot):
                    @pl.when(i * per_tile + j >= s.steps)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    at_k = pl.ds(j * STEP, STEP)
                    plgpu.copy_gmem_to_smem(
                        x_g.at[pl.ds(row, s.tile_m), at_k],
                        xs.at[slot],
                        full.at[slot],
                        collective_axes="cn" if s.cluster[1] > 1 else None,
                    )
                    if gated:
                        source = hopper_gated.columns(w_g, lead[0] if lead else None, col, s.tile_n, at_k)
                    else:
                        source = w_g.at[(*lead, pl.ds(col, s.tile_n), at_k)]
                    plgpu.copy_gmem_to_smem(
                        source,
                        ws.at[slot],
                        full.at[slot],
                        collective_axes="cm" if s.cluster[0] > 1 else None,
                    )
                    return after(slot)

                return lax.fori_loop(0, per_tile, step, slot)

            lax.fori_loop(0, count, tile, jnp.int32(0))
            total = count * per_tile

            def drain(k, _):  # a program must outlive what its cluster sends to it
                plgpu.barrier_wait(empty.at[lax.rem(k, s.steps)])
                return None

            lax.fori_loop(jnp.maximum(total - s.steps, 0), total, drain, None)

        @pl.when(wg < s.consumers)
        def _multiply():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            mine = pl.ds(wg * (wg_m if s.split == "m" else wg_n), wg_m if s.split == "m" else wg_n)

            def multiply(acc, slot):
                plgpu.barrier_wait(full.at[slot])
                x_mk = xs.at[slot, mine] if s.split == "m" else xs.at[slot]
                w_nk = ws.at[slot, mine] if s.split == "n" else ws.at[slot]
                if gated:
                    w_nk = hopper_gated.flat(w_nk)
                plgpu.wgmma(acc, x_mk, w_nk.transpose((1, 0)))

            def total(n, slot, under=()):
                """The sum of the next `n` leaves, [wg_m, wg_n] in registers, and the slot after them. Each function of
                `under` is called when one more product of the first leaf is under way."""

                def leaf(i, slots, sums, last):
                    """Leaves from `i` on. slots: the next slot and the one before it, whose products are under way if `last`,
                    the accumulator of the leaf before this one, is not None."""

                    def run(acc, slots=slots, sums=sums):
                        def step(_, slots):
                            slot, before = slots
                            multiply(acc, slot)
                            plgpu.wgmma_wait(s.in_flight)
                            plgpu.barrier_arrive(empty.at[before if s.in_flight else slot])
                            return after(slot), slot

                        done = s.in_flight
                        if last is not None:
                            slots = step(0, slots)
                            sums = _added(sums, _complete(last))
                        elif s.in_flight:
                            multiply(acc, slots[0])
                            slots = after(slots[0]), slots[0]
                        for k, call in enumerate(under if i == 0 else ()):
                            if 0 < k < per_leaf:
                                slots, done = step(0, slots), k + 1
                            call()
                        slots = lax.fori_loop(done, per_leaf, step, slots)
                        if s.in_flight and i + 1 < n:
                            return leaf(i + 1, slots, sums, acc)
                        plgpu.wgmma_wait(0)
                        if s.in_flight:
                            plgpu.barrier_arrive(empty.at[slots[1]])
                        sums = _added(sums, _complete(acc))
                        return leaf(i + 1, slots, sums, None) if i + 1 < n else (sums[0][1], slots[0])

                    return pl.run_scoped(run, plgpu.ACC((wg_m, wg_n), jnp.float32))

                return leaf(0, (slot, slot), (), None)

            def finish(call, i, sum_mn):
                """Calls an epilogue, or a part of it, with tile i."""
                row, col = origin(i)
                at = Tile(row + (wg * wg_m if s.split == "m" else 0), col + (wg * wg_n if s.split == "n" else 0), wg)
                call(half_s[0][wg] + sum_mn if halved else sum_mn, at, inputs, outputs, scratch)

            def halves(slot, under=()):
                """The sum of a tile's leaves and the slot after them; with `halved`, of the second half of them, while the
                first half's is in shared memory."""
                if not halved:
                    return total(leaves, slot, under)
                half_mn, slot = total(leaves // 2, slot, under)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # its place is the epilogue's scratch
                half_s[0][wg] = half_mn
                return total(leaves // 2, slot)

            def late_tile(i, carry):
                slot, before_mn = carry
                store = lambda call: pl.when(i > 0)(functools.partial(finish, call, i - 1, before_mn))  # noqa: E731
                sum_mn, slot = halves(slot, [functools.partial(store, part) for part in parts])
                return slot, sum_mn

            def tile(i, slot):
                sum_mn, slot = halves(slot)
                if turns:
                    plgpu.barrier_wait(turn[0].at[wg])
                finish(epilogue.run, i, sum_mn)
                if turns:
                    pl.when((wg == 0) | (i + 1 < count))(lambda: plgpu.barrier_arrive(turn[0].at[1 - wg]))
                return slot

            if late:
                nothing_mn = plgpu.layout_cast(jnp.zeros((wg_m, wg_n), jnp.float32), plgpu.Layout.WGMMA)
                _, sum_mn = lax.fori_loop(0, count, late_tile, (jnp.int32(0), nothing_mn))
                finish(epilogue.run, count - 1, sum_mn)
            else:
                if turns:
                    pl.when(wg == 1)(lambda: plgpu.barrier_arrive(turn[0].at[0]))
                lax.fori_loop(0, count, tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    axes = tuple(axis for axis, size in zip(("cm", "cn"), s.cluster, strict=True) if size > 1)
    last = (tuple(epilogue.scratch),)
    if halved:
        last = (plgpu.SMEM((s.consumers, wg_m, wg_n), jnp.float32, transforms=TILED32), *last)
    if halved and not mosaic.interpreting():  # the race detector takes a union as one whole, not consumer by consumer
        last = plgpu.RefUnion(*last)
    empty = dict(num_arrivals=s.consumers, num_barriers=s.steps)
    scratch_types = [
        plgpu.SMEM((s.steps, s.tile_m, STEP), x_TK.dtype, transforms=mosaic.TILED),
        hopper_gated.columns_of(s.steps, s.tile_n, STEP)
        if gated
        else plgpu.SMEM((s.steps, s.tile_n, STEP), x_TK.dtype, transforms=mosaic.TILED),
        plgpu.Barrier(num_arrivals=2, num_barriers=s.steps),
        plgpu.ClusterBarrier(collective_axes=axes, **empty) if clustered else plgpu.Barrier(**empty),
        *([plgpu.Barrier(num_arrivals=1, num_barriers=s.consumers)] if turns else []),
        last,
    ]
    cluster = dict(cluster=s.cluster, cluster_names=("cm", "cn")) if clustered else {}
    run = mosaic.kernel(
        body,
        out_type=epilogue.outputs,
        scratch_types=scratch_types,
        grid=(programs,),
        grid_names=("program",),
        num_threads=s.consumers + 1,
        thread_name="wg",
        # Half a tree is read by the thread that wrote it, so that it needs no barriers, either.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=not epilogue.barriers),
        **cluster,
    )
    if gated:
        value = hopper_gated.flat_stack(value, s.tile_n)
    return run(x_TK, value, *(() if layer is None else (layer.reshape(1),)), *epilogue.inputs)

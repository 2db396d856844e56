"""A GEMM for few tokens as a part of a kernel: what its loader and its multiplying warpgroups do, for kernels of one GEMM
(`hopper_small`) or of several one after the other."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.gemm import hopper_gated

if TYPE_CHECKING:
    from pallas_kernels.gemm.hopper_small import Epilogue, Schedule

WGMMA_ROWS = 64
AXES = ("program", "part", "leaf", "block", "wg")
CONSUMER_REGISTERS = {2: 240, 3: 160, 4: 112}
"""Registers of a thread by number of consumer warpgroups: 64 Ki a program, shared with the loader's warpgroup."""
WRITTEN_OUT = (32, 4)
"""Tokens, and leaves of a program, up to which a tree is written out; a larger one in registers is a loop, or they spill. At 32
tokens a loop took 1.3 us more, at 8, 16 and 64 none."""


def _tiles(width: int, itemsize: int) -> tuple:
    """Layout in shared memory of matrices in tiles of 8 rows and `width` columns."""
    swizzle = width * itemsize
    return (plgpu.TilingTransform((8, width)), *([plgpu.SwizzleTransform(swizzle)] if swizzle > 16 else []))


def scratch_of(s: Schedule, leaves: int, columns: int, out_dtype, gated: bool) -> dict:
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


@dataclasses.dataclass(frozen=True)
class Part:
    """One GEMM of a kernel, as far as it is known when the kernel is traced.

    Attributes:
      schedule: how it is cut.
      tokens: rows of x.
      K: of the weight.
      N: columns that the weight has; `columns` of the result, those from N on hold `fill`.
      leaves: of the tree over K.
      out_dtype: of the result.
      gate: of gates and ups, or None; see `hopper_small.small_gemm`.
      stacked: whether the weight is a layer of a stack.
      packed: loads of fewer weight rows than an instruction reads lie one after the other, and an instruction reads on into
        the next ones, for rows of its result that nobody stores. Else each has the room of whole instructions.
      epilogue: what becomes of the result's tiles instead of their store, or None.
    """

    schedule: Schedule
    tokens: int
    K: int
    N: int
    columns: int
    leaves: int
    out_dtype: jnp.dtype
    fill: float = 0.0
    gate: Callable | None = None
    stacked: bool = False
    packed: bool = False
    epilogue: Epilogue | None = None

    def scratch(self) -> dict:
        """Shared memory and barriers of a program, as `pl.run_scoped` takes them."""
        s = self.schedule
        scratch = scratch_of(s, self.leaves, self.columns, self.out_dtype, self.gate is not None)
        if self.epilogue is not None:
            scratch["end_s"] = self.epilogue.scratch(s)
        if self.packed:
            shape = (s.stages * s.rows + WGMMA_ROWS - s.rows, s.k_tile)
            scratch["w_s"] = plgpu.SMEM(shape, jnp.bfloat16, transforms=mosaic.TILED)
        return scratch

    def smem_bytes(self, stages: int) -> int:
        """Shared memory of a program with so many loads in flight."""
        s = self.schedule
        end = s.warpgroups * WGMMA_ROWS * s.owned * self.out_dtype.itemsize // self.per_column
        rows = stages * s.rows + WGMMA_ROWS - s.rows if self.packed else stages * s.warpgroups * WGMMA_ROWS
        return (rows + stages * s.tokens) * s.k_tile * 2 + 16 * stages + end + 1024

    @property
    def per_column(self) -> int:
        """Rows of the weight that make a column of the result."""
        return 1 if self.gate is None else 2

    @property
    def blocks(self) -> int:
        """Blocks of tokens."""
        return -(-self.tokens // self.schedule.tokens)

    @property
    def join(self) -> int:
        """Programs of a cluster that share loads of the weight."""
        return min(self.schedule.join, self.blocks)

    @property
    def tiles(self) -> int:
        """Tiles of columns."""
        return -(-self.columns // (self.schedule.rows // self.per_column))

    @property
    def programs(self) -> int:
        """Programs (clusters of them, if leaves are split) that walk over the tiles."""
        return min(self.schedule.programs or self.tiles, self.tiles)

    @property
    def chains(self) -> int:
        """Leaves of one program."""
        return self.leaves // self.schedule.split

    @property
    def per_chain(self) -> int:
        """Loads of a leaf."""
        return self.K // self.leaves // self.schedule.k_tile

    @property
    def steps(self) -> int:
        """Loads of a tile."""
        return self.per_chain * self.chains

    def first_token(self, place: dict) -> jax.Array:
        """Of a program's block of tokens; `place` is the program's index on each of `AXES`."""
        return (place["part"] * self.join + place["block"]) * self.schedule.tokens

    def count(self, place: dict) -> jax.Array:
        """Tiles of a program."""
        return lax.div(self.tiles - place["program"] + self.programs - 1, self.programs)

    def tile(self, place: dict, t) -> jax.Array:
        """The first column of a program's t-th tile."""
        return (place["program"] + t * self.programs) * (self.schedule.rows // self.per_column)

    def _at_k(self, place, i):
        return pl.ds((place["leaf"] * self.steps + lax.rem(i, self.steps)) * self.schedule.k_tile, self.schedule.k_tile)

    def load_weight(self, place: dict, scratch: dict, w_g, index: tuple, i) -> None:
        """Starts the copy of the weight for a program's i-th load; `index` is the layer in a stack, or nothing."""
        s, slot = self.schedule, lax.rem(i, self.schedule.stages)
        w_s, at_k = scratch["w_s"], self._at_k(place, i)
        first = self.tile(place, lax.div(i, self.steps))
        if self.gate is not None:
            source, target = hopper_gated.rows(w_g, index[0] if index else None, first, s.rows, at_k, w_s.at[slot])
        elif self.packed:
            source = w_g.at[(*index, pl.ds(first, s.rows), at_k)]
            target = w_s.at[pl.ds(slot * s.rows, s.rows)]
        else:
            source = w_g.at[(*index, pl.ds(first, s.rows), at_k)]
            target = w_s.at[slot] if s.rows >= WGMMA_ROWS else w_s.at[slot, pl.ds(0, s.rows)]
        plgpu.copy_gmem_to_smem(
            source,
            target,
            scratch["full"].at[slot],
            collective_axes="block" if self.join > 1 else None,
            oob_mode=mosaic.STREAM,
        )

    def load_x(self, place: dict, scratch: dict, x_g, i) -> None:
        """Starts the copy of x for a program's i-th load."""
        slot = lax.rem(i, self.schedule.stages)
        source = x_g.at[pl.ds(self.first_token(place), self.schedule.tokens), self._at_k(place, i)]
        plgpu.copy_gmem_to_smem(source, scratch["x_s"].at[slot], scratch["full"].at[slot])

    def wait_for_slot(self, scratch: dict, i) -> None:
        """Until what was in the slot of the i-th load has been read; the ring is empty when the program begins."""

        @pl.when(i >= self.schedule.stages)
        def _():
            plgpu.barrier_wait(scratch["empty"].at[lax.rem(i, self.schedule.stages)])

    def multiply(self, place: dict, scratch: dict, *refs) -> None:
        """A multiplying warpgroup's part: all of the program's tiles, stored and complete in global memory at the end.

        refs: the result; of an epilogue its operands and outputs.
        """
        y_g, epilogue = refs[-1], self.epilogue
        s, leaves, per_chain, steps, chains = self.schedule, self.leaves, self.per_chain, self.steps, self.chains
        N, columns, gated = self.N, self.columns, self.gate is not None
        leaf, wg, first_token = place["leaf"], place["wg"], self.first_token(place)
        x_s, w_s, full, empty = (scratch[name] for name in ("x_s", "w_s", "full", "empty"))
        waiting_s, arrived = scratch.get("waiting_s"), scratch.get("arrived")
        y_s, parts_s = scratch["end_s"] if s.split > 1 else (scratch["end_s"], None)
        width, most_columns = min(s.rows, WGMMA_ROWS) // self.per_column, WGMMA_ROWS // self.per_column  # of a warpgroup
        owned = s.owned
        owners = s.tokens // owned
        waits_in_smem = range(1, 1 + s.waiting(leaves))  # levels of the tree
        tile = functools.partial(self.tile, place)

        def chain(first):
            """One leaf: steps first.. of this program's loads, summed from zero."""

            def run(acc):
                def step(j, carry):
                    slot = lax.rem(first + j, s.stages)
                    plgpu.barrier_wait(full.at[slot])
                    if gated:
                        w_tile = hopper_gated.operand(w_s.at[slot], wg)
                    elif self.packed:
                        w_tile = w_s.at[pl.ds(slot * s.rows, WGMMA_ROWS)]
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
                y_NT = jnp.where(n_NT < N, y_NT, jnp.float32(self.fill))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            y_w = y_s.at[wg, pl.ds(0, owned)]
            y_NT = plgpu.layout_cast(y_NT.astype(self.out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            if gated:
                y_NT = self.gate(*hopper_gated.halves(y_NT), hopper_gated.LAYOUT)
            y_w.transpose((1, 0))[...] = y_NT
            plgpu.commit_smem()
            if width == most_columns:
                plgpu.copy_smem_to_gmem(y_w, y_g.at[pl.ds(at_token, tokens), pl.ds(first, width)])
                return
            for t in range(0, tokens, 8):  # in shared memory only 8 tokens of fewer columns than all are contiguous
                plgpu.copy_smem_to_gmem(
                    y_s.at[wg, pl.ds(t, 8), pl.ds(0, width)], y_g.at[pl.ds(at_token + t, 8), pl.ds(first, width)]
                )

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

        begun = None
        if epilogue is not None:
            mosaic.results_can_be_read()
            begun = epilogue.begin(refs, first_token, wg)

        def walk(t, carry):
            if waits_in_smem or (s.tokens <= WRITTEN_OUT[0] and chains <= WRITTEN_OUT[1]):
                y_NT = tree_of((chain(t * steps + c * per_chain) for c in range(chains)), put, get)
            else:
                y_NT = subtree(t * steps, chains)
            first = tile(t) + wg * most_columns
            if epilogue is not None:
                epilogue.end(begun, y_NT, first, wg, refs, scratch["end_s"])
                return carry
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

        lax.fori_loop(0, self.count(place), walk, None)
        plgpu.wait_smem_to_gmem(0)

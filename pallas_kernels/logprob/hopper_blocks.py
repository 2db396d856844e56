"""Sums of a vocabulary block of 128 on Hopper: one arithmetic, in registers, whichever kernel has the logits.

With scale = inv_temp * log2(e), rounded once, a block gives M, its largest logit * scale rounded up to a whole number, and the
sum of 2^(logit * scale - M): halves of the block are added to one another down to 8 columns, which one thread does for
itself, and these 8 as multiples of 2^-23. Integers have the same sum in any order, in any layout, under any schedule. (All 128
as integers would lose what is below 2^-24 of the largest: a sharp distribution's tail.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.logprob import VOCAB_BLOCK

LOG2E = math.log2(math.e)
FIXED_POINT_BITS = 23
FLOOR = -(2.0**30)
"""Smallest M: finite, so that a block of pads gives 2^-inf = 0 and not NaN."""
ROWS = 64
"""Rows of a tile: those of one warpgroup."""
STEPS = 6
CONSUMERS = 2
COLUMNS = 8
"""Columns of Layout.WGMMA that several threads share."""
TILED32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def block_sums(z_MV: jax.Array, inv_temp_M: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(M fp32 [rows], sum int32 [rows] in units of 2^-23) of fp32 logits [rows, 128] in Layout.WGMMA.

    A NaN among a row's logits makes its M NaN.
    """
    row = mosaic.row_layout()
    scale_M = mosaic.mul(inv_temp_M, LOG2E, row)
    # The largest logit's product is the largest, and rounded up: no exponent below is above 0.
    max_M = mosaic.ceil(mosaic.mul_up(z_MV.max(axis=1), scale_M, row), row)
    max_M = jnp.maximum(max_M, FLOOR)
    sum_MV = mosaic.exp2(mosaic.fma(z_MV, mosaic.rows(scale_M, z_MV.shape), mosaic.rows(-max_M, z_MV.shape)))
    while sum_MV.shape[1] > COLUMNS:
        half = sum_MV.shape[1] // 2
        sum_MV = mosaic.add(sum_MV[:, :half], sum_MV[:, half:])
    count_MV = mosaic.nearest(mosaic.mul(sum_MV, 2.0**FIXED_POINT_BITS)).astype(jnp.int32)
    return max_M, count_MV.sum(axis=1)


@jax.jit
def block_stats(logits_BV: jax.Array, inv_temp_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`block_sums` of every block of every row: (fp32 [blocks, P], int32 [blocks, P]); columns from B on are undefined.

    Args:
      logits_BV: fp32 [B, V], V a multiple of 128; B at most 8 or a multiple of 8.
      inv_temp_P: fp32 [P], P a multiple of 64, at least B.
    """

    def work(z_MV, rows, block, inputs, outputs):
        max_g, sum_g = outputs
        max_g[block, rows], sum_g[block, rows] = block_sums(z_MV, *inputs)

    shape = logits_BV.shape[1] // VOCAB_BLOCK, inv_temp_P.shape[0]
    out_type = tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32))
    return over_tiles(logits_BV, (inv_temp_P,), out_type, work)


def drain(empty, count: jax.Array) -> None:
    """Waits until the last of `count` loads through the ring have been read."""

    def wait(i, _):
        plgpu.barrier_wait(empty.at[lax.rem(i, STEPS)])
        return None

    lax.fori_loop(jnp.maximum(count - STEPS, 0), count, wait, None)


def over_tiles(logits_BV: jax.Array, inputs_P: tuple[jax.Array, ...], out_type, work: Callable[..., None]):
    """Runs `work` on every 64 x 128 tile of logits, streamed through shared memory at the memory's speed.

    Args:
      logits_BV, each of inputs_P: as in `block_stats`.
      out_type: the outputs' shapes.
      work: (z_MV, rows, block, inputs_M, outputs): the tile in Layout.WGMMA, its rows as a slice, its block's index, its
        rows of each input, the outputs' refs in GMEM.
    """
    B, V = logits_BV.shape
    blocks = V // VOCAB_BLOCK
    tiles = -(-B // ROWS) * blocks
    programs = min(mosaic.SMS, -(-tiles // CONSUMERS))

    def body(z_g, *refs):
        inputs, outputs, (z_s, full, empty) = refs[: len(inputs_P)], refs[len(inputs_P) : -3], refs[-3:]
        program, wg = lax.axis_index("program"), lax.axis_index("wg")
        count = lax.div(tiles - 1 - program, programs) + 1

        def origin(i):
            tile = program + i * programs
            return lax.div(tile, blocks) * ROWS, lax.rem(tile, blocks)

        @pl.when(wg == CONSUMERS)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            def load(i, _):
                row, block = origin(i)
                slot = lax.rem(i, STEPS)

                @pl.when(i >= STEPS)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                at = z_g.at[pl.ds(row, ROWS), pl.ds(block * VOCAB_BLOCK, VOCAB_BLOCK)]
                plgpu.copy_gmem_to_smem(at, z_s.at[slot], full.at[slot])
                return None

            lax.fori_loop(0, count, load, None)
            drain(empty, count)

        @pl.when(wg < CONSUMERS)
        def _work():
            plgpu.set_max_registers(232, action="increase")

            def tile(k, _):
                i = wg + k * CONSUMERS
                row, block = origin(i)
                slot = lax.rem(i, STEPS)
                rows = pl.ds(row, ROWS)
                inputs_M = [plgpu.load(ref.at[rows], layout=mosaic.row_layout(), optimized=False) for ref in inputs]

                plgpu.barrier_wait(full.at[slot])
                z_MV = plgpu.load(z_s.at[slot], layout=plgpu.Layout.WGMMA)
                plgpu.commit_smem()  # what was read here, TMA may now write
                plgpu.barrier_arrive(empty.at[slot])
                work(z_MV, rows, block, inputs_M, outputs)
                return None

            lax.fori_loop(0, lax.div(count - wg + CONSUMERS - 1, CONSUMERS), tile, None)

    return mosaic.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((STEPS, ROWS, VOCAB_BLOCK), jnp.float32, transforms=TILED32),
            plgpu.Barrier(num_barriers=STEPS),
            plgpu.Barrier(num_barriers=STEPS),
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
    )(logits_BV, *inputs_P)

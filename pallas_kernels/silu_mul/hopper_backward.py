"""Gradient of silu(gate) * up on Hopper in one pass: gates, ups and the result's gradient stream through shared memory.

No bits are claimed between shapes, but a launch has the same bits every time: each element is a function of three.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels import mosaic, row_stream
from pallas_kernels.silu_mul.hopper_layout import COLUMNS, LAYOUT


def schedule(T: int, F: int) -> tuple[int, int, int]:
    """(rows of a tile, slots, programs a multiprocessor)."""
    rows = 8 if -(-T // 8) * -(-F // COLUMNS) > 4 * mosaic.SMS else 4
    return rows, 4, 3


@functools.partial(jax.jit, static_argnames="plan")
def _call(gate_up_TN, dy_TF, *, plan):
    T, F = dy_TF.shape
    rows, stages, programs = plan
    across = -(-F // COLUMNS)
    tiles = -(-T // rows) * across

    def body(in_g, dy_g, out_g):
        def scoped(gate_s, up_s, dy_s, loaded):
            def at(tile):
                """The tile's rows and columns; what lies past the edge is read as zeros and not stored."""
                return pl.ds(lax.div(tile, across) * rows, rows), pl.ds(lax.rem(tile, across) * COLUMNS, COLUMNS)

            def load(tile, slot):
                t, f = at(tile)
                for source, s in ((in_g.at[t, 0, f], gate_s), (in_g.at[t, 1, f], up_s), (dy_g.at[t, f], dy_s)):
                    plgpu.copy_gmem_to_smem(source, s.at[slot], loaded.at[slot])

            def work(slot, carry):
                g, u, dy = (
                    row_stream.widen(plgpu.load(s.at[slot], layout=LAYOUT, optimized=False), LAYOUT)
                    for s in (gate_s, up_s, dy_s)
                )
                sigmoid = mosaic.reciprocal(1 + mosaic.exp2(g * -math.log2(math.e), LAYOUT), LAYOUT)
                dy_sigmoid = dy * sigmoid
                gate_s.at[slot][...] = row_stream.narrow(dy_sigmoid * u * (1 + g * (1 - sigmoid)), LAYOUT)
                up_s.at[slot][...] = row_stream.narrow(dy_sigmoid * g, LAYOUT)
                return carry

            def store(tile, slot):
                t, f = at(tile)
                for i, s in enumerate((gate_s, up_s)):
                    plgpu.copy_smem_to_gmem(s.at[slot], out_g.at[t, i, f], commit_group=False)

            row_stream.stream(tiles, stages, loaded, load, work, store)

        pl.run_scoped(
            scoped,
            *[plgpu.SMEM((stages, rows, COLUMNS), gate_up_TN.dtype)] * 3,
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        )

    out = jax.ShapeDtypeStruct((T, 2, F), gate_up_TN.dtype)
    run = row_stream.kernel(body, programs=row_stream.programs(tiles, programs), out_type=out)
    return run(gate_up_TN.reshape(T, 2, F), dy_TF).reshape(T, 2 * F)


def backward(gate_up_TN: jax.Array, dy_TF: jax.Array) -> jax.Array:
    """Gradient of gate_up, [T, 2 F]."""
    return _call(gate_up_TN, dy_TF, plan=schedule(*dy_TF.shape))

"""Gradient of RMSNorm on Hopper in one pass over the rows; the weight's gradient is added up on the way.

No bits are claimed between shapes, but a launch has the same bits every time: a program adds up the weight's gradient of its
tiles in order, and XLA adds the programs' sums in a fixed order.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import row_stream
from pallas_kernels.rms_norm.hopper_layout import WARP_COLUMNS, row_layout, unit


def schedule(D: int) -> tuple[int, int, int]:
    """(rows of a tile, slots, programs a multiprocessor)."""
    row_bytes = -(-D // (4 * WARP_COLUMNS)) * 4 * WARP_COLUMNS * 2 * 3
    rows = 2
    while rows < 4 and 2 * rows * row_bytes <= 49152:
        rows *= 2
    return rows, 2, max(1, min(4, 221184 // (2 * rows * row_bytes + D * 2)))


@functools.partial(jax.jit, static_argnames=("eps", "plan"))
def _call(h_TD, w_D, dy_TD, dh_TD, *, eps: float, plan):
    T, D = h_TD.shape
    rows, stages, programs = plan
    u = unit(D)
    layout = row_layout(4, u)
    pieces, per_piece = -(-D // (4 * WARP_COLUMNS)), 4 * WARP_COLUMNS // u
    tiles = -(-T // rows)
    programs = row_stream.programs(tiles, programs)
    cut = lambda x: x.reshape(*x.shape[:-1], D // u, u)  # noqa: E731

    def body(h_g, dy_g, dh_g, w_g, dx_g, dw_g):
        program = lax.axis_index(row_stream.AXIS)
        whole = pl.ds(program * 0, pieces * per_piece)  # past D the copy engine fills in zeros

        def scoped(h_s, dy_s, dh_s, w_s, loaded, w_loaded):
            plgpu.copy_gmem_to_smem(w_g.at[whole], w_s, w_loaded)

            def load(tile, slot):
                for g, s in ((h_g, h_s), (dy_g, dy_s), (dh_g, dh_s)):
                    plgpu.copy_gmem_to_smem(g.at[pl.ds(tile * rows, rows), whole], s.at[slot], loaded.at[slot])

            def work(slot, sums):
                part = lambda s, p: s.at[slot, :, pl.ds(p * per_piece, per_piece)]  # noqa: E731

                def read(s, p):
                    return row_stream.widen(plgpu.load(part(s, p), layout=layout, optimized=False), layout)

                def weight(p):
                    w = plgpu.load(w_s.at[pl.ds(p * per_piece, per_piece)], layout=layout.reduce(0), optimized=False)
                    return row_stream.widen(row_stream.spread(w, (rows, per_piece, u), (1, 2), layout), layout)

                squares = products = row_stream.full((rows, per_piece, u), 0, layout)
                for p in range(pieces):
                    h = read(h_s, p)
                    squares = squares + h * h
                    products = products + h * (read(dy_s, p) * weight(p))
                r = row_stream.inverse_root(squares.sum(axis=2).sum(axis=1), D, eps, layout.reduce(2).reduce(1))
                mean = products.sum(axis=2).sum(axis=1) * r * (1 / D)
                r, mean = (row_stream.spread(x, squares.shape, (0,), layout) for x in (r, mean))
                after = []
                for p in range(pieces):
                    n, dy = read(h_s, p) * r, read(dy_s, p)
                    after.append(sums[p] + (dy * n).sum(axis=0))
                    dx = r * (dy * weight(p) - n * mean) + read(dh_s, p)
                    part(h_s, p)[...] = row_stream.narrow(dx, layout)
                return tuple(after)

            def store(tile, slot):
                plgpu.copy_smem_to_gmem(h_s.at[slot], dx_g.at[pl.ds(tile * rows, rows), whole], commit_group=False)

            zeros = tuple(row_stream.full((per_piece, u), 0, layout.reduce(0)) for _ in range(pieces))
            ready = lambda: plgpu.barrier_wait(w_loaded)  # noqa: E731
            sums = row_stream.stream(tiles, stages, loaded, load, work, store, ready, zeros)
            for p, s in enumerate(sums):
                dw_g.at[program, pl.ds(p * per_piece, per_piece)][...] = s

        pl.run_scoped(
            scoped,
            *[plgpu.SMEM((stages, rows, pieces * per_piece, u), h_TD.dtype)] * 3,
            plgpu.SMEM((pieces * per_piece, u), h_TD.dtype),
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            plgpu.Barrier(),
        )

    out_type = [
        jax.ShapeDtypeStruct((T, D // u, u), h_TD.dtype),
        jax.ShapeDtypeStruct((programs, pieces * per_piece, u), jnp.float32),
    ]
    dx, dw = row_stream.kernel(body, programs=programs, out_type=out_type)(*map(cut, (h_TD, dy_TD, dh_TD, w_D)))
    return dx.reshape(T, D), jnp.sum(dw, axis=0).reshape(-1)[:D]


def backward(h_TD, w_D, dy_TD, dh_TD, eps: float) -> tuple[jax.Array, jax.Array]:
    """(gradient of h, fp32 gradient of the weight); dh is what comes to h by other ways than the norm."""
    return _call(h_TD, w_D, dy_TD, dh_TD, eps=eps, plan=schedule(h_TD.shape[1]))

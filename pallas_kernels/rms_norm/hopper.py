"""RMSNorm on Hopper: rows stream through shared memory, a row in one warp or in four, its sum in one order in any batch."""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels import mosaic, row_stream
from pallas_kernels.rms_norm import hopper_backward
from pallas_kernels.rms_norm.hopper_layout import WARP_COLUMNS, row_layout, unit
from pallas_kernels.weight import Weight

VERSION = 1


def entry(D: int, eps: float, dtype, has_residual: bool) -> dict:
    """This implementation's line in the contract: all that reaches the bits."""
    row_stream.refuse_all_but_bf16("rms_norm", dtype)
    warps = row_warps(D)
    return {
        "implementation": "hopper",
        "version": VERSION,
        "arch": "sm90",
        "accumulate": "float32",
        "order": f"{warps * WARP_COLUMNS}-wide pieces in order; of the sums of a piece's columns 8 neighbours in order, "
        f"32 lanes by doubling distance, {warps} warps by pairs",
        "width": D,
        "eps": float(eps).hex(),
        "normalise": "x * (1 / sqrt(sum / width + eps)), each operation rounded to nearest",
        "round": [f"x + residual: {dtype}"] * has_residual + [f"normalised: {dtype}", f"times weight: {dtype}"],
    }


def row_warps(D: int) -> int:
    """Warps that share a row: one, or all four of the warpgroup where rows are long. Reaches the bits."""
    return 4 if D > 2560 else 1


def schedule(T: int, D: int, has_residual: bool) -> tuple[int, int, int]:
    """(rows of a tile, slots, programs a multiprocessor). None of them reaches the bits."""
    warps = row_warps(D)
    piece = warps * WARP_COLUMNS
    row_bytes = -(-D // piece) * piece * 2 * (1 + has_residual)
    rows = 4 if warps == 1 else 2
    while rows < 16 and 2 * rows * row_bytes <= 32768 and T > mosaic.SMS * rows:
        rows *= 2
    return rows, 2, max(1, min(4, 221184 // (2 * rows * row_bytes + D * 2)))


@functools.partial(jax.jit, static_argnames=("eps", "plan"))
def _call(x_TD, residual_TD, w: Weight, *, eps: float, plan):
    T, D = x_TD.shape
    rows, stages, programs = plan
    u = unit(D)
    warps = row_warps(D)
    layout = row_layout(warps, u)
    pieces, per_piece = -(-D // (warps * WARP_COLUMNS)), warps * WARP_COLUMNS // u
    tiles = -(-T // rows)
    has_residual = residual_TD is not None
    cut = lambda x: x.reshape(*x.shape[:-1], D // u, u)  # noqa: E731
    operands = tuple(cut(x) for x in ((x_TD, residual_TD) if has_residual else (x_TD,)))
    shape = jax.ShapeDtypeStruct(operands[0].shape, x_TD.dtype)
    n = len(operands)

    def body(*refs):
        in_g, w_g, layer_g, out_g = refs[:n], refs[n], refs[n + 1 : len(refs) - n], refs[len(refs) - n :]
        whole = pl.ds(lax.axis_index(row_stream.AXIS) * 0, pieces * per_piece)  # past D the copy engine fills in zeros

        def scoped(ring, w_s, loaded, w_loaded):
            def weights():
                plgpu.copy_gmem_to_smem(w_g.at[(*(ref[0] for ref in layer_g), whole)], w_s, w_loaded)
                plgpu.barrier_wait(w_loaded)

            def load(tile, slot):
                for g, s in zip(in_g, ring, strict=True):
                    plgpu.copy_gmem_to_smem(g.at[pl.ds(tile * rows, rows), whole], s.at[slot], loaded.at[slot])

            def piece(s, slot, p):
                return s.at[slot, :, pl.ds(p * per_piece, per_piece)]

            def work(slot, carry):
                read = lambda s, p: plgpu.load(piece(s, slot, p), layout=layout, optimized=False)  # noqa: E731
                total = row_stream.full((rows, per_piece, u), 0, layout)
                for p in range(pieces):
                    h = read(ring[0], p)
                    if has_residual:
                        h = row_stream.add(h, read(ring[1], p), layout)
                        piece(ring[1], slot, p)[...] = h
                    h = row_stream.widen(h, layout)
                    total = mosaic.fma(h, h, total, layout)
                r = row_stream.inverse_root(total.sum(axis=2).sum(axis=1), D, eps, layout.reduce(2).reduce(1))
                r = row_stream.spread(r, total.shape, (0,), layout)
                for p in range(pieces):
                    h = row_stream.widen(read(ring[-1], p), layout)
                    y = row_stream.narrow(mosaic.mul(h, r, layout), layout)
                    w = plgpu.load(w_s.at[pl.ds(p * per_piece, per_piece)], layout=layout.reduce(0), optimized=False)
                    w = row_stream.spread(w, y.shape, (1, 2), layout)
                    piece(ring[0], slot, p)[...] = row_stream.mul(y, w, layout)
                return carry

            def store(tile, slot):
                for g, s in zip(out_g, ring, strict=True):
                    plgpu.copy_smem_to_gmem(s.at[slot], g.at[pl.ds(tile * rows, rows), whole], commit_group=False)

            row_stream.stream(tiles, stages, loaded, load, work, store, ready=weights)

        pl.run_scoped(
            scoped,
            [plgpu.SMEM((stages, rows, pieces * per_piece, u), x_TD.dtype)] * n,
            plgpu.SMEM((pieces * per_piece, u), x_TD.dtype),
            plgpu.Barrier(num_arrivals=n, num_barriers=stages),
            plgpu.Barrier(),
        )

    out = row_stream.kernel(body, programs=row_stream.programs(tiles, programs), out_type=[shape] * n)(
        *operands, cut(w.value), *w.index()
    )
    return out[0].reshape(T, D), out[1].reshape(T, D) if has_residual else x_TD


def rms_norm(x_TD, residual_TD, w: Weight, eps: float) -> tuple[jax.Array, jax.Array]:
    """(normalised rows, h): h is x, or x + residual."""
    T, D = x_TD.shape
    return _call(x_TD, residual_TD, w, eps=eps, plan=schedule(T, D, residual_TD is not None))


backward = hopper_backward.backward

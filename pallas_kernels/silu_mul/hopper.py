"""silu(gate) * up on Hopper: tiles of gates and ups stream through shared memory."""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels import mosaic, registry, row_stream
from pallas_kernels.silu_mul import hopper_backward, hopper_of_gemm
from pallas_kernels.silu_mul.hopper_layout import COLUMNS, LAYOUT
from pallas_kernels.silu_mul.hopper_product import product

VERSION = 1


def entry(F: int, dtype) -> dict:
    """This implementation's line in the contract: all that reaches the bits."""
    row_stream.refuse_all_but_bf16("silu_mul", dtype)
    return {
        "implementation": "hopper",
        "version": VERSION,
        "arch": "sm90",
        "inside": "float32: (g * rcp.approx(1 + ex2.approx.ftz(g * -log2(e)))) * u",
        "width": F,
        "round": str(dtype),
    }


def schedule(T: int, F: int) -> tuple[int, int, int]:
    """(rows of a tile, slots, programs a multiprocessor). None of them reaches the bits."""
    rows = 4
    while rows < 16 and T > rows and -(-T // rows) * -(-F // COLUMNS) > 4 * mosaic.SMS:
        rows *= 2
    return rows, 4, 3


@functools.partial(jax.jit, static_argnames="plan")
def _call(gate_up_TN, *, plan):
    T, N = gate_up_TN.shape
    F = N // 2
    if F % 8:
        raise registry.Unsupported(f"silu_mul: the Hopper kernel takes widths that are multiples of 8, not {F}; {registry.USE_CPU}")
    rows, stages, programs = plan
    across = -(-F // COLUMNS)
    tiles = -(-T // rows) * across

    def body(in_g, out_g):
        def scoped(gate_s, up_s, loaded):
            def corner(tile):
                return lax.div(tile, across) * rows, lax.rem(tile, across) * COLUMNS

            # A tile may reach over the gates' end into the ups, or over the row's end into zeros: neither is stored.
            def load(tile, slot):
                t, f = corner(tile)
                for s, column in ((gate_s, f), (up_s, F + f)):
                    plgpu.copy_gmem_to_smem(
                        in_g.at[pl.ds(t, rows), pl.ds(column, COLUMNS)], s.at[slot], loaded.at[slot]
                    )

            def work(slot, carry):
                gate, up = (plgpu.load(s.at[slot], layout=LAYOUT, optimized=False) for s in (gate_s, up_s))
                gate_s.at[slot][...] = product(gate, up, LAYOUT)
                return carry

            def store(tile, slot):
                t, f = corner(tile)
                out = out_g.at[pl.ds(t, rows), pl.ds(f, COLUMNS)]
                plgpu.copy_smem_to_gmem(gate_s.at[slot], out, commit_group=False)

            row_stream.stream(tiles, stages, loaded, load, work, store)

        pl.run_scoped(
            scoped,
            plgpu.SMEM((stages, rows, COLUMNS), gate_up_TN.dtype),
            plgpu.SMEM((stages, rows, COLUMNS), gate_up_TN.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        )

    out = jax.ShapeDtypeStruct((T, F), gate_up_TN.dtype)
    return row_stream.kernel(body, programs=row_stream.programs(tiles, programs), out_type=out)(gate_up_TN)


def silu_mul(gate_up_TN: jax.Array) -> jax.Array:
    """[T, 2 F] -> [T, F]."""
    T, N = gate_up_TN.shape
    return _call(gate_up_TN, plan=schedule(T, N // 2))


backward = hopper_backward.backward
multiplies, of_gemm = hopper_of_gemm.multiplies, hopper_of_gemm.of_gemm

"""The target of a log-probability where it is still to be chosen: the best of what several programs found, and its logit."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic

SHARES = 4
"""Fewest shares of a `Choice`: a warpgroup's warps read one each."""


class Choice(NamedTuple):
    """What shares of the vocabulary offer each row, SHARES of them or more.

    Attributes:
      score_nP: fp32 [shares, P], the best score of each share. index_nP: int32, which entry has it. Equal scores: the lowest entry.
      logits_BV: fp32 [B, V], B rows of the P.
    """

    score_nP: jax.Array
    index_nP: jax.Array
    logits_BV: jax.Array


def better(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The better one of two (score, index), element by element."""
    second = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return jnp.where(second, b[0], a[0]), jnp.where(second, b[1], a[1])


def best(score_g, index_g, wg, wgs: int, rows, layout) -> tuple[jax.Array, jax.Array]:
    """(score, index), [warps, rows] in `layout`: of the shares that the warps of warpgroup `wg` of `wgs` read, every share by one of
    them or by several."""
    shares, warps = score_g.shape[0], SHARES

    def read(n):
        # Past the end the last ones again: the best of all stays the same.
        at = pl.ds(jnp.minimum((n * wgs + wg) * warps, shares - warps), warps)
        return tuple(plgpu.load(ref.at[at, rows], layout=layout, optimized=False) for ref in (score_g, index_g))

    found = [read(n) for n in range(-(-shares // (warps * wgs)))]
    while len(found) > 1:
        found = [better(*pair) if len(pair) == 2 else pair[0] for pair in (found[i : i + 2] for i in range(0, len(found), 2))]
    return found[0]


def logit(z_g, row_P: jax.Array, column_P: jax.Array, layout) -> jax.Array:
    """z_g[row, column], fp32 [P] in `layout`; int32 indices in it, all inside of z_g [B, V] in global memory."""
    if mosaic.interpreting():

        def one(i, found):
            return lax.dynamic_update_index_in_dim(found, z_g[row_P[i], column_P[i]], i, 0)

        return lax.fori_loop(0, len(row_P), one, jnp.zeros(row_P.shape, jnp.float32))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout, layout),
        return_type=plgpu.ShapeDtypeStruct(row_P.shape, jnp.float32, layout=layout),
    )
    def emit(_, ref, row, column):
        f32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
        (row_stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
        wide = lambda register: arith.extsi(i64, vector.extract(register, dynamic_position=[], static_position=[0]))  # noqa: E731
        registers = np.empty(row.registers.shape, dtype=object)
        for at in np.ndindex(registers.shape):
            place = arith.addi(arith.muli(wide(row.registers[at]), mgpu.c(row_stride, i64)), wide(column.registers[at]))
            address = arith.addi(base, arith.muli(place, mgpu.c(4, i64)))
            value = llvm.inline_asm(f32, [address], "ld.global.f32 $0, [$1];", "=f,l", has_side_effects=True)
            registers[at] = vector.broadcast(ir.VectorType.get((1,), f32), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=row.layout, _is_signed=None)

    return emit(z_g, row_P, column_P)

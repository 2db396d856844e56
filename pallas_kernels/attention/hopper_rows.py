"""Rows of a tile in global memory: 64 rows are (token, query head of one group), and only the first `limit` are real.

Rows past the limit belong to another sequence, or to nobody: they are not written, and read as zeros. Every thread moves
the elements that it holds in the layout of a wgmma result, so a row goes to memory without passing through others.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic

SCALAR = plgpu.Layout.WG_SPLAT(())


def _places(layout, shape: tuple[int, ...]):
    """(this thread's first row, its first column, [(static row, static column) of each register]) of a [64, n] or [64]."""
    i32 = ir.IntegerType.get_signless(32)
    n = shape[1] if len(shape) == 2 else 1
    strides = layout.tiling.tile_strides((n, 1)[: len(shape)])
    dynamic = [mgpu.c(s, i32) for s in strides[-layout.tiled_tiling_rank :]]
    own = arith.addi(
        mgpu.utils.dyn_dot(layout.warp_indices(), dynamic), mgpu.utils.dyn_dot(layout.lane_indices(), dynamic)
    )
    size = mgpu.c(n, i32)
    static = [
        divmod(sum(i * s for i, s in zip(index, strides, strict=True)), n)
        for index in np.ndindex(layout.registers_shape(shape))
    ]
    return arith.divui(own, size), arith.remui(own, size), static


def _pointers(ref, layout, shape, token, head, limit, G: int):
    """[(index of register, address, predicate)]: where each register of a tile lies in ref [.., H, n] or [.., H]."""
    i32, i64 = (ir.IntegerType.get_signless(b) for b in (32, 64))
    ty = ir.MemRefType(ref.type)
    (token_stride, head_stride, *_), _ = ty.get_strides_and_offset()
    item = mgpu.bitwidth(ty.element_type) // 8
    base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
    row0, column0, static = _places(layout, shape)
    rows = {}
    for row, _ in static:
        if row in rows:
            continue
        r = arith.addi(row0, mgpu.c(row, i32))
        t = arith.addi(token, arith.divui(r, mgpu.c(G, i32)))
        h = arith.addi(head, arith.remui(r, mgpu.c(G, i32)))
        terms = ((t, token_stride), (h, head_stride), (column0, 1))
        start = functools.reduce(arith.addi, (arith.muli(arith.extsi(i64, x), mgpu.c(s * item, i64)) for x, s in terms))
        real = arith.cmpi(arith.CmpIPredicate.ult, r, limit)
        rows[row] = arith.addi(base, start), arith.select(real, mgpu.c(1, i32), mgpu.c(0, i32))
    return [(arith.addi(rows[row][0], mgpu.c(column * item, i64)), rows[row][1]) for row, column in static]


def store(ref, x, token, head, limit, G: int) -> None:
    """Writes rows r < limit of x to ref[token + r // G, head + r % G].

    Args:
      ref: [T, H, n] with x [64, n], or [T, H] with x [64], in global memory.
      x: 2-byte or 4-byte elements, in the layout of a wgmma result or of its rows.
      token, head, limit: int32 scalars.
      G: query heads of one group.
    """
    if mosaic.interpreting():

        def one(r, carry):
            ref[token + r // G, head + r % G] = lax.dynamic_index_in_dim(x, r, keepdims=False)
            return carry

        lax.fori_loop(0, limit, one, None)
        return
    layout = plgpu.Layout.WGMMA if x.ndim == 2 else mosaic.row_layout()

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, SCALAR, SCALAR, SCALAR))
    def emit(_, ref, x, token, head, limit):
        scalars = (s.registers.item() for s in (token, head, limit))
        places = _pointers(ref, x.layout, x.shape, *scalars, G)
        for (address, real), register in zip(places, x.registers.flat, strict=True):
            size = ir.VectorType(register.type).shape[0] * mgpu.bitwidth(x.mlir_dtype)
            word = ir.IntegerType.get_signless(min(size, 32))
            words = vector.bitcast(ir.VectorType.get((size // word.width,), word), register)
            values = [
                vector.extract(words, dynamic_position=[], static_position=[i]) for i in range(size // word.width)
            ]
            data = ", ".join(f"${i + 2}" for i in range(len(values)))
            data = f"{{{data}}}" if len(values) > 1 else data
            kind = f"v{len(values)}.b{word.width}" if len(values) > 1 else f"b{word.width}"
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [address, real, *values],
                f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.global.{kind} [$0], {data}; }}",
                "l,r" + ",r" * len(values),
                has_side_effects=True,
            )

    emit(ref, x, token, head, limit)


def load(ref, shape: tuple[int, ...], token, head, limit, G: int) -> jax.Array:
    """fp32 [64, n] or [64]: ref[token + r // G, head + r % G] for rows r < limit, zeros in the other rows.

    Args:
      ref: fp32 [T, H, n] or [T, H] in global memory.
      shape: (64, n) or (64,).
      token, head, limit: int32 scalars.
      G: query heads of one group.
    """
    if mosaic.interpreting():

        def one(r, x):
            return lax.dynamic_update_index_in_dim(x, ref[token + r // G, head + r % G], r, 0)

        return lax.fori_loop(0, limit, one, jnp.zeros(shape, jnp.float32))
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else mosaic.row_layout()

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout),
    )
    def emit(_, ref, token, head, limit):
        tiled = layout.to_mgpu()
        scalars = (s.registers.item() for s in (token, head, limit))
        f32 = ir.F32Type.get()
        registers = []
        for address, real in _pointers(ref, tiled, shape, *scalars, G):
            n = tiled.vector_length
            out = ", ".join(f"${i}" for i in range(n))
            zero = "".join(f"mov.f32 ${i}, 0f00000000; " for i in range(n))
            kind, out = (f"v{n}.f32", f"{{{out}}}") if n > 1 else ("f32", out)
            result = llvm.inline_asm(
                ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * n)})>") if n > 1 else f32,
                [address, real],
                f"{{ .reg .pred p; setp.ne.b32 p, ${n + 1}, 0; {zero}@p ld.global.{kind} {out}, [${n}]; }}",
                ",".join(["=&f"] * n) + ",l,r",
                has_side_effects=True,
            )
            values = [llvm.extractvalue(f32, result, [i]) for i in range(n)] if n > 1 else [result]
            register = llvm.mlir_undef(ir.VectorType.get((n,), f32))
            for i, value in enumerate(values):
                register = vector.insert(value, register, dynamic_position=[], static_position=[i])
            registers.append(register)
        array = np.empty(len(registers), dtype=object)
        array[:] = registers
        return mgpu.FragmentedArray(
            _registers=array.reshape(tiled.registers_shape(shape)), _layout=tiled, _is_signed=None
        )

    return emit(ref, token, head, limit)

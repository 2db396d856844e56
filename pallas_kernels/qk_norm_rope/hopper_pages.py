"""Rows to their places in pages, and elements from theirs, each thread what it holds."""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic


def store(pages, x_Mh: jax.Array, row_Mh: jax.Array, column_Mh: jax.Array, layout) -> None:
    """Writes x to pages[row, column], element by element; rows below 0 are not written.

    Args:
      pages: [R, n] in global memory, of x's dtype.
      x_Mh: bf16, in `layout`, whose vectors lie along a row; row_Mh, column_Mh: int32 like it, the same row, and neighbouring
        columns, in the elements of a vector.
    """
    if mosaic.interpreting():

        def one(r, carry):
            @pl.when(row_Mh[r, 0] >= 0)
            def _():
                pages[row_Mh[r, 0], pl.ds(column_Mh[r, 0], x_Mh.shape[1])] = lax.dynamic_index_in_dim(
                    x_Mh, r, keepdims=False
                )

            return carry

        lax.fori_loop(0, x_Mh.shape[0], one, None)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout, layout))
    def emit(_, pages, x, row, column):
        i32, i64 = (ir.IntegerType.get_signless(b) for b in (32, 64))
        ty = ir.MemRefType(pages.type)
        (row_stride, _), _ = ty.get_strides_and_offset()
        item = mgpu.bitwidth(ty.element_type) // 8
        base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(pages))
        first = lambda register: vector.extract(register, dynamic_position=[], static_position=[0])  # noqa: E731
        for register, r, c in zip(x.registers.flat, row.registers.flat, column.registers.flat, strict=True):
            r, c = first(r), first(c)
            offset = arith.addi(
                arith.muli(arith.extsi(i64, r), mgpu.c(row_stride * item, i64)),
                arith.muli(arith.extsi(i64, c), mgpu.c(item, i64)),
            )
            (n,) = ir.VectorType(register.type).shape
            words = vector.bitcast(ir.VectorType.get((n // 2,), i32), register)
            values = [vector.extract(words, dynamic_position=[], static_position=[i]) for i in range(n // 2)]
            data = ", ".join(f"${i + 2}" for i in range(len(values)))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [arith.addi(base, offset), r, *values],
                f"{{ .reg .pred p; setp.ge.s32 p, $1, 0; @p st.global.v{len(values)}.b32 [$0], {{{data}}}; }}",
                "l,r" + ",r" * len(values),
                has_side_effects=True,
            )

    emit(pages, x_Mh, row_Mh, column_Mh)


def load(source, offset: jax.Array, layout) -> jax.Array:
    """source[offset] of any offsets, like `offset`: now, not where the compiler finds that it is needed.

    Args:
      source: [n] in global memory, of 2- or 4-byte values.
      offset: int32 in `layout`: neighbours, from a multiple of their number on, in the elements of a vector; inside of source.
    """
    if mosaic.interpreting():
        return jnp.take(source[...], offset, axis=0)
    out = plgpu.ShapeDtypeStruct(offset.shape, source.dtype, layout=layout)
    signed = jnp.issubdtype(source.dtype, jnp.integer)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=out)
    def emit(_, source, offset):
        i32, i64 = (ir.IntegerType.get_signless(b) for b in (32, 64))
        element = ir.MemRefType(source.type).element_type
        item = mgpu.bitwidth(element) // 8
        base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(source))

        def one(register):
            (n,) = ir.VectorType(register.type).shape
            count = n * item // 4
            at = arith.extsi(i64, vector.extract(register, dynamic_position=[], static_position=[0]))
            address = arith.addi(base, arith.muli(at, mgpu.c(item, i64)))
            names = ", ".join(f"${i}" for i in range(count))
            load = f"ld.global.v{count}.b32 {{{names}}}" if count > 1 else "ld.global.b32 $0"
            words = llvm.inline_asm(
                i32 if count == 1 else ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>"),
                [address],
                f"{load}, [${count}];",
                "=r," * count + "l",
                has_side_effects=True,
            )
            packed = llvm.mlir_undef(ir.VectorType.get((count,), i32))
            for i in range(count):
                word = words if count == 1 else llvm.extractvalue(i32, words, [i])
                packed = vector.insert(word, packed, dynamic_position=[], static_position=[i])
            return mgpu.utils.bitcast(packed, ir.VectorType.get((n,), element))

        return offset._pointwise(one, output_is_signed=offset.is_signed if signed else None)

    return emit(source, offset)

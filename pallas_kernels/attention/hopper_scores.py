"""Scores of one block on the tensor core, without zeros to start from: the first product overwrites. And their mask.

An accumulator of Mosaic's begins as zeros that the warpgroup writes to its registers, while it has the tensor core and the
others wait for it. The bits are the same, as are the instructions after the first.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels import mosaic

IN_FLIGHT = plgpu.Layout._WGMMA_ACC_32BIT  # noqa: SLF001  (of a wgmma's registers, one each: nothing is computed from them)
DEPTH = 16
"""K of one wgmma."""


def issue(q_refs, k_refs) -> jax.Array:
    """Issues S = sum of q k^T as one group; fp32 [64, n], not to be touched before a wait and `landed`.

    Args:
      q_refs: bf16 [64, 64] in shared memory, mosaic.TILED.
      k_refs: as many, [n, 64].
    """
    n = k_refs[0].shape[0]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(mosaic.TILED),) * (2 * len(q_refs)),
        return_type=plgpu.ShapeDtypeStruct((64, n), jnp.float32, layout=IN_FLIGHT),
    )
    def emit(_, *refs):
        layout = IN_FLIGHT.to_mgpu()
        one = ir.VectorType.get((1,), ir.F32Type.get())
        nvvm.wgmma_fence_aligned()
        registers = []
        for q, k in zip(refs[: len(q_refs)], refs[len(q_refs) :], strict=True):
            at_q, step_q = _descriptor(q, (64, 64), logical_k_major=False)
            at_k, step_k = _descriptor(mgpu.utils.memref_transpose(k, (1, 0, 3, 2)), (64, n), logical_k_major=True)
            for i in range(64 // DEPTH):
                registers = _multiply(registers, _forward(at_q, i * step_q), _forward(at_k, i * step_k), n, one)
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)
        array = np.empty(len(registers), dtype=object)
        array[:] = registers
        return mgpu.FragmentedArray(
            _registers=array.reshape(layout.registers_shape((64, n))), _layout=layout, _is_signed=None
        )

    return emit(*q_refs, *k_refs)


def landed(s_MB: jax.Array) -> jax.Array:
    """The scores that a wait has made complete."""
    return plgpu.layout_cast(mosaic.here(s_MB, IN_FLIGHT), plgpu.Layout.WGMMA)


def _descriptor(ref, group: tuple[int, int], logical_k_major: bool):
    """(a matrix in shared memory as a wgmma takes it, bytes from one K of 16 to the next)."""
    (base, (none, (step, *_))), _, fastest = mma_utils.create_descriptor(
        ref, swizzle=128, large_tile=(64, 64), group_size=group, logical_k_major=logical_k_major
    )
    assert not none and fastest == mma_utils.Dim.K
    return base, step


def _forward(descriptor, size: int):
    return arith.addi(descriptor, mgpu.c(size >> 4, ir.IntegerType.get_signless(64))) if size else descriptor


def _multiply(registers: list, a, b, n: int, one):
    """Issues one wgmma that adds to `registers`, or fills them if there are none yet; the registers after it."""
    count = n // 2
    outs = ", ".join(f"${i}" for i in range(count))
    at = count + len(registers)
    ptx = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(bool(registers))}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k{DEPTH}.f32.bf16.bf16 {{{outs}}}, ${at}, ${at + 1}, p, 1, 1, 0, 0; }}"
    )
    constraints = ["=f"] * count + [str(i) for i in range(len(registers))] + ["l", "l"]
    out = llvm.inline_asm(
        llvm.StructType.get_literal([one] * count),
        [*registers, a, b],
        ptx,
        ",".join(constraints),
        has_side_effects=True,
    )
    return [llvm.extractvalue(one, out, [i]) for i in range(count)]


def hide(s_MB, G: int, ahead):
    """Scores, -inf where the key comes after the row; ahead: position of the first row's token less that of the first key."""
    if mosaic.interpreting():
        iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, s_MB.shape, layout=plgpu.Layout.WGMMA)
        return jnp.where(iota(1) <= lax.div(iota(0), G) + ahead, s_MB, -jnp.inf)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct(s_MB.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def emit(_, s, ahead):
        i32 = ir.IntegerType.get_signless(32)

        def const(value):
            return mgpu.c(value, i32)

        thread = arith.remui(mgpu.utils.thread_idx(), const(128))
        lane = arith.remui(thread, const(32))
        row = arith.addi(arith.muli(arith.divui(thread, const(32)), const(16)), arith.divui(lane, const(4)))
        ahead = arith.subi(ahead.registers.item(), arith.muli(arith.remui(lane, const(4)), const(2)))
        # Opaque: what differs between a thread's elements stays an immediate of each comparison.
        last = [
            llvm.inline_asm(
                i32,
                [ahead, arith.divui(arith.addi(row, const(8 * i)), const(G))],
                "add.s32 $0, $1, $2;",
                "=r,r,r",
                has_side_effects=True,
            )
            for i in (0, 1)
        ]
        never = mgpu.c(-float("inf"), ir.F32Type.get())
        out = np.empty_like(s.registers)
        for at, pair in np.ndenumerate(s.registers):  # at[1]: group of 8 columns, at[4]: of 8 rows
            for e in range(2):
                seen = arith.cmpi(arith.CmpIPredicate.sge, last[at[4]], const(8 * at[1] + e))
                score = vector.extract(pair, dynamic_position=[], static_position=[e])
                score = arith.select(seen, score, never)
                pair = vector.insert(score, pair, dynamic_position=[], static_position=[e])
            out[at] = pair
        return mgpu.FragmentedArray(_registers=out, _layout=s.layout, _is_signed=None)

    return emit(s_MB, ahead)

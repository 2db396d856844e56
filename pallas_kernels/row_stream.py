"""What the Hopper row kernels share: a ring of shared memory that rows pass through, and the packed arithmetic of bf16.

The kernels are bound by memory bandwidth. A program of one warpgroup keeps `stages` tiles of rows in flight: copied in by
the copy engine, changed in place, copied out. A row lies in one warp, or in part of one, whatever the tile: its
bits cannot depend on the tile, on its place in it, or on other rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic, registry

AXIS = "program"


def refuse_all_but_bf16(op: str, dtype) -> None:
    """Raises registry.Unsupported for another dtype."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        raise registry.Unsupported(
            f"{op}: the Hopper kernel takes bfloat16, not {jnp.dtype(dtype)}; {registry.USE_BF16}"
        )


def stream(
    tiles: int,
    stages: int,
    loaded,
    load: Callable[[jax.Array, jax.Array], None],
    work: Callable,
    store: Callable[[jax.Array, jax.Array], None],
    ready: Callable[[], None] = lambda: None,
    carry=(),
):
    """Takes this program's tiles (its own index, and so on in steps of the number of programs) through the ring.

    Args:
      tiles: how many there are in all.
      stages: slots of the ring.
      loaded: one barrier a slot; a slot's copies arrive there.
      load: (tile, slot): starts the copies into a slot.
      work: (slot, carry): changes a slot in place; returns the carry of the next tile.
      store: (tile, slot): starts the copies out of a slot, as part of no group yet.
      ready: called once, between the first copies in and the first work.
      carry: arrays that go from one tile's work to the next.

    Returns:
      The last tile's carry.
    """
    program, programs = lax.axis_index(AXIS), lax.axis_size(AXIS)
    mine = lax.div(tiles - program + (programs - 1), programs)

    def load_number(i):
        load(program + i * programs, lax.rem(i, stages))

    for i in range(stages):
        pl.when(i < mine)(lambda i=i: load_number(jnp.int32(i)))

    ready()

    def step(i, carry):
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(loaded.at[slot])
        carry = work(slot, carry)
        plgpu.commit_smem()
        store(program + i * programs, slot)
        plgpu.commit_smem_to_gmem_group()

        @pl.when((i > 0) & (i - 1 + stages < mine))
        def _refill():
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the slot of the step before has been read
            load_number(i - 1 + stages)

        return carry

    carry = lax.fori_loop(0, mine, step, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry


def programs(tiles: int, per_sm: int) -> int:
    """How many programs a kernel has: at most `per_sm` on each multiprocessor."""
    return min(tiles, mosaic.SMS * per_sm)


def kernel(body, *, programs: int, **options):
    """`mosaic.kernel` on a line of programs of one warpgroup."""
    return mosaic.kernel(
        body,
        grid=(programs,),
        grid_names=(AXIS,),
        # A thread reads and writes the same addresses of a slot and no others; commit_smem and the waits do the rest.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **options,
    )


def spread(x: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...], layout) -> jax.Array:
    """x, whose axes are `axes` of `shape`, spread over the other axes of an array in `layout`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, axes), layout)


def full(shape: tuple[int, ...], value: float, layout) -> jax.Array:
    """fp32 array of one value in `layout`."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def inverse_root(total: jax.Array, D: int, eps: float, layout) -> jax.Array:
    """1 / sqrt(total / D + eps), every operation rounded to nearest."""
    mean = mosaic.div(total, float(D), layout)
    return mosaic.div(1.0, mosaic.sqrt(mosaic.add(mean, float(eps), layout), layout), layout)


def _packed(instruction: str, operands, layout, fallback):
    """A PTX instruction on pairs of bf16; arrays of one shape and `layout`, vectors of an even length."""
    if mosaic.interpreting():
        return fallback(*operands)
    out = plgpu.ShapeDtypeStruct(operands[0].shape, jnp.bfloat16, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * len(operands), return_type=out)
    def emit(_, first, *rest):
        lift = fragmented_array.FragmentedArray._lift_fast_packed_instr
        return first._pointwise(lift(f"{instruction}.bf16x2", f"{instruction}.bf16"), *rest)

    return emit(*operands)


def _rounded(op):
    return lambda x, y: op(x.astype(jnp.float32), y.astype(jnp.float32)).astype(jnp.bfloat16)


def mul(x: jax.Array, y: jax.Array, layout) -> jax.Array:
    """x * y of bf16, rounded to bf16, never fused with an addition."""
    return _packed("mul.rn", (x, y), layout, _rounded(jnp.multiply))


def add(x: jax.Array, y: jax.Array, layout) -> jax.Array:
    """x + y of bf16, rounded to bf16, never fused with a product."""
    return _packed("add.rn", (x, y), layout, _rounded(jnp.add))


def sub(x: jax.Array, y: jax.Array, layout) -> jax.Array:
    """x - y of bf16, rounded to bf16, never fused with a product."""
    return _packed("sub.rn", (x, y), layout, _rounded(jnp.subtract))


def _vector(words: list[ir.Value]) -> ir.Value:
    """The vector of these values of one type."""
    out = llvm.mlir_undef(ir.VectorType.get((len(words),), words[0].type))
    for i, word in enumerate(words):
        out = vector.insert(word, out, dynamic_position=[], static_position=[i])
    return out


def widen(x: jax.Array, layout) -> jax.Array:
    """bf16 to fp32, two elements an instruction each: the bits of a bf16 are the upper half of its fp32."""
    if mosaic.interpreting():
        return x.astype(jnp.float32)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout))
    def emit(_, x):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        sixteen, upper = (arith.constant(i32, n) for n in (16, -65536))

        def one(register):
            (n,) = ir.VectorType(register.type).shape
            pairs = utils.bitcast(register, ir.VectorType.get((n // 2,), i32))
            words = []
            for i in range(n // 2):
                pair = vector.extract(pairs, dynamic_position=[], static_position=[i])
                words += [arith.shli(pair, sixteen), arith.andi(pair, upper)]
            return utils.bitcast(_vector(words), ir.VectorType.get((n,), f32))

        return x._pointwise(one)

    return emit(x)


def narrow(x: jax.Array, layout) -> jax.Array:
    """fp32 to bf16, rounded to nearest even, two elements an instruction."""
    if mosaic.interpreting():
        return x.astype(jnp.bfloat16)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.bfloat16, layout=layout))
    def emit(_, x):
        i32, bf16 = ir.IntegerType.get_signless(32), ir.BF16Type.get()

        def one(register):
            (n,) = ir.VectorType(register.type).shape
            words = [vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(n)]
            pairs = [
                llvm.inline_asm(i32, [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")
                for low, high in zip(words[::2], words[1::2], strict=True)
            ]
            return utils.bitcast(_vector(pairs), ir.VectorType.get((n,), bf16))

        return x._pointwise(one)

    return emit(x)

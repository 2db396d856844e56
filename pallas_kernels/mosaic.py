"""What our Hopper kernels need of Mosaic GPU and is bound to one JAX release: launch, interpreter, explicit arithmetic.

Mosaic emits float add, sub and mul with contraction allowed, so the compiler may fuse a product and a sum in one
specialisation of a kernel and not in another. Arithmetic whose rounding reaches the bits goes through the functions here:
each is one PTX instruction that no compiler pass fuses, splits or reorders.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import launch_context
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.mosaic.gpu.fragmented_array import optimization_barrier
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_kernels import environment

SMS = 132
"""Streaming multiprocessors of an H100 SXM or H200: persistent kernels launch this many programs."""

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""Layout in shared memory of a 2-byte matrix whose rows are multiples of 64 long, as wgmma and TMA want it."""

_interpret: contextvars.ContextVar[bool] = contextvars.ContextVar("interpret", default=False)
_trace_context = jax.make_user_context(False)


INTERPRETER_THREADS = 32
"""Threads of XLA's CPU client that the interpreter needs: each warpgroup that waits holds one."""


@contextlib.contextmanager
def interpreted():
    """Kernels traced inside run on the CPU, in JAX's GPU interpreter with race detection.

    Raises:
      RuntimeError: XLA's CPU client has so few threads that warpgroups could wait for each other for ever.
    """
    if environment.cpu_threads() < INTERPRETER_THREADS:
        raise RuntimeError(
            f"JAX's GPU interpreter needs more threads than this process has ({environment.cpu_threads()}): set "
            f"PJRT_NPROC={INTERPRETER_THREADS} before JAX starts (`make test` does)"
        )
    token = _interpret.set(True)
    try:
        with _trace_context(True):  # part of the key of JAX's caches: nothing is answered from a trace for the GPU
            yield
    finally:
        _interpret.reset(token)


def interpreting() -> bool:
    """Whether kernels are being traced for the interpreter."""
    return _interpret.get()


def kernel(body, **options):
    """`plgpu.kernel`, or its interpreted form inside `interpreted()`. A profile shows it by the op and the function that made it."""
    if interpreting():
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)
    return plgpu.kernel(body, kernel_name=_name(body), **options)


def _name(body) -> str:
    """attention_decode_merge_splits, of `merge_splits` in attention/hopper_decode.py."""
    words = body.__module__.split(".")[1:] + [body.__qualname__.partition(".<locals>")[0]]
    return "_".join(word.removeprefix("hopper").strip("_") for word in words if word != "hopper")


_announce = mosaic_utils.BarrierRef.arrive_expect_tx


def _announce_relaxed(self, tx_count: int, predicate=None) -> None:
    """Announces a store to another program's shared memory at that program's barrier, without releasing all that this thread
    has written before, as Mosaic does: it waits for the whole GPU, and the bytes of the store itself are all that is waited
    for at the barrier."""
    if self.base_address.type != ir.Type.parse("!llvm.ptr<7>") or predicate is not None:  # its own program's barrier
        return _announce(self, tx_count, predicate)
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [self.get_ptr(), mosaic_utils.c(tx_count, ir.IntegerType.get_signless(32))],
        "mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [$0], $1;",
        "l,r",
        has_side_effects=True,
    )


mosaic_utils.BarrierRef.arrive_expect_tx = _announce_relaxed


STREAM = plgpu.OOBFillMode.UNDEFINED
"""`oob_mode` of a copy to shared memory of what is read once, such as a weight: its lines leave the L2 cache first. What lies
outside of the array is then not said to be zero. A copy in Mosaic takes no cache hint, so that this mode, which it has no other
use for, stands for one; without it nothing changes."""
_EVICT_FIRST = 0x12F0000000000000  # CUTLASS, cute::TMA::CacheHintSm90
_hint: contextvars.ContextVar[int | None] = contextvars.ContextVar("hint", default=None)
_copy, _load = launch_context.LaunchContext.async_copy, nvvm.cp_async_bulk_tensor_shared_cluster_global


def _copy_with_hint(self, *, oob_mode=launch_context.OOBFillMode.ZEROS, **operands):
    token = _hint.set(_EVICT_FIRST if oob_mode == launch_context.OOBFillMode.UNDEFINED else None)
    try:
        _copy(self, oob_mode=oob_mode, **operands)
    finally:
        _hint.reset(token)


def _load_with_hint(*operands, **options):
    if (hint := _hint.get()) is not None:
        options["l2_cache_hint"] = mosaic_utils.c(hint, ir.IntegerType.get_signless(64))
    return _load(*operands, **options)


launch_context.LaunchContext.async_copy = _copy_with_hint
nvvm.cp_async_bulk_tensor_shared_cluster_global = _load_with_hint


def _instruction(ptx: str, operands: tuple, layout, fallback):
    """One fp32 PTX instruction on each element of `operands`: arrays of one shape, all in `layout`, and Python floats."""
    if interpreting():
        return fallback(*operands)
    arrays = [x for x in operands if not isinstance(x, float)]
    shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    numbers = itertools.count(1)
    # An array would do for a constant, but Mosaic cannot hand over one that is the same everywhere.
    texts = [
        f"0f{np.float32(x).view(np.uint32):08X}" if isinstance(x, float) else f"${next(numbers)}" for x in operands
    ]

    def scalar(*args):
        return llvm.inline_asm(ir.F32Type.get(), args, f"{ptx} $0, {', '.join(texts)};", "=f" + ",f" * len(args))

    @plgpu.inline_mgpu(
        arg_types=(layout,) * len(arrays), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)
    )
    def emit(_, first, *rest):
        return first._pointwise(first._lift_fast_instr(scalar), *rest)

    return emit(*arrays)


def _product(x, y):
    """x * y in the interpreter. XLA's CPU compiler contracts what it fuses, and fuses nothing out of a conditional."""
    some = next(v for v in (x, y) if not isinstance(v, float)).ravel()[0]
    no_payload = lax.bitcast_convert_type(some, jnp.uint32) != 0x7FC0ABCD  # true, and the compiler does not know
    return lax.cond(no_payload, lambda: x * y, lambda: jnp.zeros(jnp.broadcast_shapes(jnp.shape(x), jnp.shape(y))))


def fma(x: jax.Array, y: jax.Array, z: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """x * y + z, rounded once; fp32 arrays of one shape and `layout`, some of them Python floats."""
    return _instruction("fma.rn.f32", (x, y, z), layout, lambda x, y, z: x * y + z)


def mul(x: jax.Array, y: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """x * y, rounded, never fused with an addition; fp32 arrays of one shape and `layout`."""
    return _instruction("mul.rn.f32", (x, y), layout, _product)


def mul_up(x: jax.Array, y: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """x * y rounded up, so never below the product (to the nearest in the interpreter); arrays as in `mul`."""
    return _instruction("mul.rp.f32", (x, y), layout, lambda x, y: x * y)


def add(x: jax.Array, y: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """x + y, rounded, never fused with a product; fp32 arrays of one shape and `layout`."""
    return _instruction("add.rn.f32", (x, y), layout, lambda x, y: x + y)


def neg(x: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """-x, by the instruction that reads it; `-x` is an instruction of its own, on integers."""
    return _instruction("neg.f32", (x,), layout, jnp.negative)


def exp2(x: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """2**x by the special function unit (2 ulp; exact for whole numbers; subnormals flush to 0)."""
    return _instruction("ex2.approx.ftz.f32", (x,), layout, jnp.exp2)


def ceil(x: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """The next whole number that is not below x, as fp32."""
    return _instruction("cvt.rpi.f32.f32", (x,), layout, jnp.ceil)


def nearest(x: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """The nearest whole number, the even one of two, as fp32."""
    return _instruction("cvt.rni.f32.f32", (x,), layout, jnp.round)


def div(x: jax.Array, y: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """x / y, rounded to nearest."""
    return _instruction("div.rn.f32", (x, y), layout, jnp.divide)


def sqrt(x: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """The square root, rounded to nearest."""
    return _instruction("sqrt.rn.f32", (x,), layout, jnp.sqrt)


def reciprocal(x: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """1 / x by the special function unit (1 ulp, subnormals kept)."""
    return _instruction("rcp.approx.f32", (x,), layout, lambda x: 1 / x)


def log2(x: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """Logarithm to base 2 by the special function unit (subnormals are 0: six instructions fewer for two)."""
    return _instruction("lg2.approx.ftz.f32", (x,), layout, jnp.log2)


def here(x: jax.Array, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """x, computed here, neither before nor after.

    Whatever a wait for products has made complete goes through this, right after the wait: LLVM knows of no tie between the two,
    and where it has unrolled the loop before, it reads the accumulators ahead of the wait. And a sum that the compiler puts off
    until it is needed keeps what it is of in registers.
    """
    if interpreting():
        return x

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout))
    def emit(_, x):
        return optimization_barrier(x)

    return emit(x)


def row_layout(layout=plgpu.Layout.WGMMA):
    """Layout of one value a row of a matrix in `layout`."""
    return layout.reduce(1)


def rows(x_M: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """x [M] spread over the columns of [M, N]."""
    return lax.broadcast_in_dim(x_M, shape, [0])


def named_barrier(what: str, number) -> None:
    """One of the hardware's barriers, for two warpgroups: one calls with "sync" and waits for the other's "arrive"."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),))
    def emit(_, number):
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [number.registers.item()], f"bar.{what} $0, 256;", "r", has_side_effects=True
        )

    emit(number)


def after_last_kernel() -> None:
    """Waits until the kernels before this one have finished and their results can be read; lets the next kernel start.

    A kernel that calls this is launched while the one before it runs ("programmatic dependent launch"): what comes before the
    call overlaps with it, and may neither write global memory nor rely on what it reads there. One warpgroup calls it for all
    that it then feeds.
    """
    results_can_be_read()
    if not interpreting():
        plgpu.griddepcontrol_launch_dependents()


def results_can_be_read() -> None:
    """The wait of `after_last_kernel`, for another warpgroup that reads such results itself."""
    if not interpreting():
        plgpu.griddepcontrol_wait()

"""A barrier of all programs of one Hopper kernel: what one program has stored, another reads after it.

No program may wait for one that has not started. So a kernel with such a barrier has at most as many programs as the GPU has
multiprocessors (`fits`), each small enough for an empty one, in no clusters: whatever runs beside it, each of them gets a
multiprocessor, because other kernels end without it. Two of these kernels never run side by side: the second
needs the first one's result, or calls `mosaic.after_last_kernel` before it touches the counters.

Counters lie in global memory, zero before each kernel and after it: the last program to leave sets them back. A launch of a
replayed graph thus finds what the first one found, no kernel has to clear them, and to XLA they are a constant: their content
between kernels never differs from it.

Memory order. Results go out by the copy engine; the wait for its writes (not only for its reads) makes them visible to ordinary
instructions of the thread that waits (an end of a bulk copy implies a fence between the proxies; a second one, written out,
costs next to nothing), and the warpgroup's barrier after it to the one thread that adds to the counter, with release semantics
at the scope of the GPU. On the other side one thread reads the counter until it is full and fences (acquire,
GPU); the warpgroup's barrier hands that on. If the results are then read by the copy engine, which is another proxy, the
thread that starts the copy must first execute `fence.proxy.async`: all threads of the warpgroup do.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

ARRIVED, LEFT = 0, 1
_AT_REST = np.array([0, 0, 0x67726964], np.int32)
"""The last one is never touched: XLA computes constants of one value anew wherever they are used, with a kernel each time, and
may keep those of equal content once for all its programs: nobody else has this one."""


def counters() -> jax.Array:
    """The operand that `arrive`, `wait` and `leave` take as a reference; one barrier a kernel."""
    return jnp.asarray(_AT_REST)


def fits(programs: int) -> bool:
    """Whether each of so many programs has a multiprocessor of its own on every device of this process."""
    return all(getattr(device, "core_count", 0) >= programs for device in jax.local_devices())


def _counter(ref, index: int) -> ir.Value:
    """Address of one of the counters."""
    i64 = ir.IntegerType.get_signless(64)
    pointer = utils.memref_ptr(ref)
    base = llvm.ptrtoint(i64, pointer)
    return llvm.inttoptr(pointer.type, arith.addi(base, arith.constant(i64, 4 * index)))


def arrive(counters_g) -> None:
    """Says that this program has stored all that others wait for. One warpgroup calls it, after `wait_smem_to_gmem(0)`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, ref):
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)
        utils.SemaphoreRef(_counter(ref, ARRIVED)).signal(1, memory_scope="gpu")

    emit(counters_g)


def wait(counters_g, programs: int) -> None:
    """Until all `programs` have arrived; what they have stored can then be read, by the copy engine too. A warpgroup calls it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, ref):
        utils.SemaphoreRef(_counter(ref, ARRIVED)).wait(programs, decrement=False, memory_scope="gpu")
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

    emit(counters_g)


def leave(counters_g, waiters: int) -> None:
    """After `wait`, by the same warpgroup: the last of `waiters`, the programs that wait, sets the counters back.

    An exchange with acquire and release: all others have read the full counter before they left, so nobody waits for it.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, ref):
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            utils.inline_ptx(
                "{ .reg .pred last; .reg .b32 before;\n"
                "atom.acq_rel.gpu.global.add.u32 before, [$1], 1;\n"
                f"setp.eq.u32 last, before, {waiters - 1};\n"
                "@last st.relaxed.gpu.global.u32 [$0], 0;\n"
                "@last st.relaxed.gpu.global.u32 [$1], 0; }",
                _counter(ref, ARRIVED),
                _counter(ref, LEFT),
                has_side_effects=True,
            )

    emit(counters_g)

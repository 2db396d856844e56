"""The MLP of few tokens in one kernel: each program makes some columns of silu(gate) * up, all wait for all, each makes some
columns of down.

A small model's GEMM is bound by latency: a launch, the first bytes of its weight, a ramp. Here the weight of down is asked for
before the barrier and waits in shared memory when its activations come. Both products are the parts of the few-token GEMM
(`gemm/hopper_parts.py`): chains, trees, roundings and so the bits are those of the two ops.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import gemm, grid_barrier, mosaic, registry
from pallas_kernels.gemm import hopper_gated, hopper_small
from pallas_kernels.gemm.hopper_parts import AXES, Part
from pallas_kernels.gemm.hopper_small import SMEM_BYTES, Schedule
from pallas_kernels.silu_mul import hopper as silu_hopper
from pallas_kernels.silu_mul.hopper_product import product
from pallas_kernels.weight import Weight

TOKENS = (8, 16, 32, 64)
FASTER = frozenset((576, 1536, 576, tokens) for tokens in TOKENS)
"""(D of the result, F, K, most tokens) where one kernel was measured to take less time than two: SmolLM2's, a layer in 9.0 to 11.8
instead of 14.3 to 15.3 us; of Qwen3-0.6B's at 16 tokens it took 14.3 instead of 13.2."""
FIRST_SHARE = 0.6
"""Of shared memory that gates and ups may take; their loads end before those of down begin to be needed."""

MOST_LOADS = 32
"""In flight: Mosaic has no more barriers in one array."""


def pays(x_TK: jax.Array, w_2FK: Weight, w_DF: Weight) -> bool:
    """Whether one kernel serves here, and is known to be faster."""
    T, (D, F), K = len(x_TK), w_DF.shape, w_2FK.shape[-1]
    if T > TOKENS[-1] or (D, F, K, _bucket(T)) not in FASTER or not silu_hopper.multiplies(x_TK, w_2FK):
        return False
    return w_DF.dtype == x_TK.dtype and grid_barrier.fits(max(part.programs for part in parts(T, D, F, K)))


def _bucket(T: int) -> int:
    return next(tokens for tokens in TOKENS if T <= tokens)


def parts(T: int, D: int, F: int, K: int, stacked: bool = True) -> tuple[Part, Part]:
    """Gates and ups, and down, of [T, K]: as few rows of a weight a program as make one wave, as many loads as there is room.

    Raises:
      ValueError: shapes that the kernel does not take.
    """
    if not 1 <= T <= TOKENS[-1]:
        raise ValueError(f"mlp in one kernel takes 1 to {TOKENS[-1]} tokens, not {T}")
    bf16 = jnp.dtype(jnp.bfloat16)
    leaves = gemm.leaf_count(F)
    rows = lambda N, of: next((n for n in of if -(-N // n) <= mosaic.SMS), of[-1])  # noqa: E731
    k_tile = lambda leaf: next((n for n in (192, 128) if leaf % n == 0), 64)  # noqa: E731
    cut = dict(tokens=_bucket(T), stages=2, programs=mosaic.SMS)
    first = Schedule(rows=rows(2 * F, (16, 32, 48, 64)), k_tile=k_tile(K), **cut)
    second = Schedule(rows=rows(D, (8, 16, 32, 48, 64)), k_tile=k_tile(F // leaves), **cut)
    for N, width, n, s, gated in ((F, K, 1, first, True), (D, F, leaves, second, False)):
        if reason := hopper_small.fault(T, N, width, n, N, s, bf16, gated):
            raise ValueError(f"mlp of {T} tokens, D {D}, F {F}, K {K}: {reason}")
    first = _filled(Part(first, T, K, F, F, 1, bf16, gate=product, stacked=stacked), int(SMEM_BYTES * FIRST_SHARE))
    second = Part(second, T, F, D, D, leaves, bf16, stacked=stacked, packed=second.rows < 64)
    return first, _filled(second, SMEM_BYTES - first.smem_bytes(first.schedule.stages))


def _filled(part: Part, room: int) -> Part:
    """The part with as many loads in flight as it has and as fit in so many bytes; two if even those do not."""
    most = min(part.steps * -(-part.tiles // part.programs), MOST_LOADS)
    stages = next((n for n in range(most, 2, -1) if part.smem_bytes(n) <= room), 2)
    return dataclasses.replace(part, schedule=dataclasses.replace(part.schedule, stages=stages))


def recorded(x_TK: jax.Array, w_2FK: Weight, w_DF: Weight, regions: tuple[str, str, str]) -> jax.Array:
    """`mlp`, with the contract's entries of the ops apart."""
    gemm.prepared(x_TK, w_2FK, 1, "column", regions[0], "hopper")
    registry.record(regions[1], silu_hopper.entry(w_DF.shape[-1], x_TK.dtype))
    gemm.prepared(jax.ShapeDtypeStruct((len(x_TK), w_DF.shape[-1]), x_TK.dtype), w_DF, gemm.leaf_count(w_DF.shape[-1]), "row", regions[2], "hopper")
    return mlp(x_TK, w_2FK, w_DF)


def mlp(x_TK: jax.Array, w_2FK: Weight, w_DF: Weight) -> jax.Array:
    """[T, K], bf16 [2, F, K], [D, F] -> [T, D]. In the interpreter, which has no such barrier, the parts are two kernels.

    Raises:
      ValueError: shapes that the kernel does not take, or one weight is a layer of a stack and the other is not.
    """
    T, K = x_TK.shape
    D, F = w_DF.shape
    if T > 8 and T % 8:  # the copy engine moves whole tiles of 8 rows
        return mlp(jnp.pad(x_TK, ((0, -T % 8), (0, 0))), w_2FK, w_DF)[:T]
    stacked = w_2FK.layer is not None
    if stacked != (w_DF.layer is not None):
        raise ValueError("mlp: both weights are layers of stacks, or none is")
    first, second = parts(T, D, F, K, stacked)
    if mosaic.interpreting():
        h_TF = hopper_small.alone(first, x_TK, w_2FK.value, w_2FK.layer)
        return hopper_small.alone(second, h_TF, w_DF.value, w_DF.layer)
    programs = max(first.programs, second.programs)

    def body(x_g, w_2FK_g, w_DF_g, counters_g, *rest):
        *layers_g, h_g, y_g = rest
        place = {axis: lax.axis_index(axis) for axis in AXES}
        program, wg = place["program"], place["wg"]
        in_first, in_second = program < first.programs, program < second.programs

        def scoped(a, b):
            @pl.when(wg == 1)
            def _load():
                mosaic.after_last_kernel()
                index_a, index_b = ((ref[0],) for ref in layers_g) if stacked else ((), ())
                loads_a, loads_b = first.count(place) * first.steps, second.count(place) * second.steps
                ahead = lax.min(loads_b, jnp.int32(second.schedule.stages))

                def load(i, carry):
                    first.wait_for_slot(a, i)
                    first.load_weight(place, a, w_2FK_g, index_a, i)
                    first.load_x(place, a, x_g, i)
                    return carry

                def load_ahead(i, carry):
                    second.load_weight(place, b, w_DF_g, index_b, i)
                    return carry

                def load_activations(i, carry):
                    second.load_x(place, b, h_g, i)
                    return carry

                def load_rest(i, carry):
                    second.wait_for_slot(b, i)
                    second.load_weight(place, b, w_DF_g, index_b, i)
                    second.load_x(place, b, h_g, i)
                    return carry

                @plgpu.warp_map
                def _(warp):
                    @pl.when(warp == 0)
                    def _():
                        @pl.when(in_first)
                        def _():
                            lax.fori_loop(0, loads_a, load, None)

                        @pl.when(in_second)
                        def _():
                            lax.fori_loop(0, ahead, load_ahead, None)

                @pl.when(in_second)
                def _():
                    grid_barrier.wait(counters_g, programs)

                    @plgpu.warp_map
                    def _(warp):
                        @pl.when(warp == 0)
                        def _():
                            lax.fori_loop(0, ahead, load_activations, None)
                            lax.fori_loop(ahead, loads_b, load_rest, None)

                    grid_barrier.leave(counters_g, second.programs)

            @pl.when(wg == 0)
            def _multiply():
                @pl.when(in_first)
                def _():
                    first.multiply(place, a, h_g)  # ends when its stores are complete

                # A program without a tile of `first` may arrive while the kernel before this one still runs: its loader waits
                # for that kernel, and the multiplying warpgroup does too.
                @pl.when(jnp.logical_not(in_first))
                def _():
                    mosaic.after_last_kernel()

                grid_barrier.arrive(counters_g)

                @pl.when(in_second)
                def _():
                    second.multiply(place, b, y_g)

        pl.run_scoped(scoped, first.scratch(), second.scratch(), collective_axes="wg")

    shape = lambda N: jax.ShapeDtypeStruct((T, N), x_TK.dtype)  # noqa: E731
    _, y_TD = mosaic.kernel(
        body,
        out_type=[shape(F), shape(D)],
        grid=(programs, 1),
        grid_names=AXES[:2],
        cluster=(1, 1),
        cluster_names=AXES[2:4],
        num_threads=2,
        thread_name=AXES[4],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(x_TK, hopper_gated.by_eights(w_2FK.value), w_DF.value, grid_barrier.counters(), *w_2FK.index(), *w_DF.index())
    return y_TD

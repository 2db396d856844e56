"""GEMM for at most 256 tokens on Hopper: weights are the M operand of wgmma and tokens its N operand.

Such a GEMM is bound by the bytes of its weight, so a schedule is a way to keep loads of all SMs in flight: how many weight
rows a program takes, whether the leaves of a tree are shared out over a cluster, who loads for whom. None of it reaches the
bits: each leaf of an element is one chain of wgmma over its K in order, whatever the shape of the instruction, and
leaves meet in one balanced tree of fp32 additions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.gemm import hopper_gated
from pallas_kernels.gemm.hopper_parts import AXES, CONSUMER_REGISTERS, WGMMA_ROWS, Part

MAX_TOKENS = 256
SMEM_BYTES = 227 * 1024
LOADER_REGISTERS = 24
TREE_REGISTERS = {1: 192, 2: 192, 3: 96, 4: 64}
"""Of a thread for sums of leaves, by number of consumer warpgroups; where a tree needs more, sums wait in shared memory."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How one small GEMM is cut into programs.

    Attributes:
      rows: weight rows of a program: 8 (not of gates and ups), 16, 32, 48, or a multiple of 64 (one consumer warpgroup for each 64).
      tokens: tokens of a program; a multiple of 8.
      k_tile: length of K of one load, a multiple of 64 that divides a leaf.
      stages: loads in flight.
      split: programs of a cluster that share out the leaves of a tree; a power of two that divides `leaves`.
      join: programs of a cluster with different tokens that share loads of the weight.
      programs: clusters launched, each of which walks over tiles; 0 launches one for each tile.
    """

    rows: int = 64
    tokens: int = 64
    k_tile: int = 64
    stages: int = 4
    split: int = 1
    join: int = 1
    programs: int = 0

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups of a program."""
        return -(-self.rows // WGMMA_ROWS)

    @property
    def owned(self) -> int:
        """Tokens whose sums a program finishes: all of its own, or a share where programs split the leaves."""
        return self.tokens // min(self.split, self.tokens // 8)

    @property
    def swaps(self) -> bool:
        """Whether two programs send each other one half of their sums and keep the other; more of them send all to all."""
        return self.split == 2 and self.owned < self.tokens

    @property
    def received(self) -> int:
        """Sums that a program which shares out leaves receives."""
        return 1 if self.swaps else self.split

    def waiting(self, leaves: int) -> int:
        """Levels of a program's tree whose sums wait in shared memory, if they do; the leaf before the last waits in
        registers."""
        levels = (leaves // self.split).bit_length()
        return 0 if levels * self.tokens // 2 <= TREE_REGISTERS[self.warpgroups] else max(levels - 2, 0)


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What becomes of a program's tiles, where that is more than storing them. A chain's, in bf16.

    Attributes:
      rows: weight rows that belong together: a program has a whole number of them.
      operands: arrays and refs that it reads and writes, after the weight.
      outputs: results of the kernel, instead of y.
      scratch: (schedule) -> what `pl.run_scoped` makes of shared memory, in place of the staged y.
      smem_bytes: (schedule) -> bytes of that.
      begin: (refs of operands and outputs, first token, consumer warpgroup) -> arrays that `end` needs of a program's tokens,
        loaded while the GEMM waits for its first operands.
      end: (begun, y_NT, first weight row of it, consumer warpgroup, refs, scratch): one consumer warpgroup's result of one
        tile, fp32 [64, tokens] in WGMMA. Every consumer of a program calls it for each tile; rows may lie past the weight's
        end. Loads of next tiles go on meanwhile.
    """

    rows: int
    operands: tuple
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    scratch: Callable[[Schedule], Any]
    smem_bytes: Callable[[Schedule], int]
    begin: Callable
    end: Callable


TABLE: dict[tuple[str, int], tuple[tuple[int, Schedule], ...]] = {
    ("chain", 8): (
        (99, Schedule(rows=48, tokens=8, k_tile=128, stages=12)),
        (132, Schedule(tokens=8, k_tile=128, stages=10)),
        (264, Schedule(tokens=8, k_tile=128, stages=12, programs=132)),
        (396, Schedule(tokens=8, k_tile=128, stages=12, programs=132)),
        (0, Schedule(tokens=8, k_tile=128, stages=12, programs=132)),
    ),
    ("chain", 16): (
        (132, Schedule(tokens=16, k_tile=128, stages=9)),
        (264, Schedule(tokens=16, k_tile=128, stages=11, programs=132)),
        (396, Schedule(tokens=16, k_tile=128, stages=11, programs=132)),
        (0, Schedule(tokens=16, k_tile=128, stages=11, programs=132)),
    ),
    ("chain", 32): (
        (132, Schedule(tokens=32, k_tile=128, stages=8)),
        (264, Schedule(rows=128, tokens=32, stages=8)),
        (396, Schedule(tokens=32, k_tile=128, stages=9, programs=132)),
        (0, Schedule(tokens=32, k_tile=128, stages=9, programs=132)),
    ),
    ("chain", 64): (
        (132, Schedule(k_tile=128, stages=6)),
        (264, Schedule(rows=128, stages=8)),
        (396, Schedule(k_tile=128, stages=6, programs=132)),
        (0, Schedule(k_tile=128, stages=6, programs=132)),
    ),
    ("chain", 128): (
        (132, Schedule(tokens=128, stages=7)),
        (0, Schedule(rows=128, tokens=128, stages=6)),
    ),
    ("chain", 256): (
        (33, Schedule(k_tile=128, stages=6)),
        (66, Schedule(tokens=128, stages=8)),
        (0, Schedule(rows=128, tokens=128, stages=6, join=2, programs=66)),
    ),
    ("tree", 8): (
        (12, Schedule(tokens=8, k_tile=128, stages=10, split=8)),
        (28, Schedule(tokens=8, k_tile=128, stages=10, split=4)),
        (66, Schedule(tokens=8, k_tile=128, stages=10, split=2)),
        (132, Schedule(tokens=8, k_tile=128, stages=10)),
        (0, Schedule(tokens=8, k_tile=128, stages=10, programs=132)),
    ),
    ("tree", 16): (
        (12, Schedule(tokens=16, k_tile=128, stages=9, split=8)),
        (28, Schedule(tokens=16, k_tile=128, stages=9, split=4)),
        (66, Schedule(tokens=16, k_tile=128, stages=9, split=2)),
        (132, Schedule(tokens=16, k_tile=128, stages=9)),
        (0, Schedule(tokens=16, k_tile=128, stages=9, programs=132)),
    ),
    ("tree", 32): (
        (12, Schedule(tokens=32, k_tile=128, stages=8, split=8)),
        (28, Schedule(tokens=32, k_tile=128, stages=8, split=4)),
        (66, Schedule(tokens=32, k_tile=128, stages=9, split=2)),
        (132, Schedule(tokens=32, k_tile=128, stages=9)),
        (0, Schedule(tokens=32, k_tile=128, stages=9, programs=132)),
    ),
    ("tree", 64): (
        (12, Schedule(k_tile=128, stages=6, split=8)),
        (28, Schedule(k_tile=128, stages=6, split=4)),
        (66, Schedule(k_tile=128, stages=6, split=2)),
        (132, Schedule(k_tile=128, stages=6)),
        (0, Schedule(k_tile=128, stages=6, programs=132)),
    ),
    ("tree", 128): (
        (12, Schedule(tokens=128, stages=6, split=8)),
        (28, Schedule(tokens=128, stages=6, split=4)),
        (66, Schedule(tokens=128, stages=8, split=2)),
        (132, Schedule(tokens=128, stages=6)),
        (0, Schedule(tokens=128, stages=6, programs=132)),
    ),
    ("tree", 256): (
        (14, Schedule(k_tile=128, stages=6, split=2)),
        (33, Schedule(k_tile=128, stages=6)),
        (66, Schedule(rows=128, tokens=128, stages=6, split=2)),
        (0, Schedule(tokens=128, stages=6, programs=66)),
    ),
}
"""By order and tokens: numbers of 64-row tiles of the weight up to which a schedule serves (0: any), and the schedule.

One wave of programs on 132 SMs where that is possible, and then as many loads in flight as fit. Clusters of 4 and 8 stay
well below 132 programs: not every such cluster finds its SMs free side by side, and 128 programs took two waves.
`python -m benchmarks.kernels.tune_gemm_small` measures the candidates on a GPU and rewrites this table.
"""


def schedule_for(T: int, N: int, K: int, leaves: int) -> Schedule:
    """The table's schedule for x [T, K], w [N, K] and `leaves` leaves."""
    order = "chain" if leaves == 1 else "tree"
    tokens = next((tokens for tokens in (8, 16, 32, 64, 128) if T <= tokens), MAX_TOKENS)
    tiles = -(-N // WGMMA_ROWS)
    s = next(s for limit, s in TABLE[order, tokens] if tiles <= limit or not limit)
    return dataclasses.replace(fitting_steps(s, K // leaves), split=min(s.split, leaves))


def fitting_steps(s: Schedule, leaf: int) -> Schedule:
    """The schedule, by steps of 64 if a leaf does not fall into its own."""
    return dataclasses.replace(s, k_tile=64, stages=s.stages * s.k_tile // 64) if leaf % s.k_tile else s


def fitted(s: Schedule, leaves: int, out_dtype, gated: bool = False, epilogue: Epilogue | None = None) -> Schedule:
    """The schedule with as many of its stages as shared memory holds beside results of this dtype."""
    fits = lambda n: smem_bytes(s, leaves, out_dtype, n, gated, epilogue) <= SMEM_BYTES  # noqa: E731
    return dataclasses.replace(s, stages=next((n for n in range(s.stages, 1, -1) if fits(n)), s.stages))


def fault(
    T, N, K, leaves, columns, s: Schedule, out_dtype, gated: bool = False, epilogue: Epilogue | None = None
) -> str | None:
    """Why the kernel cannot serve these shapes with this schedule; None if it can."""
    faults = {
        f"tokens must be 1..{MAX_TOKENS}": not 1 <= T <= MAX_TOKENS,
        "N and columns must be multiples of 8, columns N at least": N % 8 or columns % 8 or columns < N,
        "leaves must be a power of two": leaves < 1 or leaves & (leaves - 1),
        "k_tile must be a multiple of 64 that divides a leaf": s.k_tile % 64 or K % (leaves * s.k_tile),
        "rows must be 8, 16, 32, 48 or a multiple of 64, at most 256": s.rows not in (8, 16, 32, 48, 64, 128, 192, 256),
        "gates and ups are eights of rows each": gated and s.rows == 8,
        "tokens of a program must be a multiple of 8, at most 256": s.tokens % 8 or not 8 <= s.tokens <= MAX_TOKENS,
        "split must be a power of two that divides leaves": s.split < 1 or leaves % s.split or s.split & (s.split - 1),
        "tokens must fall into whole eights for each program that owns some": s.split > 1 and s.tokens & (s.tokens - 1),
        "join must divide the eights of rows": min(s.rows, WGMMA_ROWS) // (16 if gated else 8) % s.join,
        "a cluster has 8 programs at most": s.split * s.join > 8,
        "a split program has one tile": s.split > 1 and s.programs,
        "not even two stages fit in shared memory": smem_bytes(s, leaves, out_dtype, s.stages, gated, epilogue)
        > SMEM_BYTES,
        "gates and ups are whole chains rounded to bfloat16": gated and (leaves > 1 or columns > N or out_dtype != jnp.bfloat16),
        "an epilogue takes whole chains rounded to bfloat16, and no gate": epilogue is not None
        and (leaves > 1 or columns > N or out_dtype != jnp.bfloat16 or gated),
        "rows of a program must hold whole ones of the epilogue's": epilogue is not None
        and (s.rows % epilogue.rows or N % epilogue.rows),
        "out_dtype must be bfloat16 or float32": out_dtype not in (jnp.bfloat16, jnp.float32),
    }
    return next((text for text, holds in faults.items() if holds), None)


def smem_bytes(
    s: Schedule, leaves: int, out_dtype, stages: int, gated: bool = False, epilogue: Epilogue | None = None
) -> int:
    """Shared memory of a program: loads in flight, sums from other programs or else staged output, sums that wait, barriers."""
    rows = s.warpgroups * WGMMA_ROWS
    ring = stages * ((rows + s.tokens) * s.k_tile * 2 + 16)
    if epilogue is not None:
        return ring + epilogue.smem_bytes(s) + 1024
    end = s.owned * (4 * s.received if s.split > 1 else jnp.dtype(out_dtype).itemsize)
    return ring + rows * (end // (2 if gated else 1) + 4 * s.waiting(leaves) * s.tokens) + 1024


def small_gemm(
    x_TK: jax.Array,
    value: jax.Array,
    layer: jax.Array | None,
    leaves: int,
    out_dtype,
    *,
    columns: int | None = None,
    fill: float = 0.0,
    gate: Callable | None = None,
    epilogue: Epilogue | None = None,
    schedule: Schedule | None = None,
) -> jax.Array | list[jax.Array]:
    """y = x w^T for few tokens.

    Args:
      x_TK: [T, K] bf16, 1 <= T <= 256, K a multiple of 64.
      value: [N, K] bf16, or [L, N, K] of which `layer` is read; N a multiple of 8.
      layer: int32 scalar, given with a stack and only then.
      leaves: contiguous leaves of K, each a chain from zero; a power of two whose leaves are multiples of 64 long.
      out_dtype: bfloat16 or float32.
      columns: columns of the result, a multiple of 8, N or more; N by default.
      fill: what the columns from N on hold.
      gate: given with a weight [2, N, K] of gates and ups, or [L, 2, N, K], and only then: y is gate(gates, ups, layout), both
        bf16 [N, T] as the plain GEMM rounds them, in registers, and so is the result. Of a schedule's rows one half are gates.
      epilogue: what becomes of y's tiles instead; not of its last tokens that only round T up to a multiple of 8.
      schedule: how to cut it; the table's choice by default.

    Returns:
      [T, columns], or a list of the epilogue's outputs.

    Raises:
      ValueError: shapes that this kernel or this schedule does not take.
    """
    T, K = x_TK.shape
    if T > 8 and T % 8:  # TMA moves whole tiles of 8 rows
        padded = small_gemm(
            jnp.pad(x_TK, ((0, -T % 8), (0, 0))),
            value,
            layer,
            leaves,
            out_dtype,
            columns=columns,
            fill=fill,
            gate=gate,
            epilogue=epilogue,
            schedule=schedule,
        )
        return padded if epilogue is not None else padded[:T]
    N = value.shape[-2]
    columns = columns or N
    out_dtype = jnp.dtype(out_dtype)
    gated = gate is not None
    per_column = 2 if gated else 1  # rows of the weight
    s = fitted(schedule or schedule_for(T, N * per_column, K, leaves), leaves, out_dtype, gated, epilogue)
    reason = fault(T, N, K, leaves, columns, s, out_dtype, gated, epilogue)
    if reason:
        raise ValueError(f"small_gemm of {T} tokens, N {N}, K {K}, {leaves} leaves, {s}: {reason}")
    part = Part(s, T, K, N, columns, leaves, out_dtype, fill, gate, layer is not None, epilogue=epilogue)
    return alone(part, x_TK, value, layer)


def alone(part: Part, x_TK: jax.Array, value: jax.Array, layer: jax.Array | None) -> jax.Array | list[jax.Array]:
    """The kernel of one part; x, weight, layer and results as of `small_gemm`."""
    s, epilogue = part.schedule, part.epilogue

    def body(x_g, w_g, *rest):
        refs = rest[part.stacked :]
        layer_g = rest[0] if part.stacked else None
        place = {axis: lax.axis_index(axis) for axis in AXES}
        wg = place["wg"]

        def scoped(**scratch):
            @pl.when(wg == s.warpgroups)
            def _load():
                if s.warpgroups > 1:
                    plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
                mosaic.after_last_kernel()
                index = (layer_g[0],) if part.stacked else ()
                loads = part.count(place) * part.steps

                def step(i, carry):
                    part.wait_for_slot(scratch, i)
                    part.load_weight(place, scratch, w_g, index, i)
                    part.load_x(place, scratch, x_g, i)
                    return carry

                def drain(i, carry):
                    # A program must outlive the arrivals of its neighbours at its barriers.
                    part.wait_for_slot(scratch, i)
                    return carry

                @plgpu.warp_map
                def _(warp):  # one warp needs no barrier of the warpgroup for each load
                    @pl.when(warp == 0)
                    def _():
                        lax.fori_loop(0, loads, step, None)
                        lax.fori_loop(loads, loads + s.stages, drain, None)

            @pl.when(wg < s.warpgroups)
            def _multiply():
                if s.warpgroups > 1:
                    plgpu.set_max_registers(CONSUMER_REGISTERS[s.warpgroups], action="increase")
                part.multiply(place, scratch, *refs)

        pl.run_scoped(scoped, **part.scratch(), collective_axes="wg")

    run = mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((part.tokens, part.columns), part.out_dtype) if epilogue is None else list(epilogue.outputs),
        grid=(part.programs, -(-part.blocks // part.join)),
        grid_names=AXES[:2],
        cluster=(s.split, part.join),
        cluster_names=AXES[2:4],
        num_threads=s.warpgroups + 1,
        thread_name=AXES[4],
        # Only sums that wait in shared memory are read by other lanes than wrote them.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=not s.waiting(part.leaves)),
    )
    weight = value if part.gate is None else hopper_gated.by_eights(value)
    operands = (jnp.reshape(layer, (1,)),) if part.stacked else ()
    operands += () if epilogue is None else epilogue.operands
    return run(x_TK, weight, *operands)

"""silu(gate) * up in the kernel that multiplies by gates and ups: one launch less, and no [T, 2 F] in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.gemm import hopper_large, hopper_small, schedules
from pallas_kernels.gemm.hopper import LOAD_ROWS
from pallas_kernels.gemm.hopper_small import Schedule
from pallas_kernels.silu_mul.hopper_product import product
from pallas_kernels.weight import Weight, as_weight

TILES = range(2 * mosaic.SMS + 1, 3 * mosaic.SMS + 1)
WIDE: dict[int, Schedule] = {
    8: Schedule(rows=192, tokens=8, k_tile=128, stages=4),
    16: Schedule(rows=192, tokens=16, k_tile=128, stages=4),
    32: Schedule(rows=192, tokens=32, k_tile=128, stages=4),
    64: Schedule(rows=192, k_tile=128, stages=3),
    128: Schedule(rows=192, tokens=128, stages=5),
}
"""By the most tokens, for gates and ups of so many tiles of 64 rows (`TILES`): 192 rows make one wave of them. With the weights
of Qwen3-8B and 4B that takes 1 to 12 % less time than the GEMM's own schedules."""


def multiplies(x_TK: jax.Array, w_2FK: Weight | jax.Array) -> bool:
    """Whether one kernel multiplies by these gates and ups, too; where not, the GEMM and the product are two, and say what of
    these operands they refuse."""
    w = as_weight(w_2FK)
    return x_TK.dtype == w.dtype == jnp.bfloat16 and w.shape[1] % 8 == 0 and w.shape[2] % hopper_large.STEP == 0


def of_gemm(x_TK: jax.Array, w: Weight) -> jax.Array:
    """[T, K], bf16 [2, F, K] -> [T, F]."""
    T, (_, F, K) = len(x_TK), w.shape
    if schedules.is_few(T, 2 * F, 1):
        schedule = few_schedule(T, F, K)
        return hopper_small.small_gemm(x_TK, w.value, w.layer, 1, x_TK.dtype, gate=product, schedule=schedule)
    return large(x_TK, w, schedules.large(T, 2 * F, K, 1))


def few_schedule(T: int, F: int, K: int) -> Schedule:
    """Of the kernel for few tokens: the GEMM's own, but for `WIDE`."""
    own = hopper_small.schedule_for(T, 2 * F, K, 1)
    wide = next((s for tokens, s in WIDE.items() if T <= tokens), own)
    return wide if -(-2 * F // hopper_small.WGMMA_ROWS) in TILES and K % wide.k_tile == 0 else own


def large(x_TK: jax.Array, w: Weight, schedule: schedules.Schedule) -> jax.Array:
    """`of_gemm` by the kernel for many rows and one of its schedules."""
    T, F = len(x_TK), w.shape[1]
    x_PK = jnp.pad(x_TK, ((0, -T % LOAD_ROWS), (0, 0)))
    epilogue = hopper_large.store(len(x_PK), F, x_TK.dtype, schedule, gate=product)
    (y_PF,) = hopper_large.matmul(x_PK, w.value, w.layer, 1, 2 * F, epilogue, schedule, gated=True)
    return y_PF[:T]

"""Norm, rotation and places in the GEMM that projects, for few tokens: which shapes, by which schedules."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.gemm import hopper_small, schedules
from pallas_kernels.gemm.hopper_small import MAX_TOKENS, Schedule, small_gemm
from pallas_kernels.qk_norm_rope import hopper_epilogue
from pallas_kernels.weight import Weight

HEADS = (64, 128, 256)
"""Head dims whose heads are whole warpgroups' rows."""
TABLE: dict[tuple[int, int], tuple[tuple[int, Schedule | None], ...]] = {
    (64, 8): ((99, Schedule(tokens=8, k_tile=128, stages=10)),),
    (64, 16): ((99, Schedule(tokens=16, stages=9)),),
    (64, 256): ((33, Schedule(tokens=32, stages=9, join=2)),),
    (128, 16): ((66, Schedule(rows=128, tokens=16, k_tile=128, stages=6)),),
    (128, 64): ((99, Schedule(rows=128, tokens=32, k_tile=128, stages=4, join=2)),),
    (128, 128): ((99, Schedule(rows=128, stages=8, join=2)),),
    (128, 256): (
        (33, Schedule(rows=128, tokens=32, stages=9, join=2)),
        (66, Schedule(rows=128, stages=8, join=2)),
        (99, Schedule(rows=128, tokens=128, stages=6, join=2)),
    ),
    (256, 128): ((0, Schedule(rows=256, stages=4, join=2)),),
    (256, 256): ((0, Schedule(rows=256, stages=4, join=2)),),
}
"""By head dim and tokens: numbers of 64-row tiles of the weight up to which a line serves (0: any), and its schedule, or None for
two kernels. Where there is no line: the GEMM's own schedule for few tokens, if its programs hold whole heads, else two kernels.
Measured on an H200 at the shapes of SmolLM2, Qwen3-0.6B and 8B (docs/hopper.md); not of heads of 256, nor of 128 for 33 tiles."""


def schedule_for(x_TD: jax.Array, w: Weight, dtype) -> Schedule | None:
    """By which schedule one kernel multiplies by a projection [K, G + 2, d, D], too, for pages of `dtype`; None for two
    kernels, which say what of these operands they refuse."""
    T, (*heads, D) = len(x_TD), w.shape
    d = heads[-1]
    if not x_TD.dtype == w.dtype == dtype == jnp.bfloat16 or d not in HEADS or D % 64 or not 1 <= T <= MAX_TOKENS:
        return None
    return choice(T, heads[0] * heads[1] * d, D, d)


def choice(T: int, N: int, D: int, d: int) -> Schedule | None:
    """The table's, for x [T, D], w [N, D] and heads of d."""
    tokens = next(tokens for tokens in (8, 16, 32, 64, 128, MAX_TOKENS) if T <= tokens)
    tiles = -(-N // hopper_small.WGMMA_ROWS)
    lines = (s for limit, s in TABLE.get((d, tokens), ()) if tiles <= limit or not limit)
    own = hopper_small.schedule_for(T, N, D, 1)
    s = next(lines, own if schedules.is_few(T, N, 1) and own.rows % d == 0 else None)
    return s and hopper_small.fitting_steps(s, D)


def of_gemm(x_TD, w: Weight, rotations_T2h, norms: tuple[Weight, ...], eps, k_pages, v_pages, slots_T, layer, schedule: Schedule):
    """(q [T, H, d], k_pages, v_pages); one kernel, nothing else moves."""
    T, D = x_TD.shape
    K, g2, d, _ = w.shape
    L, N, page, *_ = k_pages.shape
    heads = hopper_epilogue.Heads(K=K, groups=g2 - 2, d=d, T=T, eps=eps, layer_rows=N * page)
    refs = [jax.new_ref(x.reshape(L * N * page, K * d)) for x in (k_pages, v_pages)]
    at = slots_T, jnp.asarray(layer, jnp.int32).reshape(1)
    epilogue = hopper_epilogue.epilogue(heads, schedule, rotations_T2h, norms, *refs, *at)
    value = w.value.reshape(*w.value.shape[: 0 if w.layer is None else 1], -1, D)
    (q_TN,) = small_gemm(x_TD, value, w.layer, 1, jnp.bfloat16, epilogue=epilogue, schedule=schedule)
    return q_TN.reshape(T, K * (g2 - 2), d), *(ref[...].reshape(k_pages.shape) for ref in refs)

"""From block sums to the log-probability on Hopper: one kernel, whichever kernel made the sums.

Blocks are added in groups of 16, each a balanced tree, groups in order inside an eighth of the vocabulary, eighths in a
balanced tree, in fp32; every scale is a power of two. The whole numbers among the exponents, the largest M and the sum's
own, meet the target's exponent without a rounding, so that the log-probability is rounded once at its own size: neither large
logits nor a large vocabulary cost precision.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.logprob import EIGHTHS
from pallas_kernels.logprob.hopper_blocks import FIXED_POINT_BITS, FLOOR, LOG2E
from pallas_kernels.logprob.hopper_choice import Choice, best, better, logit

ROWS = 32
"""Rows of a program: a lane's own, so that a decode step's few hundred rows are many programs."""
WARPS = 4
"""Warps of a warpgroup, each with an eighth of the vocabulary."""
WARPGROUPS = EIGHTHS // WARPS
GROUP = 16
"""Blocks whose sums are added in a tree."""
STEPS = 3
"""Groups that are on their way from memory: two programs fit on a multiprocessor."""
EIGHTHS_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, ROWS), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""[eighths, rows]"""
LAYOUT = EIGHTHS_LAYOUT.reduce(0)
"""[rows], the same in every warp."""

LN2 = float(np.float32(np.log(2.0)))
LN2_LOW = float(np.float32(np.log(2.0) - LN2))
# (log1p(f) - f) / f^2 for f in [-1/3, 1/3], by powers of f: minimax, 0.6 ulp of log1p in all.
LOG1P = (
    -0.5, 0.3333320915699005, -0.24999716877937317, 0.20010747015476227, -0.16682302951812744, 0.14001159369945526,
    -0.12167185544967651, 0.14004762470722198, -0.12948833405971527,
)  # fmt: skip


def _mul(x, y, layout=LAYOUT):
    return mosaic.mul(x, y, layout)


def _add(x, y, layout=LAYOUT):
    return mosaic.add(x, y, layout)


def _fma(x, y, z):
    return mosaic.fma(x, y, z, LAYOUT)


def _power(n: jax.Array) -> jax.Array:
    """2**n for whole-number fp32 n <= 0; 0 below -126. The bits are assembled."""
    # A sum of this size has its whole numbers in its last bits: no conversion, which costs four instructions.
    whole = lax.bitcast_convert_type(jnp.maximum(n, -127.0) + 1.5 * 2.0**23, jnp.int32)
    return lax.bitcast_convert_type((whole << 23) + (127 << 23), jnp.float32)


def _join(a, b):
    """Two (M, sum) as one: exact products, one rounded addition."""
    top = jnp.maximum(a[0], b[0])
    return top, _add(_mul(a[1], _power(a[0] - top)), _mul(b[1], _power(b[0] - top)))


def _tree(terms: list, add):
    while len(terms) > 1:
        terms = [add(a, b) for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def _two_sum(x, y):
    """x + y rounded, and what the rounding lost."""
    total = _add(x, y)
    y_in = _add(total, -x)
    return total, _add(_add(x, -_add(total, -y_in)), _add(y, -y_in))


def log(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(k, l): ln(x) = k ln2 + l of positive, normal fp32 x; k a whole number, l in [ln 2/3, ln 4/3] within 1 ulp."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # Exponent and mantissa, the mantissa in [2/3, 4/3).
    k = (bits - 0x3F2AAAAB) >> 23
    f = _add(lax.bitcast_convert_type(bits - (k << 23), jnp.float32), -1.0)
    series = _fma(f, LOG1P[-1], LOG1P[-2])
    for coefficient in LOG1P[-3::-1]:
        series = _fma(series, f, coefficient)
    return k.astype(jnp.float32), _fma(_mul(f, f), series, f)


def _finish(max_P, sum_P, target_P, inv_temp_P) -> tuple[jax.Array, jax.Array]:
    """(log-probability, log-sum-exp) from the sum of 2^(logit * scale - M).

    With d = target * scale - M - k, where the sum is 2^k e^l, the log-probability is d ln2 - l, but for the rounding of scale
    = inv_temp * log2(e): d is worth inv_temp / scale nats each, LN2 + low, and k, which scale did not make, ln2.
    """
    scale_P = _mul(inv_temp_P, LOG2E)
    low_P = mosaic.div(_fma(-scale_P, LN2, inv_temp_P), scale_P, LAYOUT)
    k_P, rest_P = log(sum_P)
    rest_P = _fma(-k_P, _add(low_P, -LN2_LOW), rest_P)
    max_P = _add(max_P, k_P)
    exponent_P = _mul(target_P, scale_P)
    d_P, lost_P = _two_sum(exponent_P, -max_P)
    lost_P = _add(lost_P, _fma(target_P, scale_P, -exponent_P))
    # What is small first: one rounding is of the result's size.
    logprob_P = _fma(d_P, LN2, _fma(d_P, low_P, _fma(lost_P, LN2, -rest_P)))
    logprob_P = jnp.where(exponent_P == -jnp.inf, exponent_P, logprob_P)  # what it lost is NaN
    return jnp.minimum(logprob_P, 0.0), _fma(max_P, LN2, _fma(max_P, low_P, rest_P))


@functools.partial(jax.jit, static_argnums=0)
def combine(blocks: int, max_nP, sum_nP, target: jax.Array | Choice, inv_temp_P) -> tuple[jax.Array, ...]:
    """(log-probability, log-sum-exp), nats, fp32 [P]; of a Choice also what was chosen, int32 [P].

    Args:
      blocks: blocks of the padded vocabulary, a multiple of 8.
      max_nP, sum_nP: fp32 and int32 [blocks or more (then they are copied), P], of `hopper_blocks.block_sums`.
      target: fp32 [P], each row's logit of its target, or the targets' choice, which is then made here.
      inv_temp_P: fp32 [P]; P a multiple of 32.
    """
    P = inv_temp_P.shape[0]
    chosen = isinstance(target, Choice)
    targets = tuple(target) if chosen else (target,)
    per_eighth = blocks // EIGHTHS
    groups = -(-per_eighth // GROUP)
    mul, add = (functools.partial(fn, layout=EIGHTHS_LAYOUT) for fn in (_mul, _add))

    def body(max_g, sum_g, inv_temp_g, *refs):
        targets_g, (logprob_g, lse_g, *token_g) = refs[: len(targets)], refs[len(targets) : len(targets) + 2 + chosen]
        max_s, sum_s, tops_s, totals_s, full, ready, *choice = refs[len(targets) + 2 + chosen :]
        wg = lax.axis_index("wg")
        program = lax.axis_index("program")
        rows = pl.ds(program * ROWS, ROWS)
        load = lambda ref: plgpu.load(ref, layout=LAYOUT, optimized=False)  # noqa: E731
        own = pl.ds(wg * WARPS, WARPS)
        arrived = lambda slot: full.at[wg * STEPS + slot]  # noqa: E731

        def fetch(i, slot):
            for ref, to in ((max_g, max_s), (sum_g, sum_s)):
                at = ref.at[own, pl.ds(i * GROUP, GROUP), rows]
                plgpu.copy_gmem_to_smem(at, to.at[wg, slot], arrived(slot))

        lax.fori_loop(0, min(STEPS, groups), lambda i, _: fetch(i, i), None)
        if chosen:
            (score_g, index_g, z_g), (scores_s, indices_s, met) = targets_g, choice
            scores_s[own], indices_s[own] = best(score_g, index_g, wg, WARPGROUPS, rows, EIGHTHS_LAYOUT)
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)
            _, token_P = functools.reduce(better, [(load(scores_s.at[e]), load(indices_s.at[e])) for e in range(EIGHTHS)])
            row_P = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=LAYOUT) + program * ROWS
            target_P = logit(z_g, jnp.minimum(row_P, z_g.shape[0] - 1), token_P, LAYOUT)

        def group(i, total):
            slot = lax.rem(i, STEPS)
            left = per_eighth - i * GROUP
            at = [jnp.minimum(n, left - 1) if per_eighth % GROUP else n for n in range(GROUP)]
            load = lambda ref, n: plgpu.load(ref.at[wg, slot, :, n], layout=EIGHTHS_LAYOUT, optimized=False)  # noqa: E731
            plgpu.barrier_wait(arrived(slot))
            found = [(load(max_s, n), load(sum_s, n).astype(jnp.float32)) for n in at]
            plgpu.commit_smem()  # what was read here, TMA may now write

            @pl.when(i + STEPS < groups)
            def _():
                fetch(i + STEPS, slot)

            if per_eighth % GROUP:  # past the end the last one again, weighing nothing
                found = [(m, s * (n < left).astype(jnp.float32)) for n, (m, s) in enumerate(found)]
            # Scales are exact: all terms to one exponent first.
            top = jnp.maximum(total[0], _tree([max_EP for max_EP, _ in found], jnp.maximum))
            sum_EP = mul(total[1], _power(total[0] - top))
            return top, add(sum_EP, _tree([mul(sum_EP, _power(max_EP - top)) for max_EP, sum_EP in found], add))

        nothing = (jnp.full((WARPS, ROWS), value, jnp.float32) for value in (FLOOR, 0.0))
        total = tuple(plgpu.layout_cast(x, EIGHTHS_LAYOUT) for x in nothing)
        tops_s[own], totals_s[own] = lax.fori_loop(0, groups, group, total)
        plgpu.barrier_arrive(ready)

        @pl.when(wg == 0)
        def _last():
            plgpu.barrier_wait(ready)
            max_P, sum_P = _tree([(load(tops_s.at[e]), load(totals_s.at[e])) for e in range(EIGHTHS)], _join)
            sum_P = _mul(sum_P, 2.0**-FIXED_POINT_BITS)
            own_P = target_P if chosen else load(targets_g[0].at[rows])
            logprob_g[rows], lse_g[rows] = _finish(max_P, sum_P, own_P, load(inv_temp_g.at[rows]))
            if chosen:
                token_g[0][rows] = token_P

    ring = (WARPGROUPS, STEPS, WARPS, GROUP, ROWS)
    each_eighth = lambda *dtypes: [plgpu.SMEM((EIGHTHS, ROWS), dtype) for dtype in dtypes]  # noqa: E731
    return mosaic.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((P,), jnp.float32),) * 2 + (jax.ShapeDtypeStruct((P,), jnp.int32),) * chosen,
        scratch_types=[
            plgpu.SMEM(ring, jnp.float32),
            plgpu.SMEM(ring, jnp.int32),
            *each_eighth(jnp.float32, jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS * STEPS),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            *([*each_eighth(jnp.float32, jnp.int32), plgpu.Barrier(num_arrivals=WARPGROUPS)] if chosen else []),
        ],
        grid=(P // ROWS,),
        grid_names=("program",),
        num_threads=WARPGROUPS,
        thread_name="wg",
    )(*(x_nP[:blocks].reshape(EIGHTHS, per_eighth, P) for x_nP in (max_nP, sum_nP)), inv_temp_P, *targets)

"""From block sums to the log-probability on Hopper: one kernel, whichever kernel made the sums.

Blocks are added in order inside an eighth of the vocabulary, eighths in a balanced tree, in fp32; every scale is a power of
two. The largest exponent M and the target meet before the logarithm is subtracted, so that large logits do not cost
precision.
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

ROWS = 128
"""Rows of a program: one a thread."""
AHEAD = 16
"""Blocks whose sums are on their way from memory together."""
LAYOUT = plgpu.Layout.WG_STRIDED((ROWS,), vec_size=1)

# Block sums count in units of log2 by fp32 LOG2E: back in nats, M is worth M / LOG2E, in two parts.
_NATS = 1.0 / float(np.float32(LOG2E))
NATS_HIGH = float(np.float32(_NATS))
NATS_LOW = float(np.float32(_NATS - NATS_HIGH))
LN2 = float(np.float32(np.log(2.0)))
# (log1p(f) - f) / f^2 for f in [-1/3, 1/3], by powers of f: minimax, 0.6 ulp of log1p in all.
LOG1P = (
    -0.5, 0.3333320915699005, -0.24999716877937317, 0.20010747015476227, -0.16682302951812744, 0.14001159369945526,
    -0.12167185544967651, 0.14004762470722198, -0.12948833405971527,
)  # fmt: skip


def _full(value: float) -> jax.Array:
    return jnp.full((ROWS,), value, jnp.float32)


def _mul(x, y):
    return mosaic.mul(x, y, LAYOUT)


def _add(x, y):
    return mosaic.add(x, y, LAYOUT)


def _fma(x, y, z):
    return mosaic.fma(x, y, z, LAYOUT)


def _power(n: jax.Array) -> jax.Array:
    """2**n for whole-number fp32 n <= 0; 0 below -126. The bits are assembled."""
    exponent = jnp.maximum(n, -127.0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def _join(a, b):
    """Two (M, sum) as one: exact products, one rounded addition."""
    top = jnp.maximum(a[0], b[0])
    return top, _add(_mul(a[1], _power(a[0] - top)), _mul(b[1], _power(b[0] - top)))


def log(x: jax.Array) -> jax.Array:
    """ln of positive, normal fp32 x; within 1 ulp but for cancellation between exponent and mantissa."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # Exponent and mantissa, the mantissa in [2/3, 4/3).
    k = (bits - 0x3F2AAAAB) >> 23
    f = _add(lax.bitcast_convert_type(bits - (k << 23), jnp.float32), -1.0)
    series = _fma(f, LOG1P[-1], LOG1P[-2])
    for coefficient in LOG1P[-3::-1]:
        series = _fma(series, f, coefficient)
    return _fma(k.astype(jnp.float32), LN2, _fma(_mul(f, f), series, f))


@functools.partial(jax.jit, static_argnums=0)
def combine(blocks: int, max_nP, sum_nP, target_P, inv_temp_P) -> tuple[jax.Array, jax.Array]:
    """(log-probability, log-sum-exp), nats, fp32 [P].

    Args:
      blocks: blocks of the padded vocabulary, a multiple of 8.
      max_nP, sum_nP: fp32 and int32 [blocks or more, P], of `hopper_blocks.block_sums`.
      target_P: fp32 [P], each row's logit of its target.
      inv_temp_P: fp32 [P]; P a multiple of 128.
    """
    P = target_P.shape[0]
    per_eighth = blocks // EIGHTHS

    def body(max_g, sum_g, target_g, inv_temp_g, logprob_g, lse_g, max_s, sum_s, ready):
        eighth = lax.axis_index("wg")
        rows = pl.ds(lax.axis_index("program") * ROWS, ROWS)
        load = lambda ref: plgpu.load(ref, layout=LAYOUT)  # noqa: E731

        start = eighth * per_eighth

        def in_order(i, total):
            numbers = [i * AHEAD + n for n in range(AHEAD)]
            at = [start + jnp.minimum(n, per_eighth - 1) for n in numbers]
            found = [(load(max_g.at[n, rows]), load(sum_g.at[n, rows]).astype(jnp.float32)) for n in at]
            if per_eighth % AHEAD:  # past the end the last one again, weighing nothing
                found = [
                    (m, s * (n < per_eighth).astype(jnp.float32)) for (m, s), n in zip(found, numbers, strict=True)
                ]
            # Scales are exact: all terms to one exponent first, then only additions wait for one another.
            top = functools.reduce(jnp.maximum, [max_P for max_P, _ in found], total[0])
            sum_P = _mul(total[1], _power(total[0] - top))
            for term_P in [_mul(sum_P, _power(max_P - top)) for max_P, sum_P in found]:
                sum_P = _add(sum_P, term_P)
            return top, sum_P

        total = tuple(plgpu.layout_cast(_full(value), LAYOUT) for value in (FLOOR, 0.0))
        total = lax.fori_loop(0, -(-per_eighth // AHEAD), in_order, total)
        max_s[eighth], sum_s[eighth] = total
        plgpu.barrier_arrive(ready)

        @pl.when(eighth == 0)
        def _finish():
            plgpu.barrier_wait(ready)
            sums = [(load(max_s.at[e]), load(sum_s.at[e])) for e in range(EIGHTHS)]
            while len(sums) > 1:
                sums = [_join(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
            ((top_P, sum_P),) = sums
            # What is small first: only two roundings are of the result's size.
            low_P = _fma(top_P, NATS_LOW, log(_mul(sum_P, 2.0**-FIXED_POINT_BITS)))
            target_P = _mul(load(target_g.at[rows]), load(inv_temp_g.at[rows]))
            logprob_g[rows] = jnp.minimum(_add(_fma(-top_P, NATS_HIGH, target_P), -low_P), 0.0)
            lse_g[rows] = _fma(top_P, NATS_HIGH, low_P)

    return mosaic.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((P,), jnp.float32),) * 2,
        scratch_types=[
            plgpu.SMEM((EIGHTHS, ROWS), jnp.float32),
            plgpu.SMEM((EIGHTHS, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=EIGHTHS),
        ],
        grid=(P // ROWS,),
        grid_names=("program",),
        num_threads=EIGHTHS,
        thread_name="wg",
    )(max_nP, sum_nP, target_P, inv_temp_P)

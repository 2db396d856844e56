"""Softmax of the attention kernels: one block of scores after the other, and runs of blocks merged.

FlashAttention-2's online softmax in log2 units. Every product that feeds a sum is explicit, so that all kernels round alike. A
block whose keys a row does not see adds exact zeros to it and rescales by exactly 1, so blocks may be skipped or not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic

COLUMNS = 8
"""Columns of the running sum of P: the narrowest slice of a wgmma result."""
ROW = mosaic.row_layout()


class Total(NamedTuple):
    """One or more splits, merged."""

    m_M: jax.Array  # maximum
    l_M: jax.Array  # sum of P
    o_Md: jax.Array


def full(value, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """An array of one value, in the layout of a wgmma result or of its rows."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), plgpu.Layout.WGMMA if len(shape) == 2 else ROW)


def softmax(s_MB, m_M, l_M8, scale: float):
    """(m, alpha, l, P in fp32) after a block of scores.

    P = 2**(score * scale - m) by one fma and one ex2. The largest P of a row is 1 but for the rounding of m, so that it is
    exact in bf16, where the product with V takes it. The sum takes P before that rounding, 8 columns at a time from the left.
    """
    top_M = mosaic.mul(s_MB.max(axis=1), scale, ROW)
    new_M = jnp.maximum(m_M, top_M)
    alpha_M = mosaic.exp2(m_M - new_M, ROW)
    p_MB = mosaic.exp2(mosaic.fma(s_MB, scale, mosaic.rows(-new_M, s_MB.shape)))
    l_M8 = mosaic.fma(l_M8, mosaic.rows(alpha_M, l_M8.shape), p_MB[:, :COLUMNS])
    for i in range(COLUMNS, s_MB.shape[1], COLUMNS):
        l_M8 = l_M8 + p_MB[:, i : i + COLUMNS]
    return new_M, alpha_M, l_M8, p_MB


def add(total: Total, part: Total) -> Total:
    """Two runs of splits, lower positions first. One without keys, whose O is zero, leaves the other's bits (but for the sign
    of a zero, which `finish` takes away)."""
    some_M = part.l_M != 0
    m_M = jnp.where(some_M, jnp.maximum(total.m_M, part.m_M), total.m_M)
    a_M = mosaic.exp2(total.m_M - m_M, ROW)
    b_M = jnp.where(some_M, mosaic.exp2(part.m_M - m_M, ROW), 0.0)
    l_M = mosaic.fma(total.l_M, a_M, mosaic.mul(part.l_M, b_M, ROW), ROW)
    wide = functools.partial(mosaic.rows, shape=part.o_Md.shape)
    return Total(m_M, l_M, mosaic.fma(total.o_Md, wide(a_M), mosaic.mul(part.o_Md, wide(b_M))))


def merge(total: Total, part: Total) -> Total:
    """`add`, where O of a part without keys may hold anything."""
    some_Md = mosaic.rows(part.l_M, part.o_Md.shape) != 0
    return add(total, part._replace(o_Md=jnp.where(some_Md, part.o_Md, 0)))


def finish(total: Total):
    """(O in bf16, without a minus zero; log-sum-exp in log2 units); zeros for a row that sees no key."""
    some_M = total.l_M > 0
    inverse_M = jnp.where(some_M, mosaic.div(1.0, total.l_M, ROW), 0.0)
    lse_M = jnp.where(some_M, total.m_M + mosaic.log2(total.l_M, ROW), 0.0)
    o_Md = mosaic.fma(total.o_Md, mosaic.rows(inverse_M, total.o_Md.shape), 0.0)
    return o_Md.astype(jnp.bfloat16), lse_M

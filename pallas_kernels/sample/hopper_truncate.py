"""What survives top-k, top-p and min-p on Hopper: one kernel rounds, all else is integers, exact in any order."""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.logprob import VOCAB_BLOCK
from pallas_kernels.logprob import hopper as logprob
from pallas_kernels.logprob.hopper_blocks import LOG2E, over_tiles

FIXED_POINT_BITS = 31
DIGIT = 4
"""Bits of an edge that one pass over a row settles."""


def kept(logits_BV, inv_temp_B, top_k_B, top_p_B, min_p_B) -> jax.Array:
    """Which entries survive truncation, bool [B, V]."""
    B, V = logits_BV.shape
    zeros_B = jnp.zeros(B, jnp.int32)
    order_BV, mass_BV = _order_and_mass(logits_BV, inv_temp_B, logprob.reduce(logits_BV, zeros_B, inv_temp_B)[1])
    exists_BV = logits_BV > -jnp.inf

    def top_k():
        count_B = jnp.where((top_k_B <= 0) | (top_k_B > V), V, top_k_B).astype(jnp.uint32)
        return exists_BV & _largest(order_BV, exists_BV.astype(jnp.uint32), count_B)

    keep_BV = lax.cond(jnp.any(top_k_B > 0), top_k, lambda: exists_BV)

    def top_p():
        kept_BV = jnp.where(keep_BV, mass_BV, 0)
        total_B = jnp.sum(kept_BV, axis=1, dtype=jnp.uint32)
        wanted_B = jnp.ceil(total_B.astype(jnp.float32) * top_p_B).astype(jnp.uint32)
        nucleus_BV = _largest(order_BV, kept_BV, jnp.clip(wanted_B, 1, total_B))
        return keep_BV & ((top_p_B >= 1)[:, None] | nucleus_BV)

    keep_BV = lax.cond(jnp.any(top_p_B < 1), top_p, lambda: keep_BV)
    least_B = jnp.ceil(jnp.max(mass_BV, axis=1).astype(jnp.float32) * min_p_B).astype(jnp.uint32)
    return keep_BV & (mass_BV >= least_B[:, None])


def _order_and_mass(logits_BV, inv_temp_B, lse_B) -> tuple[jax.Array, jax.Array]:
    """uint32 [B, V] that compare as logit * inv_temp does, and probabilities as integers."""
    B, V = logits_BV.shape
    pad = lambda x_B: jnp.pad(x_B, (0, -B % 64))  # noqa: E731
    extra = -B % 8 if B > 8 else 0  # TMA moves tiles of 8 rows
    logits_BV = jnp.pad(logits_BV, ((0, extra), (0, 0))) if extra else logits_BV

    def work(z_MV, rows, block, inputs, outputs):
        inv_temp_M, lse_M = inputs
        order_g, mass_g = outputs
        at = (rows, pl.ds(block * VOCAB_BLOCK, VOCAB_BLOCK))
        wide = lambda x_M: mosaic.rows(x_M, z_MV.shape)  # noqa: E731
        s_MV = mosaic.mul(z_MV, wide(inv_temp_M))
        bits_MV = lax.bitcast_convert_type(mosaic.add(s_MV, 0.0), jnp.uint32)  # -0 + 0 is 0
        # Negative floats compare backwards as integers.
        order_g[at] = jnp.where(bits_MV >> 31 == 1, ~bits_MV, bits_MV | jnp.uint32(2**31))
        least_M = mosaic.mul(-lse_M, LOG2E, mosaic.row_layout())
        p_MV = mosaic.exp2(mosaic.fma(s_MV, LOG2E, wide(least_M)))
        mass_g[at] = mosaic.mul(p_MV, 2.0**FIXED_POINT_BITS).astype(jnp.uint32)

    shape = jax.ShapeDtypeStruct((B + -B % 64, V), jnp.uint32)
    order_PV, mass_PV = over_tiles(logits_BV, (pad(inv_temp_B), pad(lse_B)), (shape, shape), work)
    return order_PV[:B], mass_PV[:B]


def _largest(order_BV, mass_BV, wanted_B) -> jax.Array:
    """The smallest set of largest entries whose masses reach `wanted`, ties at the edge by lowest index; bool [B, V]."""
    V = order_BV.shape[1]
    edge_B = _edge(order_BV, mass_BV, wanted_B, 32)
    above_BV = order_BV > edge_B[:, None]
    missing_B = wanted_B - jnp.sum(jnp.where(above_BV, mass_BV, 0), axis=1, dtype=jnp.uint32)
    at_edge_BV = order_BV == edge_B[:, None]
    backwards_BV = jnp.broadcast_to(jnp.arange(V, 0, -1, dtype=jnp.uint32)[None], order_BV.shape)
    last_B = _edge(backwards_BV, jnp.where(at_edge_BV, mass_BV, 0), missing_B, V.bit_length())
    return above_BV | (at_edge_BV & (backwards_BV >= last_B[:, None]))


def _edge(order_BV, mass_BV, wanted_B, bits: int) -> jax.Array:
    """uint32 [B]: the largest edge such that the masses of entries not below it reach `wanted`; digit by digit from above."""
    digits = -(-bits // DIGIT)

    def refine(i, edge_B):
        shift = ((digits - 1 - i) * DIGIT).astype(jnp.uint32)
        reached_B = jnp.zeros_like(edge_B)
        for digit in range(1, 1 << DIGIT):
            trial_B = edge_B | (jnp.uint32(digit) << shift)
            mass_B = jnp.sum(jnp.where(order_BV >= trial_B[:, None], mass_BV, 0), axis=1, dtype=jnp.uint32)
            reached_B += (mass_B >= wanted_B).astype(jnp.uint32)  # of ever larger edges, the first few reach it
        return edge_B | (reached_B << shift)

    return lax.fori_loop(0, digits, refine, jnp.zeros_like(wanted_B))

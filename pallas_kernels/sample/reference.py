"""Gumbel-max sampling in plain JAX; every sum is of integers, every maximum exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from pallas_kernels.logprob import reference as logprob
from pallas_kernels.sample import truncates
from pallas_kernels.tiles import ROWS, map_rows

VERSION = 2
FIXED_POINT_BITS = 31


def entry(V8: int) -> dict:
    """This implementation's line in the contract."""
    return {
        "implementation": "reference",
        "version": VERSION,
        "arch": "cpu",
        "noise": "-log(-log1p(-(bits + 0.5) / 2^32)), Threefry-2x32 of (position, vocabulary index) under the seed",
        "ties": "lowest index",
        "truncation": "top-k, then top-p, then min-p",
        "probability": f"integers, 2^{FIXED_POINT_BITS} is 1",
        "tile": [ROWS, V8],
    }


def sample(
    logits_BV, keys_B2, positions_B, inv_temp_B, top_k_B, top_p_B, min_p_B, *, with_logprob: bool, reduce=logprob.reduce
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(tokens [B], log-probability over the whole vocabulary [B] or zeros, that under the truncated distribution [B], anything
    if no row truncates); `reduce` is the log-probability's implementation."""
    tokens_B, truncated_B = _choose(logits_BV, keys_B2, positions_B, inv_temp_B, top_k_B, top_p_B, min_p_B)
    if not with_logprob:
        return tokens_B, jnp.zeros_like(truncated_B), truncated_B
    return tokens_B, reduce(logits_BV, tokens_B, jnp.where(inv_temp_B == 0, 1, inv_temp_B))[0], truncated_B


def _choose(logits_BV, keys_B2, positions_B, inv_temp_B, top_k_B, top_p_B, min_p_B) -> tuple[jax.Array, jax.Array]:
    """(tokens [B], log-probability under the truncated distribution [B], anything if no row truncates)."""
    some = jnp.any(truncates(top_k_B, top_p_B, min_p_B))

    def tile(z_MV, keys_M2, positions_M, inv_temp_M, top_k_M, top_p_M, min_p_M):
        greedy_M = inv_temp_M == 0
        s_MV = z_MV * jnp.where(greedy_M, 1, inv_temp_M)[:, None]
        noisy_MV = s_MV + jnp.where(greedy_M[:, None], 0, _gumbel(keys_M2, positions_M, z_MV.shape[1]))
        best = lambda noisy_MV: jnp.argmax(noisy_MV, axis=1).astype(jnp.int32)  # noqa: E731

        def truncated():
            keep_MV = _kept(s_MV, top_k_M, top_p_M, min_p_M)
            token_M = best(jnp.where(keep_MV, noisy_MV, -jnp.inf))
            chosen_M = jnp.take_along_axis(s_MV, token_M[:, None], axis=1)[:, 0]
            return token_M, chosen_M - jax.nn.logsumexp(jnp.where(keep_MV, s_MV, -jnp.inf), axis=1)

        return lax.cond(some, truncated, lambda: (best(noisy_MV), jnp.zeros_like(greedy_M, jnp.float32)))

    return map_rows(tile, (logits_BV, keys_B2, positions_B, inv_temp_B, top_k_B, top_p_B, min_p_B))


def _gumbel(keys_M2, positions_M, V: int) -> jax.Array:
    """fp32 [M, V]; fine resolution in the upper tail, where a rare token is won."""
    shape = (positions_M.shape[0], V)
    wide = lambda x_M: jnp.broadcast_to(x_M[:, None].astype(jnp.uint32), shape)  # noqa: E731
    index_MV = jnp.broadcast_to(jnp.arange(V, dtype=jnp.uint32)[None], shape)
    bits_MV, _ = threefry2x32_p.bind(wide(keys_M2[:, 0]), wide(keys_M2[:, 1]), wide(positions_M), index_MV)
    u_MV = jnp.minimum((bits_MV.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32), jnp.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-u_MV))


def _kept(s_MV, top_k_M, top_p_M, min_p_M) -> jax.Array:
    """Which entries survive truncation, bool [M, V]."""
    V = s_MV.shape[1]
    order_MV = _ordered(s_MV)
    exists_MV = s_MV > -jnp.inf
    count_M = jnp.where((top_k_M <= 0) | (top_k_M > V), V, top_k_M).astype(jnp.uint32)
    keep_MV = exists_MV & _largest(order_MV, jnp.where(exists_MV, 1, 0).astype(jnp.uint32), count_M)
    _, lse_M = logprob.reduce(s_MV, jnp.zeros(s_MV.shape[0], jnp.int32), jnp.ones(s_MV.shape[0], jnp.float32))
    probability_MV = jnp.exp(s_MV - lse_M[:, None])
    fixed_MV = jnp.floor(probability_MV * jnp.float32(2.0**FIXED_POINT_BITS)).astype(jnp.uint32)
    mass_MV = jnp.where(keep_MV, fixed_MV, 0)
    total_M = jnp.sum(mass_MV, axis=1, dtype=jnp.uint32)
    wanted_M = jnp.ceil(total_M.astype(jnp.float32) * top_p_M).astype(jnp.uint32)
    keep_MV &= (top_p_M >= 1)[:, None] | _largest(order_MV, mass_MV, jnp.clip(wanted_M, 1, total_M))
    top_M = jnp.max(probability_MV, axis=1)
    return keep_MV & (probability_MV >= (min_p_M * top_M)[:, None])


def _ordered(s_MV) -> jax.Array:
    """uint32 that compares as the fp32 does (negative floats compare backwards as integers)."""
    bits_MV = lax.bitcast_convert_type(s_MV + 0.0, jnp.uint32)
    negative = bits_MV >> 31 == 1
    return jnp.where(negative, ~bits_MV, bits_MV | jnp.uint32(2**31))


def _largest(order_MV, mass_MV, wanted_M) -> jax.Array:
    """The smallest set of largest entries whose masses reach `wanted`, ties at the edge by lowest index; bool [M, V].

    The edge is found bit by bit: 32 exact integer sums, whatever the size of the vocabulary.
    """

    def refine(i, edge_M):
        trial_M = edge_M | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        reached_M = jnp.sum(jnp.where(order_MV >= trial_M[:, None], mass_MV, 0), axis=1, dtype=jnp.uint32) >= wanted_M
        return jnp.where(reached_M, trial_M, edge_M)

    edge_M = lax.fori_loop(0, 32, refine, jnp.zeros_like(wanted_M))
    above_MV = order_MV > edge_M[:, None]
    at_edge_MV = order_MV == edge_M[:, None]
    missing_M = wanted_M - jnp.sum(jnp.where(above_MV, mass_MV, 0), axis=1, dtype=jnp.uint32)
    edge_mass_MV = jnp.where(at_edge_MV, mass_MV, 0)
    before_MV = jnp.cumsum(edge_mass_MV, axis=1, dtype=jnp.uint32) - edge_mass_MV
    return above_MV | (at_edge_MV & (before_MV < missing_M[:, None]))

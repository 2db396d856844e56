"""What survives top-k, top-p and min-p on Hopper: a kernel looks at logits again for each digit of an edge; sums are of
integers, exact in any order.

An entry's order is its scaled logit as an integer that compares alike. Its mass is its probability in fixed point, or 1 where
entries are counted. A truncation keeps the entries above an edge, and of those at the edge the ones up to an index.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.logprob import VOCAB_BLOCK
from pallas_kernels.logprob import hopper as logprob
from pallas_kernels.logprob.hopper_blocks import LOG2E, ROWS, over_tiles

FIXED_POINT_BITS = 31
DIGIT = 3
"""Bits of an edge that one look at the logits settles."""


class Cut(NamedTuple):
    """Keeps entries of an order above `edge`, and of those at it the ones whose index is at most `last`: uint32 [P]."""

    edge: jax.Array
    last: jax.Array


class Rows(NamedTuple):
    """What gives entries their orders and masses: logits [B, V]; for each row, [P], inverse temperature and log-sum-exp
    (fp32), whether entries are counted (uint32, 0 or 1), and the cut outside of which entries weigh nothing."""

    logits_BV: jax.Array
    inv_temp_P: jax.Array
    lse_P: jax.Array
    counts_P: jax.Array
    among: Cut


def truncate(logits_BV, inv_temp_B, top_k_B, top_p_B, min_p_B) -> jax.Array:
    """fp32 [B, V]: the logits that survive, -inf in place of the others."""
    B, V = logits_BV.shape
    pad = lambda x_B, fill: jnp.pad(x_B, (0, -B % ROWS), constant_values=fill)  # noqa: E731
    extra = -B % 8 if B > 8 else 0  # TMA moves tiles of 8 rows
    lse_B = logprob.reduce(logits_BV, jnp.zeros(B, jnp.int32), inv_temp_B)[1]
    logits_BV = jnp.pad(logits_BV, ((0, extra), (0, 0))) if extra else logits_BV
    top_k_P, top_p_P, min_p_P = pad(top_k_B, 0), pad(top_p_B, 1), pad(min_p_B, 0)
    zeros_P = jnp.zeros(top_k_P.shape, jnp.uint32)
    everything = Cut(zeros_P, zeros_P + V)
    rows = Rows(logits_BV, pad(inv_temp_B, 1), pad(lse_B, 0), zeros_P, everything)

    def top_k():
        count_P = jnp.where((top_k_P <= 0) | (top_k_P > V), V, top_k_P).astype(jnp.uint32)
        return _cut(rows._replace(counts_P=zeros_P + 1), count_P)

    by_k = lax.cond(jnp.any(top_k_P > 0), top_k, lambda: everything)
    rows = rows._replace(among=by_k)
    total_P, _, top_P = _at_edge(rows, zeros_P)

    def top_p():
        wanted_P = jnp.ceil(total_P.astype(jnp.float32) * top_p_P).astype(jnp.uint32)
        cut = _cut(rows, jnp.clip(wanted_P, 1, total_P))
        return Cut(*(jnp.where(top_p_P >= 1, whole, part) for whole, part in zip(everything, cut, strict=True)))

    by_p = lax.cond(jnp.any(top_p_P < 1), top_p, lambda: everything)
    least_P = jnp.ceil(top_P.astype(jnp.float32) * min_p_P).astype(jnp.uint32)
    return _masked(rows, by_p, least_P)[:B]


@jax.jit
def _cut(rows: Rows, wanted_P: jax.Array) -> Cut:
    """The smallest set of largest entries whose masses reach `wanted`, ties at the edge by lowest index."""
    V = rows.logits_BV.shape[1]
    edge_P = _edge(rows, None, wanted_P, 32)
    above_P, tied_P, _ = _at_edge(rows, edge_P)
    missing_P = wanted_P - above_P

    def ties():
        # Of largest distances from the vocabulary's end.
        return V - _edge(rows, edge_P, missing_P, V.bit_length())

    # One entry at the edge, as a rule: it stays.
    return Cut(edge_P, lax.cond(jnp.any(tied_P > 1), ties, lambda: jnp.full_like(edge_P, V)))


def _edge(rows: Rows, tied_P: jax.Array | None, wanted_P: jax.Array, bits: int) -> jax.Array:
    """uint32 [P]: the largest edge such that the masses of entries not below it reach `wanted`; digit by digit from above.

    With `tied`, the entries are those of this order, and their order is their distance from the vocabulary's end.
    """
    digits = -(-bits // DIGIT)

    def refine(i, edge_P):
        shift = ((digits - 1 - i) * DIGIT).astype(jnp.uint32)
        mass_nP = _sums(rows, edge_P, jnp.broadcast_to(shift, edge_P.shape), tied_P)
        digit_n = jnp.arange(1, 1 << DIGIT, dtype=jnp.uint32)
        fits_n = (digit_n << shift) >> shift == digit_n  # the first digit of 32 bits is shorter
        # Of ever larger edges the first few are reached.
        reached_P = jnp.sum((mass_nP >= wanted_P) & fits_n[:, None], axis=0, dtype=jnp.uint32)
        return edge_P | (reached_P << shift)

    return lax.fori_loop(0, digits, refine, jnp.zeros_like(wanted_P))


def _order(z_MV: jax.Array, inv_temp_M: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scaled logits, uint32 that compare as they do) of a tile."""
    s_MV = mosaic.mul(z_MV, mosaic.rows(inv_temp_M, z_MV.shape))
    bits_MV = lax.bitcast_convert_type(mosaic.add(s_MV, 0.0), jnp.uint32)  # -0 + 0 is 0
    # Negative floats compare backwards as integers.
    return s_MV, jnp.where(bits_MV >> 31 == 1, ~bits_MV, bits_MV | jnp.uint32(2**31))


def _mass(s_MV: jax.Array, lse_M: jax.Array) -> jax.Array:
    """Probabilities of scaled logits, uint32, 2^31 is 1."""
    least_M = mosaic.mul(-lse_M, LOG2E, mosaic.row_layout())
    p_MV = mosaic.exp2(mosaic.fma(s_MV, LOG2E, mosaic.rows(least_M, s_MV.shape)))
    return mosaic.mul(p_MV, 2.0**FIXED_POINT_BITS).astype(jnp.uint32)


def _keeps(order_MV, index_MV, edge_M, last_M) -> jax.Array:
    edge_MV, last_MV = (mosaic.rows(x_M, order_MV.shape) for x_M in (edge_M, last_M))
    return (order_MV > edge_MV) | ((order_MV == edge_MV) & (index_MV <= last_MV))


def _index(block, shape) -> jax.Array:
    return (plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + block * VOCAB_BLOCK).astype(
        jnp.uint32
    )


def _weighed(z_MV, block, inputs):
    """(order, mass) of a tile; `inputs` are its rows of `_fixed`."""
    inv_temp_M, lse_M, counts_M, *among_M = inputs
    s_MV, order_MV = _order(z_MV, inv_temp_M)
    one_MV = jnp.where(z_MV > -jnp.inf, jnp.uint32(1), jnp.uint32(0))
    mass_MV = jnp.where(mosaic.rows(counts_M, z_MV.shape) > 0, one_MV, _mass(s_MV, lse_M))
    kept_MV = _keeps(order_MV, _index(block, z_MV.shape), *among_M)
    return order_MV, jnp.where(kept_MV, mass_MV, jnp.uint32(0))


FIXED = 5


def _fixed(rows: Rows) -> tuple[jax.Array, ...]:
    """The inputs of a tile that every kernel here takes."""
    return rows.inv_temp_P, rows.lse_P, rows.counts_P, *rows.among


def _blocks(n: int, rows: Rows) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((n, rows.logits_BV.shape[1] // VOCAB_BLOCK, rows.lse_P.shape[0]), jnp.uint32)


def _sums(rows: Rows, edge_P: jax.Array, shift_P: jax.Array, tied_P: jax.Array | None) -> jax.Array:
    """uint32 [2^DIGIT - 1, P]: for each digit but 0, put into the edge at `shift`, the masses of entries not below it."""
    V = rows.logits_BV.shape[1]
    digits = range(1, 1 << DIGIT)
    ties = () if tied_P is None else (tied_P,)

    def work(z_MV, at, block, inputs, outputs):
        order_MV, mass_MV = _weighed(z_MV, block, inputs[:FIXED])
        edge_M, shift_M, *tied_M = inputs[FIXED:]
        for x_M in tied_M:
            end_MV = jnp.uint32(V) - _index(block, z_MV.shape)
            order_MV = jnp.where(order_MV == mosaic.rows(x_M, z_MV.shape), end_MV, jnp.uint32(0))
        for digit in digits:
            trial_M = edge_M | (jnp.full(edge_M.shape, digit, jnp.uint32) << shift_M)
            reached_MV = order_MV >= mosaic.rows(trial_M, z_MV.shape)
            outputs[0][digit - 1, block, at] = jnp.where(reached_MV, mass_MV, jnp.uint32(0)).sum(axis=1)

    inputs = (*_fixed(rows), edge_P, shift_P, *ties)
    (sums,) = over_tiles(rows.logits_BV, inputs, (_blocks(len(digits), rows),), work)
    return jnp.sum(sums, axis=1, dtype=jnp.uint32)


@jax.jit
def _at_edge(rows: Rows, edge_P: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """uint32 [P] each: the masses above the edge, how many entries with a mass are at it, the largest mass."""

    def work(z_MV, at, block, inputs, outputs):
        order_MV, mass_MV = _weighed(z_MV, block, inputs[:FIXED])
        edge_MV = mosaic.rows(inputs[FIXED], z_MV.shape)
        tied_MV = (order_MV == edge_MV) & (mass_MV > 0)
        outputs[0][0, block, at] = jnp.where(order_MV > edge_MV, mass_MV, jnp.uint32(0)).sum(axis=1)
        outputs[0][1, block, at] = jnp.where(tied_MV, jnp.uint32(1), jnp.uint32(0)).sum(axis=1)
        outputs[0][2, block, at] = mass_MV.max(axis=1)

    (found,) = over_tiles(rows.logits_BV, (*_fixed(rows), edge_P), (_blocks(3, rows),), work)
    above_P, tied_P = jnp.sum(found[:2], axis=1, dtype=jnp.uint32)
    return above_P, tied_P, jnp.max(found[2], axis=0)


def _masked(rows: Rows, by_p: Cut, least_P: jax.Array) -> jax.Array:
    """Logits that both cuts keep and whose masses are not below `least`, -inf in place of the others."""
    B, V = rows.logits_BV.shape

    def work(z_MV, at, block, inputs, outputs):
        order_MV, mass_MV = _weighed(z_MV, block, inputs[:FIXED])
        least_M, *cut_M = inputs[FIXED:]
        kept_MV = _keeps(order_MV, _index(block, z_MV.shape), *inputs[FIXED - 2 : FIXED])
        kept_MV &= _keeps(order_MV, _index(block, z_MV.shape), *cut_M) & (mass_MV >= mosaic.rows(least_M, z_MV.shape))
        outputs[0][at, pl.ds(block * VOCAB_BLOCK, VOCAB_BLOCK)] = jnp.where(kept_MV, z_MV, -jnp.inf)

    out_type = (jax.ShapeDtypeStruct((rows.lse_P.shape[0], V), jnp.float32),)
    (kept_PV,) = over_tiles(rows.logits_BV, (*_fixed(rows), least_P, *by_p), out_type, work)
    return kept_PV[:B]

"""Gumbel-max sampling on Hopper: one kernel scores, keeps the best of each row and sums the log-probability's blocks; every other
step is exact."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.logprob import hopper as logprob
from pallas_kernels.logprob.hopper_blocks import CONSUMERS, STEPS, TILED32, block_sums, drain
from pallas_kernels.logprob.hopper_choice import SHARES, Choice
from pallas_kernels.sample import hopper_truncate, truncates

VERSION = 1
ROWS, COLUMNS = 64, 128
"""Tile of logits that is loaded at once: a block of the log-probability's vocabulary."""
PIECE = 32
"""Columns that are scored at once: two pieces side by side share one Threefry call, which gives two words."""
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
LN2 = float(np.float32(np.log(2.0)))
LN_LN2 = float(np.float32(np.log(np.log(2.0))))
SERIES = tuple(float(np.float32(1 / (n * np.log(2.0)))) for n in range(1, 7))
"""-log2(1 - u) = u / ln 2 + u^2 / (2 ln 2) + ...: coefficients for u < SMALL."""
SMALL = 0.125
LAST = 2**31 - 1


def entry(V8: int) -> dict:
    """This implementation's line in the contract: all that reaches the bits. No tile does."""
    return {
        "implementation": "hopper",
        "version": VERSION,
        "arch": "sm90",
        "vocab_padded": V8,
        "noise": "-log(-log1p(-(bits + 0.5) / 2^32)), Threefry-2x32 of (position, counter) under the seed",
        "counter": f"index // {2 * PIECE} * {PIECE} + index % {PIECE}, word index // {PIECE} % 2",
        "log": "lg2.approx; below 1/8 log1p is its series",
        "series": [x.hex() for x in (LN2, LN_LN2, *SERIES)],
        "ties": "lowest index",
        "truncation": "top-k, then top-p, then min-p",
        "probability": f"integers, 2^{hopper_truncate.FIXED_POINT_BITS} is 1",
    }


def sample(
    logits_BV, keys_B2, positions_B, inv_temp_B, top_k_B, top_p_B, min_p_B, *, with_logprob: bool, fixed: Fixed | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(tokens [B], log-probability over the whole vocabulary [B] or zeros, that under the truncated distribution [B], anything
    if no row truncates)."""
    fixed = fixed or fixed_of(keys_B2, inv_temp_B, top_k_B, top_p_B, min_p_B)
    none_B = jnp.zeros_like(fixed.inv_temp_B)

    def best(logits_BV, with_sums):
        """(tokens [B], their log-probabilities under these logits [B])"""
        return _best(logits_BV, fixed, positions_B, with_sums)

    def truncated():
        tokens_B, truncated_B = best(hopper_truncate.truncate(logits_BV, fixed.inv_temp_B, top_k_B, top_p_B, min_p_B), True)
        logprob_B = logprob.reduce(logits_BV, tokens_B, fixed.inv_temp_B)[0] if with_logprob else none_B
        return tokens_B, logprob_B, truncated_B

    def whole():
        return *best(logits_BV, with_logprob), none_B

    return lax.cond(fixed.some_truncate, truncated, whole)


class Fixed(NamedTuple):
    """What does not change from step to step; P is B rounded up to whole tiles."""

    key0_P: jax.Array
    key1_P: jax.Array
    inv_temp_P: jax.Array
    noisy_P: jax.Array  # 0 for greedy, else 1
    inv_temp_B: jax.Array  # 1 for greedy
    some_truncate: jax.Array


def fixed_of(keys_B2, inv_temp_B, top_k_B, top_p_B, min_p_B) -> Fixed:
    """Of rows' parameters, as `sample` takes them."""
    greedy_B = inv_temp_B == 0
    inv_temp_B = jnp.where(greedy_B, 1, inv_temp_B)
    keys_P = [_padded(keys_B2[:, i]) for i in range(2)]
    noisy_P = _padded(jnp.where(greedy_B, 0.0, 1.0))
    some = jnp.any(truncates(top_k_B, top_p_B, min_p_B))
    return Fixed(*keys_P, _padded(inv_temp_B, 1), noisy_P, inv_temp_B, some)


def threefry(keys: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011) on uint32 arrays of one shape."""
    schedule = (*keys, keys[0] ^ keys[1] ^ jnp.uint32(PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            x = x + y
            y = (y << bits) | (y >> (32 - bits))
            y = x ^ y
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def gumbel(bits: jax.Array) -> jax.Array:
    """Gumbel noise of uint32 random bits, in Layout.WGMMA; fine resolution in the upper tail, where a rare token is won."""
    u = mosaic.fma(bits.astype(jnp.float32), 2.0**-32, 2.0**-33)
    u = jnp.minimum(u, 1 - 2.0**-24)
    series = mosaic.fma(u, -SERIES[-1], -SERIES[-2])
    for coefficient in SERIES[-3::-1]:
        series = mosaic.fma(series, u, -coefficient)
    log = jnp.where(u < SMALL, mosaic.mul(series, u), mosaic.log2(mosaic.fma(u, -1.0, 1.0)))  # of 1 - u, in units of ln 2
    return mosaic.fma(mosaic.log2(mosaic.neg(log)), -LN2, -LN_LN2)


def _padded(x_B: jax.Array, fill=0) -> jax.Array:
    return jnp.pad(x_B, (0, -x_B.shape[0] % ROWS), constant_values=fill)


def _best(logits_BV, fixed: Fixed, positions_B, with_sums: bool) -> tuple[jax.Array, jax.Array]:
    """(int32 [B], the lowest index of the largest logit * inv_temp + noise, no noise for greedy rows; its log-probability [B], if
    asked for, else zeros)."""
    B = logits_BV.shape[0]
    extra = -B % 8 if B > 8 else 0  # TMA moves tiles of 8 rows
    loads_BV = jnp.pad(logits_BV, ((0, extra), (0, 0))) if extra else logits_BV
    rows = fixed.key0_P, fixed.key1_P, _padded(lax.bitcast_convert_type(positions_B, jnp.uint32)), fixed.inv_temp_P, fixed.noisy_P
    score_SP, index_SP, *sums = _scan(with_sums, loads_BV, *rows)
    if with_sums:
        return logprob.finish_choice(*sums, Choice(score_SP, index_SP, logits_BV), fixed.inv_temp_P)
    index_SP = jnp.where(score_SP == jnp.max(score_SP, axis=0), index_SP, LAST)
    return jnp.min(index_SP, axis=0)[:B], jnp.zeros_like(fixed.inv_temp_B)


@functools.partial(jax.jit, static_argnums=0)
def _scan(with_sums: bool, logits_BV, key0_P, key1_P, position_P, inv_temp_P, noisy_P) -> tuple[jax.Array, ...]:
    """(best score fp32, its index int32), [shares of the vocabulary, P]; with sums, what `block_stats` gives, besides: the
    logits are read once for both."""
    P = inv_temp_P.shape[0]
    blocks = logits_BV.shape[1] // COLUMNS
    tiles = P // ROWS
    splits = min(max(SHARES // CONSUMERS, mosaic.SMS // tiles), blocks)
    shape = (ROWS, PIECE)
    wide = lambda x_M: mosaic.rows(x_M, shape)  # noqa: E731
    layout = plgpu.Layout.WGMMA

    def body(z_g, *refs):
        row_refs, (score_g, index_g), sum_refs, (z_s, full, empty) = refs[:5], refs[5:7], refs[7:-3], refs[-3:]
        split, wg = lax.axis_index("split"), lax.axis_index("wg")
        at = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
        start = lax.div(split * blocks, splits)
        count = lax.div((split + 1) * blocks, splits) - start

        @pl.when(wg == CONSUMERS)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            def load(i, _):
                slot = lax.rem(i, STEPS)

                @pl.when(i >= STEPS)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                z_at = z_g.at[at, pl.ds((start + i) * COLUMNS, COLUMNS)]
                plgpu.copy_gmem_to_smem(z_at, z_s.at[slot], full.at[slot])
                return None

            lax.fori_loop(0, count, load, None)
            drain(empty, count)

        @pl.when(wg < CONSUMERS)
        def _score():
            plgpu.set_max_registers(232, action="increase")
            rows = [plgpu.load(ref.at[at], layout=mosaic.row_layout(), optimized=False) for ref in row_refs]
            key0_M, key1_M, position_M, inv_temp_M, noisy_M = rows
            column_MV = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

            def tile(k, best):
                i = wg + k * CONSUMERS
                slot = lax.rem(i, STEPS)
                plgpu.barrier_wait(full.at[slot])
                z_MV = plgpu.load(z_s.at[slot], layout=layout)
                plgpu.commit_smem()  # what was read here, TMA may now write
                plgpu.barrier_arrive(empty.at[slot])
                if with_sums:
                    max_g, sum_g = sum_refs
                    max_g[start + i, at], sum_g[start + i, at] = block_sums(z_MV, inv_temp_M)
                for pair in range(COLUMNS // (2 * PIECE)):
                    piece = (start + i) * (COLUMNS // PIECE) + 2 * pair
                    counter_MV = (column_MV + lax.div(piece, 2) * PIECE).astype(jnp.uint32)
                    words = threefry((wide(key0_M), wide(key1_M)), (wide(position_M), counter_MV))
                    for half, bits_MV in enumerate(words):
                        first = (2 * pair + half) * PIECE
                        s_MV = mosaic.mul(z_MV[:, first : first + PIECE], wide(inv_temp_M))
                        score_MV = mosaic.fma(gumbel(bits_MV), wide(noisy_M), s_MV)
                        better_MV = score_MV > best[0]
                        best = jnp.where(better_MV, score_MV, best[0]), jnp.where(better_MV, piece + half, best[1])
                return best

            none = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
            none = tuple(plgpu.layout_cast(x, layout) for x in none)
            score_MV, piece_MV = lax.fori_loop(0, lax.div(count - wg + CONSUMERS - 1, CONSUMERS), tile, none)
            score_M = score_MV.max(axis=1)
            index_MV = jnp.where(score_MV == wide(score_M), piece_MV * PIECE + column_MV, LAST)
            share = split * CONSUMERS + wg
            score_g[share, at], index_g[share, at] = score_M, index_MV.min(axis=1)

    outputs = [splits * CONSUMERS] + [blocks] * with_sums
    return mosaic.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((n, P), dtype) for n in outputs for dtype in (jnp.float32, jnp.int32)),
        scratch_types=[
            plgpu.SMEM((STEPS, ROWS, COLUMNS), jnp.float32, transforms=TILED32),
            plgpu.Barrier(num_barriers=STEPS),
            plgpu.Barrier(num_barriers=STEPS),
        ],
        grid=(tiles, splits),
        grid_names=("tile", "split"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
    )(logits_BV, key0_P, key1_P, position_P, inv_temp_P, noisy_P)

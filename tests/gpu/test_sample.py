"""Sampling on the GPU: tokens are the Gumbel maximum of the named bits, a row's own, of the right distribution and support."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from pallas_kernels import logprob, sample
from pallas_kernels.logprob import hopper as hopper_logprob
from pallas_kernels.logprob import hopper_blocks
from pallas_kernels.sample import hopper, hopper_truncate
from tests.pallas_kernels.base import same
from tests.pallas_kernels.test_sample import kept

B, V = 256, 32000
V8 = logprob.padded_vocab(V)


@functools.partial(jax.jit, static_argnames="impl")
def draw(*requests, impl="hopper"):
    return sample.sample(*requests, regions=("r", "l"), impl=impl)


@functools.cache
def requests() -> tuple[jax.Array, ...]:
    """Rows of every temperature, every 50th greedy, none truncated."""
    keys = jax.random.split(jax.random.key(0), 3)
    z = jnp.where(jnp.arange(V8) < V, jax.random.normal(keys[0], (B, V8)) * 3, -jnp.inf)
    inv_temp = 1 / jnp.array([0.7, 1.0, 1.3], jnp.float32)[jax.random.randint(keys[1], (B,), 0, 3)]
    inv_temp = jnp.where(jnp.arange(B) % 50 == 3, 0, inv_temp)
    none = jnp.zeros(B, jnp.int32), jnp.ones(B), jnp.zeros(B)
    return z, jax.random.bits(keys[2], (B, 2), jnp.uint32), jnp.arange(B, dtype=jnp.int32) * 7, inv_temp, *none


@functools.cache
def whole() -> list[np.ndarray]:
    return [np.asarray(y) for y in draw(*requests())]


def truncating(every: int = 1) -> tuple[jax.Array, ...]:
    """`requests`, but every so many rows truncate in one of several ways."""
    way = jnp.where(jnp.arange(B) % every == 0, jnp.arange(B) // every % 5, 9)
    top_k = jnp.select([way == 0, way == 3], [20, 1000], 0).astype(jnp.int32)
    top_p = jnp.select([way == 1, way == 3], [0.9, 0.5], 1.0)
    return *requests()[:4], top_k, top_p, jnp.select([way == 2, way == 4], [0.05, 0.9], 0.0)


def noise(keys, positions) -> np.ndarray:
    """The entry's noise in float64 [B, V8]."""
    index = np.arange(V8)
    counter = (index // 64 * 32 + index % 32).astype(np.uint32)
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.uint32), (len(keys), V8))  # noqa: E731
    words = threefry2x32_p.bind(wide(keys[:, :1]), wide(keys[:, 1:]), wide(positions[:, None]), wide(counter[None]))
    bits = np.where(index // 32 % 2 == 0, *map(np.asarray, words)).astype(np.float64)
    return -np.log(-np.log1p(-np.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)))


def test_tokens_are_the_gumbel_maximum():
    z, keys, positions, inv_temp = (np.asarray(x) for x in requests()[:4])
    greedy = inv_temp == 0
    scores = z.astype(np.float64) * np.where(greedy, 1, inv_temp)[:, None]
    noisy = scores + np.where(greedy, 0, 1)[:, None] * noise(keys, positions)
    tokens, full, lp = whole()
    lost = noisy.max(1) - noisy[np.arange(B), tokens]
    assert (lost < 2e-5).all(), "not the largest, even to rounding"
    assert (tokens != noisy.argmax(1)).sum() <= 1
    assert np.array_equal(tokens[greedy], z[greedy].argmax(1)) and not lp[greedy].any()
    want = scores[np.arange(B), tokens] - np.log(np.exp(scores).sum(1))
    np.testing.assert_allclose(lp[~greedy], want[~greedy], atol=5e-6)
    contract = np.asarray(hopper_logprob.reduce(z, tokens, np.where(greedy, np.float32(1), inv_temp))[0])
    assert same([full, lp[~greedy]], [contract, contract[~greedy]]), "nothing is truncated: the contract's log-probability"
    for other in ((keys + np.uint32(1), positions), (keys, positions + 1)):
        changed = np.asarray(draw(z, *other, *requests()[3:])[0]) != tokens
        assert changed[~greedy].mean() > 0.5 and not changed[greedy].any(), "the control: another seed or position"


def test_sums_of_the_choice_are_those_of_a_kernel_of_their_own():
    """And they change nothing of the choice; other rows, other programs."""
    for n in (B, 64, 8):
        z, keys, positions, *rest = (x[:n] for x in requests())
        fixed = hopper.fixed_of(keys, *rest)
        rows = fixed.key0_P, fixed.key1_P, hopper._padded(positions.astype(jnp.uint32)), fixed.inv_temp_P, fixed.noisy_P
        _, _, *sums = hopper._scan(True, z, *rows)
        best = jax.jit(hopper._best, static_argnums=3)
        (tokens, _), (alone, _) = (best(z, fixed, positions, with_sums) for with_sums in (True, False))
        assert same([tokens, alone], [whole()[0][:n]] * 2), n
        stats = hopper_blocks.block_stats(z, fixed.inv_temp_P)
        sums, stats = ([np.asarray(x)[:, :n] for x in y] for y in (sums, stats))
        assert same(sums, stats) and not same(sums, stats[::-1]), n


def test_ties_and_frequencies():
    """Chi-square of 20,480 draws against the softmax; the control, another temperature, must not fit."""
    _, keys, positions, _, *none = requests()
    z = jnp.full((B, V8), -jnp.inf).at[:, jnp.array([40, 300, 700, 70, 31999])].set(2.0)
    assert (np.asarray(draw(z, keys, positions, jnp.zeros(B), *none)[0]) == 40).all()
    tokens = np.asarray(draw(z, keys, positions, jnp.ones(B), *none)[0])
    assert set(tokens.tolist()) == {40, 70, 300, 700, 31999}, "pads are never drawn"
    places = np.sort(np.random.default_rng(5).permutation(V)[:12])
    row = np.random.default_rng(6).standard_normal(12).astype(np.float32)
    z = jnp.full((B, V8), -jnp.inf).at[:, places].set(row)
    inv_temp = jnp.full(B, 1 / 1.3, jnp.float32)
    tokens = np.concatenate([draw(z, keys, positions + 1000 * i, inv_temp, *none)[0] for i in range(80)])
    assert set(tokens.tolist()) <= set(places.tolist())
    counts, n = np.bincount(np.searchsorted(places, tokens), minlength=12), len(tokens)
    p = lambda t: np.exp(row / t) / np.exp(row / t).sum()  # noqa: E731
    chi2 = lambda p: float((((counts - n * p) ** 2) / (n * p)).sum())  # noqa: E731
    assert chi2(p(1.3)) < 31.3  # 11 degrees of freedom, 0.1 %
    assert chi2(p(1.0)) > 200


def test_a_row_has_its_own_token_in_any_batch():
    odd = jnp.arange(B) % 2 == 1
    for rows in (requests(), truncating()):
        all_rows = [np.asarray(y) for y in draw(*rows)]
        shuffled = np.random.default_rng(0).permutation(B)
        for pick in (shuffled, shuffled[:13]):
            assert same(draw(*(x[pick] for x in rows)), [y[pick] for y in all_rows]), len(pick)
        dirty = draw(jnp.where(odd[:, None], jnp.nan, rows[0]), *rows[1:])
        assert same([np.asarray(y)[::2] for y in dirty], [y[::2] for y in all_rows])
    beside = [np.asarray(y) for y in draw(*truncating(every=2))]
    assert same([y[1::2] for y in beside], [y[1::2] for y in whole()]), "rows that truncate reach the others"
    assert (beside[0][::2] != whole()[0][::2]).any()


def test_support_of_every_truncation():
    z, _, _, inv_temp, top_k, top_p, min_p = (np.array(x) for x in truncating())
    z[1], z[2, :V], z[3] = np.round(z[1]), 0, np.round(z[3])  # ties at the edge
    top_k[:12] = [5, 3, 7, 50, 0, 0, 20, 1, V8 + 5, 0, 0, 31999]
    top_p[:12] = [1, 1, 0.5, 0.2, 0.999, 1, 0.8, 1, 1, 0.3, 1e-6, 1]
    min_p[:12] = [0, 0, 0, 0, 0, 0.1, 0.01, 0, 0, 0, 0, 0]
    inv_temp[inv_temp == 0] = 1
    keep = np.isfinite(jax.jit(hopper_truncate.truncate)(z, inv_temp, top_k, top_p, min_p))
    for i in range(40):
        want = kept(z[i] * inv_temp[i], top_k[i], top_p[i], min_p[i])
        # A nucleus ends where the masses reach its share: in 2^31 parts, and in fp32 exponents, to a few entries of many.
        slack = 2 + 5e-3 * want.sum() if top_p[i] < 1 else 0
        assert (keep[i] != want).sum() <= slack, f"row {i}: {keep[i].sum()} kept, {want.sum()} wanted"
        assert keep[i].sum() == want.sum() or want.sum() > 100

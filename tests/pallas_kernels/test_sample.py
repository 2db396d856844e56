from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import logprob, sample
from tests.pallas_kernels.base import ISO, same

V = 1024


def call(z, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, keys=None, positions=None, impl=ISO[0]):
    B = len(z)
    full = lambda x, dtype: jnp.broadcast_to(jnp.asarray(x, dtype), (B,))  # noqa: E731
    keys = np.stack([np.arange(B), np.zeros(B)], 1) if keys is None else keys
    inv_temp = 0.0 if temperature == 0 else np.float32(1) / np.float32(temperature)
    return jax.jit(lambda *a: sample.sample(*a, regions=("r", "l"), impl=impl))(
        jnp.asarray(z, jnp.float32), jnp.asarray(keys, jnp.uint32),
        jnp.asarray(np.arange(B) if positions is None else positions, jnp.int32),
        full(inv_temp, jnp.float32), full(top_k, jnp.int32), full(top_p, jnp.float32), full(min_p, jnp.float32),
    )  # fmt: skip


def logits(B, seed=0, scale=3.0, V=V, real=1000):
    z = np.random.default_rng(seed).standard_normal((B, V)) * scale
    z[:, real:] = -np.inf
    return z.astype(np.float32)


@pytest.mark.parametrize("options", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8}])
def test_a_token_depends_on_its_row_seed_and_position_alone(options):
    z = logits(40)
    keys, positions = np.stack([np.arange(40) * 7, np.arange(40)], 1), np.arange(40) * 3
    whole = call(z, keys=keys, positions=positions, temperature=0.8, **options)
    for pick in ([5], [39, 0, 7], np.random.default_rng(1).permutation(40)):
        part = call(z[pick], keys=keys[pick], positions=positions[pick], temperature=0.8, **options)
        assert same(part, [x[np.asarray(pick)] for x in whole])
    other_seed = call(z, keys=keys + 1, positions=positions, temperature=0.8, **options)[0]
    other_position = call(z, keys=keys, positions=positions + 1, temperature=0.8, **options)[0]
    assert (other_seed != whole[0]).any() and (other_position != whole[0]).any()


def kept(z, top_k=0, top_p=1.0, min_p=0.0):
    """Support of the truncated distribution, in float64."""
    order = np.argsort(-z, kind="stable")
    p = np.exp(z.astype(np.float64) - z.max())
    p /= p.sum()
    keep = np.zeros(len(z), bool)
    keep[order[: top_k or len(z)]] = True
    keep &= np.isfinite(z)
    if top_p < 1:
        q = np.where(keep, p, 0)[order]
        before = np.cumsum(q) - q
        nucleus = np.zeros(len(z), bool)
        nucleus[order[before < top_p * q.sum()]] = True
        keep &= nucleus
    return keep & (p >= min_p * p.max())


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_k": 7}, {"top_k": 5000}, {"top_p": 0.5}, {"top_p": 0.999}, {"min_p": 0.2},
                {"top_k": 30, "top_p": 0.7, "min_p": 0.01}]
)  # fmt: skip
def test_support_and_truncated_log_probability(options):
    row = logits(1, seed=4)[0]
    B = 400
    tokens, _, lp = call(np.tile(row, (B, 1)), **options)
    keep = kept(row, **options)
    assert keep[np.asarray(tokens)].all()
    p = np.where(keep, np.exp(row.astype(np.float64) - row.max()), 0)
    p /= p.sum()
    np.testing.assert_allclose(lp, np.log(p[np.asarray(tokens)]), atol=2e-5)
    expected = np.flatnonzero(p > 0.03)  # 400 draws miss one of these once in 200,000 times
    assert set(expected) <= set(np.asarray(tokens))


def test_a_row_that_keeps_all_has_the_contracts_log_probability_beside_any_row():
    z = logits(6)
    alone = call(z, temperature=0.8)
    contract = logprob.from_logits(z, alone[0], jnp.full(6, np.float32(1) / np.float32(0.8)), region="l", impl=ISO[0])
    assert same(alone[1:], [contract, contract])
    tokens, full, truncated = call(z, temperature=0.8, top_k=[0, 3, 0, 0, 0, 0], top_p=[1, 1, 1, 0.5, 1, 1])
    whole = np.array([0, 2, 4, 5])
    assert same([x[whole] for x in (tokens, full, truncated)], [x[whole] for x in alone])
    assert (truncated[jnp.array([1, 3])] > full[jnp.array([1, 3])]).all()


def test_ties_go_to_the_lowest_index():
    z = np.full((16, V), -5.0, np.float32)
    z[:, [40, 300, 700]] = 2.0
    assert (np.asarray(call(z, temperature=0)[0]) == 40).all()
    tokens = np.asarray(call(np.tile(z, (8, 1)), top_k=2)[0])
    assert set(tokens) == {40, 300}


def test_a_large_vocabulary_keeps_its_flat_tail():
    """152k equal tokens beside one large: top-p in coarse fixed point would lose the tail's mass."""
    V = 151_552
    z = np.full((1, V), 0.0, np.float32)
    z[0, 17] = np.log(V / 4)  # 20 % of the mass
    tokens = np.asarray(call(np.tile(z, (64, 1)), top_p=0.95)[0])
    assert (tokens == 17).mean() < 0.5
    assert tokens.max() < 0.95 * V + 100, "beyond the nucleus, ties by lowest index"
    assert tokens.max() > 0.6 * V


def test_greedy_log_probability_is_zero_and_padding_is_never_sampled():
    z = logits(64, scale=0.01, real=3)
    assert (np.asarray(call(z)[0]) < 3).all()
    tokens, _, lp = call(z, temperature=0)
    assert np.array_equal(tokens, z.argmax(1)) and not np.asarray(lp).any()


def test_frequencies():
    """Chi-square of 20,000 draws against the softmax; the control, another temperature, must not fit."""
    row = logits(1, seed=6, scale=1.0, real=12)
    B = 20_000
    p = lambda t: np.exp(row[0, :12] / t) / np.exp(row[0, :12] / t).sum()  # noqa: E731
    counts = np.bincount(np.asarray(call(np.tile(row, (B, 1)), temperature=1.3, positions=np.zeros(B))[0]), minlength=12)
    chi2 = lambda p: float((((counts - B * p) ** 2) / (B * p)).sum())  # noqa: E731
    assert chi2(p(1.3)) < 31.3  # 11 degrees of freedom, 0.1 %
    assert chi2(p(1.0)) > 200

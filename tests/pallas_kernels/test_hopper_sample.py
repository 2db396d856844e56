"""Sampling on Hopper without a GPU: in the interpreter, with its race detector, and lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.extend.random import threefry2x32_p

from pallas_kernels import mosaic, sample
from pallas_kernels.logprob import hopper as logprob
from pallas_kernels.logprob import hopper_blocks
from pallas_kernels.sample import hopper, hopper_truncate
from tests.pallas_kernels.base import same
from tests.pallas_kernels.test_sample import kept

B, V = 10, 1024


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Two programs share the vocabulary: each has several tiles."""
    monkeypatch.setattr(mosaic, "SMS", 2)


def interpreted(fn, *args):
    with mosaic.interpreted():
        out = jax.tree.map(np.asarray, jax.jit(fn)(*args))
    assert not gpu_callbacks.get_races().races_found
    return out


def requests(B=B):
    """Rows of every kind: logits [B, V], keys, positions, inverse temperatures (greedy row 3), no truncation."""
    rng = np.random.default_rng(0)
    z = (rng.standard_normal((B, V)) * 2).astype(np.float32)
    z[:, 1000:] = -np.inf
    inv_temp = (1 / rng.choice([0.7, 1.0, 1.3], B)).astype(np.float32)
    inv_temp[3 % B] = 0
    none = np.zeros(B, np.int32), np.ones(B, np.float32), np.zeros(B, np.float32)
    return z, rng.integers(0, 2**32, (B, 2), dtype=np.uint32), np.arange(B, dtype=np.int32) * 7, inv_temp, *none


def draw(*requests):
    return sample.sample(*requests, regions=("choice", "logprob"), impl="hopper")


@functools.cache
def whole():
    """(tokens, log-probabilities, truncated ones) of `requests()`."""
    return interpreted(draw, *requests())


def noise(keys, positions):
    """The entry's noise in float64 [B, V]."""
    index = np.arange(V)
    counter = (index // 64 * 32 + index % 32).astype(np.uint32)
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.uint32), (len(keys), V))  # noqa: E731
    words = threefry2x32_p.bind(wide(keys[:, :1]), wide(keys[:, 1:]), wide(positions[:, None]), wide(counter[None]))
    bits = np.where(index // 32 % 2 == 0, *map(np.asarray, words)).astype(np.float64)
    return -np.log(-np.log1p(-np.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)))


def test_threefry_is_threefry():
    words = np.random.default_rng(0).integers(0, 2**32, (4, 1000), dtype=np.uint32)
    assert same(hopper.threefry(tuple(words[:2]), tuple(words[2:])), threefry2x32_p.bind(*map(jnp.asarray, words)))


def test_noise_in_its_tails():
    bits = np.r_[0, 1, 2**28, 2**29 - 1, 2**29, 2**32 - 1, np.random.default_rng(0).integers(0, 2**32, 1000)].astype(
        np.uint32
    )
    with mosaic.interpreted():
        got = np.asarray(hopper.gumbel(bits))
    u = np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    exact = -np.log(-np.log1p(-u))
    # Where noise is large it decides; where it is small, u near 1 has no finer steps.
    assert np.abs(got - exact)[exact > 0].max() < 3e-6 and np.abs(got - exact).max() < 1e-3
    assert got[0] == got.max() and got.max() > 22


def test_tokens_are_the_gumbel_maximum():
    z, keys, positions, inv_temp, *_ = requests()
    tokens, full, lp = whole()
    scores = z.astype(np.float64) * np.where(inv_temp == 0, 1, inv_temp)[:, None]
    noisy = scores + np.where(inv_temp == 0, 0, 1)[:, None] * noise(keys, positions)
    assert np.array_equal(tokens, noisy.argmax(1)) and tokens[3] == z[3].argmax()
    p = np.exp(scores)
    want = np.where(inv_temp == 0, 0, np.log((p / p.sum(1, keepdims=True))[np.arange(B), tokens]))
    np.testing.assert_allclose(lp, want, atol=1e-5)
    contract = interpreted(logprob.reduce, z, tokens, np.where(inv_temp == 0, np.float32(1), inv_temp))[0]
    assert same([full, lp[inv_temp > 0]], [contract, contract[inv_temp > 0]])


def test_sums_of_the_choice_are_those_of_a_kernel_of_their_own():
    """And they change nothing of the choice."""
    z, keys, positions, *rest = requests()

    def both(z):
        fixed = hopper.fixed_of(keys, *rest)
        loads = jnp.pad(z, ((0, 6), (0, 0)))  # whole ones
        at = hopper._padded(positions.astype(np.uint32))
        _, _, *sums = hopper._scan(True, loads, fixed.key0_P, fixed.key1_P, at, fixed.inv_temp_P, fixed.noisy_P)
        chosen = [hopper._best(z, fixed, positions, with_sums)[0] for with_sums in (True, False)]
        return sums, chosen, hopper_blocks.block_stats(loads, fixed.inv_temp_P)

    sums, chosen, stats = interpreted(both, z)
    assert same(chosen, whole()[:1] * 2)
    own = lambda stats: [x[:, :B] for x in stats]  # noqa: E731
    assert same(own(sums), own(stats)) and not same(own(sums), own(x[::-1] for x in stats))


@pytest.mark.parametrize("region", ["logprob", None])
def test_the_whole_vocabulary_is_summed_only_for_log_probabilities(monkeypatch, region):
    asked, scan = [], hopper._scan
    monkeypatch.setattr(hopper, "_scan", lambda with_sums, *rows: asked.append(with_sums) or scan(with_sums, *rows))
    run = functools.partial(sample.sample, regions=("choice", region), impl="hopper")
    jax.eval_shape(run, *requests())
    assert sorted(asked) == [region is not None, True]  # where rows truncate, what is kept is summed


def test_a_row_alone_and_beside_rows_that_truncate():
    z, keys, positions, inv_temp, top_k, top_p, min_p = requests()
    pick = np.array([7, 2])
    some = interpreted(draw, *(x[pick] for x in (z, keys, positions, inv_temp, top_k, top_p, min_p)))
    assert same(some, [x[pick] for x in whole()])
    top_k[::2] = 3
    beside = interpreted(draw, z, keys, positions, inv_temp, top_k, top_p, min_p)
    assert same([x[1::2] for x in beside], [x[1::2] for x in whole()])
    assert not same([x[::2] for x in beside], [x[::2] for x in whole()])


def test_ties_go_to_the_lowest_index_and_pads_to_none():
    z = np.full((8, V), -np.inf, np.float32)
    z[:, [40, 300, 700, 70]] = 2.0
    _, keys, positions, _, *none = requests(8)
    assert (interpreted(draw, z, keys, positions, np.zeros(8, np.float32), *none)[0] == 40).all()
    tokens = interpreted(draw, z, keys, positions, np.ones(8, np.float32), *none)[0]
    assert set(tokens) <= {40, 70, 300, 700} and len(set(tokens)) > 1


def test_support_of_every_truncation():
    z = requests()[0]
    z[1], z[2, :1000] = np.round(z[1]), 0  # ties at the edge
    inv_temp = np.ones(B, np.float32)
    top_k = np.array([5, 3, 7, 0, 0, 0, 20, 1, 5000, 0], np.int32)
    top_p = np.array([1, 1, 0.5, 0.9, 0.999, 1, 0.8, 1, 1, 0.3], np.float32)
    min_p = np.array([0, 0, 0, 0, 0, 0.1, 0.01, 0, 0, 0], np.float32)
    keep = np.isfinite(interpreted(hopper_truncate.truncate, z, inv_temp, top_k, top_p, min_p))
    for i in range(B):
        want = kept(z[i], top_k[i], top_p[i], min_p[i])
        assert np.array_equal(keep[i], want), f"row {i}: {keep[i].sum()} kept, {want.sum()} wanted"


def test_lowers_for_cuda(monkeypatch, rows=256):
    monkeypatch.setattr(mosaic, "SMS", 132)
    shapes = [jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for x in requests()]
    shapes[0] = jax.ShapeDtypeStruct((rows, 152576), jnp.float32)
    text = jax.jit(draw).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    # Truncation's 6, the choice with its sums and what comes of them, and where rows truncate the whole log-probability's 2.
    assert text.count("mosaic_gpu_v2") == 10

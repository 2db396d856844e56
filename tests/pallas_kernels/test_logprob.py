from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import logprob
from pallas_kernels.logprob import reference
from pallas_kernels.weight import Weight
from tests.pallas_kernels.base import ISO, RowOp, bits, relative, same, spread

V, D = 1300, 64


def head(dtype, V=V):
    return jnp.asarray(np.random.default_rng(9).standard_normal((V, D)) * 0.3, dtype)


class TestLogprob(RowOp):
    V = V

    def rows(self, rng, T, dtype):
        temperature = rng.choice([0.7, 1.0, 1.3], T).astype(np.float32)
        x = jnp.asarray(rng.standard_normal((T, D)) * 2, dtype)
        return x, jnp.asarray(rng.integers(0, self.V, T), jnp.int32), jnp.asarray(np.float32(1) / temperature)

    def call(self, impl, x, targets, inv_temp):
        return (logprob.logprob(x, head(x.dtype, self.V), targets, inv_temp, regions=("a", "b"), impl=impl),)

    def exact(self, x, targets, inv_temp):
        bf16 = np.array_equal(x, np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64))
        z = x @ np.asarray(head(jnp.bfloat16 if bf16 else jnp.float32, self.V), np.float64).T * inv_temp[:, None]
        top = z.max(1, keepdims=True)
        return (np.take_along_axis(z, targets[:, None], 1)[:, 0] - (np.log(np.exp(z - top).sum(1)) + top[:, 0]),)

    # Logits stay fp32, so bf16 operands cost nothing more.
    tolerance = {"bfloat16": 1e-6, "float32": 1e-6}


class TestLogprobTinyVocabulary(TestLogprob):
    V = 13


@pytest.mark.parametrize("impl", ISO)
def test_decode_has_the_bits_of_training(impl):
    x, targets, inv_temp = TestLogprob().rows(np.random.default_rng(0), 70, "bfloat16")
    trained = TestLogprob().call(impl, x, targets, inv_temp)[0]
    for rows in (slice(0, 1), slice(3, 19), slice(0, 70)):
        z = logprob.logits(x[rows], head(x.dtype), region="a", impl=impl)
        assert z.shape[1] == 2048 and np.isneginf(z[:, V:]).all()
        decoded = logprob.from_logits(z, targets[rows], inv_temp[rows], region="b", impl=impl)
        assert same([decoded], [trained[rows]])


@pytest.mark.parametrize("impl", ISO)
def test_never_positive_and_exact_at_the_ends(impl):
    z = np.full((16, 1024), -np.inf, np.float32)
    z[:, :3] = [0.0, -200.0, -np.inf]
    z[8:, 5] = 88.0
    lp = lambda t: np.asarray(  # noqa: E731
        logprob.from_logits(jnp.asarray(z), jnp.full(16, t), jnp.ones(16), region="b", impl=impl)
    )
    assert (lp(0)[:8] == 0).all() and (lp(1)[:8] == -200).all() and np.isneginf(lp(2)).all()
    assert (lp(5)[8:] == 0).all() and (lp(0)[8:] == -88).all()
    rng = np.random.default_rng(1)
    near = jnp.asarray(rng.standard_normal((16, 1024)) * 1e-3 + 40 * (np.arange(1024) == 7), jnp.float32)
    assert (logprob.from_logits(near, jnp.full(16, 7), jnp.ones(16), region="b", impl=impl) <= 0).all()


def test_an_eighth_of_the_vocabulary_has_its_own_bits():
    """A shard that owns whole eighths owns a subtree: what the other shards hold must not change its partial sums."""
    z = spread(np.random.default_rng(2), 16, 8 * 256, binades=3, dtype=jnp.float32)
    run = jax.jit(reference.eighths)
    whole = run(z)
    for ranks in (2, 4, 8):
        size, own = z.shape[1] // ranks, 8 // ranks
        for rank in range(ranks):
            here = slice(rank * size, (rank + 1) * size)
            for fill in (-jnp.inf, 300.0):
                part = run(jnp.full_like(z, fill).at[:, here].set(z[:, here]))
                mine = slice(rank * own, (rank + 1) * own)
                assert same([x[:, mine] for x in part], [x[:, mine] for x in whole])
    moved = run(z.at[:, 300].set(np.nextafter(np.asarray(z[:, 300]), np.inf) + 1))
    assert not same([moved[1][:, 1:2]], [whole[1][:, 1:2]]) and same([moved[1][:, 2:]], [whole[1][:, 2:]])


@pytest.mark.parametrize("impl", [*ISO, "native"])
def test_the_master_gets_the_gradient(impl):
    x, targets, inv_temp = TestLogprob().rows(np.random.default_rng(0), 100, "bfloat16")
    w = head(jnp.bfloat16)

    def loss(x, value, master):
        weight = Weight(value, None, master)
        lp = logprob.logprob(x, weight, targets, inv_temp, regions=("a", "b"), impl=impl)
        return jnp.sum(lp * jnp.arange(100))

    dx, to_value, to_master = jax.grad(loss, argnums=(0, 1, 2))(x, w, w.astype(jnp.float32))
    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T * np.asarray(inv_temp, np.float64)[:, None]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    dz = (np.eye(V)[targets] - p) * (np.arange(100) * np.asarray(inv_temp, np.float64))[:, None]
    assert to_master.dtype == jnp.float32 and not np.asarray(to_value, np.float32).any()
    assert relative(to_master, dz.T @ np.asarray(x, np.float64)) < 1e-2
    assert relative(dx, dz @ np.asarray(w, np.float64)) < 1e-2


def test_training_never_holds_all_logits():
    T = 4096
    x = jnp.zeros((T, D), jnp.bfloat16)

    def loss(x):
        ones = jnp.ones(T)
        return logprob.logprob(x, head(x.dtype, 4096), jnp.zeros(T, jnp.int32), ones, regions=("a", "b"), impl=ISO[0]).sum()

    memory = jax.jit(jax.value_and_grad(loss)).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < T * 4096 * 4 / 8


@pytest.mark.parametrize("v", [1, 13, 1024, 1025, 49152, 151936])
def test_padded_vocabulary(v):
    padded = logprob.padded_vocab(v)
    assert padded % 1024 == 0 and v <= padded < v + 1024


def test_temperature_is_one_rounded_factor():
    """One definition on both sides: logits times fp32(1 / temperature)."""
    z = spread(np.random.default_rng(3), 16, 1024, dtype=jnp.float32)
    inv = jnp.full(16, np.float32(1) / np.float32(0.7))
    scaled = np.asarray(z) * np.asarray(inv)[:, None]
    a = logprob.from_logits(z, jnp.arange(16), inv, region="b", impl=ISO[0])
    b = logprob.from_logits(jnp.asarray(scaled), jnp.arange(16), jnp.ones(16), region="b", impl=ISO[0])
    assert np.array_equal(bits(a), bits(b))

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rms_norm
from pallas_kernels.weight import Weight
from tests.pallas_kernels.base import ISO, RowOp, same, spread

EPS = 1e-5


def weight(D, dtype):
    return jnp.asarray(1 + 0.3 * np.random.default_rng(9).standard_normal(D), dtype)


class TestRmsNorm(RowOp):
    D = 576

    def rows(self, rng, T, dtype):
        return (spread(rng, T, self.D, dtype=dtype),)

    def call(self, impl, x):
        return (rms_norm.rms_norm(x, weight(self.D, x.dtype), eps=EPS, region="r", impl=impl),)

    def exact(self, x):
        return (x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * np.asarray(weight(self.D, jnp.float32), np.float64),)


class TestRmsNormOneLane(TestRmsNorm):
    D = 96


class TestAddRmsNorm(RowOp):
    D = 192

    def rows(self, rng, T, dtype):
        return spread(rng, T, self.D, dtype=dtype), spread(rng, T, self.D, dtype=dtype)

    def call(self, impl, x, residual):
        return rms_norm.add_rms_norm(x, residual, weight(self.D, x.dtype), eps=EPS, region="r", impl=impl)

    def exact(self, x, residual):
        h = x + residual
        return TestRmsNorm.exact(self, h)[0], h


@pytest.mark.parametrize("impl", ISO)
def test_adding_zero_changes_nothing(impl):
    x = spread(np.random.default_rng(0), 20, 192)
    y, h = rms_norm.add_rms_norm(x, jnp.zeros_like(x), weight(192, x.dtype), eps=EPS, region="r", impl=impl)
    assert same([y, h], [rms_norm.rms_norm(x, weight(192, x.dtype), eps=EPS, region="r", impl=impl), x])


@pytest.mark.parametrize("impl", [*ISO, "native"])
def test_the_master_gets_the_gradient(impl):
    x, w = spread(np.random.default_rng(0), 20, 192, binades=2), weight(192, jnp.bfloat16)

    def loss(value, master):
        return rms_norm.rms_norm(x, Weight(value, None, master), eps=EPS, region="r", impl=impl).astype(float).sum()

    to_value, to_master = jax.grad(loss, argnums=(0, 1))(w, w.astype(jnp.float32))
    assert to_master.dtype == jnp.float32 and np.abs(to_master).max() > 0
    assert not np.asarray(to_value, np.float32).any()


def test_faults_are_named():
    with pytest.raises(ValueError, match="r: x is bfloat16"):
        rms_norm.rms_norm(jnp.ones((2, 8), jnp.bfloat16), jnp.ones(4, jnp.bfloat16), eps=EPS, region="r", impl=ISO[0])

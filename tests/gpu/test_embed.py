"""The embedding's gradient on the GPU: bits of the sums in batch order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.embed import hopper
from tests.pallas_kernels.base import differ, spread


@pytest.mark.parametrize(("T", "V", "D"), [(3000, 49152, 576), (1000, 151936, 1024)])
def test_sums_in_batch_order(T, V, D):
    rng = np.random.default_rng(T)
    tokens_T = np.where(rng.random(T) < 0.3, 5, rng.integers(0, V, T)).astype(np.int32)
    dy_TD = spread(rng, T, D)
    run = jax.jit(functools.partial(hopper.embed_backward, V=V))
    dw_VD = np.asarray(run(jnp.asarray(tokens_T), dy_TD))
    want_VD = np.zeros((V, D), np.float32)
    for token, row_D in zip(tokens_T, np.asarray(dy_TD, np.float32), strict=True):
        want_VD[token] += row_D
    assert differ(dw_VD, want_VD) == 0
    other = np.asarray(run(jnp.asarray(tokens_T[::-1]), dy_TD[::-1]))
    assert differ(other, want_VD) > 0  # control: the reverse order has other bits

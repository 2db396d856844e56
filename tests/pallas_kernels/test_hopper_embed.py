from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic
from pallas_kernels.embed import hopper, reference
from tests.pallas_kernels.base import bits, spread


@pytest.mark.parametrize(("T", "V", "D"), [(120, 70, 200), (90, 32, 64)])
def test_interpreted_bits_are_those_of_sums_in_batch_order(T, V, D):
    rng = np.random.default_rng(T)
    tokens_T = jnp.asarray(rng.integers(0, 3, T) * 9, jnp.int32)  # most of the vocabulary gets zeros
    dy_TD = spread(rng, T, D)
    with mosaic.interpreted():
        dw_VD = jax.jit(functools.partial(hopper.embed_backward, V=V))(tokens_T, dy_TD)
    want_VD = np.zeros((V, D), np.float32)
    for token, row_D in zip(np.asarray(tokens_T), np.asarray(dy_TD, np.float32), strict=True):
        want_VD[token] += row_D
    assert np.array_equal(bits(dw_VD), bits(want_VD))
    assert np.array_equal(bits(reference.embed_backward(tokens_T, dy_TD, V)), bits(want_VD))
    backwards = reference.embed_backward(tokens_T[::-1], dy_TD[::-1], V)
    assert not np.array_equal(bits(backwards), bits(want_VD))  # control: another order is seen


@pytest.mark.parametrize(("T", "V", "D"), [(16384, 151936, 4096), (100, 49152, 576), (7, 1000, 64)])
def test_lowers_for_cuda(T, V, D):
    shapes = jax.ShapeDtypeStruct((T,), jnp.int32), jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    text = jax.jit(functools.partial(hopper.embed_backward, V=V)).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text

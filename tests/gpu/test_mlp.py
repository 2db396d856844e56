"""The MLP in one kernel on a GPU: the bits of the ops apart, from warm and from cold caches, thousands of times."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import gemm, grid_barrier, silu_mul
from pallas_kernels.mlp import hopper
from pallas_kernels.weight import Weight
from tests.pallas_kernels.base import bits, same, spread
from tests.pallas_kernels.test_hopper_mlp import REGIONS, SHAPES

TOKENS = (1, 3, 8, 16, 17, 32, 40, 64)
LAYERS = {"smollm2": 30, "qwen3-0.6b": 8, "ragged": 8}
"""More bytes of weights than the L2 cache holds: each layer's are cold when its turn comes."""


@functools.cache
def stacks(model):
    """64 rows over 13 binades, and weights of layers that all differ."""
    D, F, K = SHAPES[model]
    rng = np.random.default_rng(D)
    L = LAYERS[model]
    base = [spread(rng, 2, F, K) * jnp.bfloat16(K**-0.5 / 16), spread(rng, D, F)]
    stack = [jnp.stack([jnp.roll(w, 7 * i + 1, axis=-1) for i in range(L)]) for w in base]
    return spread(rng, 64, K), *stack


def two(x, w, v):
    h = silu_mul.of_gemm(x, w, regions=REGIONS[:2], impl="hopper")
    return gemm.tree(h, v, region=REGIONS[2], impl="hopper")


@functools.partial(jax.jit, static_argnums=0)
def of_layer(run, x, w, v, layer):
    return run(x, Weight(w, layer), Weight(v, layer))


def test_this_gpu_runs_all_programs_at_once():
    assert grid_barrier.fits(132) and not grid_barrier.fits(10_000)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("model", SHAPES)
def test_the_bits_of_two_ops(model, T):
    x, w, v = stacks(model)
    x = x[np.random.default_rng(T).permutation(64)[:T]]
    for layer in (0, LAYERS[model] - 1):
        args = x, w, v, jnp.int32(layer)
        y = of_layer(hopper.mlp, *args)
        assert same([y], [of_layer(two, *args)])
        assert np.isfinite(np.asarray(y, np.float32)).all() and len(np.unique(bits(y))) > 300


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("T", [16, 64])
@pytest.mark.parametrize("model", ["smollm2", "qwen3-0.6b"])
def test_thousands_of_launches(model, T, cold):
    """Inputs that never repeat: what another program has not stored yet, or a copy has read too early, shows as a wrong bit, as
    the buffers hold another launch's values. Control: one changed row is counted."""

    @jax.jit
    def run(x, w, v, control):
        def step(i, wrong):
            layer = i % len(w) if cold else jnp.int32(0)
            # Whole numbers of binades: as wide a spread as before, and other values in each launch.
            x_i = jnp.roll(x, i, axis=1) * jnp.exp2((i % 5 - 2).astype(jnp.float32)).astype(x.dtype)
            weights = Weight(w, layer), Weight(v, layer)
            ours = hopper.mlp(jnp.where((i == 3) & control, x_i.at[0].multiply(2), x_i), *weights)
            ours, theirs = (lax.bitcast_convert_type(y, jnp.uint16) for y in (ours, two(x_i, *weights)))
            return wrong + (ours != theirs).any(axis=1).sum()

        return lax.fori_loop(0, 20_000, step, 0)

    x, w, v = stacks(model)
    assert run(x[:T], w, v, False) == 0 and run(x[:T], w, v, True) == 1

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import embed
from pallas_kernels.weight import Weight
from tests.pallas_kernels.base import bits, relative, spread


def test_rows_are_exact_and_gradients_sum_in_order():
    rng = np.random.default_rng(0)
    table, tokens = spread(rng, 50, 16), jnp.asarray(rng.integers(0, 50, 400), jnp.int32)
    assert np.array_equal(bits(embed.embed(tokens, table, impl="reference", region="r")), bits(table[tokens]))
    dy = spread(rng, 400, 16, dtype=jnp.float32)

    def loss(value, master):
        return jnp.sum(embed.embed(tokens, Weight(value, None, master), impl="reference", region="r").astype(jnp.float32) * dy)

    run = jax.jit(jax.grad(loss, argnums=(0, 1)))
    to_value, to_master = run(table, table.astype(jnp.float32))
    want = np.zeros((50, 16))
    np.add.at(want, np.asarray(tokens), np.asarray(dy.astype(jnp.bfloat16), np.float64))
    assert not np.asarray(to_value, np.float32).any() and to_master.dtype == jnp.float32
    assert relative(to_master, want) < 1e-5
    assert np.array_equal(bits(run(table, table.astype(jnp.float32))[1]), bits(to_master))
    plain = jax.grad(lambda t: jnp.sum(embed.embed(tokens, t, impl="reference", region="r") * dy))(table.astype(jnp.float32))
    assert relative(plain, np.asarray(jax.grad(lambda t: jnp.sum(t[tokens] * dy))(table.astype(jnp.float32)))) < 1e-6

"""silu(gate) * up in plain JAX, one row tile at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.tiles import ROWS, map_rows

VERSION = 1


def entry(F: int, dtype) -> dict:
    """This implementation's line in the contract: all that reaches the bits."""
    return {
        "implementation": "reference",
        "version": VERSION,
        "arch": "cpu",
        "inside": "float32: g * (1 / (1 + exp(-g))) * u",
        "tile": [ROWS, F],
        "round": str(dtype),
    }


def silu_mul(gate_up_TN: jax.Array) -> jax.Array:
    """[T, 2 F] -> [T, F]."""

    def tile(gate_up_MN):
        g_MF, u_MF = jnp.split(gate_up_MN.astype(jnp.float32), 2, axis=1)
        return ((g_MF * (1 / (1 + jnp.exp(-g_MF))) * u_MF).astype(gate_up_MN.dtype),)

    return map_rows(tile, (gate_up_TN,))[0]


def backward(gate_up_TN: jax.Array, dy_TF: jax.Array) -> jax.Array:
    """Gradient of gate_up, [T, 2 F]. With s = sigmoid(g): dg = dy u s (1 + g (1 - s)), du = dy g s."""
    g_TF, u_TF = jnp.split(gate_up_TN.astype(jnp.float32), 2, axis=1)
    dy_TF = dy_TF.astype(jnp.float32)
    s_TF = jax.nn.sigmoid(g_TF)
    d_TN = jnp.concatenate([dy_TF * u_TF * s_TF * (1 + g_TF * (1 - s_TF)), dy_TF * g_TF * s_TF], axis=1)
    return d_TN.astype(gate_up_TN.dtype)

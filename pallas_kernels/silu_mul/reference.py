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

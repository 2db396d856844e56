"""Rows of keys or values to their places in pages, by XLA's scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write(pages_LNpKd: jax.Array, x_TKd: jax.Array, slots_T: jax.Array, layer: jax.Array) -> jax.Array:
    """The pages with x[t] in place slots_T[t] of layer `layer`; rows whose slot is N * p or more go nowhere.

    Each of those gets a slot of its own out of range: all indices are unique, and XLA's deterministic scatter is then a plain
    parallel store.
    """
    _, N, page, *_ = pages_LNpKd.shape
    slots_T = jnp.where(slots_T < N * page, slots_T, N * page + jnp.arange(slots_T.shape[0], dtype=jnp.int32))
    at = layer, slots_T // page, slots_T % page
    return pages_LNpKd.at[at].set(x_TKd, mode="drop", unique_indices=True)

"""The embedding's gradient in plain JAX: rows sorted by token (a stable sort), segments summed."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def embed_backward(tokens_T: jax.Array, dy_TD: jax.Array, V: int) -> jax.Array:
    """fp32 [V, D]: for each vocabulary entry the sum of its tokens' rows, in batch order; zeros where it has none."""
    order_T = jnp.argsort(tokens_T, stable=True)
    rows_TD = dy_TD.astype(jnp.float32)[order_T]
    return jax.ops.segment_sum(rows_TD, tokens_T[order_T], num_segments=V, indices_are_sorted=True)

"""Embedding: a row gather, exact; its gradient sorts the tokens and sums segments, so that no order is left to chance."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.weight import Weight, as_weight


def embed(tokens_T: jax.Array, w_VD: Weight | jax.Array, *, region: str, impl: str) -> jax.Array:
    """Rows of the table.

    Args:
      tokens_T: int32 [T], in [0, V).
      w_VD: [V, D], a Weight or an array.
      region: name of the region in the contract.
      impl: "reference", "hopper" or "native": they differ in the gradient only.

    Returns:
      [T, D] in the table's dtype. Every implementation is this one: a gather rounds nothing.
    """
    w = as_weight(w_VD)
    registry.record(region, {"implementation": "gather", "version": 1, "round": "none"})
    return _embed(impl, tokens_T, w.value, w.master)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed(impl, tokens_T, value_VD, master_VD):
    del impl, master_VD
    return jnp.take(value_VD, tokens_T, axis=0, mode="clip")


def _embed_fwd(impl, tokens_T, value_VD, master_VD):
    # Zero-size arrays carry the static facts that the backward needs.
    facts = jnp.zeros((value_VD.shape[0], 0), value_VD.dtype)
    return _embed(impl, tokens_T, value_VD, master_VD), (tokens_T, facts, master_VD is not None)


def _embed_bwd(impl, saved, dy_TD):
    """Rows of one token are summed in the order of the batch, in fp32."""
    tokens_T, facts, to_master = saved
    dw_VD = registry.implementation("embed", impl).embed_backward(tokens_T, dy_TD, facts.shape[0])
    return (None, None, dw_VD) if to_master else (None, dw_VD.astype(facts.dtype), None)


_embed.defvjp(_embed_fwd, _embed_bwd)

"""Log-probability as a user would otherwise have it: jax.nn.log_softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.logprob import padded_vocab
from pallas_kernels.logprob.chunks import CHUNK, by_chunk

MAX_CHUNK = 1024
"""Rows whose logits exist at one time in training: enough that the weight's traffic does not bound the dots."""


def logits_entry(V: int, D: int, dtype) -> dict:
    """The logits' line in the contract; it claims no order."""
    del V, D
    return {"implementation": "native", "operands": str(dtype), "round": "float32", "order": "XLA's choice"}


def entry(V8: int) -> dict:
    """The reduction's line in the contract; it claims no order."""
    del V8
    return {
        "implementation": "native",
        "semantics": "log-softmax of logits * inv_temp over the full vocabulary, nats",
        "order": "XLA's choice",
    }


def logits(x_BD: jax.Array, w_VD: jax.Array) -> jax.Array:
    """fp32 [B, padded V]; pads are -inf."""
    z_BV = jnp.einsum("bd,vd->bv", x_BD, w_VD, preferred_element_type=jnp.float32)
    return jnp.pad(z_BV, ((0, 0), (0, padded_vocab(w_VD.shape[0]) - w_VD.shape[0])), constant_values=-jnp.inf)


def reduce(logits_BV, targets_B, inv_temp_B) -> tuple[jax.Array, jax.Array]:
    """(log-probability of the target [B], log-sum-exp [B]), nats, fp32."""
    s_BV = logits_BV * inv_temp_B[:, None]
    lse_B = jax.nn.logsumexp(s_BV, axis=1)
    return jnp.take_along_axis(s_BV, targets_B[:, None], axis=1)[:, 0] - lse_B, lse_B


def logprob(x_TD, w_VD, targets_T, inv_temp_T) -> jax.Array:
    """fp32 [T], differentiable: chunks of tokens, their logits made again in the backward pass."""
    chunk = jax.checkpoint(lambda x, t, s: reduce(logits(x, w_VD), t, s)[0])
    rows = min(-(-x_TD.shape[0] // CHUNK) * CHUNK, MAX_CHUNK)
    return by_chunk(chunk, x_TD, targets_T, inv_temp_T, rows)

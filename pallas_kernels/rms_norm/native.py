"""RMSNorm as a user would otherwise have it: jnp, fused by XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def entry(D: int, eps: float, dtype, has_residual: bool) -> dict:
    """This implementation's line in the contract; it claims no order."""
    del D, has_residual
    return {"implementation": "native", "eps": float(eps).hex(), "round": str(dtype), "order": "XLA's choice"}


def rms_norm(x_TD, residual_TD, w_D, eps: float):
    """(normalised rows, h)."""
    h_TD = x_TD if residual_TD is None else x_TD + residual_TD
    h32 = h_TD.astype(jnp.float32)
    n_TD = (h32 * lax.rsqrt(jnp.mean(h32 * h32, axis=-1, keepdims=True) + eps)).astype(x_TD.dtype)
    return n_TD * w_D, h_TD

"""GEMM as a user would otherwise have it: one XLA dot."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.weight import Weight


def entry(N: int, K: int, leaves: int, parallel: str, dtype, out_dtype) -> dict:
    """This implementation's line in the contract; it claims no order."""
    del N, K, leaves, parallel
    return {"implementation": "native", "operands": str(dtype), "round": str(out_dtype), "order": "XLA's choice"}


def gemm(x_TK: jax.Array, w: Weight, out_dtype) -> jax.Array:
    """y [T, N] = x [T, K] w^T."""
    w_NK = w.trainable().reshape(-1, x_TK.shape[-1])
    return jnp.einsum("tk,nk->tn", x_TK, w_NK, preferred_element_type=out_dtype)

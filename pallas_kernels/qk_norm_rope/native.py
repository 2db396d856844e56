"""Query and key norm and rotary positions as a user would otherwise have them: jnp, fused by XLA."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.qk_norm_rope import pages
from pallas_kernels.rms_norm import native as rms_norm


def entry(shape, eps: float, theta: float, table_hash: str, has_norm: bool, dtype) -> dict:
    """This implementation's line in the contract; it claims no order."""
    del shape, has_norm
    return {
        "implementation": "native",
        "eps": float(eps).hex(),
        "theta": float(theta).hex(),
        "table_sha256": table_hash,
        "round": str(dtype),
        "order": "XLA's choice",
    }


def qk_norm_rope(qkv_TKgd, cos_sin_T2h, norms, eps: float):
    """(q [T, H, d], k [T, K, d], v [T, K, d])."""
    T, K, g2, d = qkv_TKgd.shape
    q_TKgd, k_TKgd, v_TKd = qkv_TKgd[:, :, : g2 - 2], qkv_TKgd[:, :, g2 - 2 : -1], qkv_TKgd[:, :, -1]
    if norms:
        q_TKgd = rms_norm.rms_norm(q_TKgd, None, norms[0], eps)[0]
        k_TKgd = rms_norm.rms_norm(k_TKgd, None, norms[1], eps)[0]
    cos, sin = cos_sin_T2h[:, 0, None, None], cos_sin_T2h[:, 1, None, None]

    def rotate(x_TKgd):
        a, b = jnp.split(x_TKgd, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return rotate(q_TKgd).reshape(T, K * (g2 - 2), d), rotate(k_TKgd)[:, :, 0], v_TKd


def to_pages(qkv_TKgd, cos_sin_T2h, norms, eps: float, k_pages, v_pages, slots_T, layer):
    """(q [T, H, d], k_pages, v_pages)."""
    q_THd, k_TKd, v_TKd = qk_norm_rope(qkv_TKgd, cos_sin_T2h, norms, eps)
    return q_THd, pages.write(k_pages, k_TKd, slots_T, layer), pages.write(v_pages, v_TKd, slots_T, layer)

"""Query and key norm and rotary positions in plain JAX, one row tile at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.qk_norm_rope import pages
from pallas_kernels.rms_norm.reference import LANES, normalise
from pallas_kernels.tiles import ROWS, map_rows
from pallas_kernels.weight import Weight

VERSION = 1


def entry(shape: tuple[int, int, int], eps: float, theta: float, table_hash: str, has_norm: bool, dtype) -> dict:
    """This implementation's line in the contract: all that reaches the bits. shape: (K, G + 2, d)."""
    norm = {
        "norm_order": f"{LANES}-wide pieces in order, lanes by halving",
        "eps": float(eps).hex(),
        "norm_round": [f"normalised: {dtype}", f"times weight: {dtype}"],
    }
    return {
        "implementation": "reference",
        "version": VERSION,
        "arch": "cpu",
        "inside": "float32",
        **(norm if has_norm else {"norm": "none"}),
        "theta": float(theta).hex(),
        "table_sha256": table_hash,
        "rope_round": [f"cos, sin: {dtype}", f"each product: {dtype}", f"sum: {dtype}"],
        "tile": [ROWS, *shape],
    }


def qk_norm_rope(
    qkv_TKgd, cos_sin_T2h, norms: tuple[Weight, ...], eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(q [T, H, d], k [T, K, d], v [T, K, d])."""
    T, K, g2, d = qkv_TKgd.shape
    dtype = qkv_TKgd.dtype
    norms = tuple(w.slice() for w in norms)
    rounded = lambda x: x.astype(dtype).astype(jnp.float32)  # noqa: E731

    def norm(x_MKgd, w_d):
        return rounded(rounded(normalise(x_MKgd, eps)) * w_d.astype(jnp.float32))

    def tile(qkv_MKgd, cos_sin_M2h):
        q_MKgd, k_MKgd = (qkv_MKgd[:, :, part].astype(jnp.float32) for part in (slice(0, g2 - 2), slice(g2 - 2, -1)))
        if norms:
            q_MKgd, k_MKgd = norm(q_MKgd, norms[0]), norm(k_MKgd, norms[1])
        cos, sin = (cos_sin_M2h[:, i, None, None].astype(jnp.float32) for i in (0, 1))

        def rotate(x_MKgd):
            a, b = jnp.split(x_MKgd, 2, axis=-1)
            low = rounded(a * cos) - rounded(b * sin)
            high = rounded(b * cos) + rounded(a * sin)
            return jnp.concatenate([low, high], axis=-1).astype(dtype)

        return rotate(q_MKgd).reshape(-1, K * (g2 - 2), d), rotate(k_MKgd)[:, :, 0], qkv_MKgd[:, :, -1]

    return map_rows(tile, (qkv_TKgd, cos_sin_T2h))


def to_pages(qkv_TKgd, cos_sin_T2h, norms, eps: float, k_pages, v_pages, slots_T, layer):
    """(q [T, H, d], k_pages, v_pages)."""
    q_THd, k_TKd, v_TKd = qk_norm_rope(qkv_TKgd, cos_sin_T2h, norms, eps)
    return q_THd, pages.write(k_pages, k_TKd, slots_T, layer), pages.write(v_pages, v_TKd, slots_T, layer)


def backward(qkv_TKgd, cos_sin_T2h, norms, grads, eps: float) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(gradient of qkv, fp32 gradients of the norm weights) from those of q [T, H, d], k and v [T, K, d].

    The rotation's transpose rotates back; then the norm's gradient, as in rms_norm. fp32 inside.
    """
    T, K, g2, d = qkv_TKgd.shape
    dq_THd, dk_TKd, dv_TKd = (g.astype(jnp.float32) for g in grads)
    cos_T11h, sin_T11h = (cos_sin_T2h[:, i, None, None].astype(jnp.float32) for i in (0, 1))
    dqk_TKgd = jnp.concatenate([dq_THd.reshape(T, K, g2 - 2, d), dk_TKd[:, :, None]], axis=2)
    a, b = jnp.split(dqk_TKgd, 2, axis=-1)
    dqk_TKgd = jnp.concatenate([a * cos_T11h + b * sin_T11h, b * cos_T11h - a * sin_T11h], axis=-1)
    dnorms = []
    if norms:
        x_TKgd = qkv_TKgd[:, :, :-1].astype(jnp.float32)
        r_TKg1 = lax.rsqrt(jnp.mean(x_TKgd * x_TKgd, axis=-1, keepdims=True) + eps)
        n_TKgd = x_TKgd * r_TKg1
        for part in (slice(0, g2 - 2), slice(g2 - 2, None)):
            dnorms.append(jnp.sum((dqk_TKgd * n_TKgd)[:, :, part], axis=(0, 1, 2)))
        q_d, k_d = (w.astype(jnp.float32) for w in norms)
        w_gd = jnp.concatenate([jnp.broadcast_to(q_d, (g2 - 2, d)), k_d[None]])
        g_TKgd = dqk_TKgd * w_gd
        dqk_TKgd = r_TKg1 * (g_TKgd - n_TKgd * jnp.mean(g_TKgd * n_TKgd, axis=-1, keepdims=True))
    dqkv_TKgd = jnp.concatenate([dqk_TKgd, dv_TKd[:, :, None]], axis=2).astype(qkv_TKgd.dtype)
    return dqkv_TKgd, tuple(dnorms)

"""RMSNorm in plain JAX, one row tile at a time, the sum of squares in the contract's order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tiles import ROWS, halving_sum, map_rows
from pallas_kernels.weight import Weight

VERSION = 1
LANES = 128


def entry(D: int, eps: float, dtype, has_residual: bool) -> dict:
    """This implementation's line in the contract: all that reaches the bits."""
    return {
        "implementation": "reference",
        "version": VERSION,
        "arch": "cpu",
        "accumulate": "float32",
        "order": f"{LANES}-wide pieces in order, lanes by halving",
        "width": D,
        "eps": float(eps).hex(),
        "tile": [ROWS, D],
        "round": [f"x + residual: {dtype}"] * has_residual + [f"normalised: {dtype}", f"times weight: {dtype}"],
    }


def lane_sum(x_MD: jax.Array) -> jax.Array:
    """Sum over the last axis, zero-padded to a multiple of 128: pieces in order, then halving. fp32 in and out."""
    D = x_MD.shape[-1]
    x_MD = jnp.pad(x_MD, [(0, 0)] * (x_MD.ndim - 1) + [(0, -D % LANES)])
    pieces = x_MD.reshape(*x_MD.shape[:-1], -1, LANES)
    total = pieces[..., 0, :]
    for i in range(1, pieces.shape[-2]):
        total = total + pieces[..., i, :]
    return halving_sum(total)


def normalise(x_MD: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) in fp32; x in fp32. Shared with the norm of queries and keys."""
    mean = lane_sum(x_MD * x_MD) / x_MD.shape[-1]
    return x_MD * lax.rsqrt(mean + eps)[..., None]


def rms_norm(x_TD, residual_TD, w: Weight, eps: float) -> tuple[jax.Array, jax.Array]:
    """(normalised rows, h): h is x, or x + residual."""
    dtype, w_D = x_TD.dtype, w.slice()

    def tile(x_MD, *residual_MD):
        h_MD = x_MD.astype(jnp.float32)
        if residual_MD:
            h_MD = h_MD + residual_MD[0].astype(jnp.float32)
        h_MD = h_MD.astype(dtype)
        n_MD = normalise(h_MD.astype(jnp.float32), eps).astype(dtype)
        y_MD = (n_MD.astype(jnp.float32) * w_D.astype(jnp.float32)).astype(dtype)
        return y_MD, h_MD

    return map_rows(tile, (x_TD,) if residual_TD is None else (x_TD, residual_TD))


def backward(h_TD, w_D, dy_TD, dh_TD, eps: float) -> tuple[jax.Array, jax.Array]:
    """(gradient of h, fp32 gradient of the weight); dh is what comes to h by other ways than the norm.

    With r = rsqrt(mean(h^2) + eps), n = h r, g = dy w: r (g - n mean(g n)) + dh, and the sum over rows of dy n.
    """
    dtype = h_TD.dtype
    h_TD, w_D, dy_TD, dh_TD = (x.astype(jnp.float32) for x in (h_TD, w_D, dy_TD, dh_TD))
    r_T1 = lax.rsqrt(jnp.mean(h_TD * h_TD, axis=1, keepdims=True) + eps)
    n_TD = h_TD * r_T1
    g_TD = dy_TD * w_D
    dx_TD = r_T1 * (g_TD - n_TD * jnp.mean(g_TD * n_TD, axis=1, keepdims=True)) + dh_TD
    return dx_TD.astype(dtype), jnp.sum(dy_TD * n_TD, axis=0)

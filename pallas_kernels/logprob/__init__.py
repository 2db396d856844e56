"""Log-probability of a token: log-softmax of logits / temperature over the full vocabulary, in nats, fp32.

The vocabulary is padded with -inf to a multiple of 8 x 128. In each block of 128 the maximum, in log2 units, is rounded up
to a whole number M, and 2^(z - M) is summed by halving. Inside an eighth the blocks' sums, scaled exactly to the eighth's
largest M, are added in order; the eighths are added in a balanced tree. So an eighth is a shard's own, and one row kernel
serves every case. The subtraction is inside the op; the result is never above 0.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import registry
from pallas_kernels.weight import Weight, as_weight

EIGHTHS = 8
VOCAB_BLOCK = 128
CHUNK = 64
"""Rows whose logits exist at one time in training."""


def padded_vocab(V: int) -> int:
    """V rounded up to a multiple of 8 x 128, so that every eighth is whole blocks."""
    unit = EIGHTHS * VOCAB_BLOCK
    return -(-V // unit) * unit


def logits(x_BD: jax.Array, w_VD: Weight | jax.Array, *, region: str, impl: str) -> jax.Array:
    """fp32 logits of a few rows, padded with -inf.

    Args:
      x_BD: [B, D] final hidden rows, bf16 or fp32.
      w_VD: [V, D] of the same dtype.
      region: name of the region in the contract.
      impl: "reference", "hopper" or "native".

    Returns:
      fp32 [B, padded_vocab(V)].

    Raises:
      registry.Unsupported: no such implementation.
    """
    w = as_weight(w_VD)
    module = registry.implementation("logprob", impl)
    registry.record(region, module.logits_entry(w.shape[0], x_BD.shape[1], x_BD.dtype))
    return module.logits(x_BD, w.trainable() if impl == "native" else w.value)


def from_logits(logits_BV: jax.Array, targets_B: jax.Array, inv_temp_B: jax.Array, *, region: str, impl: str) -> jax.Array:
    """Log-probability of each row's target from logits at hand (decode); no gradient.

    Args:
      logits_BV: fp32 [B, padded vocabulary], as `logits` gives.
      targets_B: int32 [B].
      inv_temp_B: fp32 [B], 1 / temperature, finite and > 0.
      region: name of the region in the contract.
      impl: "reference", "hopper" or "native".

    Returns:
      fp32 [B], <= 0: the bits of `logprob` on the same row.
    """
    module = registry.implementation("logprob", impl)
    registry.record(region, module.entry(logits_BV.shape[1]))
    return module.reduce(logits_BV, targets_B, inv_temp_B)[0]


def logprob(
    x_TD: jax.Array, w_VD: Weight | jax.Array, targets_T: jax.Array, inv_temp_T: jax.Array, *, regions: tuple[str, str], impl: str
) -> jax.Array:
    """Log-probability of each row's target, differentiable in x and the weight; never holds [T, V].

    Args:
      x_TD: [T, D] final hidden rows, bf16 or fp32.
      w_VD: [V, D] of the same dtype.
      targets_T: int32 [T], in [0, V).
      inv_temp_T: fp32 [T], 1 / temperature, finite and > 0.
      regions: names of the logits' and the reduction's regions in the contract.
      impl: "reference", "hopper" or "native".

    Returns:
      fp32 [T], <= 0.

    Raises:
      registry.Unsupported: no such implementation.
    """
    w = as_weight(w_VD)
    module = registry.implementation("logprob", impl)
    registry.record(regions[0], module.logits_entry(w.shape[0], x_TD.shape[1], x_TD.dtype))
    registry.record(regions[1], module.entry(padded_vocab(w.shape[0])))
    if impl == "native":
        w_VD = w.trainable()
        chunk = jax.checkpoint(lambda x, t, s: module.reduce(module.logits(x, w_VD), t, s)[0])
        return _by_chunk(chunk, x_TD, targets_T, inv_temp_T)
    return _iso(impl, x_TD, w.value, w.master, targets_T, inv_temp_T)


def _chunks(x_TD, targets_T, inv_temp_T, *more_T):
    """Arrays [T, ...] cut in chunks [n, CHUNK, ...], padded with zero rows of inverse temperature 1: a padding row's
    logits are then finite, and its gradient is zero and not zero times NaN."""
    T = x_TD.shape[0]
    n = -(-T // CHUNK)

    def cut(x, fill=0):
        widths = ((0, n * CHUNK - T),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, widths, constant_values=fill).reshape(n, CHUNK, *x.shape[1:])

    return cut(x_TD), cut(targets_T), cut(inv_temp_T, 1), *map(cut, more_T)


def _by_chunk(fn, x_TD, targets_T, inv_temp_T):
    out = lax.map(lambda a: fn(*a), _chunks(x_TD, targets_T, inv_temp_T))
    return jax.tree.map(lambda o: o.reshape(-1, *o.shape[2:])[: x_TD.shape[0]], out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _iso(impl, x_TD, value_VD, master_VD, targets_T, inv_temp_T):
    return _iso_fwd(impl, x_TD, value_VD, master_VD, targets_T, inv_temp_T)[0]


def _iso_fwd(impl, x_TD, value_VD, master_VD, targets_T, inv_temp_T):
    module = registry.implementation("logprob", impl)
    chunk = lambda x, t, s: module.reduce(module.logits(x, value_VD), t, s)  # noqa: E731
    lp_T, lse_T = _by_chunk(chunk, x_TD, targets_T, inv_temp_T)
    return lp_T, (x_TD, value_VD, targets_T, inv_temp_T, lse_T, master_VD is not None)


def _iso_bwd(impl, saved, dlp_T):
    """dz = dlp inv_temp (onehot - softmax); dx = dz W, dW = dz^T x, chunk by chunk, dW summed in fp32 in order."""
    x_TD, value_VD, targets_T, inv_temp_T, lse_T, to_master = saved
    module = registry.implementation("logprob", impl)
    V = value_VD.shape[0]

    def chunk(dw_VD, rows):
        x_CD, t_C, s_C, lse_C, g_C = rows
        z_CV = module.logits(x_CD, value_VD)[:, :V] * s_C[:, None]
        onehot_CV = jnp.arange(V)[None] == t_C[:, None]
        dz_CV = ((g_C * s_C)[:, None] * (onehot_CV - jnp.exp(z_CV - lse_C[:, None]))).astype(x_CD.dtype)
        dx_CD = jnp.dot(dz_CV, value_VD, preferred_element_type=jnp.float32)
        return dw_VD + jnp.einsum("cv,cd->vd", dz_CV, x_CD, preferred_element_type=jnp.float32), dx_CD

    dw_VD, dx = lax.scan(chunk, jnp.zeros(value_VD.shape, jnp.float32), _chunks(x_TD, targets_T, inv_temp_T, lse_T, dlp_T))
    dx_TD = dx.reshape(-1, x_TD.shape[1])[: x_TD.shape[0]].astype(x_TD.dtype)
    dw = (None, dw_VD) if to_master else (dw_VD.astype(value_VD.dtype), None)
    return (dx_TD, *dw, None, None)


_iso.defvjp(_iso_fwd, _iso_bwd)

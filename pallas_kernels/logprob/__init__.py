"""Log-probability of a token: log-softmax of logits / temperature over the full vocabulary, in nats, fp32.

The vocabulary is padded with -inf to a multiple of 8 x 128. In each block of 128 the maximum, in log2 units, is rounded up
to a whole number M, and 2^(z - M) is summed. Inside an eighth the blocks' sums, scaled exactly to the largest M, are added;
the eighths are added in a balanced tree. So an eighth is a shard's own, and one arithmetic serves every case. (In which order
a block and an eighth are summed is the implementation's own.) The subtraction is inside the op; the result is never above 0.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.weight import Weight, as_weight

EIGHTHS = 8
VOCAB_BLOCK = 128


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


def from_logits(
    logits_BV: jax.Array, targets_B: jax.Array, inv_temp_B: jax.Array, *, region: str, impl: str
) -> jax.Array:
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
    x_TD: jax.Array,
    w_VD: Weight | jax.Array,
    targets_T: jax.Array,
    inv_temp_T: jax.Array,
    *,
    regions: tuple[str, str],
    impl: str,
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
        return module.logprob(x_TD, w.trainable(), targets_T, inv_temp_T)
    return _iso(impl, x_TD, w.value, w.master, targets_T, inv_temp_T)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _iso(impl, x_TD, value_VD, master_VD, targets_T, inv_temp_T):
    return _iso_fwd(impl, x_TD, value_VD, master_VD, targets_T, inv_temp_T)[0]


def _iso_fwd(impl, x_TD, value_VD, master_VD, targets_T, inv_temp_T):
    lp_T, lse_T = registry.implementation("logprob", impl).forward(x_TD, value_VD, targets_T, inv_temp_T)
    return lp_T, (x_TD, value_VD, targets_T, inv_temp_T, lse_T, master_VD is not None)


def _iso_bwd(impl, saved, dlp_T):
    *arrays, to_master = saved
    value_VD = arrays[1]
    dw_dtype = jnp.float32 if to_master else value_VD.dtype
    dx_TD, dw_VD = registry.implementation("logprob", impl).backward(*arrays, dlp_T, dw_dtype)
    return (dx_TD, *((None, dw_VD) if to_master else (dw_VD, None)), None, None)


_iso.defvjp(_iso_fwd, _iso_bwd)

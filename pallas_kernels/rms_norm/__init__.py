"""RMSNorm, with or without the residual addition before it (Zhang and Sennrich 2019, eq. 4).

y = cast(x / sqrt(mean(x^2) + eps)) * w: fp32 inside, cast to x's dtype before the weight, and one rounding of the product,
as in Hugging Face's Llama and Qwen3 code. The sum of squares runs over the width padded with zeros to a multiple of 128:
the 128-wide pieces are added in order, then the 128 lanes by halving.
"""

from __future__ import annotations

import functools

import jax

from pallas_kernels import registry
from pallas_kernels.weight import Weight, as_weight, of_backward


def rms_norm(x_TD: jax.Array, w_D: Weight | jax.Array, *, eps: float, region: str, impl: str) -> jax.Array:
    """Normalised rows.

    Args:
      x_TD: [T, D], bf16 or fp32.
      w_D: [D] of the same dtype.
      eps: added to the mean square.
      region: name of the region in the contract.
      impl: "reference", "hopper" or "native".

    Returns:
      [T, D] in x's dtype.

    Raises:
      ValueError: shapes or dtypes do not fit.
      registry.Unsupported: no such implementation.
    """
    return _norm(x_TD, None, w_D, eps, region, impl)[0]


def add_rms_norm(x_TD, residual_TD, w_D, *, eps: float, region: str, impl: str) -> tuple[jax.Array, jax.Array]:
    """RMSNorm of h = x + residual (one rounding). Arguments as in `rms_norm`; residual [T, D] in x's dtype.

    Returns:
      (normalised [T, D], h [T, D]).
    """
    return _norm(x_TD, residual_TD, w_D, eps, region, impl)


def _norm(x_TD, residual_TD, w_D, eps, region, impl):
    w = as_weight(w_D)
    if w.shape != x_TD.shape[1:] or w.dtype != x_TD.dtype:
        raise ValueError(f"{region}: x is {x_TD.dtype} {x_TD.shape}, the weight {w.dtype} {w.shape}")
    module = registry.implementation("rms_norm", impl)
    registry.record(region, module.entry(x_TD.shape[1], eps, x_TD.dtype, residual_TD is not None))
    if impl == "native":
        return module.rms_norm(x_TD, residual_TD, w.trainable(), eps)
    return _iso(impl, eps, x_TD, residual_TD, w.value, w.layer, w.master)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _iso(impl, eps, x_TD, residual_TD, value, layer, master_D):
    del master_D
    return registry.implementation("rms_norm", impl).rms_norm(x_TD, residual_TD, Weight(value, layer), eps)


def _iso_fwd(impl, eps, x_TD, residual_TD, value, layer, master_D):
    y_TD, h_TD = _iso(impl, eps, x_TD, residual_TD, value, layer, master_D)
    return (y_TD, h_TD), (h_TD, value, layer, residual_TD is not None, master_D is not None)


def _iso_bwd(impl, eps, saved, grads):
    h_TD, value, layer, has_residual, to_master = saved
    w_D = of_backward(value, layer, to_master)
    dx_TD, dw_D = registry.implementation("rms_norm", impl).backward(h_TD, w_D, *grads, eps)
    dw = (None, None, dw_D) if to_master else (dw_D.astype(value.dtype), None, None)
    return (dx_TD, dx_TD if has_residual else None, *dw)


_iso.defvjp(_iso_fwd, _iso_bwd)

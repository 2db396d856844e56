"""silu(gate) * up (Shazeer 2020, SwiGLU without its matrices): fp32 inside, one rounding."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import gemm, registry
from pallas_kernels.weight import Weight


def silu_mul(gate_up_TN: jax.Array, *, region: str, impl: str) -> jax.Array:
    """silu(gate) * up.

    Args:
      gate_up_TN: [T, 2 F], gates first, bf16 or fp32.
      region: name of the region in the contract.
      impl: "reference", "hopper" or "native".

    Returns:
      [T, F] in the same dtype.

    Raises:
      registry.Unsupported: no such implementation.
    """
    module = registry.implementation("silu_mul", impl)
    registry.record(region, module.entry(gate_up_TN.shape[1] // 2, gate_up_TN.dtype))
    return module.silu_mul(gate_up_TN) if impl == "native" else _iso(impl, gate_up_TN)


def of_gemm(x_TK: jax.Array, w_2FK: Weight | jax.Array, *, regions: tuple[str, str], impl: str) -> jax.Array:
    """`silu_mul` of `gemm.chain`, the same bits, by one kernel where there is one. No gradient: that needs gates and ups.

    Args:
      x_TK: [T, K], bf16 or fp32.
      w_2FK: [2, F, K], gates first, of the same dtype; a Weight or an array.
      regions: names of the GEMM's and of the product's region in the contract.
      impl: "reference", "hopper" or "native".

    Returns:
      [T, F] in the same dtype.

    Raises:
      What `gemm.chain` and `silu_mul` raise.
    """
    module = registry.implementation("silu_mul", impl)
    if impl != "hopper" or not module.multiplies(x_TK, w_2FK):
        return silu_mul(gemm.chain(x_TK, w_2FK, region=regions[0], impl=impl), region=regions[1], impl=impl)
    _, w, _, dtype = gemm.prepared(x_TK, w_2FK, 1, "column", regions[0], impl)
    registry.record(regions[1], module.entry(w.shape[1], dtype))
    return module.of_gemm(x_TK, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _iso(impl, gate_up_TN):
    return registry.implementation("silu_mul", impl).silu_mul(gate_up_TN)


def _iso_fwd(impl, gate_up_TN):
    return _iso(impl, gate_up_TN), gate_up_TN


def _iso_bwd(impl, gate_up_TN, dy_TF):
    return (registry.implementation("silu_mul", impl).backward(gate_up_TN, dy_TF),)


_iso.defvjp(_iso_fwd, _iso_bwd)

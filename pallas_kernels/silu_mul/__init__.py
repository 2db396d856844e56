"""silu(gate) * up (Shazeer 2020, SwiGLU without its matrices): fp32 inside, one rounding."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import registry


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _iso(impl, gate_up_TN):
    return registry.implementation("silu_mul", impl).silu_mul(gate_up_TN)


def _iso_fwd(impl, gate_up_TN):
    return _iso(impl, gate_up_TN), gate_up_TN


def _iso_bwd(impl, gate_up_TN, dy_TF):
    return (registry.implementation("silu_mul", impl).backward(gate_up_TN, dy_TF),)


_iso.defvjp(_iso_fwd, _iso_bwd)

"""Numerics: the one switch between the contract's kernels and what a user would otherwise have."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import registry


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How the model computes.

    Attributes:
      mode: "iso" (the contract) or "native" (XLA's own dots and attention: the baseline; never chosen silently).
      backend: "reference" (plain JAX, any device), "hopper" (Pallas Mosaic GPU, sm90) or "auto".
      compute_dtype: "bfloat16" or "float32": dtype of weights and activations in the forward. Logits are always fp32.
    """

    mode: str = "iso"
    backend: str = "auto"
    compute_dtype: str = "bfloat16"

    def __post_init__(self):
        for field, allowed in (
            ("mode", ("iso", "native")),
            ("backend", ("auto", "reference", "hopper")),
            ("compute_dtype", ("bfloat16", "float32")),
        ):
            if getattr(self, field) not in allowed:
                raise ValueError(f"numerics: {field}={getattr(self, field)!r}; choose one of {', '.join(allowed)}")

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.compute_dtype)

    @property
    def impl(self) -> str:
        """Name of the implementation that runs: "reference", "hopper" or "native".

        Raises:
          registry.Unsupported: the backend asked for cannot serve on this machine.
        """
        if self.mode == "native":
            return "native"
        return registry.resolve_backend(self.backend, jax.default_backend())

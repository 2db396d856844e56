"""The model, its contract and what runs it forward. Importing it sets XLA's flags, so import it before JAX computes."""

import pallas_kernels  # noqa: F401  (its import sets the flags)

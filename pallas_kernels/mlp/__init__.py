"""The MLP of a layer, silu(gate) * up and down, for inference: the bits of the ops apart, in one kernel where that pays."""

from __future__ import annotations

import jax

from pallas_kernels import gemm, silu_mul
from pallas_kernels.mlp import hopper
from pallas_kernels.weight import Weight, as_weight


def mlp(x_TK: jax.Array, w_2FK: Weight | jax.Array, w_DF: Weight | jax.Array, *, regions: tuple[str, str, str], impl: str) -> jax.Array:
    """`gemm.tree` of `silu_mul.of_gemm`. No gradient.

    Args:
      x_TK: [T, K], bf16 or fp32.
      w_2FK: [2, F, K], gates first, of the same dtype; a Weight or an array.
      w_DF: [D, F] likewise.
      regions: names in the contract of gates and ups, of their product, and of down.
      impl: "reference", "hopper" or "native".

    Returns:
      [T, D] in the same dtype.

    Raises:
      What `silu_mul.of_gemm` and `gemm.tree` raise.
    """
    w_2FK, w_DF = as_weight(w_2FK), as_weight(w_DF)
    if impl == "hopper" and hopper.pays(x_TK, w_2FK, w_DF):
        return hopper.recorded(x_TK, w_2FK, w_DF, regions)
    h_TF = silu_mul.of_gemm(x_TK, w_2FK, regions=regions[:2], impl=impl)
    return gemm.tree(h_TF, w_DF, region=regions[2], impl=impl)

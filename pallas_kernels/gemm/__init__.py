"""GEMM: y = x w^T in one of two orders of summation over K, each the same for a row in any call.

`chain`: fp32 accumulation over the whole of K in order. `tree`: K cut in `leaves` contiguous leaves, each a chain from
zero, leaves added in a balanced binary tree in fp32, lower index on the left: a tensor-parallel rank that owns a
contiguous power-of-two share of the leaves owns a subtree, so that the expression is one for every number of ranks. Both
round once, at the end.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import registry
from pallas_kernels.weight import Weight, as_weight

MAX_LEAVES = 8
LEAF_MULTIPLE = 64


def leaf_count(K: int) -> int:
    """Leaves of a row-parallel GEMM: the largest power of two <= 8 whose leaves are a multiple of 64 long; else 1."""
    leaves = MAX_LEAVES
    while leaves > 1 and K % (leaves * LEAF_MULTIPLE):
        leaves //= 2
    return leaves


def chain(x_TK: jax.Array, w_NK: Weight | jax.Array, *, region: str, impl: str, out_dtype=None) -> jax.Array:
    """Column-parallel GEMM (qkv, gate_up): one chain over K.

    Args:
      x_TK: [T, K], bf16 or fp32.
      w_NK: [..., K] of the same dtype (leading dimensions are flattened to N), a Weight or an array.
      region: name of the region in the contract.
      impl: "reference", "hopper" or "native".
      out_dtype: dtype of the result; x's by default.

    Returns:
      [T, N].

    Raises:
      ValueError: shapes or dtypes do not fit.
      registry.Unsupported: no such implementation.
    """
    return _gemm(x_TK, w_NK, 1, "column", region, impl, out_dtype)


def tree(x_TK: jax.Array, w_NK: Weight | jax.Array, *, region: str, impl: str, contract_dims: int = 1) -> jax.Array:
    """Row-parallel GEMM (o, down): `leaf_count(K)` chains and a balanced tree. Arguments and errors as in `chain`.

    Args:
      contract_dims: trailing dimensions of the weight that make up K (2 for the output projection's [D, H, d]).
    """
    w = as_weight(w_NK)
    K = x_TK.shape[-1]
    flat = lambda a, keep: None if a is None else a.reshape(*a.shape[:keep], K)  # noqa: E731
    lead = len(w.value.shape) - contract_dims
    w = Weight(flat(w.value, lead), w.layer, flat(w.master, len(w.shape) - contract_dims))
    return _gemm(x_TK, w, leaf_count(K), "row", region, impl, None)


def _gemm(x_TK, w, leaves, parallel, region, impl, out_dtype):
    w = as_weight(w)
    K = x_TK.shape[-1]
    if w.shape[-1] != K or x_TK.ndim != 2:
        raise ValueError(f"{region}: x {x_TK.shape} and weight {w.shape} do not share K, their last dimension")
    if w.dtype != x_TK.dtype:
        raise ValueError(f"{region}: x is {x_TK.dtype} and the weight {w.dtype}; cast one first")
    out_dtype = jnp.dtype(out_dtype or x_TK.dtype)
    module = registry.implementation("gemm", impl)
    N = w.value[..., 0].size // (1 if w.layer is None else w.value.shape[0])
    registry.record(region, module.entry(N, K, leaves, parallel, x_TK.dtype, out_dtype))
    if impl == "native":
        return module.gemm(x_TK, w, out_dtype)
    value = w.value.reshape(*w.value.shape[: 0 if w.layer is None else 1], N, K)
    master = None if w.master is None else w.master.reshape(N, K)
    return _iso(impl, leaves, parallel, out_dtype, x_TK, value, w.layer, master)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _iso(impl, leaves, parallel, out_dtype, x_TK, value, layer, master):
    del master
    return registry.implementation("gemm", impl).gemm(x_TK, value, layer, leaves, parallel, out_dtype)


def _iso_fwd(impl, leaves, parallel, out_dtype, x_TK, value, layer, master):
    y = _iso(impl, leaves, parallel, out_dtype, x_TK, value, layer, master)
    return y, (x_TK, value, layer, master is not None)


def _iso_bwd(impl, leaves, parallel, out_dtype, saved, dy_TN):
    """dX = dY W and dW = dY^T X: library dots with fp32 accumulation. They need no fixed order, only the same each run."""
    del impl, leaves, parallel, out_dtype
    x_TK, value, layer, to_master = saved
    if layer is not None:
        raise NotImplementedError("no gradient through a stack with a layer index: pass one layer's slice in training")
    dy_TN = dy_TN.astype(x_TK.dtype)
    dx_TK = lax.dot_general(dy_TN, value, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    dw_NK = lax.dot_general(dy_TN, x_TK, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    dx_TK = dx_TK.astype(x_TK.dtype)
    return (dx_TK, None, None, dw_NK) if to_master else (dx_TK, dw_NK.astype(value.dtype), None, None)


_iso.defvjp(_iso_fwd, _iso_bwd)

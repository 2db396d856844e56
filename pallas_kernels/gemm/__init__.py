"""GEMM: y = x w^T in one of two orders of summation over K, each the same for a row in any call.

`chain`: fp32 accumulation over the whole of K in order. `tree`: K cut in `leaves` contiguous leaves, each a chain from
zero, leaves added in a balanced binary tree in fp32, lower index on the left: a tensor-parallel rank that owns a
contiguous power-of-two share of the leaves owns a subtree, so that the expression is one for every number of ranks. Both
round once, at the end.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import registry
from pallas_kernels.weight import Weight, as_weight, of_backward

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
      x_TK: K may stand as its `contract_dims` dimensions ([T, H, d] for the output projection).
      contract_dims: trailing dimensions of the weight that make up K (2 for the output projection's [D, H, d]).
    """
    K = math.prod(as_weight(w_NK).shape[-contract_dims:])
    return _gemm(x_TK, w_NK, leaf_count(K), "row", region, impl, None, contract_dims)


def _gemm(x, w, leaves, parallel, region, impl, out_dtype, contract_dims=1):
    module, w, K, out_dtype = prepared(x, w, leaves, parallel, region, impl, out_dtype, contract_dims)
    if impl == "native":
        return module.gemm(x.reshape(-1, K), w, out_dtype)
    return _iso(impl, leaves, parallel, out_dtype, x, w.value, w.layer, w.master)


def prepared(x, w, leaves: int, parallel: str, region: str, impl: str, out_dtype=None, contract_dims: int = 1):
    """(implementation, Weight, K, dtype of the result) of a GEMM whose operands are checked and whose region is recorded.

    For ops that multiply inside a kernel of their own; arguments and errors as in `chain` and `tree`.
    """
    w = as_weight(w)
    K = math.prod(w.shape[-contract_dims:])
    if x.shape[1:] not in ((K,), w.shape[-contract_dims:]):
        raise ValueError(f"{region}: x {x.shape} and weight {w.shape} do not share K, their last dimension")
    if w.dtype != x.dtype:
        raise ValueError(f"{region}: x is {x.dtype} and the weight {w.dtype}; cast one first")
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    module = registry.implementation("gemm", impl)
    registry.record(region, module.entry(math.prod(w.shape) // K, K, leaves, parallel, x.dtype, out_dtype))
    return module, w, K, out_dtype


# Operands come as they are and are flattened inside: what the backward keeps is then an array that exists anyway, and a loop
# over layers does not stack copies of its weights.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _iso(impl, leaves, parallel, out_dtype, x, value, layer, master):
    del master
    x_TK = x.reshape(x.shape[0], -1)
    stack = value.shape[: 0 if layer is None else 1]
    flat = value.reshape(*stack, -1, x_TK.shape[1])
    return registry.implementation("gemm", impl).gemm(x_TK, flat, layer, leaves, parallel, out_dtype)


def _iso_fwd(impl, leaves, parallel, out_dtype, x, value, layer, master):
    y = _iso(impl, leaves, parallel, out_dtype, x, value, layer, master)
    return y, (x, value, layer, master is not None)


def _iso_bwd(impl, leaves, parallel, out_dtype, saved, dy_TN):
    """dX = dY W and dW = dY^T X: library dots with fp32 accumulation. They need no fixed order, only the same each run."""
    del leaves, parallel, out_dtype
    x, value, layer, to_master = saved
    w = of_backward(value, layer, to_master)
    x_TK = x.reshape(x.shape[0], -1)
    w_NK = w.reshape(-1, x_TK.shape[1])
    dy_TN = dy_TN.astype(x.dtype)
    # On a GPU the library accumulates in fp32 whatever it returns; fp32 results would be converted in another pass.
    dx_dtype = x.dtype if impl == "hopper" else jnp.float32
    dx_TK = lax.dot_general(dy_TN, w_NK, (((1,), (0,)), ((), ())), preferred_element_type=dx_dtype)
    dw_NK = lax.dot_general(dy_TN, x_TK, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    dx, dw = dx_TK.astype(x.dtype).reshape(x.shape), dw_NK.reshape(w.shape)
    return (dx, None, None, dw) if to_master else (dx, dw.astype(value.dtype), None, None)


_iso.defvjp(_iso_fwd, _iso_bwd)

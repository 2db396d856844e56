"""Log-probability in plain JAX, one row tile at a time, the log-sum-exp in the contract's order."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gemm import reference as gemm
from pallas_kernels.logprob import EIGHTHS, VOCAB_BLOCK, padded_vocab
from pallas_kernels.logprob.chunks import by_chunk, cut
from pallas_kernels.tiles import ROWS, exp2_int, halving_sum, map_rows

VERSION = 1
LN2 = math.log(2.0)
LOG2E = math.log2(math.e)


def logits_entry(V: int, D: int, dtype) -> dict:
    """The logits' line in the contract: a chain, never rounded below fp32."""
    return gemm.entry(padded_vocab(V), D, 1, "column", dtype, "float32")


def entry(V8: int) -> dict:
    """The reduction's line in the contract."""
    return {
        "implementation": "reference",
        "version": VERSION,
        "arch": "cpu",
        "semantics": "log-softmax of logits * inv_temp over the full vocabulary, nats",
        "vocab_padded": V8,
        "vocab_block": VOCAB_BLOCK,
        "maximum": "per block, rounded up to a whole number in log2 units",
        "order": f"halving in a block, blocks in order in an eighth, tree({EIGHTHS}) over eighths",
        "accumulate": "float32",
        "clamp": "<= 0",
        "tile": [ROWS, V8],
    }


def logits(x_BD: jax.Array, w_VD: jax.Array) -> jax.Array:
    """fp32 [B, padded V]; pads are -inf."""
    V = w_VD.shape[0]
    V8 = padded_vocab(V)
    # Tiles of the padded vocabulary: the dots have one shape for every shard of it.
    z_BV = gemm.gemm(x_BD, w_VD, None, 1, "column", jnp.float32, padded_N=V8)
    return z_BV if V == V8 else jnp.where(jnp.arange(V8)[None] < V, z_BV, -jnp.inf)


def eighths(s_MV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per eighth of the vocabulary: (M, sum of 2^(z - M)) of the scaled logits z in log2 units, fp32 [rows, eighths].

    A shard of the vocabulary owns whole eighths, so these are what shards would exchange.
    """
    z_Menb = (s_MV * jnp.float32(LOG2E)).reshape(s_MV.shape[0], EIGHTHS, -1, VOCAB_BLOCK)
    # Finite, so that a block of pads gives 2^-inf = 0 and not NaN.
    max_Men = jnp.maximum(jnp.ceil(jnp.max(z_Menb, axis=3)), jnp.float32(-(2.0**30)))
    sum_Men = halving_sum(jnp.exp2(z_Menb - max_Men[..., None]))
    max_Me = jnp.max(max_Men, axis=2)
    scaled_nMe = jnp.moveaxis(sum_Men * exp2_int(max_Men - max_Me[..., None]), 2, 0)
    zeros_Me = jnp.zeros(max_Me.shape, jnp.float32)
    return max_Me, lax.fori_loop(0, scaled_nMe.shape[0], lambda n, total: total + scaled_nMe[n], zeros_Me)


def reduce(logits_BV, targets_B, inv_temp_B) -> tuple[jax.Array, jax.Array]:
    """(log-probability of the target [B], log-sum-exp [B]), nats, fp32."""

    def tile(z_MV, targets_M, inv_temp_M):
        s_MV = z_MV * inv_temp_M[:, None]
        target_M = jnp.take_along_axis(s_MV, targets_M[:, None], axis=1)[:, 0]
        max_Me, sum_Me = eighths(s_MV)
        while sum_Me.shape[1] > 1:
            a_max, b_max = max_Me[:, ::2], max_Me[:, 1::2]
            max_Me = jnp.maximum(a_max, b_max)
            # Exact products: the addition rounds the same whether or not it fuses with them.
            sum_Me = sum_Me[:, ::2] * exp2_int(a_max - max_Me) + sum_Me[:, 1::2] * exp2_int(b_max - max_Me)
        lse_M = (max_Me[:, 0] + jnp.log2(sum_Me[:, 0])) * jnp.float32(LN2)
        return jnp.minimum(target_M - lse_M, 0.0), lse_M

    return map_rows(tile, (logits_BV, targets_B, inv_temp_B))


def forward(x_TD, w_VD, targets_T, inv_temp_T) -> tuple[jax.Array, jax.Array]:
    """`reduce` of every row's logits, chunk by chunk."""
    return by_chunk(lambda x, t, s: reduce(logits(x, w_VD), t, s), x_TD, targets_T, inv_temp_T)


def backward(x_TD, w_VD, targets_T, inv_temp_T, lse_T, dlp_T, dw_dtype) -> tuple[jax.Array, jax.Array]:
    """(dx [T, D], dw [V, D] in dw_dtype): dz = dlp inv_temp (onehot - softmax); dx = dz W, dW = dz^T x, chunk by chunk, dW
    summed in fp32 in order."""
    V = w_VD.shape[0]

    def chunk(dw_VD, rows):
        x_CD, t_C, s_C, lse_C, g_C = rows
        z_CV = logits(x_CD, w_VD)[:, :V] * s_C[:, None]
        onehot_CV = jnp.arange(V)[None] == t_C[:, None]
        dz_CV = ((g_C * s_C)[:, None] * (onehot_CV - jnp.exp(z_CV - lse_C[:, None]))).astype(x_CD.dtype)
        dx_CD = jnp.dot(dz_CV, w_VD, preferred_element_type=jnp.float32)
        return dw_VD + jnp.einsum("cv,cd->vd", dz_CV, x_CD, preferred_element_type=jnp.float32), dx_CD

    dw_VD, dx = lax.scan(chunk, jnp.zeros(w_VD.shape, jnp.float32), cut(x_TD, targets_T, inv_temp_T, lse_T, dlp_T))
    return dx.reshape(-1, x_TD.shape[1])[: x_TD.shape[0]].astype(x_TD.dtype), dw_VD.astype(dw_dtype)

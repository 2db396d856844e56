"""cuDNN's causal attention on packed sequences, as JAX itself calls it: the baseline on a GPU.

jax.nn.dot_product_attention takes no packed sequences, so this goes through JAX's own cuDNN module, bound to one release.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused


def attention(q_THd: jax.Array, k_TKd: jax.Array, v_TKd: jax.Array, q_start_S1: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v, [T, H, d] bf16 or fp16: causal, within each sequence; differentiable.

    Rows of k and v are those of q. Rows past the last sequence attend among themselves. Its backward adds dq with atomics
    (XLA's deterministic ops switch that off, for a workspace of hundreds of times q), in fp32 [S + 1, T, H, d].
    """
    rows, _, d = q_THd.shape
    # Its backward takes even lengths only; rows that are added lie past the last sequence.
    q_THd, k_TKd, v_TKd = (jnp.pad(x, ((0, rows % 2), (0, 0), (0, 0))) for x in (q_THd, k_TKd, v_TKd))
    T = q_THd.shape[0]
    options = {"scale": 1 / math.sqrt(d), "mask_type": fused.MaskType.CAUSAL}
    if q_start_S1.shape[0] > 2:  # one sequence begins at row 0: rows past it lie in its future
        offset_1E = jnp.concatenate([q_start_S1, jnp.full((1,), T, jnp.int32)])[None]
        length_1E = offset_1E[:, 1:] - offset_1E[:, :-1]
        options = {"scale": 1 / math.sqrt(d), "mask_type": fused.MaskType.PADDING_CAUSAL}
        options |= dict(q_seqlen=length_1E, kv_seqlen=length_1E, q_offsets=offset_1E, kv_offsets=offset_1E)
    return fused.dot_product_attention(q_THd[None], k_TKd[None], v_TKd[None], **options)[0, :rows]

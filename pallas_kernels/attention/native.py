"""Attention as a user would otherwise have it: cuDNN in training on a GPU, else jax.nn.dot_product_attention, masked."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import cudnn

ROWS_AT_ONCE = 64
"""Query rows whose keys are gathered together in inference; bounds memory."""

PACKED_BYTES = 8 << 30
"""Largest workspace of cuDNN's packed backward; with more sequences, training goes through padded ones."""


def entry(G: int, K: int, d: int, dtype) -> dict:
    """This implementation's line in the contract; it claims no order."""
    del G, K, d
    return {"implementation": "native", "round": str(dtype), "order": "XLA's choice"}


def work_list(q_THd, k_pages, q_start_S1, kv_len_S, page_table_SP, share: bool = False, shortest_S=None) -> None:
    """None: the library takes lengths as they are."""


def attention(q_THd, k_pages, v_pages, q_start_S1, kv_len_S, page_table_SP, layer):
    """[T, H, d]. Training (layer is None): cuDNN, of whole sequences, on a GPU; else padded sequences, or all rows over all
    pages where that is less work. Inference: each row over its sequence's pages."""
    T = q_THd.shape[0]
    rows_T = jnp.arange(T)
    seq_T = jnp.clip(jnp.searchsorted(q_start_S1, rows_T, side="right") - 1, 0, kv_len_S.shape[0] - 1)
    position_T = kv_len_S[seq_T] - q_start_S1[seq_T + 1] + rows_T
    real_T = rows_T < q_start_S1[-1]
    run = _over_own_pages
    if layer is None:
        (N, p, *_), (S, P) = k_pages.shape, page_table_SP.shape
        run = _padded_sequences if S * (P * p) ** 2 < T * N * p else _over_all_pages
        if jax.default_backend() == "gpu" and q_THd.dtype == jnp.bfloat16:
            packed = S == 1 or 4 * (S + 1) * q_THd.size < PACKED_BYTES
            run = functools.partial(_cudnn_packed, q_start_S1) if packed else _cudnn_padded
    o_THd = run(q_THd, k_pages, v_pages, kv_len_S, page_table_SP, layer, seq_T, position_T)
    return jnp.where(real_T[:, None, None], o_THd, 0)


def _cudnn_packed(q_start_S1, q_THd, k_pages, v_pages, kv_len_S, page_table_SP, layer, seq_T, position_T):
    """Rows as they lie; NaN where a sequence's first keys are not among this call's rows."""
    del layer
    N, p, K, d = k_pages.shape
    T = q_THd.shape[0]
    inside_T = position_T < kv_len_S[seq_T]
    slot_T = page_table_SP.at[seq_T, position_T // p].get(mode="clip") * p + position_T % p
    slot_T = jnp.where(inside_T, slot_T, N * p + jnp.arange(T))  # each its own: the gradient's scatter is a plain store
    k_TKd, v_TKd = (
        x.reshape(N * p, K, d).at[slot_T].get(mode="fill", fill_value=0, unique_indices=True)
        for x in (k_pages, v_pages)
    )
    o_THd = cudnn.attention(q_THd, k_TKd, v_TKd, q_start_S1)
    whole_S = kv_len_S == q_start_S1[1:] - q_start_S1[:-1]
    return jnp.where(whole_S[seq_T][:, None, None], o_THd, jnp.nan)


def _cudnn_padded(q_THd, k_pages, v_pages, kv_len_S, page_table_SP, layer, seq_T, position_T):
    """One batched call over [S, L] positions."""
    del layer
    q_SLHd, k_SLKd, v_SLKd = _by_sequence(q_THd, k_pages, v_pages, kv_len_S, page_table_SP, seq_T, position_T)
    o_SLHd = jax.nn.dot_product_attention(
        q_SLHd, k_SLKd, v_SLKd, is_causal=True,
        query_seq_lengths=kv_len_S, key_value_seq_lengths=kv_len_S, implementation="cudnn",
    )  # fmt: skip
    return o_SLHd.at[seq_T, position_T].get(mode="clip")


def _padded_sequences(q_THd, k_pages, v_pages, kv_len_S, page_table_SP, layer, seq_T, position_T):
    """One batched call over [S, L] positions, as trainers on padded batches have it."""
    del layer
    q_SLHd, k_SLKd, v_SLKd = _by_sequence(q_THd, k_pages, v_pages, kv_len_S, page_table_SP, seq_T, position_T)
    position_L = jnp.arange(q_SLHd.shape[1])
    written_SL = position_L[None] < kv_len_S[:, None]
    sees_SLL = (position_L[None, None, :] <= position_L[None, :, None]) & written_SL[:, None, :]
    o_SLHd = jax.nn.dot_product_attention(q_SLHd, k_SLKd, v_SLKd, mask=sees_SLL[:, None])
    return o_SLHd.at[seq_T, position_T].get(mode="clip")


def _by_sequence(q_THd, k_pages, v_pages, kv_len_S, page_table_SP, seq_T, position_T):
    """q [S, L, H, d], k and v [S, L, K, d]: rows by position in their sequences, zeros elsewhere."""
    p, K, d = k_pages.shape[1:]
    S, P = page_table_SP.shape
    L = P * p
    written_SL = jnp.arange(L)[None] < kv_len_S[:, None]
    k_SLKd, v_SLKd = (
        jnp.where(written_SL[..., None, None], x.at[page_table_SP].get(mode="clip").reshape(S, L, K, d), 0)
        for x in (k_pages, v_pages)
    )
    # Padding rows come after the last sequence's, whose clipped index they have: their positions are past its end.
    inside_T = position_T < kv_len_S[seq_T]
    q_SLHd = jnp.zeros((S, L, *q_THd.shape[1:]), q_THd.dtype)
    q_SLHd = q_SLHd.at[seq_T, jnp.where(inside_T, position_T, L)].set(q_THd, mode="drop")
    return q_SLHd, k_SLKd, v_SLKd


def _over_all_pages(q_THd, k_pages, v_pages, kv_len_S, page_table_SP, layer, seq_T, position_T):
    del layer
    N, p, K, d = k_pages.shape
    S, P = page_table_SP.shape
    used_SP = jnp.arange(P)[None] * p < kv_len_S[:, None]
    page_SP = jnp.where(used_SP, page_table_SP, N)
    grid = lambda x: jnp.broadcast_to(x, (S, P))  # noqa: E731
    owner_N = jnp.full((N,), -1, jnp.int32).at[page_SP].set(grid(jnp.arange(S)[:, None]), mode="drop")
    first_N = jnp.zeros((N,), jnp.int32).at[page_SP].set(grid(jnp.arange(P)[None] * p), mode="drop")
    position_B = (first_N[:, None] + jnp.arange(p)[None]).reshape(-1)
    sees_TB = (jnp.repeat(owner_N, p)[None] == seq_T[:, None]) & (position_B[None] <= position_T[:, None])
    k_BKd, v_BKd = (x.reshape(N * p, K, d) for x in (k_pages, v_pages))
    return jax.nn.dot_product_attention(q_THd[None], k_BKd[None], v_BKd[None], mask=sees_TB[None, None])[0]


def _over_own_pages(q_THd, k_pages, v_pages, kv_len_S, page_table_SP, layer, seq_T, position_T):
    p, K, d = k_pages.shape[-3:]
    B = page_table_SP.shape[1] * p

    def one_row(row):
        q_Hd, seq, position = row
        pages_P = page_table_SP[seq]
        sees_B = jnp.arange(B) <= position
        # The mask weighs by zero, and zero times a NaN of an unwritten row is NaN.
        k_BKd, v_BKd = (
            jnp.where(sees_B[:, None, None], x.at[layer, pages_P].get(mode="clip").reshape(B, K, d), 0)
            for x in (k_pages, v_pages)
        )
        return jax.nn.dot_product_attention(q_Hd[None, None], k_BKd[None], v_BKd[None], mask=sees_B[None, None, None])[
            0, 0
        ]

    return lax.map(one_row, (q_THd, seq_T, position_T), batch_size=ROWS_AT_ONCE)

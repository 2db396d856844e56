"""Paged causal attention in plain JAX: tiles of 16 tokens of one sequence, every dot of one fixed shape."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import SPLIT, kv_block
from pallas_kernels.tiles import exp2_int

VERSION = 2
TILE_TOKENS = 16
NEVER = -(2.0**30)
"""Initial running maximum: finite, so that a row without a key never meets infinity minus infinity."""


def entry(G: int, K: int, d: int, dtype) -> dict:
    """This implementation's line in the contract: all that reaches the bits."""
    return {
        "implementation": "reference",
        "version": VERSION,
        "arch": "cpu",
        "operands": str(dtype),
        "accumulate": "float32",
        "block": kv_block(d),
        "split": SPLIT,
        "maximum": "rounded up to a whole number in log2 units",
        "scale": float(softmax_scale(d)).hex(),
        "order": "blocks in order, splits in order",
        "sum_of_p": f"dot with a column of ones, K {kv_block(d)}",
        "dot": [TILE_TOKENS * G, kv_block(d), d],
        "kv_heads": K,
        "round": [f"P: {dtype}", f"O / sum: {dtype}"],
    }


def softmax_scale(d: int) -> float:
    """log2(e) / sqrt(d): scores in log2 units."""
    return math.log2(math.e) / math.sqrt(d)


class Tile(NamedTuple):
    """Which rows one tile holds; int32 scalars."""

    sequence: jax.Array
    row: jax.Array  # first row in [T]
    rows: jax.Array  # how many of its rows are real
    position: jax.Array  # of the first row


class Tiles(NamedTuple):
    """Tiles of all sequences, in row order: a tile never holds rows of two sequences."""

    q_start_S1: jax.Array
    kv_len_S: jax.Array
    end_S: jax.Array  # tiles up to and including each sequence

    @classmethod
    def of(cls, q_start_S1, kv_len_S) -> Tiles:
        q_len_S = q_start_S1[1:] - q_start_S1[:-1]
        return cls(q_start_S1, kv_len_S, jnp.cumsum((q_len_S + TILE_TOKENS - 1) // TILE_TOKENS))

    @property
    def count(self) -> jax.Array:
        return self.end_S[-1]

    def __getitem__(self, i) -> Tile:
        s = jnp.minimum(jnp.sum(self.end_S <= i), self.kv_len_S.shape[0] - 1)
        start, end = self.q_start_S1[s], self.q_start_S1[s + 1]
        first = self.end_S[s] - (end - start + TILE_TOKENS - 1) // TILE_TOKENS
        offset = (i - first) * TILE_TOKENS
        rows = jnp.minimum(end - start - offset, TILE_TOKENS)
        return Tile(s, start + offset, rows, self.kv_len_S[s] - (end - start) + offset)


def _rows_by_kv_head(x_PHd, row, K: int):
    """[16, H, d] at `row` -> [K, 16 * G, d]: rows of a dot are (token, query head of the group)."""
    x_MHd = lax.dynamic_slice_in_dim(x_PHd, row, TILE_TOKENS)
    M, H, d = x_MHd.shape
    return x_MHd.reshape(M, K, H // K, d).transpose(1, 0, 2, 3).reshape(K, M * (H // K), d)


def _rows_by_token(x_KRd, H: int):
    """The inverse of `_rows_by_kv_head`'s reordering: [K, 16 * G, d] -> [16, H, d]."""
    K, R, d = x_KRd.shape
    return x_KRd.reshape(K, TILE_TOKENS, R // TILE_TOKENS, d).transpose(1, 0, 2, 3).reshape(TILE_TOKENS, H, d)


class _Block:
    """One block of keys and values of a tile's sequence, and which of them each row of the tile sees."""

    def __init__(self, k_pages, v_pages, table_SP, layer, tile: Tile, kv_len, b, R: int):
        page_size, K, d = k_pages.shape[-3:]
        B = kv_block(d)
        pages = max(1, B // page_size)
        self.pages = lax.dynamic_slice(table_SP, (tile.sequence, b * B // page_size), (1, pages))[0]
        self.page_size, self.offset = page_size, b * B % page_size  # 0 but in pages of several blocks
        at = self.pages if layer is None else (layer, self.pages)
        position = b * B + jnp.arange(B)
        written = position < kv_len
        k_KBd, v_KBd = (
            lax.dynamic_slice_in_dim(x.at[at].get(mode="clip").reshape(-1, K, d), self.offset, B).transpose(1, 0, 2)
            for x in (k_pages, v_pages)
        )
        # 0 x NaN is NaN: what was never written is replaced, not only weighted by zero.
        self.k_KBd = jnp.where(written[None, :, None], k_KBd, 0)
        self.v_KBd = jnp.where(written[None, :, None], v_KBd, 0)
        token_R = jnp.arange(R) // (R // TILE_TOKENS)
        sees_RB = (position[None, :] <= tile.position + token_R[:, None]) & written[None, :]
        self.sees_RB = sees_RB & (token_R < tile.rows)[:, None]

    def scores(self, q_KRd):
        """Scaled scores in log2 units, fp32 [K, R, B]; -inf where a row does not see a key."""
        s_KRB = _dot(q_KRd, self.k_KBd, 2, 2) * jnp.float32(softmax_scale(q_KRd.shape[-1]))
        return jnp.where(self.sees_RB[None], s_KRB, -jnp.inf)

    def add_to(self, pages, x_KBd):
        """Pages with the block's gradient added."""
        x_BKd = x_KBd.transpose(1, 0, 2)
        if rest := -x_BKd.shape[0] % self.page_size:
            x_BKd = jnp.pad(x_BKd, ((0, rest), (0, 0), (0, 0)))
            x_BKd = jnp.roll(x_BKd, self.offset, axis=0)
        return pages.at[self.pages].add(x_BKd.reshape(-1, *pages.shape[1:]), mode="drop")


def _dot(a, b, contract_a: int, contract_b: int):
    """Batched over the KV heads (axis 0), fp32 out."""
    dims = (((contract_a,), (contract_b,)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)


def work_list(q_THd, k_pages, q_start_S1, kv_len_S, page_table_SP, share: bool = False, shortest_S=None) -> None:
    """None: tiles are walked where they lie."""


def attention(q_THd, k_pages, v_pages, q_start_S1, kv_len_S, page_table_SP, layer, work=None):
    """(o [T, H, d], log-sum-exp in log2 units, fp32 [T, H])."""
    del work
    T, H, d = q_THd.shape
    K = k_pages.shape[-2]
    R, B = TILE_TOKENS * (H // K), kv_block(d)
    q_PHd = jnp.pad(q_THd, ((0, TILE_TOKENS), (0, 0), (0, 0)))
    ones_KB1 = jnp.ones((K, B, 1), q_THd.dtype)
    empty = (
        jnp.full((K, R, 1), NEVER, jnp.float32),
        jnp.zeros((K, R, 1), jnp.float32),
        jnp.zeros((K, R, d), jnp.float32),
    )
    tiles = Tiles.of(q_start_S1, kv_len_S)

    def one_tile(i, out):
        tile = tiles[i]
        kv_len = kv_len_S[tile.sequence]
        q_KRd = _rows_by_kv_head(q_PHd, tile.row, K)
        blocks = (tile.position + tile.rows + B - 1) // B
        per_split = SPLIT // B

        def one_block(b, carry):
            m_KR1, l_KR1, o_KRd = carry
            block = _Block(k_pages, v_pages, page_table_SP, layer, tile, kv_len, b, R)
            s_KRB = block.scores(q_KRd)
            m_new_KR1 = jnp.maximum(m_KR1, jnp.ceil(jnp.max(s_KRB, axis=2, keepdims=True)))
            alpha_KR1 = exp2_int(m_KR1 - m_new_KR1)
            p_KRB = jnp.exp2(s_KRB - m_new_KR1).astype(q_THd.dtype)
            # Products by alpha are exact, so it does not matter whether they fuse with the additions.
            l_new_KR1 = l_KR1 * alpha_KR1 + _dot(p_KRB, ones_KB1, 2, 1)
            o_new_KRd = o_KRd * alpha_KR1 + _dot(p_KRB, block.v_KBd, 2, 1)
            seen_1R1 = jnp.any(block.sees_RB, axis=1)[None, :, None]
            return m_new_KR1, jnp.where(seen_1R1, l_new_KR1, l_KR1), jnp.where(seen_1R1, o_new_KRd, o_KRd)

        def one_split(n, total):
            last = jnp.minimum(blocks, (n + 1) * per_split)
            part = lax.fori_loop(n * per_split, last, one_block, empty)
            m_KR1 = jnp.maximum(total[0], part[0])
            a_KR1, b_KR1 = exp2_int(total[0] - m_KR1), exp2_int(part[0] - m_KR1)
            first_KR1, nothing_KR1 = total[1] == 0, part[1] == 0

            def merge(x, y):
                return jnp.where(nothing_KR1, x, jnp.where(first_KR1, y, x * a_KR1 + y * b_KR1))

            return m_KR1, merge(total[1], part[1]), merge(total[2], part[2])

        m_KR1, l_KR1, o_KRd = lax.fori_loop(0, (blocks + per_split - 1) // per_split, one_split, empty)
        o_KRd = jnp.where(l_KR1 > 0, o_KRd / l_KR1, 0).astype(q_THd.dtype)
        lse_KR1 = jnp.where(l_KR1 > 0, m_KR1 + jnp.log2(l_KR1), 0)
        # Rows past the tile's own belong to later tiles, which overwrite them: tiles run in row order.
        o_PHd, lse_PH1 = out
        o_PHd = lax.dynamic_update_slice_in_dim(o_PHd, _rows_by_token(o_KRd, H), tile.row, 0)
        lse_PH1 = lax.dynamic_update_slice_in_dim(lse_PH1, _rows_by_token(lse_KR1, H), tile.row, 0)
        return o_PHd, lse_PH1

    out = (jnp.zeros_like(q_PHd), jnp.zeros((T + TILE_TOKENS, H, 1), jnp.float32))
    o_PHd, lse_PH1 = lax.fori_loop(0, tiles.count, one_tile, out)
    return o_PHd[:T], lse_PH1[:T, :, 0]


def attention_backward(
    q_THd, k_pages, v_pages, q_start_S1, kv_len_S, page_table_SP, o_THd, lse_TH, do_THd
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq [T, H, d], dk pages, dv pages) (FlashAttention-2, algorithm 2). Tiles run in order, sums are fp32."""
    T, H, d = q_THd.shape
    K = k_pages.shape[-2]
    R, B = TILE_TOKENS * (H // K), kv_block(d)
    dtype = q_THd.dtype
    pad = lambda x: jnp.pad(x, ((0, TILE_TOKENS),) + ((0, 0),) * (x.ndim - 1))  # noqa: E731
    q_PHd, o_PHd, do_PHd, lse_PH1 = pad(q_THd), pad(o_THd), pad(do_THd), pad(lse_TH)[..., None]
    tiles = Tiles.of(q_start_S1, kv_len_S)

    def one_tile(i, grads):
        dq_PHd, dk_pages, dv_pages = grads
        tile = tiles[i]
        kv_len = kv_len_S[tile.sequence]
        q_KRd, o_KRd, do_KRd, lse_KR1 = (_rows_by_kv_head(x, tile.row, K) for x in (q_PHd, o_PHd, do_PHd, lse_PH1))
        delta_KR1 = jnp.sum(o_KRd.astype(jnp.float32) * do_KRd.astype(jnp.float32), axis=2, keepdims=True)

        def one_block(b, carry):
            dq_KRd, dk_pages, dv_pages = carry
            block = _Block(k_pages, v_pages, page_table_SP, None, tile, kv_len, b, R)
            p_KRB = jnp.exp2(block.scores(q_KRd) - lse_KR1)
            dp_KRB = _dot(do_KRd, block.v_KBd, 2, 2)
            ds_KRB = (jnp.where(block.sees_RB[None], p_KRB * (dp_KRB - delta_KR1), 0) / math.sqrt(d)).astype(dtype)
            dq_KRd = dq_KRd + _dot(ds_KRB, block.k_KBd, 2, 1)
            dk_KBd = _dot(ds_KRB, q_KRd, 1, 1)
            dv_KBd = _dot(p_KRB.astype(dtype), do_KRd, 1, 1)
            return dq_KRd, block.add_to(dk_pages, dk_KBd), block.add_to(dv_pages, dv_KBd)

        blocks = (tile.position + tile.rows + B - 1) // B
        dq_KRd = jnp.zeros((K, R, d), jnp.float32)
        dq_KRd, dk_pages, dv_pages = lax.fori_loop(0, blocks, one_block, (dq_KRd, dk_pages, dv_pages))
        dq_PHd = lax.dynamic_update_slice_in_dim(dq_PHd, _rows_by_token(dq_KRd, H), tile.row, 0)
        return dq_PHd, dk_pages, dv_pages

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q_PHd, k_pages, v_pages))
    dq_PHd, dk_pages, dv_pages = lax.fori_loop(0, tiles.count, one_tile, zeros)
    return dq_PHd[:T].astype(dtype), dk_pages.astype(dtype), dv_pages.astype(dtype)

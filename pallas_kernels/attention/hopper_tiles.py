"""Tiles of rows and how programs share them: integers, computed on the device, as lengths are known only there."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import SPLIT, kv_block

ROWS = 64
"""Rows of one warpgroup, M of a wgmma: (token, query head of the group)."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static of a call."""

    H: int
    K: int
    d: int
    page: int
    other_block: int | None = None  # than the contract's
    split: int = SPLIT
    layer_rows: int = 0  # of a layer's keys in a stack of layers

    @property
    def G(self) -> int:
        """Query heads of one KV head."""
        return self.H // self.K

    @property
    def tokens(self) -> int:
        """Tokens that one warpgroup holds."""
        return ROWS // self.G

    @property
    def block(self) -> int:
        """Positions of one KV block."""
        return self.other_block or kv_block(self.d)

    @property
    def per_split(self) -> int:
        """KV blocks of one split."""
        return self.split // self.block

    @property
    def piece(self) -> int:
        """Positions of a KV block that lie together in memory."""
        return min(self.page, self.block)

    @property
    def pieces(self) -> int:
        """Of one KV block."""
        return self.block // self.piece


class Tile(NamedTuple):
    """Which rows one tile holds; int32 scalars."""

    sequence: jax.Array
    token: jax.Array  # first token, in [T]
    tokens: jax.Array  # how many of its tokens are real
    position: jax.Array  # of the first token
    blocks: jax.Array  # KV blocks that its last token needs


def needed(position, tokens, block: int):
    """KV blocks that the last of `tokens` tokens from `position` on needs; none before position 0."""
    return jnp.maximum(position + tokens + block - 1, 0) // block


def tiles(q_start_S1, kv_len_S, T: int, tokens: int, block: int):
    """(int32 [N, 5], N tiles, one `Tile` a row; how many are real, int32).

    Tiles of a sequence hold up to `tokens` tokens in order; rows past the last sequence are one more sequence, without keys.
    """
    S = kv_len_S.shape[0]
    N = min(T, T // tokens + S + 1)
    start_S1 = q_start_S1
    end_S1 = jnp.append(q_start_S1[1:], T)
    kv_len_S1 = jnp.append(kv_len_S, 0)
    count_S1 = (end_S1 - start_S1 + tokens - 1) // tokens
    last_S1 = jnp.sum(jnp.where(jnp.arange(S + 1)[:, None] >= jnp.arange(S + 1)[None], count_S1[None], 0), axis=1)
    i_N = jnp.arange(N)
    s_N = jnp.minimum(jnp.sum(last_S1[None] <= i_N[:, None], axis=1), S)
    offset_N = (i_N - (last_S1 - count_S1)[s_N]) * tokens
    length_N = (end_S1 - start_S1)[s_N]
    tokens_N = jnp.clip(length_N - offset_N, 0, tokens)
    position_N = kv_len_S1[s_N] - length_N + offset_N
    blocks_N = jnp.where(s_N < S, needed(position_N, tokens_N, block), 0)
    fields = (s_N, start_S1[s_N] + offset_N, tokens_N, position_N, blocks_N)
    return jnp.stack(fields, axis=1).astype(jnp.int32), last_S1[-1].astype(jnp.int32)


def descending(size_N) -> jax.Array:
    """Indices of sizes from the largest down, equal ones in order. Ranks are counted: two small kernels, where a sort is many."""
    n_N = jnp.arange(size_N.shape[0])
    key_N = size_N * size_N.shape[0] - n_N
    rank_N = jnp.sum(key_N[None] > key_N[:, None], axis=1)
    return jnp.sum(jnp.where(rank_N[None] == n_N[:, None], n_N[None], 0), axis=1)


class Deal(NamedTuple):
    """Items in descending size, dealt to workers there and back again, so that nobody has the largest of every round."""

    worker: jax.Array
    workers: int
    items: jax.Array

    def __getitem__(self, i):
        """The worker's i-th item."""
        return i * self.workers + jnp.where(lax.rem(i, 2) == 0, self.worker, self.workers - 1 - self.worker)

    def count(self):
        """How many items are the worker's."""
        rounds = lax.div(self.items, self.workers)
        return rounds + jnp.where(self[rounds] < self.items, 1, 0)

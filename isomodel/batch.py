"""What one forward runs on: flat tokens, where their keys and values go, and the paged cache they go to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from isomodel.config import ModelConfig

NO_SLOT = 2**30
"""Slot of a row whose K and V are written nowhere (padding)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Flat token rows of S sequences, in sequence order, tight; every array int32.

    The rows of sequence s are q_start_S1[s] to q_start_S1[s + 1], its newest tokens: its last row is the token at
    position kv_len_S[s] - 1. Rows past q_start_S1[-1] are padding (slot NO_SLOT). Unused sequences come last, with no
    rows and kv_len 0. Entries of the page table past a sequence's pages are never read.

    Attributes:
      tokens_T: token ids.
      positions_T: position of each row's token in its sequence.
      slots_T: page * page_size + offset where the row's K and V are written; NO_SLOT for padding.
      q_start_S1: first row of each sequence, and the end of the last.
      kv_len_S: tokens of each sequence whose K and V are in pages once this batch's are written.
      page_table_SP: pages of each sequence, in order.
    """

    tokens_T: jax.Array
    positions_T: jax.Array
    slots_T: jax.Array
    q_start_S1: jax.Array
    kv_len_S: jax.Array
    page_table_SP: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers in pages: k and v [L, N, page_size, KH, d], N pages."""

    k_LNpKd: jax.Array
    v_LNpKd: jax.Array

    @classmethod
    def zeros(cls, cfg: ModelConfig, num_pages: int, page_size: int, dtype=jnp.bfloat16) -> KVCache:
        shape = (cfg.num_layers, num_pages, page_size, cfg.num_kv_heads, cfg.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @property
    def page_size(self) -> int:
        return self.k_LNpKd.shape[2]


@dataclasses.dataclass(frozen=True)
class TrainPages:
    """Pages that live for one layer of one training forward: how many and how large (static).

    `num_pages` counts all pages that the batch's table names. Each sequence starts on a page of its own.
    """

    num_pages: int
    page_size: int


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows of one sequence a batch holds: tokens `start` to `stop` of `token_ids`, on `pages` (host values)."""

    token_ids: Sequence[int]
    start: int
    stop: int
    pages: Sequence[int]


def make_batch(sequences: Sequence[Rows], page_size: int, *, T: int, S: int, P: int) -> Batch:
    """A Batch of these rows, padded to T rows, S sequences and P table columns.

    Raises:
      ValueError: they do not fit.
    """
    tokens_T, positions_T, slots_T = np.zeros(T, np.int32), np.zeros(T, np.int32), np.full(T, NO_SLOT, np.int32)
    q_start_S1, kv_len_S, table_SP = np.zeros(S + 1, np.int32), np.zeros(S, np.int32), np.zeros((S, P), np.int32)
    total = sum(rows.stop - rows.start for rows in sequences)
    if len(sequences) > S or total > T or any(len(rows.pages) > P for rows in sequences):
        raise ValueError(f"{len(sequences)} sequences of {total} rows do not fit in T={T}, S={S}, P={P}")
    row = 0
    for s, rows in enumerate(sequences):
        position = np.arange(rows.start, rows.stop)
        here = slice(row, row + len(position))
        tokens_T[here], positions_T[here] = np.asarray(rows.token_ids)[rows.start : rows.stop], position
        slots_T[here] = np.asarray(rows.pages)[position // page_size] * page_size + position % page_size
        table_SP[s, : len(rows.pages)] = rows.pages
        row += len(position)
        q_start_S1[s + 1], kv_len_S[s] = row, rows.stop
    q_start_S1[len(sequences) + 1 :] = row
    return Batch(*map(jnp.asarray, (tokens_T, positions_T, slots_T, q_start_S1, kv_len_S, table_SP)))

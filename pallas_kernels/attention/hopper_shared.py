"""Which sequences read the same pages from their start on: integers, computed on the device.

Samples of one prompt hold its pages by reference. A tile of 64 rows is full of one sequence's few heads only in part, so
neighbours with the same first pages can walk the blocks of those together, each row as if it were alone.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.attention.hopper_tiles import Shape


def pays(saved: jax.Array | int, longest: jax.Array | int, shape: Shape) -> jax.Array | bool:
    """Whether it is faster to walk shared blocks first than to let everybody walk its own, which then come out of the L2 cache.

    A multiprocessor takes about 1.1 us for such a block, and 2.4 us for each of the longest walk, which all others wait for; a
    launch, and open splits that are written and read, cost as much as 16 blocks (one H200).

    Args:
      saved: blocks that fewer are walked, of one KV head.
      longest: blocks of the longest split that is shared.
      shape: static sizes.
    """
    return saved * shape.K > mosaic.SMS * (16 + 2 * longest)


def may_pay(S: int, P: int, shape: Shape) -> bool:
    """Whether S sequences of at most P pages can share so much that it pays, if all of them have one prompt."""
    blocks = P * shape.page // shape.block
    return pays((S - -(-S // shape.tokens)) * blocks, min(blocks, shape.per_split), shape)


def groups(q_start_S1, kv_len_S, table_SP, shape: Shape, worth: Callable = pays):
    """(int32 [S], leading KV blocks of each sequence that its group walks together; int32 [S, 5], a `Tile` for each group).

    A group is of neighbours with one row each, at most as many as a tile has tokens; its blocks lie whole in pages that all
    have, below every member's newest position, so that none is masked and each member has a block of its own left. The tile
    of a group is its first member's; the other entries have no tokens. Nothing is shared unless it is `worth` it.
    """
    S, P = table_SP.shape
    s_S, p_P = jnp.arange(S), jnp.arange(P)
    previous_SP = jnp.roll(table_SP, 1, axis=0)
    pages_S = jnp.min(jnp.where(table_SP == previous_SP, P, p_P), axis=1)
    single_S = (q_start_S1[1:] - q_start_S1[:-1] == 1) & (kv_len_S > 0)
    # With the sequence before it; none for the first one.
    blocks_S = jnp.where(single_S & jnp.roll(single_S, 1) & (s_S > 0), pages_S * shape.page // shape.block, 0)
    # Where prompts begin alike, those of one prompt have more in common: neither side of an edge reaches over it.
    edge_S = (blocks_S == 0) | (blocks_S < jnp.roll(blocks_S, 1)) | (blocks_S < jnp.append(blocks_S[1:], 0))
    run_S = jnp.max(jnp.where(edge_S[None] & (s_S[None] <= s_S[:, None]), s_S[None], 0), axis=1)
    leader_S = s_S - (s_S - run_S) % shape.tokens
    below_S = jnp.maximum(kv_len_S - 1, 0) // shape.block
    most_S = jnp.where(s_S == leader_S, below_S, jnp.minimum(blocks_S, below_S))
    member_SS = leader_S[None] == leader_S[:, None]
    count_S = jnp.sum(member_SS, axis=1)
    shared_S = jnp.where(count_S > 1, jnp.min(jnp.where(member_SS, most_S[None], P * shape.page), axis=1), 0)
    real_S = (s_S == leader_S) & (shared_S > 0)
    tokens_S, blocks_S = (jnp.where(real_S, x, 0) for x in (count_S, shared_S))
    tiles_S5 = jnp.stack([s_S, q_start_S1[:-1], tokens_S, blocks_S * shape.block, blocks_S], axis=1)
    some = worth(jnp.sum(shared_S) - jnp.sum(blocks_S), jnp.max(jnp.minimum(shared_S, shape.per_split)), shape)
    return tuple(jnp.where(some, x, 0).astype(jnp.int32) for x in (shared_S, tiles_S5))

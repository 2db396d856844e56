"""Causal attention on paged keys and values: one op for training, prefill and decode.

Keys are walked in absolute blocks of 128 positions (64 where head_dim is above 128) from position 0, in splits of 2048. Scores are fp32, scaled into log2
units; P is rounded to the compute dtype, O stays fp32 (FlashAttention-2, algorithm 1). Splits are merged in order; a fully
masked block or split changes nothing. Unwritten rows of a page, and rows of other sequences, may hold anything.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import registry

BLOCK = 128
"""Positions that page tables are padded to: every KV block divides it, as every page does."""
SPLIT = 2048
SAVED = "attention"
"""Name, for the policies of jax.checkpoint, of what a backward needs of a forward besides its arguments."""
Work = tuple[jax.Array, ...]
"""What `work_list` gives: int32 arrays whose meaning is the implementation's own."""


def attention(
    q_THd: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    q_start_S1: jax.Array,
    kv_len_S: jax.Array,
    page_table_SP: jax.Array,
    *,
    layer: jax.Array | None = None,
    work: Work | None = None,
    region: str,
    impl: str,
) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v over each row's own sequence, keys up to the row's own position.

    Args:
      q_THd: [T, H, d], bf16 or fp32; rows of sequence s are q_start_S1[s] to q_start_S1[s + 1], its newest tokens.
      k_pages: [N, p, K, d], or [L, N, p, K, d] with `layer`, of the same dtype; p divides 128, K divides H.
      v_pages: like k_pages. K and V of this call's rows are already in their pages.
      q_start_S1: int32 [S + 1], not decreasing; rows past the last entry are padding and give zeros.
      kv_len_S: int32 [S], positions of each sequence that are written.
      page_table_SP: int32 [S, P], pages of each sequence in order; where a gradient is taken, no page is of two sequences.
      layer: int32 scalar, which layer of stacked pages; no gradient through such a call.
      work: what `work_list` gives for these sequences, where several layers share it; None to compute it here.
      region: name of the region in the contract.
      impl: "reference", "hopper" or "native".

    Returns:
      [T, H, d] in q's dtype.

    Raises:
      ValueError: shapes or dtypes do not fit.
      registry.Unsupported: no such implementation.
    """
    page_size, K = k_pages.shape[-3], k_pages.shape[-2]
    if BLOCK % page_size:
        raise ValueError(f"{region}: page size {page_size} does not divide {BLOCK}")
    if q_THd.shape[1] % K or q_THd.shape[2] != k_pages.shape[-1] or k_pages.shape != v_pages.shape:
        raise ValueError(f"{region}: q {q_THd.shape}, k pages {k_pages.shape}, v pages {v_pages.shape} do not fit")
    if not q_THd.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(f"{region}: q is {q_THd.dtype}, the pages {k_pages.dtype} and {v_pages.dtype}")
    page_table_SP = _whole_blocks(page_table_SP, page_size)
    module = registry.implementation("attention", impl)
    registry.record(region, module.entry(q_THd.shape[1] // K, K, q_THd.shape[2], q_THd.dtype))
    if impl == "native":
        return module.attention(q_THd, k_pages, v_pages, q_start_S1, kv_len_S, page_table_SP, layer)
    return _iso(impl, q_THd, k_pages, v_pages, q_start_S1, kv_len_S, page_table_SP, layer, work)


def kv_block(d: int) -> int:
    """Positions of one KV block at head_dim d: on Hopper, scores of 128 keys do not fit in registers beside O of 256 columns."""
    return BLOCK if d <= 128 else 64


def work_list(
    q_THd, k_pages, q_start_S1, kv_len_S, page_table_SP, *, share: bool = False, shortest_S=None, impl: str
) -> Work | None:
    """What `attention` derives from lengths alone, for all layers of a forward: XLA computes it in each trip of a loop otherwise.

    Args:
      q_THd, k_pages: as `attention` takes them, or their `jax.ShapeDtypeStruct`: nothing but shapes is used.
      q_start_S1, kv_len_S, page_table_SP, impl: as `attention` takes them.
      share: pages that sequences side by side have in common, from their first on, are read once for all of them, where the
        implementation finds that faster; of a row for each sequence. Reaches no bits.
      shortest_S: int32 [S], the least lengths that `shortened` is going to ask for, where it is used.

    Returns:
      Integers that are the implementation's own; None where it has no use for any.

    Raises:
      registry.Unsupported: no such implementation.
    """
    module = registry.implementation("attention", impl)
    page_table_SP = _whole_blocks(page_table_SP, k_pages.shape[-3])
    return module.work_list(q_THd, k_pages, q_start_S1, kv_len_S, page_table_SP, share, shortest_S)


def shortened(work: Work | None, q_THd, k_pages, longest_S, kv_len_S, *, impl: str) -> Work | None:
    """Of the work of sequences of longest_S positions, what `attention` needs of the same rows where there are kv_len_S.

    A loop whose sequences grow makes its lists once, and shortens them in each step: a small part of what making them costs.
    Which blocks a row walks, and in which order, is as in a list that is made for kv_len_S.

    Args:
      work: what `work_list` gave for longest_S, with its shortest_S; None stays None.
      q_THd, k_pages, impl: as `work_list` had them.
      longest_S, kv_len_S: int32 [S]; shortest_S <= kv_len_S <= longest_S.
    """
    if work is None:
        return None
    return registry.implementation("attention", impl).shortened(work, q_THd, k_pages, longest_S, kv_len_S)


def _whole_blocks(page_table_SP, page_size: int):
    columns = -page_table_SP.shape[1] % (BLOCK // page_size)
    return jnp.pad(page_table_SP, ((0, 0), (0, columns)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _iso(impl, q_THd, k_pages, v_pages, q_start_S1, kv_len_S, page_table_SP, layer, work):
    module = registry.implementation("attention", impl)
    return module.attention(q_THd, k_pages, v_pages, q_start_S1, kv_len_S, page_table_SP, layer, work)[0]


def _iso_fwd(impl, q_THd, k_pages, v_pages, q_start_S1, kv_len_S, page_table_SP, layer, work):
    if layer is not None:
        raise NotImplementedError("no gradient through stacked pages: training uses pages of one layer")
    module = registry.implementation("attention", impl)
    o_THd, lse_TH = module.attention(q_THd, k_pages, v_pages, q_start_S1, kv_len_S, page_table_SP, None, work)
    o_THd, lse_TH = checkpoint_name((o_THd, lse_TH), SAVED)
    return o_THd, (q_THd, k_pages, v_pages, q_start_S1, kv_len_S, page_table_SP, o_THd, lse_TH)


def _iso_bwd(impl, saved, do_THd):
    grads = registry.implementation("attention", impl).attention_backward(*saved, do_THd)
    return (*grads, None, None, None, None, None)


_iso.defvjp(_iso_fwd, _iso_bwd)

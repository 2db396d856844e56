"""Packing: trajectories into microbatches of a few static shapes.

A sequence of n tokens takes n - 1 rows: row t holds token t and predicts token t + 1, and the last token predicts
nothing. Rows are tight; only keys and values are page-aligned. The forward of a row does not depend on the packing
(numerics iso), so this is free to choose whatever fills the rows best; it is deterministic, so that a run repeats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from isomodel.batch import Batch, Rows, TrainPages, make_batch
from trainer.trajectory import Trajectory


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """One static shape: `rows` T, `sequences` S, and `pages` P of `page_size` tokens for the longest sequence."""

    rows: int
    sequences: int
    pages: int
    page_size: int

    def __post_init__(self):
        for field in ("rows", "sequences", "pages", "page_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"bucket: {field} is {getattr(self, field)}, want at least 1")

    @property
    def train_pages(self) -> TrainPages:
        """Pages for any sequences that fit: each wastes less than one page."""
        return TrainPages(num_pages=self.rows // self.page_size + self.sequences, page_size=self.page_size)

    @property
    def longest(self) -> int:
        """Most tokens of a trajectory that fits."""
        return min(self.rows, self.pages * self.page_size) + 1


def make_buckets(rows: Sequence[int], *, sequences: int, max_tokens: int, page_size: int) -> tuple[Bucket, ...]:
    """Buckets for trajectories of at most `max_tokens`, smallest first. The largest holds the longest one.

    Raises:
      ValueError: the largest bucket has fewer rows than the longest trajectory needs.
    """
    rows = sorted(set(rows))
    if not rows or rows[-1] < max_tokens - 1:
        raise ValueError(
            f"the largest microbatch has {rows[-1] if rows else 0} rows, but a trajectory may have {max_tokens} tokens, "
            f"which takes {max_tokens - 1}; raise the tokens of a microbatch or shorten prompt and completion"
        )
    pages = -(-(max_tokens - 1) // page_size)
    return tuple(Bucket(r, sequences, max(1, min(pages, -(-r // page_size))), page_size) for r in rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward runs on. Values of row t are those of the token that row t predicts.

    Attributes:
      batch: tokens and pages.
      targets_T: int32, the token to predict; 0 on rows that predict nothing.
      loss_mask_T: bool, rows that the loss counts.
      weight_T: fp32, each row's share of the loss (loss.token_weights); 0 where loss_mask_T is off.
      old_logprobs_T: fp32, the rollout's log-probabilities; 0 where loss_mask_T is off.
      advantages_T: fp32.
      inv_temp_T: fp32; 1 on padding.
      sequence_T: int32, index of the row's sequence; S on padding.
    """

    batch: Batch
    targets_T: jax.Array
    loss_mask_T: jax.Array
    weight_T: jax.Array
    old_logprobs_T: jax.Array
    advantages_T: jax.Array
    inv_temp_T: jax.Array
    sequence_T: jax.Array


@dataclasses.dataclass(frozen=True)
class Packed:
    """A microbatch (NumPy arrays) and what lies in it: `members` are indices of trajectories, in row order."""

    bucket: Bucket
    micro: MicroBatch
    members: tuple[int, ...]

    def unpack(self, values_T) -> list[tuple[int, np.ndarray]]:
        """[(trajectory, its values)]: `values_T` cut by sequence; a trajectory of n tokens gets n - 1 values, the first
        belonging to its token 1."""
        values_T = np.asarray(values_T)
        starts = self.micro.batch.q_start_S1
        return [(m, values_T[starts[i] : starts[i + 1]]) for i, m in enumerate(self.members)]


def bin_pack(rows_N: Sequence[int], bucket: Bucket) -> list[list[int]]:
    """Sequences by index into bins of at most `bucket.rows` rows and `bucket.sequences` sequences.

    First fit, longest first (Johnson 1973: at most 11/9 of the optimum, plus one); ties by index. Bins hold their
    members in index order and are ordered by their first member.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(rows_N)), key=lambda i: (-rows_N[i], i)):
        for b, free in enumerate(room):
            if rows_N[i] <= free and len(bins[b]) < bucket.sequences:
                break
        else:
            b = len(bins)
            bins.append([])
            room.append(bucket.rows)
        bins[b].append(i)
        room[b] -= rows_N[i]
    return sorted(sorted(b) for b in bins)


def pack(
    trajectories: Sequence[Trajectory], advantages_N, weights_N, buckets: Sequence[Bucket]
) -> list[Packed]:
    """Packs trajectories into microbatches, each in the smallest bucket that holds it.

    Args:
      advantages_N: advantage of each trajectory.
      weights_N: share of the minibatch's loss of each of a trajectory's loss tokens (loss.token_weights).
      buckets: shapes to choose from (make_buckets).

    Raises:
      ValueError: a trajectory of fewer than two tokens, or longer than the largest bucket takes.
    """
    buckets = sorted(buckets)
    largest = buckets[-1]
    too_long = [(i, len(t)) for i, t in enumerate(trajectories) if len(t) > largest.longest]
    too_short = [(i, len(t)) for i, t in enumerate(trajectories) if len(t) < 2]
    if too_long or too_short:
        raise ValueError(
            f"cannot pack trajectories (index, tokens) {too_long + too_short}: want 2 to {largest.longest} tokens"
        )
    rows_N = [len(t) - 1 for t in trajectories]
    packed = []
    for members in bin_pack(rows_N, largest):
        rows = [rows_N[i] for i in members]
        bucket = next(
            b
            for b in buckets
            if sum(rows) <= b.rows and len(rows) <= b.sequences and max(rows) <= b.pages * b.page_size
        )
        chosen = [[x[i] for i in members] for x in (trajectories, advantages_N, weights_N)]
        micro = _micro_batch(*chosen, bucket)
        packed.append(Packed(bucket, micro, tuple(members)))
    return packed


def _micro_batch(trajectories, advantages, weights, bucket: Bucket) -> MicroBatch:
    T, S, page_size = bucket.rows, bucket.sequences, bucket.page_size
    targets_T = np.zeros(T, np.int32)
    loss_mask_T = np.zeros(T, np.bool_)
    weight_T = np.zeros(T, np.float32)
    old_logprobs_T = np.zeros(T, np.float32)
    advantages_T = np.zeros(T, np.float32)
    inv_temp_T = np.ones(T, np.float32)
    sequence_T = np.full(T, S, np.int32)
    sequences, row, page = [], 0, 0
    for s, (trajectory, advantage, weight) in enumerate(zip(trajectories, advantages, weights, strict=True)):
        t = trajectory.flatten()
        n = len(t.token_ids) - 1
        pages = -(-n // page_size)
        sequences.append(Rows(t.token_ids, 0, n, range(page, page + pages)))
        at = slice(row, row + n)
        mask = t.loss_mask[1:]
        targets_T[at] = t.token_ids[1:]
        loss_mask_T[at] = mask
        weight_T[at] = np.where(mask, np.float32(weight), np.float32(0))
        old_logprobs_T[at] = np.where(mask, t.logprobs[1:], np.float32(0))
        advantages_T[at] = np.float32(advantage)
        inv_temp_T[at] = t.inv_temp[1:]
        sequence_T[at] = s
        row, page = row + n, page + pages
    batch = jax.device_get(make_batch(sequences, page_size, T=T, S=S, P=bucket.pages))
    return MicroBatch(batch, targets_T, loss_mask_T, weight_T, old_logprobs_T, advantages_T, inv_temp_T, sequence_T)

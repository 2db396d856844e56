"""Packing: every token of every trajectory, once, where Batch says it is; static shapes; the same packing every time."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isomodel.batch import NO_SLOT
from tests.trainer import tiny
from trainer.packing import Bucket, bin_pack, make_buckets, pack
from trainer.step import abstract_micro
from trainer.trajectory import Segment, Trajectory

SMALL = Bucket(rows=32, sequences=4, pages=2, page_size=16)


@st.composite
def batches(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 18)), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    given = [tiny.trajectory(rng, p, c, inv_temp=rng.uniform(0.5, 2)) for p, c in shapes]
    if draw(st.booleans()):  # a second turn behind a tool's output
        tool, answer = tiny.trajectory(rng, 3, 2, inv_temp=1.5).segments
        short = [i for i, t in enumerate(given) if len(t) <= 20]
        given = [Trajectory((*t.segments, tool, answer)) if i in short[:2] else t for i, t in enumerate(given)]
    return given


@given(batches())
def test_packed_microbatches_hold_every_token_where_the_metadata_says(given):
    rng = np.random.default_rng(1)
    advantages, weights = rng.normal(size=len(given)), rng.uniform(0.1, 1, len(given))
    packed = pack(given, advantages, weights, [SMALL, tiny.BUCKET])
    assert sorted(m for p in packed for m in p.members) == list(range(len(given)))
    for p in packed:
        m, b, bucket = p.micro, p.micro.batch, p.bucket
        # The compiled program takes it: shapes and dtypes are those of the bucket.
        shape = lambda x: (x.shape, np.dtype(x.dtype))  # noqa: E731
        assert jax.tree.map(shape, m) == jax.tree.map(shape, abstract_micro(bucket))
        slots = b.slots_T[b.slots_T != NO_SLOT]
        assert len(set(slots.tolist())) == len(slots)
        assert slots.max() < bucket.train_pages.num_pages * bucket.page_size
        for s, i in enumerate(p.members):
            t = given[i].flatten()
            rows = slice(b.q_start_S1[s], b.q_start_S1[s + 1])
            n = len(given[i]) - 1
            assert rows.stop - rows.start == n == b.kv_len_S[s]
            assert b.tokens_T[rows].tolist() == t.token_ids[:-1].tolist()
            assert m.targets_T[rows].tolist() == t.token_ids[1:].tolist()
            assert b.positions_T[rows].tolist() == list(range(n))
            # Slot of each row is where the page table says that its position is, and the sequence starts on a page.
            pages = b.page_table_SP[s][np.arange(n) // bucket.page_size]
            assert b.slots_T[rows].tolist() == (pages * bucket.page_size + np.arange(n) % bucket.page_size).tolist()
            assert b.slots_T[rows.start] % bucket.page_size == 0
            mask = t.loss_mask[1:]
            assert m.loss_mask_T[rows].tolist() == mask.tolist()
            assert m.old_logprobs_T[rows][mask].tobytes() == t.logprobs[1:][mask].tobytes()
            assert m.inv_temp_T[rows].tobytes() == t.inv_temp[1:].tobytes()
            assert (m.advantages_T[rows] == np.float32(advantages[i])).all()
            assert (m.weight_T[rows][mask] == np.float32(weights[i])).all()
            assert (m.sequence_T[rows] == s).all()
        # Padding: no slot, no loss, no sequence, finite everywhere.
        used, pad = len(p.members), slice(b.q_start_S1[-1], None)
        assert (b.q_start_S1[used:] == b.q_start_S1[-1]).all()
        assert (b.kv_len_S[used:] == 0).all()
        assert (b.slots_T[pad] == NO_SLOT).all()
        assert not m.loss_mask_T[pad].any() and not m.weight_T[pad].any()
        assert (m.inv_temp_T[pad] == 1).all() and (m.sequence_T[pad] == bucket.sequences).all()
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(m))
        assert not m.weight_T[~m.loss_mask_T].any()


@given(batches())
def test_unpack_gives_each_trajectory_its_own_rows(given):
    packed = pack(given, np.zeros(len(given)), np.ones(len(given)), [tiny.BUCKET])
    found = dict(pair for p in packed for pair in p.unpack(p.micro.targets_T))
    assert {i: v.tolist() for i, v in found.items()} == {
        i: t.flatten().token_ids[1:].tolist() for i, t in enumerate(given)
    }


@given(st.lists(st.integers(1, 32), min_size=1, max_size=40))
def test_bins_are_legal_deterministic_and_not_wasteful(rows):
    bins = bin_pack(rows, SMALL)
    assert sorted(i for b in bins for i in b) == list(range(len(rows)))
    assert all(sum(rows[i] for i in b) <= SMALL.rows and len(b) <= SMALL.sequences for b in bins)
    assert bins == bin_pack(list(rows), SMALL)
    # First fit: no two bins could have been one.
    assert not any(
        sum(rows[i] for i in a + b) <= SMALL.rows and len(a + b) <= SMALL.sequences
        for k, a in enumerate(bins)
        for b in bins[k + 1 :]
    )


def test_a_bin_takes_the_smallest_bucket_that_holds_it():
    rng = np.random.default_rng(0)
    buckets = make_buckets([32, 128], sequences=8, max_tokens=60, page_size=16)
    assert [(b.rows, b.pages) for b in buckets] == [(32, 2), (128, 4)]
    few = pack([tiny.trajectory(rng, 4, 10)], [0], [1], buckets)
    long = pack([tiny.trajectory(rng, 4, 40)], [0], [1], buckets)
    assert few[0].bucket.rows == 32 and long[0].bucket.rows == 128
    assert buckets[1].longest == 65


def test_pages_suffice_for_the_worst_sequences_that_fit():
    # Each sequence one row over a page: the most waste there can be.
    bucket = Bucket(rows=68, sequences=4, pages=2, page_size=16)
    rng = np.random.default_rng(0)
    (packed,) = pack([tiny.trajectory(rng, 2, 16) for _ in range(4)], [0] * 4, [1] * 4, [bucket])
    assert packed.micro.batch.page_table_SP.max() < bucket.train_pages.num_pages


def test_what_does_not_fit_is_refused_by_index():
    rng = np.random.default_rng(0)
    given = [tiny.trajectory(rng, 2, 5), tiny.trajectory(rng, 10, 40), Trajectory((Segment.context([1], 0),))]
    with pytest.raises(ValueError, match=r"\[\(1, 50\), \(2, 1\)\]: want 2 to 33 tokens"):
        pack(given, [0] * 3, [1] * 3, [SMALL])
    with pytest.raises(ValueError, match="largest microbatch has 32 rows, but a trajectory may have 60 tokens"):
        make_buckets([32], sequences=4, max_tokens=60, page_size=16)
    with pytest.raises(ValueError, match="rows is 0"):
        dataclasses.replace(SMALL, rows=0)

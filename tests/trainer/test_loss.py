"""Objectives against their formulas in float64; weights that cutting into microbatches does not change."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from tests.trainer import tiny
from trainer.config import OBJECTIVES
from trainer.loss import combine, policy_loss, token_weights
from trainer.packing import Bucket, pack

ONE = Bucket(rows=512, sequences=16, pages=4, page_size=16)
HALF = Bucket(rows=64, sequences=4, pages=4, page_size=16)
MAX_TOKENS = 24


def case(kind: str, bucket: Bucket = ONE, count: int = 12):
    """(packed microbatches, settings, new log-probabilities of each trajectory's tokens 1.., trajectories, advantages)."""
    settings = OBJECTIVES[kind]
    given = tiny.trajectories(count, seed=3, longest=MAX_TOKENS)
    rng = np.random.default_rng(4)
    advantages = rng.normal(size=count)
    weights = token_weights([t.loss_tokens for t in given], settings["aggregation"], constant=MAX_TOKENS)
    # Ratios on both sides of every bound.
    spread = 0.002 if settings["ratio"] == "sequence" else 0.4
    new = [
        np.minimum(np.nan_to_num(t.flatten().logprobs[1:], nan=-2.0) + rng.normal(0, spread, len(t) - 1), -1e-3)
        for t in given
    ]
    return pack(given, advantages, weights, [bucket]), settings, new, given, advantages


def rows_of(packed, new) -> np.ndarray:
    values = np.full(packed.bucket.rows, -7.0, np.float32)
    starts = packed.micro.batch.q_start_S1
    for s, i in enumerate(packed.members):
        values[starts[s] : starts[s + 1]] = new[i]
    return values


@functools.cache
def program(ratio: str, clip_low: float, clip_high: float, kl_coef: float):
    def loss(logprobs_T, micro, ref_logprobs_T):
        return policy_loss(
            logprobs_T,
            micro,
            ratio=ratio,
            clip_low=clip_low,
            clip_high=clip_high,
            kl_coef=kl_coef,
            ref_logprobs_T=ref_logprobs_T,
        )

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def run(packed, settings, logprobs_T, ref_logprobs_T=None, kl_coef: float = 0.0):
    """(loss, gradient by row, stats) of one microbatch."""
    fn = program(settings["ratio"], settings["clip_low"], settings["clip_high"], kl_coef)
    (loss, stats), grad = fn(logprobs_T, packed.micro, ref_logprobs_T)
    return float(loss), np.asarray(grad), stats


def by_hand(kind: str, settings, new, given, advantages) -> float:
    """The objective as its paper writes it, in float64."""
    low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
    per_sequence = []
    for t, lp, A in zip(given, new, advantages, strict=True):
        flat = t.flatten()
        mask = flat.loss_mask[1:]
        log_ratio = lp[mask] - flat.logprobs[1:][mask].astype(np.float64)
        r = np.exp(np.full(mask.sum(), log_ratio.mean())) if kind == "gspo" else np.exp(log_ratio)
        per_sequence.append(np.minimum(r * A, np.clip(r, low, high) * A))
    if kind in ("grpo", "gspo"):
        return -np.mean([x.mean() for x in per_sequence])
    if kind == "dr_grpo":
        return -np.mean([x.sum() / MAX_TOKENS for x in per_sequence])
    return -np.concatenate(per_sequence).mean()


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_loss_is_the_papers_formula(kind):
    (packed,), settings, new, given, advantages = case(kind)
    loss, _, stats = run(packed, settings, rows_of(packed, new))
    assert loss == pytest.approx(by_hand(kind, settings, new, given, advantages), rel=2e-5)
    report = combine([stats])
    assert report["clip/low"] > 0 and report["clip/high"] > 0  # the bounds were reached on both sides
    assert report["loss_tokens"] == sum(t.loss_tokens for t in given)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_gradient_is_that_of_the_formula(kind):
    (packed,), settings, new, given, advantages = case(kind, count=4)
    _, grad, _ = run(packed, settings, rows_of(packed, new))
    starts = packed.micro.batch.q_start_S1
    h = 1e-5
    checked = 0
    for s, i in enumerate(packed.members):
        for t in range(0, len(new[i]), 3):

            def moved(d, i=i, t=t):
                other = [x.copy() for x in new]
                other[i][t] += d
                return by_hand(kind, settings, other, given, advantages)

            slopes = [(moved(h) - moved(0)) / h, (moved(0) - moved(-h)) / h]
            if abs(slopes[0] - slopes[1]) > 1e-3 * max(map(abs, slopes)):
                continue  # at a bound of the clip, where there are two slopes
            assert grad[starts[s] + t] == pytest.approx(slopes[0], rel=1e-2, abs=1e-7)
            checked += slopes[0] != 0
    assert checked >= 5


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_cutting_into_microbatches_changes_no_tokens_gradient(kind):
    whole, settings, new, given, _ = case(kind)
    parts, *_ = case(kind, HALF)
    assert len(whole) == 1 and len(parts) >= 3

    def by_trajectory(packed):
        return {i: v for p in packed for i, v in p.unpack(run(p, settings, rows_of(p, new))[1])}

    a, b = by_trajectory(whole), by_trajectory(parts)
    for i in a:
        if settings["ratio"] == "token":
            assert a[i].tobytes() == b[i].tobytes()
        else:  # a sum over the sequence's rows, which lie elsewhere
            np.testing.assert_allclose(a[i], b[i], rtol=1e-6)
    total = combine([run(p, settings, rows_of(p, new))[2] for p in parts])
    one = combine([run(p, settings, rows_of(p, new))[2] for p in whole])
    assert total["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert total.keys() == one.keys()
    assert {k: total[k] for k in total if "ratio" in k or "clip" in k} == pytest.approx(
        {k: one[k] for k in one if "ratio" in k or "clip" in k}, rel=1e-5
    )
    # Control: shares made for each microbatch by itself, the common mistake, give other gradients.
    local = {}
    for p in parts:
        members = [given[i] for i in p.members]
        counts = [t.loss_tokens for t in members]
        w = token_weights(counts, settings["aggregation"], constant=MAX_TOKENS)
        (q,) = pack(members, [0] * len(members), w, [HALF])
        local |= {p.members[i]: v for i, v in q.unpack(q.micro.weight_T)}
    right = {i: v for p in parts for i, v in p.unpack(p.micro.weight_T)}
    assert any(not np.allclose(local[i], right[i]) for i in right)


def test_ratios_are_exactly_one_where_the_bits_are_the_rollouts():
    (packed,), settings, _, given, _ = case("grpo")
    same = [np.nan_to_num(t.flatten().logprobs[1:], nan=-2.0) for t in given]
    _, _, stats = run(packed, settings, rows_of(packed, same))
    report = combine([stats])
    exact = ("ratio/max", "ratio/min", "ratio/mean", "ratio/sequence_max", "ratio/sequence_min")
    assert [report[k] for k in exact] == [1.0] * 5
    assert [report[k] for k in ("kl/old", "clip/low", "clip/high", "ratio/out_of_band")] == [0.0] * 4
    # Control: a difference in one log-probability shows. (One ULP need not: exp rounds it away, so the gate compares bits.)
    same[0] = same[0].copy()
    same[0][-1] += np.float32(1e-5)
    report = combine([run(packed, settings, rows_of(packed, same))[2]])
    assert report["ratio/max"] > 1 and report["ratio/sequence_max"] > 1


def test_small_differences_add_up_over_a_sequence():
    """Field case 1: 0.01 a token looks harmless and is a ratio of 2.7 after 100 tokens; the report shows it."""
    rng = np.random.default_rng(0)
    given = [tiny.trajectory(rng, 2, 100)]
    bucket = Bucket(rows=128, sequences=1, pages=8, page_size=16)
    (packed,) = pack(given, [1.0], token_weights([100], "sequence"), [bucket])
    new = [np.nan_to_num(given[0].flatten().logprobs[1:], nan=-2.0) + 0.01]
    report = combine([run(packed, OBJECTIVES["grpo"], rows_of(packed, new))[2]])
    assert report["ratio/max"] < 1.011 and report["ratio/out_of_band"] == 0
    assert report["ratio/sequence_max"] == pytest.approx(np.e, rel=1e-3)


def test_kl_to_the_reference_is_k3():
    (packed,), settings, new, given, _ = case("grpo")
    ref = [x + np.sin(np.arange(len(x))) * 0.3 for x in new]
    ref_rows = rows_of(packed, ref)
    plain, grad0, _ = run(packed, settings, rows_of(packed, new))
    loss, grad, stats = run(packed, settings, rows_of(packed, new), kl_coef=0.5, ref_logprobs_T=ref_rows)
    k3 = [np.exp(r - n) - (r - n) - 1 for r, n in zip(ref, new, strict=True)]
    masks = [t.flatten().loss_mask[1:] for t in given]
    want = np.mean([x[m].mean() for x, m in zip(k3, masks, strict=True)])
    assert loss - plain == pytest.approx(0.5 * want, rel=1e-3)
    mean = sum(x[m].sum() for x, m in zip(k3, masks, strict=True)) / sum(m.sum() for m in masks)
    assert combine([stats])["kl/ref"] == pytest.approx(mean, rel=1e-4)
    assert not np.allclose(grad, grad0)
    # At the reference itself it is 0 with gradient 0.
    loss, grad, _ = run(packed, settings, rows_of(packed, new), kl_coef=0.5, ref_logprobs_T=rows_of(packed, new))
    assert loss == pytest.approx(plain, rel=1e-6) and np.allclose(grad, grad0, rtol=1e-5)


def test_rows_outside_the_loss_reach_nothing():
    (packed,), settings, new, _, _ = case("dapo")
    loss, grad, stats = run(packed, settings, rows_of(packed, new))
    noise = np.where(packed.micro.loss_mask_T, rows_of(packed, new), np.float32(np.nan))
    assert np.isnan(noise).any()
    other, other_grad, other_stats = run(packed, settings, noise)
    assert other == loss and combine([other_stats]) == combine([stats])
    assert other_grad.tobytes() == grad.tobytes()
    assert not grad[~packed.micro.loss_mask_T].any()


def test_weights_sum_to_one_or_to_the_share_of_max_tokens():
    counts = [3, 0, 5, 8]
    n = np.array(counts)
    assert (n * token_weights(counts, "sequence")).sum() == pytest.approx(3 / 4)  # the empty one counts as 0
    assert (n * token_weights(counts, "token")).sum() == pytest.approx(1)
    assert (n * token_weights(counts, "constant", constant=10)).sum() == pytest.approx(16 / 40)
    assert token_weights([0, 0], "token").tolist() == [0, 0]
    for bad, message in (("mean", "choose sequence, token or constant"), ("constant", "needs its divisor")):
        with pytest.raises(ValueError, match=message):
            token_weights(counts, bad)


def test_a_minibatch_without_a_loss_token_is_reported_as_such():
    given = [t.without_loss() for t in tiny.trajectories(3)]
    (packed,) = pack(given, [1.0] * 3, token_weights([0] * 3, "token"), [tiny.BUCKET])
    new = [np.full(len(t) - 1, -1.0) for t in given]
    loss, grad, stats = run(packed, OBJECTIVES["dapo"], rows_of(packed, new))
    assert loss == 0 and not grad.any()
    assert combine([stats]) == {"loss": 0.0, "loss_tokens": 0.0}


def test_what_is_wrong_is_refused():
    (packed,), *_ = case("grpo", count=2)
    x = np.zeros(ONE.rows, np.float32)
    with pytest.raises(ValueError, match="choose token or sequence"):
        policy_loss(x, packed.micro, ratio="word", clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match="needs the reference's"):
        policy_loss(x, packed.micro, ratio="token", clip_low=0.2, clip_high=0.2, kl_coef=0.1)

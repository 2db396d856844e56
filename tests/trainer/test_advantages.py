"""Advantages: against the formulas by hand, and the groups that carry nothing."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.advantages import STD_EPSILON, group_advantages, has_signal, overlong_penalty


def test_grpo_is_reward_less_mean_over_the_sample_standard_deviation():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 2.0, 2.0]])
    got = group_advantages(rewards)
    for group, row in zip(rewards, got, strict=True):
        mean = sum(group) / 4
        std = (sum((r - mean) ** 2 for r in group) / 3) ** 0.5
        assert row == pytest.approx([(r - mean) / (std + STD_EPSILON) for r in group], rel=1e-12)
    assert got.sum(axis=1) == pytest.approx([0, 0], abs=1e-12)


def test_dr_grpo_does_not_divide():
    assert group_advantages([[1.0, 0.0, 0.0, 0.0]], normalize_std=False).tolist() == [[0.75, -0.25, -0.25, -0.25]]


def test_leave_one_out_compares_with_the_others():
    rewards = np.array([[1.0, 0.0, 0.5, 4.0]])
    got = group_advantages(rewards, baseline="leave_one_out", normalize_std=False)
    want = [r - (rewards.sum() - r) / 3 for r in rewards[0]]
    assert got[0] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_have_advantage_exactly_zero(baseline, normalize_std):
    # 0.1 is where a mean of equal numbers is not that number in floating point.
    flat = np.full((1, 10), 0.1)
    assert flat.mean() != 0.1 or np.full((1, 3), 0.1).mean() != 0.1  # the hazard is there
    for group in (flat, np.full((1, 3), 0.1), np.zeros((1, 4))):
        assert (group_advantages(group, baseline=baseline, normalize_std=normalize_std) == 0).all()
    assert (group_advantages([[0.1, 0.1, 0.2]], baseline=baseline, normalize_std=normalize_std) != 0).all()


def test_has_signal_tells_groups_whose_rewards_differ():
    assert has_signal([[1, 1, 1], [0, 0, 0], [1, 0, 1], [0.1, 0.1, 0.1 + 1e-12]]).tolist() == [False, False, True, True]


def test_overlong_penalty_is_equation_13():
    got = overlong_penalty([0, 80, 81, 90, 100, 120], max_length=100, buffer=20)
    assert got.tolist() == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_advantages([[1.0], [2.0]]), "at least 2 samples"),
        (lambda: group_advantages([[1.0, np.nan]]), "prompt 0, sample 1: nan"),
        (lambda: group_advantages([1.0, 2.0]), "want \\[prompts, samples of a prompt\\]"),
        (lambda: group_advantages([[1.0, 2.0]], baseline="median"), "choose mean or leave_one_out"),
        (lambda: overlong_penalty([1], max_length=10, buffer=0), "want 1 to the 10"),
        (lambda: overlong_penalty([1], max_length=10, buffer=11), "want 1 to the 10"),
    ],
)
def test_what_is_wrong_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

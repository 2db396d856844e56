"""Trajectory: segments are checked, laid flat, cut by version."""

from __future__ import annotations

import numpy as np
import pytest

from isomodel.rollout import Completion
from trainer.trajectory import Segment, Trajectory, from_completion, split_by_version


def completion(**changes) -> Completion:
    fields = dict(
        request_id="7",
        index=0,
        prompt_ids=np.array([5, 6, 7], np.int32),
        token_ids=np.array([8, 9], np.int32),
        logprobs=np.array([-0.5, -1.5], np.float32),
        truncated_logprobs=np.array([-0.1, -0.2], np.float32),
        versions=np.array([3, 3], np.int32),
        inv_temp=np.float32(1) / np.float32(0.7),
        finish_reason="stop",
        stop_reason=9,
        seed=1,
    )
    return Completion(**(fields | changes))


def test_a_completion_becomes_prompt_and_sampled_tokens_with_the_full_log_probabilities():
    t = from_completion(completion())
    flat = t.flatten()
    assert flat.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert flat.loss_mask.tolist() == [False, False, False, True, True]
    assert flat.sampled.tolist() == [False, False, False, True, True]
    # Those before truncation, never the renormalised ones; their bits and inv_temp's are kept.
    assert flat.logprobs[3:].tobytes() == np.array([-0.5, -1.5], np.float32).tobytes()
    assert flat.inv_temp[3:].tobytes() == np.full(2, np.float32(1) / np.float32(0.7)).tobytes()
    assert flat.versions.tolist() == [3] * 5
    assert (len(t), t.loss_tokens, t.prompt_length) == (5, 2, 3)


def test_turns_with_tool_output_are_the_same_type():
    t = Trajectory(
        (
            Segment.context([1, 2], 0),
            Segment.sampled([3, 4], [-1, -2], 0, 1.0),
            Segment.context([5, 5, 5], 0),
            Segment.sampled([6], [-3], 0, 1.0),
        )
    )
    assert t.flatten().loss_mask.tolist() == [False, False, True, True, False, False, False, True]
    assert t.loss_tokens == 3
    assert t.prompt_length == 2


def test_a_completion_sampled_under_two_versions_is_cut_where_the_weights_changed():
    t = from_completion(
        completion(
            token_ids=np.arange(5, dtype=np.int32),
            logprobs=np.full(5, -1, np.float32),
            versions=np.array([3, 3, 4, 4, 3], np.int32),
        )
    )
    assert [s.weight_version for s in t.segments] == [3, 3, 4, 3]
    assert [len(s) for s in t.segments] == [3, 2, 2, 1]
    flat = t.flatten()
    # Only tokens whose whole prefix is of the version: the last token is of version 3 again and does not count.
    assert flat.under(3).tolist() == [True] * 5 + [False] * 3
    assert not flat.under(4).any()


def test_without_loss_keeps_tokens_and_log_probabilities():
    t = from_completion(completion())
    off = t.without_loss()
    assert off.loss_tokens == 0
    assert off.flatten().sampled.sum() == 2
    assert off.flatten().token_ids.tolist() == t.flatten().token_ids.tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Segment.sampled([1, 2], [-1], 0, 1.0), r"logprobs has shape \(1,\), token_ids has \(2,\)"),
        (lambda: Segment.sampled([1, 2], [-1, np.nan], 0, 1.0), "1 tokens of the loss mask have no finite"),
        (lambda: Segment.sampled([1, 2], [-1, np.nan], 0, 1.0, loss=False), "no finite log-probability"),
        (lambda: Segment.sampled([1], [-np.inf], 0, 1.0), "no finite log-probability"),
        (lambda: Segment.sampled([1], [0.25], 0, 1.0), "log-probability 0.25 is above 0"),
        (lambda: Segment.sampled([1], [-1], 0, 0.0), "inv_temp is 0.0"),
        (lambda: Segment.sampled([-4], [-1], 0, 1.0), "token id -4 is negative"),
        (lambda: Segment.context([], 0), "token_ids has shape"),
        (lambda: Segment(np.array([1.5]), np.zeros(1, np.float32), np.zeros(1, bool), 0), "token_ids has dtype float64"),
        (lambda: Trajectory(()), "no segments"),
        (lambda: Trajectory((Segment.sampled([1], [-1], 0, 1.0),)), "first token has a log-probability"),
        (lambda: from_completion(completion(finish_reason="abort")), "completion 7/0 ended by 'abort'"),
        (lambda: from_completion(completion(logprobs=None)), "completion 7/0 has no log-probabilities"),
        (lambda: split_by_version([1, 2], [-1, -1], [0], 1.0), "2 tokens, 2 log-probabilities, 1 weight versions"),
    ],
)
def test_what_is_wrong_is_refused_and_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_segment_cannot_be_changed_through_the_arrays_it_was_made_of():
    ids = np.array([1, 2], np.int32)
    segment = Segment.sampled(ids, np.array([-1, -2], np.float32), 0, 1.0)
    ids[0] = 9
    assert segment.token_ids.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        segment.logprobs[0] = 0

"""The gate: fail-closed, integers, and the control that it must stop."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.trainer import tiny
from trainer.packing import pack
from trainer.parity import MAX_LISTED, Gate, ParityError, enforce
from trainer.trajectory import Segment, Trajectory


def ulp_up(x: np.float32) -> np.float32:
    return np.nextafter(np.float32(x), np.float32(0))


def observed(given, change=lambda i, values: values, version=0, skip=()):
    """A gate that saw every trajectory's own log-probabilities, changed by `change`."""
    gate = Gate(given, version)
    for packed in pack(given, [0] * len(given), [0] * len(given), [tiny.BUCKET]):
        rows = np.zeros(packed.bucket.rows, np.float32)
        starts = packed.micro.batch.q_start_S1
        for s, i in enumerate(packed.members):
            rows[starts[s] : starts[s + 1]] = change(i, np.nan_to_num(given[i].flatten().logprobs[1:], nan=-9.0))
        if not set(packed.members) & set(skip):
            gate.observe(packed, rows)
    return gate


def pass_or_stop(report, given, tmp_path, stop=True, replay=lambda ids, n: "layers.0.attention"):
    enforce(report, given, step=3, stop=stop, replay=replay, dump=tmp_path / "parity_failure.json")


def test_equal_bits_pass_and_every_sampled_token_was_compared(tmp_path):
    given = tiny.trajectories(9)
    report = observed(given).report()
    assert report.exact and report.tokens == sum(t.loss_tokens for t in given) > 50
    assert report.metrics() == {
        "parity/max_abs": 0.0,
        "parity/mean_abs": 0.0,
        "parity/mismatched_tokens": 0,
        "parity/tokens": report.tokens,
    }
    pass_or_stop(report, given, tmp_path)
    assert not list(tmp_path.iterdir())


def test_control_one_ulp_in_one_token_stops(tmp_path):
    given = tiny.trajectories(9)

    def plant(i, values):
        if i == 4:
            values[-1] = ulp_up(values[-1])
        return values

    report = observed(given, plant).report()
    assert (report.mismatched, report.missing, report.by_trajectory) == (1, 0, {4: 1})
    assert 0 < report.max_abs < 1e-6
    replayed = []
    with pytest.raises(ParityError) as e:
        pass_or_stop(report, given, tmp_path, replay=lambda ids, n: replayed.append((ids, n)) or "layer 0, attention")
    message = str(e.value)
    position = len(given[4]) - 1
    assert f"1 of {report.tokens} log-probabilities differ in 1 of 9 sequences" in message
    assert f"trajectory 4, position {position}, token {given[4].flatten().token_ids[-1]}" in message
    assert "first region that differs, by replaying trajectory 4: layer 0, attention" in message
    assert e.value.region == "layer 0, attention"
    assert replayed[0][0].tolist() == given[4].flatten().token_ids.tolist() and replayed[0][1] == given[4].prompt_length
    dump = json.loads((tmp_path / "parity_failure.json").read_text())
    assert dump["mismatched"] == 1 and dump["first_region"] == "layer 0, attention"
    bits = [int(b, 16) for b in dump["sequences"]["4"]["rollout_logprob_bits"]]
    assert bits == given[4].flatten().logprobs.view(np.uint32).tolist()


def test_minus_zero_is_not_zero(tmp_path):
    zero = Trajectory((Segment.context([1, 2], 0), Segment.sampled([3], [0.0], 0, 1.0)))
    report = observed([zero], lambda i, v: np.where(v == 0, np.float32(-0.0), v)).report()
    assert report.mismatched == 1 and report.max_abs == 0
    with pytest.raises(ParityError):
        pass_or_stop(report, [zero], tmp_path)


@pytest.mark.parametrize("stop", [True, False])
def test_a_missing_observation_is_a_mismatch(tmp_path, stop):
    given = tiny.trajectories(20)
    gate = observed(given, skip=[3])
    report = gate.report()
    absent = [i for i in range(20) if i not in gate._observed]
    assert 3 in absent
    assert report.missing == report.mismatched == sum(given[i].loss_tokens for i in absent)
    assert report.max_abs == report.mean_abs == np.inf
    with pytest.raises(ParityError, match="have no value on one side"):
        pass_or_stop(report, given, tmp_path, stop=stop)
    # Trajectories that were due and seen are compared without it.
    assert gate.report([i for i in range(20) if i not in absent]).exact


@pytest.mark.parametrize("stop", [True, False])
def test_nan_is_never_equal(tmp_path, stop):
    given = tiny.trajectories(5)
    report = observed(given, lambda i, v: np.full_like(v, np.nan) if i == 2 else v).report()
    assert report.missing == report.mismatched == given[2].loss_tokens
    with pytest.raises(ParityError):
        pass_or_stop(report, given, tmp_path, stop=stop)


def test_nothing_compared_is_no_pass(tmp_path):
    given = [Trajectory((Segment.context([1, 2, 3], 0),))]
    with pytest.raises(ParityError, match="no token was compared"):
        pass_or_stop(observed(given).report(), given, tmp_path)
    with pytest.raises(ParityError, match="no token was compared"):
        pass_or_stop(Gate([], 0).report(), [], tmp_path)


def test_tokens_of_another_version_are_not_covered_and_stop_the_run(tmp_path):
    given = tiny.trajectories(4)
    mixed = Trajectory((*given[0].segments, Segment.sampled([5, 6], [-1, -1], 1, 1.0)))
    given = [mixed, *given[1:]]
    report = observed(given).report()
    assert report.uncovered == 2 and report.mismatched == 0 and not report.exact
    with pytest.raises(ParityError, match="2 tokens were sampled after a prefix"):
        pass_or_stop(report, given, tmp_path)
    assert observed(given, version=7).report().uncovered == sum(t.loss_tokens for t in given)


def test_native_records_the_difference_and_goes_on(tmp_path):
    given = tiny.trajectories(6)
    report = observed(given, lambda i, v: v - np.float32(0.01)).report()
    pass_or_stop(report, given, tmp_path, stop=False)
    assert report.mismatched == report.tokens
    assert report.metrics()["parity/max_abs"] == pytest.approx(0.01, rel=1e-3)
    assert report.metrics()["parity/mean_abs"] == pytest.approx(0.01, rel=1e-3)


def test_a_long_list_is_cut_and_a_replay_that_fails_does_not_hide_the_report(tmp_path):
    given = tiny.trajectories(8)

    def broken(ids, n):
        raise RuntimeError("no such region")

    report = observed(given, lambda i, v: v - np.float32(1)).report()
    with pytest.raises(ParityError) as e:
        pass_or_stop(report, given, tmp_path, replay=broken)
    assert len(report.first) == MAX_LISTED < report.mismatched
    assert f"and {report.mismatched - MAX_LISTED} more" in str(e.value)
    assert "the replay failed: RuntimeError: no such region" in str(e.value)


def test_a_report_that_cannot_be_written_is_still_given(tmp_path):
    given = tiny.trajectories(3)
    report = observed(given, lambda i, v: v - 1).report()
    with pytest.raises(ParityError, match="the sequences could not be written"):
        pass_or_stop(report, given, tmp_path / "no such folder")


def test_sampled_tokens_outside_the_loss_are_compared_too(tmp_path):
    given = [t.without_loss() for t in tiny.trajectories(4)]
    report = observed(given, lambda i, v: v - np.float32(1)).report()
    assert report.mismatched == report.tokens > 0


def test_every_turn_of_a_conversation_is_compared():
    given = tiny.trajectories(4)
    turn = (Segment.context([7, 7, 7], 0), Segment.sampled([5, 6], [-1, -2], 0, 1.0))
    given = [Trajectory((*t.segments, *turn)) for t in given]

    def plant(i, values):
        if i == 1:
            values[-1] = ulp_up(values[-1])
        return values

    assert observed(given).report().tokens == sum(t.loss_tokens for t in given)
    report = observed(given, plant).report()
    assert report.mismatched == 1 and report.first[0].position == len(given[1]) - 1

"""`isomodel verify`: all gates pass on a small model, fail where they must, and the exit code says so."""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import numpy as np
import pytest

from isomodel import cli, weights
from isomodel.numerics import Numerics
from isomodel.verify import gates
from isomodel.verify.subject import GateResult, Subject, Tally
from tests.isomodel.rollout import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    weights.save(path, tiny.CONFIG, tiny.params())
    return path


def test_every_gate_passes_and_the_exit_code_is_0(folder, tmp_path, capsys):
    assert cli.main(["verify", str(folder), "--tokens", "8", "--jobs", "3", "--json", str(tmp_path / "out.json")]) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    assert [r["gate"].split()[0] for r in results] == "1 2 2 3 4 5 5 6 6 7 9 10 control 8".split()
    assert all(r["passed"] and r["compared"] > 0 and r["differing"] == 0 for r in results)
    assert "14 gates: 14 passed, 0 failed" in capsys.readouterr().out


def test_random_weights_need_only_a_config(folder, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    digests = []
    for seed in ("3", "3", "4"):
        assert cli.main(["verify", str(tmp_path), "--random-weights", seed, "--tokens", "2", "--digest"]) == 0
        digests.append(capsys.readouterr().out.split()[-1])
    assert digests[0] == digests[1] != digests[2]


def test_control_native_numerics_fail():
    native = Numerics(mode="native", compute_dtype="float32")
    result = gates.cases(Subject(tiny.CONFIG, native, tiny.params(0, tiny.CONFIG, native)))
    assert result.differing > 0 and not result.passed and result.max_abs > 0


@pytest.fixture(scope="module")
def subject():
    """Its completions alone are computed before any test plants a fault in them."""
    subject = Subject(tiny.CONFIG, tiny.BF16, tiny.params())
    assert len(subject.alone) == 8
    return subject


def one_ulp_off(completion):
    """The completion with the last bit of its last log-probability, and of one entry of its last logits row, flipped."""
    logprobs, logits = completion.logprobs.copy(), completion.logits.copy()
    logprobs.view(np.uint32)[-1] ^= 1
    logits.view(np.uint32)[-1, 5] ^= 1
    return dataclasses.replace(completion, logprobs=logprobs, logits=logits)


AGAINST_ALONE = [g for g in gates.ALL if g not in (gates.preemption, gates.tamper, gates.control)]


@pytest.mark.parametrize("gate", AGAINST_ALONE, ids=lambda g: g.__name__)
def test_control_every_gate_sees_one_ulp(subject, gate, monkeypatch):
    monkeypatch.setitem(subject.__dict__, "alone", [one_ulp_off(c) for c in subject.alone])
    result = gate(subject)
    assert 0 < result.differing < result.compared and not result.passed and result.hazard_fired


def test_control_preemption_sees_other_weights(subject, monkeypatch):
    """Its comparison is with an engine of its own: the engine that preempts gets a weight one ULP away."""
    nudged = Subject(subject.cfg, subject.numerics, gates._nudged(subject))
    plain = subject.engine
    monkeypatch.setattr(subject, "engine", lambda **changes: (nudged.engine if changes else plain)(**changes))
    result = gates.preemption(subject)
    assert result.differing > 0 and not result.passed and result.hazard_fired


def test_control_tamper_sees_a_check_that_refuses_nothing(subject, monkeypatch):
    monkeypatch.setattr(gates, "check", lambda saved, current: [])
    result = gates.tamper(subject)
    assert result.differing == result.compared > 0 and not result.passed


def fresh(subject, code: str) -> GateResult:
    with gates.SecondProcess([sys.executable, "-c", code]) as second:
        return gates.fresh_process(subject, second)


def test_control_a_fresh_process_that_samples_otherwise(subject, monkeypatch):
    assert not fresh(subject, f"print({'0' * 64!r})").passed
    same = f"import sys; print('x' * 1_000_000, file=sys.stderr); print({gates.digest(subject)!r})"
    assert fresh(subject, same).passed
    monkeypatch.setitem(subject.__dict__, "alone", [one_ulp_off(c) for c in subject.alone])
    assert not fresh(subject, same).passed
    with pytest.raises(RuntimeError, match="second process ended with 3: (?s:.*)no such model"):
        fresh(subject, "import sys; print('no such model', file=sys.stderr); sys.exit(3)")


def test_a_second_process_ends_with_the_gates_that_fail():
    started = time.perf_counter()
    with pytest.raises(KeyError), gates.SecondProcess([sys.executable, "-c", "import time; time.sleep(600)"]) as second:
        raise KeyError("a gate")
    assert second._process.poll() is not None and time.perf_counter() - started < 60


def test_a_failed_gate_gives_exit_code_1(folder, monkeypatch, capsys):
    monkeypatch.setattr(gates, "ALL", (lambda subject: GateResult("x", "y", 5, 1, 0.1, "one bit"),))
    monkeypatch.setattr(gates, "digest_command", lambda argv: None)
    assert cli.main(["verify", str(folder)]) == 1
    assert "1 gates: 0 passed, 1 failed" in capsys.readouterr().out


def test_a_gate_whose_hazard_did_not_happen_has_not_passed():
    good = GateResult("x", "y", 5, 0, 0.0, "7 hits")
    assert good.passed
    assert not dataclasses.replace(good, hazard_fired=False).passed
    assert not dataclasses.replace(good, compared=0).passed


def test_tally_compares_bits_and_fails_closed():
    tally = Tally()
    a = np.array([1, -0.0, np.nan], np.float32)
    tally.add(a, a.copy())
    assert (tally.compared, tally.differing) == (3, 0)
    tally.add(np.array([0.0], np.float32), np.array([-0.0], np.float32))
    tally.add(None, a)
    tally.add(a[:2], a)
    assert (tally.compared, tally.differing, tally.max_abs) == (10, 7, np.inf)
    tally.add(None, None)
    assert tally.differing == 8


def test_bad_usage(folder):
    assert cli.main(["verify", str(folder), "--tokens", "1"]) == 2
    assert cli.main(["verify", str(folder), "--jobs", "-1"]) == 2
    short = dataclasses.replace(tiny.CONFIG, max_positions=100)
    with pytest.raises(ValueError, match="positions"):
        Subject(short, tiny.BF16, tiny.params())

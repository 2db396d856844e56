"""A run that stops and goes on is, to the bit, the run that never stopped."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest

from tests.trainer import kill_many, tiny
from trainer import loop
from trainer.checkpoint import CheckpointError, CheckpointStore, load_arrays
from trainer.loop import train
from trainer.metrics import read_metrics
from trainer.run_folder import RunError

SETTINGS = dict(train__steps=10, checkpoint__every=5, eval__every=5, log__samples_every=1)


class Crash(BaseException):
    """Stands for a kill inside this process: nothing catches it, and nothing is saved on its way."""


def config(folder: pathlib.Path, **overrides):
    return tiny.run_config(folder, **(SETTINGS | overrides))


def crash_in_step(monkeypatch, step: int, where: str) -> None:
    """Makes the loop fall over in that step, before ("_sampler") or after ("_writer") its updates."""
    original = loop._Run._finish

    def finish(self, rollout, start):
        if self._done + 1 == step and where == "before":
            raise Crash
        if self._done + 1 == step:
            self._writer.write = lambda row: (_ for _ in ()).throw(Crash())
        original(self, rollout, start)

    monkeypatch.setattr(loop._Run, "_finish", finish)
    monkeypatch.setattr(loop._Run, "_rescue", lambda self, error: None)


@pytest.fixture(scope="module", autouse=True)
def shared_contracts():
    with tiny.contracts_derived_once():
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    train(config(folder))
    return folder


@pytest.mark.parametrize("where", ["before", "after"])
def test_ten_steps_are_five_a_crash_and_the_rest(straight, tmp_path, monkeypatch, where):
    with monkeypatch.context() as patch, pytest.raises(Crash):
        crash_in_step(patch, 8, where)
        train(config(tmp_path))
    assert CheckpointStore(tmp_path / "runs/run/checkpoints", 2).steps() == [5]
    assert read_metrics(tmp_path / "runs/run")[-1]["step"] == 7  # steps 6 and 7 will be done again
    result = train(config(tmp_path))
    assert result.steps == 10
    assert kill_many.differences(straight / "runs/run", tmp_path / "runs/run") == []


def test_ten_steps_are_five_steps_and_five_more(straight, tmp_path):
    assert train(config(tmp_path, train__steps=5)).steps == 5
    train(config(tmp_path))
    assert kill_many.differences(straight / "runs/run", tmp_path / "runs/run") == []


def test_control_another_seed_and_one_ulp_are_differences(straight, tmp_path):
    train(config(tmp_path, seed=1))
    found = kill_many.differences(straight / "runs/run", tmp_path / "runs/run")
    assert any("masters" in f for f in found) and any("metrics" in f for f in found)


def test_a_torn_newest_checkpoint_gives_way_to_the_one_before(straight, tmp_path):
    with_torn = config(tmp_path, checkpoint__every=2)
    train(with_torn)
    store = CheckpointStore(tmp_path / "runs/run/checkpoints", 2)
    assert store.steps() == [8, 10]
    (store.path(10) / "COMMIT").unlink()
    assert train(with_torn).steps == 10
    assert kill_many.differences(straight / "runs/run", tmp_path / "runs/run") == []


def test_a_torn_last_line_of_metrics_is_taken_away(straight, tmp_path):
    train(config(tmp_path, train__steps=5))
    path = tmp_path / "runs/run/metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:40])
    train(config(tmp_path))
    assert [r["step"] for r in read_metrics(path)] == list(range(1, 11))
    assert path.read_bytes().startswith(whole)


def test_all_checkpoints_torn_is_refused_and_nothing_is_thrown_away(tmp_path):
    train(config(tmp_path, train__steps=5))
    store = CheckpointStore(tmp_path / "runs/run/checkpoints", 2)
    (store.path(5) / "facts.json").write_text("{}")
    before = (tmp_path / "runs/run/metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"every checkpoint of .* is torn(.|\n)*step 5: facts.json"):
        train(config(tmp_path))
    assert (tmp_path / "runs/run/metrics.jsonl").read_bytes() == before


def test_a_failed_save_loses_nothing(straight, tmp_path, monkeypatch):
    """The disk is full at step 10; what was saved at 5 stays, and the run goes on when there is room."""
    original = CheckpointStore.save

    def full(self, step, *args):
        if step > 5:
            raise CheckpointError("no space left")
        return original(self, step, *args)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as e:
        patch.setattr(CheckpointStore, "save", full)
        train(config(tmp_path))
    assert any("saved up to step 5" in note for note in e.value.__notes__)
    train(config(tmp_path))
    assert kill_many.differences(straight / "runs/run", tmp_path / "runs/run") == []


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
def test_with_momentum_minibatches_a_schedule_and_a_reference_too(tmp_path, objective):
    settings = dict(
        objective=objective,
        objective__kl_coef=0.01,
        train__minibatches=2,
        train__epochs=2,
        parity="all",
        optimizer__schedule="cosine",
        optimizer__warmup_steps=3,
        optimizer__total_steps=24,
        checkpoint__every=3,
        train__steps=6,
        eval__every=3,
    )
    train(config(tmp_path / "a", **settings))
    train(config(tmp_path / "b", **settings | dict(train__steps=3)))
    train(config(tmp_path / "b", **settings))
    assert kill_many.differences(tmp_path / "a/runs/run", tmp_path / "b/runs/run") == []
    rows = read_metrics(tmp_path / "a/runs/run")
    assert all(r["parity/mismatched_tokens"] == 0 and r["parity/max_abs"] == 0 for r in rows)
    assert all(r["parity/tokens"] == r["loss_tokens"] / 2 > 0 for r in rows if r["updates"])  # all of them; each in two epochs
    assert any(r["ratio/max"] > 1 for r in rows)  # later minibatches are off-policy


def test_optimizer_state_is_part_of_what_comes_back(straight):
    """Control of the comparison: it sees moments and step counts, not only weights."""
    found, _ = CheckpointStore(straight / "runs/run/checkpoints", 2).latest()
    step = tiny.step()
    abstract = step.abstract_state()
    arrays = load_arrays(found, {"masters": abstract.masters, "optimizer": abstract.optimizer})
    counts = [int(x) for x in jax.tree.leaves(arrays["optimizer"]) if x.shape == ()]
    assert counts and set(counts) == {10}
    assert any(np.asarray(x).any() for x in jax.tree.leaves(arrays["optimizer"]) if x.shape)


def test_two_kills_at_random_moments(tmp_path):
    """The quick version of kill_many.py: real processes, SIGKILL, checkpoints written all the time."""
    report = kill_many.run(tmp_path, kills=2, steps=30, seed=0)
    assert report["kills"] == 2
    assert report["differences"] == []
    json.dumps(report)

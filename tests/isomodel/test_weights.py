"""Weights in and out of Hugging Face folders: every element's place, every byte, every kind of damage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from isomodel import weights
from isomodel.config import ConfigError, ModelConfig
from isomodel.specs import init_params, weight_specs
from isomodel.weights import WeightsError
from tests.data import golden

QWEN3 = "qwen3_gqa2_untied_bf16"
LLAMA = "llama_gqa2_tied_fp32"
UNSIGNED = {2: np.uint16, 4: np.uint32}


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(UNSIGNED[array.dtype.itemsize])


def same(a, b) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bits(a), bits(b))


def same_tensors(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def tensors_of(folder) -> dict[str, np.ndarray]:
    """All tensors of a folder, by safetensors alone."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in safetensors.numpy.load_file(path).items()}


def damaged(tmp_path, name: str, change=None, file: str = "model.safetensors"):
    """A copy of a golden folder whose dict of tensors `change` has changed in place."""
    folder = tmp_path / "model"
    shutil.copytree(golden.folder(name), folder)
    if change is not None:
        tensors = tensors_of(folder)
        change(tensors)
        safetensors.numpy.save_file(tensors, folder / file, metadata={"format": "pt"})
    return folder


def sharded(tmp_path, name: str = QWEN3):
    cfg = ModelConfig.load(golden.folder(name))
    folder = tmp_path / "sharded"
    weights.save(folder, cfg, weights.load(golden.folder(name)), max_shard_bytes=30_000)
    return folder


def faults(folder, *args, **kwargs) -> str:
    with pytest.raises(WeightsError) as e:
        weights.load(folder, *args, **kwargs)
    assert str(folder) in str(e.value)
    return "\n".join(e.value.faults)


# Places


@pytest.mark.parametrize("name", golden.TINY)
def test_every_element_is_where_the_spec_says(name):
    cfg = ModelConfig.load(golden.folder(name))
    ours = {k: np.asarray(v) for k, v in weights.load(golden.folder(name), cfg).items()}
    hf = tensors_of(golden.folder(name))
    assert {k: v.shape for k, v in ours.items()} == {k: s.shape for k, s in weight_specs(cfg).items()}
    assert same(ours["embed"], hf["model.embed_tokens.weight"])
    assert same(ours["final_norm"], hf["model.norm.weight"])
    assert ("lm_head" in ours) == (not cfg.tie_embeddings)
    if not cfg.tie_embeddings:
        assert same(ours["lm_head"], hf["lm_head.weight"])
    G, d = cfg.groups, cfg.head_dim
    for layer in range(cfg.num_layers):
        of = {k.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): v for k, v in hf.items()}
        qkv = ours["layers.mixer.qkv"][layer]
        for head in range(cfg.num_heads):
            rows = slice(head * d, (head + 1) * d)
            assert same(qkv[head // G, head % G], of["self_attn.q_proj"][rows])
            assert same(ours["layers.mixer.o"][layer][:, head], of["self_attn.o_proj"][:, rows])
        for head in range(cfg.num_kv_heads):
            rows = slice(head * d, (head + 1) * d)
            assert same(qkv[head, G], of["self_attn.k_proj"][rows])
            assert same(qkv[head, G + 1], of["self_attn.v_proj"][rows])
        assert same(ours["layers.mlp.gate_up"][layer, 0], of["mlp.gate_proj"])
        assert same(ours["layers.mlp.gate_up"][layer, 1], of["mlp.up_proj"])
        assert same(ours["layers.mlp.down"][layer], of["mlp.down_proj"])
        assert same(ours["layers.mixer_norm"][layer], of["input_layernorm"])
        assert same(ours["layers.mlp_norm"][layer], of["post_attention_layernorm"])
        if cfg.qk_norm:
            assert same(ours["layers.mixer.q_norm"][layer], of["self_attn.q_norm"])
            assert same(ours["layers.mixer.k_norm"][layer], of["self_attn.k_norm"])


# Round trip


@pytest.mark.parametrize("name", golden.TINY)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_round_trip_gives_back_every_byte(tmp_path, name, shard_bytes):
    cfg = ModelConfig.load(golden.folder(name))
    params = weights.load(golden.folder(name), cfg)
    weights.save(tmp_path / "out", cfg, params, max_shard_bytes=shard_bytes)
    assert same_tensors(tensors_of(tmp_path / "out"), tensors_of(golden.folder(name)))
    assert ModelConfig.load(tmp_path / "out") == cfg
    again = weights.load(tmp_path / "out")
    assert same_tensors(again, params)
    files = {p.name for p in (tmp_path / "out").iterdir()}
    if shard_bytes == 10**9:
        assert files == {"config.json", "generation_config.json", "model.safetensors"}
    else:
        index = json.loads((tmp_path / "out" / weights.INDEX).read_text())
        shards = set(index["weight_map"].values())
        assert files == shards | {"config.json", "generation_config.json", weights.INDEX} and len(shards) > 3
        tensors = tensors_of(golden.folder(name))
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        assert index["weight_map"].keys() == tensors.keys()


def test_control_one_changed_bit_is_seen(tmp_path):
    cfg = ModelConfig.load(golden.folder(QWEN3))
    params = weights.load(golden.folder(QWEN3), cfg)
    qkv = np.array(params["layers.mixer.qkv"])
    bits(qkv)[1, 0, 0, 3, 5] ^= 1
    weights.save(tmp_path / "out", cfg, params | {"layers.mixer.qkv": jnp.asarray(qkv)})
    out, before = tensors_of(tmp_path / "out"), tensors_of(golden.folder(QWEN3))
    assert not same_tensors(out, before)
    assert [k for k in out if not same(out[k], before[k])] == ["model.layers.1.self_attn.q_proj.weight"]


def test_dtypes(tmp_path):
    stored = tensors_of(golden.folder(LLAMA))["model.norm.weight"]
    assert stored.dtype == np.float32
    assert same(np.asarray(weights.load(golden.folder(LLAMA))["final_norm"]), stored)
    rounded = weights.load(golden.folder(LLAMA), dtype="bfloat16")
    assert same(np.asarray(rounded["final_norm"]), stored.astype(ml_dtypes.bfloat16))
    assert {str(w.dtype) for w in rounded.values()} == {"bfloat16"}
    widened = weights.load(golden.folder(QWEN3), dtype=jnp.float32)
    weights.save(tmp_path / "out", ModelConfig.load(golden.folder(QWEN3)), widened, dtype="bfloat16")
    assert same_tensors(tensors_of(tmp_path / "out"), tensors_of(golden.folder(QWEN3)))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_half_precision_files_load(tmp_path):
    folder = damaged(tmp_path, LLAMA, lambda t: t.update({k: v.astype(np.float16) for k, v in t.items()}))
    params = weights.load(folder, dtype="float32")
    expected = tensors_of(golden.folder(LLAMA))["model.norm.weight"].astype(np.float16).astype(np.float32)
    assert same(np.asarray(params["final_norm"]), expected)


def test_norms_of_another_dtype_keep_it_through_a_round_trip(tmp_path):
    def widen(tensors):
        tensors.update({k: v.astype(np.float32) for k, v in tensors.items() if "norm" in k})

    folder = damaged(tmp_path, QWEN3, widen)
    params = weights.load(folder)
    assert params["final_norm"].dtype == np.float32 and params["embed"].dtype == jnp.bfloat16
    weights.save(tmp_path / "out", ModelConfig.load(folder), params)
    assert same_tensors(tensors_of(tmp_path / "out"), tensors_of(folder))


def test_shardings_place_weights():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    cfg = ModelConfig.load(golden.folder(QWEN3))
    placed = weights.load(golden.folder(QWEN3), cfg, shardings={name: sharding for name in weight_specs(cfg)})
    assert all(w.sharding == sharding for w in placed.values())


# Tied embeddings and harmless extras


def test_tied_embeddings_are_written_once(tmp_path):
    cfg = ModelConfig.load(golden.folder(LLAMA))
    assert cfg.tie_embeddings
    weights.save(tmp_path / "out", cfg, weights.load(golden.folder(LLAMA)))
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")


def test_a_tied_file_may_carry_its_head_if_it_is_the_embedding(tmp_path):
    """Qwen3-0.6B's file does."""

    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    folder = damaged(tmp_path, LLAMA, add_head)
    assert same_tensors(weights.load(folder), weights.load(golden.folder(LLAMA)))


def test_a_tied_file_whose_head_differs_is_refused(tmp_path):
    def add_head(tensors):
        head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        bits(head)[3, 4] ^= 1

    assert "lm_head.weight differs from model.embed_tokens.weight" in faults(damaged(tmp_path, LLAMA, add_head))


def test_buffers_of_old_checkpoints_are_harmless(tmp_path):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        tensors["model.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    folder = damaged(tmp_path, LLAMA, add)
    assert same_tensors(weights.load(folder), weights.load(golden.folder(LLAMA)))


# Damage


def test_all_faults_at_once(tmp_path):
    def spoil(tensors):
        for layer in (0, 1):
            del tensors[f"model.layers.{layer}.self_attn.k_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(128, ml_dtypes.bfloat16)
        tensors["visual.patch.weight"] = np.zeros((2, 2), ml_dtypes.bfloat16)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].copy()
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T.copy()
        tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((48, 128), np.int8)

    found = faults(damaged(tmp_path, QWEN3, spoil)).splitlines()
    assert found == [
        "missing: model.norm.weight",
        "missing: model.layers.{0-1}.self_attn.k_proj.weight",
        *sorted(["not expected: model.layers.0.self_attn.q_proj.bias", "not expected: visual.patch.weight"]),
        "wrong shape: lm_head.weight is [159, 48], config.json makes it [160, 48]",
        "wrong dtype: model.layers.0.mlp.down_proj.weight is I8; supported: F32, BF16, F16",
        "wrong shape: model.layers.1.mlp.up_proj.weight is [48, 128], config.json makes it [128, 48]",
    ]


def test_another_models_weights(tmp_path):
    found = faults(golden.folder(QWEN3), ModelConfig.load(golden.folder(LLAMA)))
    assert "not expected: lm_head.weight" not in found  # a tied config leaves that to the comparison of values
    assert "not expected: model.layers.{0-1}.self_attn.q_norm.weight" in found
    assert "wrong shape: model.embed_tokens.weight is [160, 48], config.json makes it [128, 32]" in found


def test_mixed_dtypes_in_one_stack_need_a_dtype(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = damaged(tmp_path, QWEN3, lambda t: t.update({name: t[name].astype(np.float32)}))
    assert f"wrong dtype: {name} is float32" in faults(folder)
    assert same_tensors(weights.load(folder, dtype="bfloat16"), weights.load(golden.folder(QWEN3)))


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_truncated(tmp_path, keep):
    folder = damaged(tmp_path, QWEN3)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    assert "model.safetensors is damaged or truncated" in faults(folder)


def test_too_long(tmp_path):
    folder = damaged(tmp_path, QWEN3)
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"x")
    assert "is damaged or truncated" in faults(folder)


def test_missing_and_torn_shards_are_all_named(tmp_path):
    folder = sharded(tmp_path)
    shards = sorted(folder.glob("model-*"))
    shards[0].unlink()
    shards[2].unlink()
    shards[3].write_bytes(shards[3].read_bytes()[:-5])
    found = faults(folder).splitlines()
    assert found[0] == f"{shards[0].name} is missing; download it again"
    assert found[1] == f"{shards[2].name} is missing; download it again"
    assert found[2].startswith(f"{shards[3].name} is damaged or truncated")
    assert len(found) == 3


def test_an_index_that_lies(tmp_path):
    folder = sharded(tmp_path)
    index = json.loads((folder / weights.INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(f for f in files if f != index["weight_map"]["model.norm.weight"])
    index["weight_map"]["ghost"] = files[0]
    (folder / weights.INDEX).write_text(json.dumps(index))
    found = faults(folder)
    assert "says that model.norm.weight is in" in found and "says that ghost is in" in found


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "", None, ".."])
def test_an_index_that_leaves_the_folder(tmp_path, file):
    folder = sharded(tmp_path)
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(WeightsError, match="not a file of this folder"):
        weights.load(folder)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_is_none(tmp_path, index):
    folder = sharded(tmp_path)
    (folder / weights.INDEX).write_text(index)
    with pytest.raises((WeightsError, ConfigError), match=weights.INDEX):
        weights.load(folder)


def test_a_tensor_in_two_shards(tmp_path):
    folder = sharded(tmp_path)
    first, second = sorted(folder.glob("model-*"))[:2]
    merged = safetensors.numpy.load_file(first) | safetensors.numpy.load_file(second)
    safetensors.numpy.save_file(merged, second)
    assert "is in two files" in faults(folder)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [(QWEN3, 0x7FC0), (QWEN3, 0xFF80), (QWEN3, 0x7F81), (LLAMA, 0x7F800000), (LLAMA, 0xFFFFFFFF)],
)
def test_nan_and_infinity_are_named_and_nothing_is_loaded(tmp_path, name, pattern):
    places = ["model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"]

    def spoil(tensors):
        for place in places:
            bits(tensors[place])[-1, -1] = pattern

    assert faults(damaged(tmp_path, name, spoil)).splitlines() == [
        "NaN or infinity in model.embed_tokens.weight",
        "NaN or infinity in model.layers.{0-1}.mlp.down_proj.weight",
    ]


def test_large_and_subnormal_values_are_values(tmp_path):
    def extremes(tensors):
        bits(tensors["model.norm.weight"])[:4] = [0x7F7F, 0xFF7F, 0x0001, 0x8000]

    folder = damaged(tmp_path, QWEN3, extremes)
    assert same(np.asarray(weights.load(folder)["final_norm"]), tensors_of(folder)["model.norm.weight"])


def test_a_value_too_large_for_the_dtype_asked_for(tmp_path):
    folder = damaged(tmp_path, LLAMA, lambda t: t["model.norm.weight"].__setitem__(0, 3.4e38))
    assert weights.load(folder)["final_norm"][0] == np.float32(3.4e38)
    assert faults(folder, dtype="bfloat16") == "NaN or infinity in model.norm.weight"


@pytest.mark.parametrize(
    ("file", "says"),
    [(None, "has neither"), ("pytorch_model.bin", "PyTorch .bin files"), ("m.gguf", "isomodel convert")],
)
def test_folders_without_safetensors(tmp_path, file, says):
    folder = damaged(tmp_path, QWEN3)
    (folder / "model.safetensors").unlink()
    if file:
        (folder / file).write_bytes(b"x")
    assert says in faults(folder)


def test_no_folder(tmp_path):
    with pytest.raises(WeightsError, match="there is no such folder"):
        weights.load(tmp_path / "none", ModelConfig.load(golden.folder(QWEN3)))


# Saving


@pytest.fixture(scope="module")
def small():
    cfg = ModelConfig.load(golden.folder(QWEN3))
    return cfg, init_params(cfg, 0, jnp.bfloat16)


def test_save_refuses_what_is_not_this_model(tmp_path, small):
    cfg, params = small
    wrong = {name: w for name, w in params.items() if name != "embed"} | {"extra": params["embed"]}
    wrong["final_norm"] = wrong["final_norm"][1:]
    wrong["lm_head"] = wrong["lm_head"].astype(jnp.int32)
    with pytest.raises(WeightsError) as e:
        weights.save(tmp_path / "out", cfg, wrong)
    assert len(e.value.faults) == 4 and list(tmp_path.iterdir()) == []


def test_save_refuses_nan_and_leaves_nothing(tmp_path, small):
    cfg, params = small
    down = params["layers.mlp.down"].at[1, 2, 3].set(jnp.nan)
    with pytest.raises(WeightsError, match="NaN or infinity in layers.mlp.down"):
        weights.save(tmp_path / "out", cfg, params | {"layers.mlp.down": down})
    assert list(tmp_path.iterdir()) == []


def test_save_takes_the_tokenizer_along(tmp_path, small):
    source = tmp_path / "tokenizer"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("x")
    (source / "notes.txt").write_text("not a tokenizer file")
    weights.save(tmp_path / "out", *small, tokenizer=source)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "chat_template.jinja"} < names and "notes.txt" not in names
    with pytest.raises(FileNotFoundError, match="has no tokenizer files"):
        weights.save(tmp_path / "out2", *small, tokenizer=tmp_path / "out2")
    assert {p.name for p in tmp_path.iterdir()} == {"tokenizer", "out"}


def test_overwriting(tmp_path, small):
    cfg, params = small
    (tmp_path / "out").mkdir()
    weights.save(tmp_path / "out", cfg, params)  # an empty folder may be there
    before = tensors_of(tmp_path / "out")
    other = init_params(cfg, 1, jnp.bfloat16)
    with pytest.raises(FileExistsError, match="already there; remove it"):
        weights.save(tmp_path / "out", cfg, other)
    assert same_tensors(tensors_of(tmp_path / "out"), before)
    weights.save(tmp_path / "out", cfg, other, overwrite=True)
    assert same_tensors(weights.load(tmp_path / "out"), other)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match="is not a model folder"):
        weights.save(tmp_path / "home", cfg, other, overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "precious"
    assert {p.name for p in tmp_path.iterdir()} == {"out", "home"}


def test_unwritable_place(tmp_path, small):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="cannot write"):
        weights.save(tmp_path / "file" / "out", *small)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_save_leaves_the_old_folder(tmp_path, small, monkeypatch, error):
    cfg, params = small
    weights.save(tmp_path / "out", cfg, params)
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise error
        return real(*args, **kwargs)

    real = safetensors.numpy.save_file
    monkeypatch.setattr(safetensors.numpy, "save_file", interrupted)
    with pytest.raises(error):
        weights.save(tmp_path / "out", cfg, init_params(cfg, 1, jnp.bfloat16), max_shard_bytes=30_000, overwrite=True)
    assert len(calls) == 3
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


FULL_DISK = """
import resource, signal, sys
from isomodel import weights
from isomodel.config import ModelConfig
source, target, limit = sys.argv[1:]
params = weights.load(source)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    weights.save(target, ModelConfig.load(source), params)
except OSError as e:
    print(e)
"""


def test_a_full_disk_leaves_nothing(tmp_path):
    """The kernel refuses the write for real: a limit on file sizes stands for the full disk."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(FULL_DISK), golden.folder(QWEN3), tmp_path / "out"]
    limited = subprocess.run([*command, "50000"], capture_output=True, text=True, env=environment)
    assert f"cannot write {tmp_path / 'out'}, nothing was left there" in limited.stdout, limited.stderr
    assert "File too large" in limited.stdout
    assert list(tmp_path.iterdir()) == []
    control = subprocess.run([*command, "500000"], capture_output=True, text=True, env=environment)
    assert control.stdout == "" and control.returncode == 0, control.stderr
    assert same_tensors(tensors_of(tmp_path / "out"), tensors_of(golden.folder(QWEN3)))

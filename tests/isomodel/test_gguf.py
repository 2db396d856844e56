"""GGUF in: configuration, tensors (the permutation of q and k undone), quantised blocks, tokenizer, damage."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import transformers

from isomodel import gguf_tokenizer, weights
from isomodel.config import ConfigError, ModelConfig
from isomodel.convert import convert
from isomodel.gguf_file import GGUFError, GGUFFile
from isomodel.tokenizer import Tokenizer
from isomodel.weights import WeightsError
from tests.data import golden
from tests.isomodel import gguf_maker

LLAMA = "llama_gqa2_tied_fp32"
Q = gguf.GGMLQuantizationType


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def same_params(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(bits(a[k]), bits(b[k])) for k in a)


def opened(tmp_path, name: str = LLAMA, **how) -> GGUFFile:
    gguf_maker.write(tmp_path / "m.gguf", golden.folder(name), **how)
    return GGUFFile(tmp_path / "m.gguf")


def loaded(file: GGUFFile, dtype: str) -> dict:
    return weights.pack(file.config, file.tensors(), dtype, source="test")


def faults(tmp_path, **how) -> str:
    with pytest.raises((GGUFError, ConfigError)) as e:
        opened(tmp_path, **how)
    assert str(tmp_path / "m.gguf") in str(e.value)
    return "\n".join(e.value.faults)


@pytest.mark.parametrize("name", golden.TINY)
def test_same_model_as_the_folder_it_was_made_from(tmp_path, name):
    file = opened(tmp_path, name)
    assert file.config == ModelConfig.load(golden.folder(name))
    assert same_params(loaded(file, "float32"), weights.load(golden.folder(name), dtype="float32"))


def test_control_rows_that_nobody_permuted_come_out_wrong(tmp_path):
    """So the test above sees the permutation: fluent nonsense is what a loader makes that forgets it."""
    right = weights.load(golden.folder(LLAMA), dtype="float32")
    wrong = loaded(opened(tmp_path, permuted=False), "float32")
    assert [k for k in right if not np.array_equal(bits(right[k]), bits(wrong[k]))] == ["layers.mixer.qkv"]
    assert np.array_equal(bits(right["layers.mixer.qkv"][:, :, -1]), bits(wrong["layers.mixer.qkv"][:, :, -1]))


def test_qwen3_files_are_not_permuted(tmp_path):
    name = "qwen3_gqa1_tied_fp32"
    stored = {t.name: t for t in gguf.GGUFReader(_path(tmp_path, name)).tensors}
    q = safetensors.numpy.load_file(golden.folder(name) / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(stored["blk.0.attn_q.weight"].data, q)


def _path(tmp_path, name):
    return opened(tmp_path, name).path


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_1, Q.Q5_0], ids=lambda k: k.name)
def test_quantised_blocks(tmp_path, kind):
    """Values are gguf's own dequantisation; the permutation is undone on rows, whatever lies in them."""
    file = opened(tmp_path, kind=kind)
    found = {name: tensor.read() for name, tensor in file.tensors().items()}
    hf = safetensors.numpy.load_file(golden.folder(LLAMA) / "model.safetensors")
    assert found.keys() == hf.keys()
    for name, tensor in hf.items():
        if tensor.ndim == 2:  # rows are quantised one by one, so their order does not matter here
            raw = tensor.astype(np.float32)
            if kind == Q.BF16:
                expected = raw.astype("bfloat16").astype(np.float32)
            else:
                expected = gguf.dequantize(gguf.quantize(raw, kind), kind)
            assert np.array_equal(bits(found[name]), bits(expected)), name
            assert not np.array_equal(found[name], raw)
        else:
            assert np.array_equal(bits(found[name]), bits(tensor)), name


def test_numbers_come_from_the_file(tmp_path):
    file = opened(tmp_path)
    golden_cfg = ModelConfig.load(golden.folder(LLAMA))
    assert (file.config.rope_theta, file.config.rms_norm_eps) == (500000.0, 1e-5) and file.config.tie_embeddings
    assert file.config.head_dim == golden_cfg.head_dim != golden_cfg.hidden_size // golden_cfg.num_heads
    untied = opened(tmp_path, "llama_gqa4_untied_fp32").config
    assert not untied.tie_embeddings and untied.rope_theta == 20000.0
    ends = opened(tmp_path, meta={"tokenizer.ggml.eot_token_id": 5}).config.eos_token_ids
    assert ends == (2, 5)


def test_head_dim_where_the_file_leaves_it_out(tmp_path):
    """GGUF's definition: embedding_length / head_count."""
    lengths = {"llama.attention.key_length": None, "llama.attention.value_length": None}
    file = opened(tmp_path, "llama_gqa8_tied_bf16", meta=lengths)
    assert file.config.head_dim == 16 and file.config == ModelConfig.load(golden.folder("llama_gqa8_tied_bf16"))


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn': RoPE scaling is not supported"),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor=4.0: not supported"),
        ({"llama.expert_count": 8}, "llama.expert_count=8: not supported"),
        ({"llama.attention.sliding_window": 512}, "llama.attention.sliding_window=512: not supported"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count=8 differs from the head dimension 16"),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length=32 differs from the head dimension"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"split.count": 3}, "it is one of 3 parts"),
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported; supported: llama, qwen3"),
        ({"llama.block_count": 0}, "num_hidden_layers=0 is not a positive integer"),
        ({"llama.feed_forward_length": [64, 64]}, "intermediate_size=[64, 64] is not an integer"),
        ({"llama.attention.head_count_kv": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id=999 is not a token id"),
    ],
)
def test_refused_by_name(tmp_path, meta, says):
    assert says in faults(tmp_path, meta=meta)


def test_scaling_tensor_of_llama_3_1_is_refused(tmp_path):
    assert "rope_freqs.weight: RoPE scaling" in faults(tmp_path, extra={"rope_freqs.weight": np.ones(8, np.float32)})


def test_several_faults_at_once(tmp_path):
    meta = {"llama.expert_count": 8, "llama.rope.scaling.type": "linear", "split.count": 2}
    assert len(faults(tmp_path, meta=meta).splitlines()) == 3


def test_missing_and_extra_tensors_are_listed(tmp_path):
    bias = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    file = opened(tmp_path, drop=("blk.1.ffn_up.weight", "output_norm.weight"), extra=bias)
    with pytest.raises(WeightsError) as e:
        loaded(file, "float32")
    assert set(e.value.faults) == {
        "missing: model.norm.weight",
        "missing: model.layers.1.mlp.up_proj.weight",
        "not expected: blk.0.attn_q.bias",
    }


@pytest.mark.parametrize("keep", [0, 3, 10, 200, 0.3, 0.9, -40])
def test_truncated(tmp_path, keep):
    path = opened(tmp_path).path
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(GGUFError, match="damaged, truncated or no GGUF file"):
        GGUFFile(path)


def test_not_a_gguf_file(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(GGUFError, match="damaged, truncated or no GGUF file"):
        GGUFFile(tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match="there is no such file"):
        GGUFFile(tmp_path / "none.gguf")


# Tokenizer

TEXTS = [
    "hello world",
    "Hello  World 123 12345\n\n the 1st",
    "it's he'LL café é naïve",
    "你好，世界 🌍👩‍👩‍👧 ٣٤",
    " \t\n x\r\ny  ",
    "<|im_start|>user\nhello<|im_end|>",
    "a<tool>b",
    "",
]


@pytest.mark.parametrize("pre", gguf_tokenizer.PRE_TOKENIZERS)
def test_texts_survive(pre):
    tokenizer = gguf_tokenizer.build(gguf_maker.tokenizer_meta(pre) | {"tokenizer.ggml.bos_token_id": 1}, "test")
    for text in TEXTS:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        whole = text if pre != "qwen2" else tokenizers.normalizers.NFC().normalize_str(text)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == whole
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False).ids == [2]
    assert tokenizer.encode("<tool>", add_special_tokens=False).ids == [len(gguf_maker.tokens()) - 1]
    assert tokenizer.decode([2, gguf_maker.tokens().index("<tool>")], skip_special_tokens=True) == "<tool>"


def test_digits_and_spaces_are_cut_as_each_model_cuts_them():
    """The merges would make 123 one token, and " 1"; what splits the text decides whether they may."""
    meta = {"tokenizer.ggml.bos_token_id": 1}
    cut = {
        pre: gguf_tokenizer.build(gguf_maker.tokenizer_meta(pre) | meta, "test")
        .encode("hello 123", add_special_tokens=False)
        .tokens
        for pre in gguf_tokenizer.PRE_TOKENIZERS
    }
    assert cut["gpt-2"] == ["hello", "Ġ1", "2", "3"]  # one piece " 123", where "Ġ 1" ranks first
    assert cut["smollm"] == ["hello", "Ġ", "1", "2", "3"]
    assert cut["qwen2"] == ["hello", "Ġ", "1", "2", "3"]
    assert cut["llama-bpe"] == ["hello", "Ġ", "123"]


def test_qwen2_is_what_transformers_builds(tmp_path):
    """Against transformers' own Qwen2Tokenizer from the same vocabulary and merges."""
    meta = gguf_maker.tokenizer_meta("qwen2")
    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    theirs = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges)
    ours = gguf_tokenizer.build(meta, "test")
    for text in TEXTS[:5]:
        assert ours.encode(text).ids == theirs.encode(text)


def test_bos_where_the_file_asks_for_it():
    meta = gguf_maker.tokenizer_meta("llama-bpe") | {"tokenizer.ggml.bos_token_id": 1}
    assert gguf_tokenizer.build(meta, "test").encode("hello").tokens == ["<|im_start|>", "hello"]
    meta["tokenizer.ggml.add_bos_token"] = False
    assert gguf_tokenizer.build(meta, "test").encode("hello").tokens == ["hello"]
    smollm = gguf_maker.tokenizer_meta("smollm") | {"tokenizer.ggml.bos_token_id": 1}
    assert gguf_tokenizer.build(smollm, "test").encode("hello").tokens == ["hello"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre": "deepseek-v3"}, "its tokenizer is gpt2/deepseek-v3; supported: gpt2/gpt-2, gpt2/smollm"),
        ({"model": "llama"}, "its tokenizer is llama/smollm"),
        ({"tokenizer.ggml.merges": ["h e", "q zz", "hello"]}, "2 merges are not of two tokens"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "has no kind for some"),
        ({"tokenizer.ggml.tokens": ["a"] * 5, "tokenizer.ggml.token_type": [1] * 5}, "names a token twice"),
    ],
)
def test_tokenizers_refused(changes, says):
    with pytest.raises(GGUFError) as e:
        gguf_tokenizer.build(gguf_maker.tokenizer_meta(**changes), "test.gguf")
    assert says in str(e.value) and "test.gguf" in str(e.value)


# Conversion


def test_convert_writes_a_whole_folder(tmp_path):
    opened(tmp_path, tokenizer={"pre": "smollm"}, meta={"tokenizer.ggml.bos_token_id": 1})
    cfg = convert(tmp_path / "m.gguf", tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {*("config.json", "generation_config.json", "model.safetensors"), *TOKENIZER}
    params = weights.load(tmp_path / "out", cfg)
    assert same_params(params, weights.load(golden.folder(LLAMA), dtype="bfloat16"))
    tokenizer = Tokenizer(tmp_path / "out")
    assert tokenizer.encode("hello 12") == [gguf_maker.tokens().index(t) for t in ("hello", "Ġ", "1", "2")]
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "user: x\n"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.hf.bos_token) == (2, 0, "<|im_start|>")
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == cfg.max_positions


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def test_convert_in_full_precision(tmp_path):
    opened(tmp_path, tokenizer={})
    convert(tmp_path / "m.gguf", tmp_path / "out", dtype="float32", max_shard_bytes=20_000)
    assert same_params(weights.load(tmp_path / "out"), weights.load(golden.folder(LLAMA)))
    assert (tmp_path / "out" / weights.INDEX).is_file()


def test_convert_with_a_tokenizer_from_elsewhere(tmp_path):
    opened(tmp_path, tokenizer={"pre": "unheard-of"})
    with pytest.raises(GGUFError, match="gpt2/unheard-of.*name a folder"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    convert(tmp_path / "m.gguf", tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_convert_a_folder_keeps_its_bytes_and_its_tokenizer(tmp_path):
    opened(tmp_path, tokenizer={})
    convert(tmp_path / "m.gguf", tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "two")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    convert(tmp_path / "two", tmp_path / "two", dtype="float32", overwrite=True)  # onto itself
    wide = weights.load(tmp_path / "two")
    assert same_params(wide, weights.load(tmp_path / "one", dtype="float32"))
    assert wide["embed"].dtype == np.float32 and (tmp_path / "two" / "tokenizer.json").is_file()

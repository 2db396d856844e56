"""ModelConfig: what it reads from Hugging Face's files, what it writes, and that it refuses the rest by name."""

from __future__ import annotations

import dataclasses
import json

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from isomodel.config import FAMILIES, ConfigError, ModelConfig
from tests.data import golden

# As published at huggingface.co/Qwen/Qwen3-0.6B and HuggingFaceTB/SmolLM2-135M-Instruct.
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
BASES = {"qwen3": QWEN3_06B, "llama": SMOLLM2}


def with_(base: dict, **changes) -> dict:
    return base | changes


def without(base: dict, *keys: str) -> dict:
    return {key: value for key, value in base.items() if key not in keys}


def faults(hf: dict, generation: dict | None = None) -> str:
    with pytest.raises(ConfigError) as e:
        ModelConfig.from_hf(hf, generation)
    assert str(e.value) == "config.json cannot be used:\n" + "\n".join(f"  - {f}" for f in e.value.faults)
    return "\n".join(e.value.faults)


def test_published_files():
    qwen = ModelConfig.from_hf(QWEN3_06B, {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "top_k": 20})
    assert dataclasses.astuple(qwen) == (
        *("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 1e-6, 1e6, 40960, True, True),
        *(151643, (151645, 151643), None),
    )
    assert qwen.groups == 2
    smol = ModelConfig.from_hf(SMOLLM2)
    assert dataclasses.astuple(smol) == (
        *("llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, 1e5, 8192, True, False),
        *(1, (2,), 2),
    )


@pytest.mark.parametrize("family", BASES)
def test_transformers_5_files_say_the_same(family):
    base = BASES[family]
    new = without(base, "rope_theta", "rope_scaling", "torch_dtype") | {
        "rope_parameters": {"rope_theta": float(base["rope_theta"]), "rope_type": "default"},
        "dtype": "bfloat16",
        "transformers_version": "5.24.0",
    }
    if family == "qwen3":
        new["layer_types"] = ["full_attention"] * 28
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(base)


@pytest.mark.parametrize("name", golden.TINY)
def test_what_we_write_means_the_same_to_transformers(name):
    """Our config.json, read by transformers, has the fields of the file that transformers wrote."""
    cfg = ModelConfig.load(golden.folder(name))
    family = transformers.Qwen3Config if cfg.family == "qwen3" else transformers.LlamaConfig
    theirs = family.from_pretrained(golden.folder(name)).to_dict()
    ours = family.from_dict(cfg.to_hf(theirs["dtype"])).to_dict()
    assert without(ours, "use_cache") == without(theirs, "use_cache")
    assert theirs["rope_parameters"]["rope_theta"] == cfg.rope_theta and theirs["head_dim"] == cfg.head_dim
    # Control: another base is seen.
    other = family.from_dict(dataclasses.replace(cfg, rope_theta=cfg.rope_theta + 1).to_hf(theirs["dtype"])).to_dict()
    assert other["rope_parameters"] != theirs["rope_parameters"]


@pytest.mark.parametrize("family", [transformers.Qwen3Config, transformers.LlamaConfig])
@pytest.mark.parametrize("use_diff", [True, False])
def test_every_key_that_transformers_writes_is_known(family, use_diff):
    hf = family()
    cfg = ModelConfig.from_hf(json.loads(hf.to_json_string(use_diff=use_diff)) | {"architectures": None})
    assert (cfg.hidden_size, cfg.num_heads, cfg.head_dim) == (hf.hidden_size, hf.num_attention_heads, hf.head_dim)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_left_out_have_the_values_that_transformers_gives(family):
    """A file with sizes alone: transformers' class defaults decide, ours must be the same."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    hf = {"model_type": family, **sizes, "num_attention_heads": 4}
    cfg = ModelConfig.from_hf(hf | {"num_key_value_heads": None})
    cls = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[family]
    theirs = cls(**without(hf, "model_type"), num_key_value_heads=None)
    assert cfg.num_kv_heads == theirs.num_key_value_heads == 4
    assert cfg.head_dim == theirs.head_dim
    assert cfg.rms_norm_eps == theirs.rms_norm_eps
    assert cfg.rope_theta == theirs.rope_parameters["rope_theta"]
    assert cfg.max_positions == theirs.max_position_embeddings
    assert cfg.tie_embeddings == theirs.tie_word_embeddings
    assert cfg.bos_token_id == theirs.bos_token_id
    assert cfg.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "rope_scaling has type 'llama3'"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling has type 'linear'"),
        ("rope_scaling", {"type": "default", "factor": 2.0}, "rope_scaling.factor=2.0: unknown"),
        ("rope_scaling", "linear", "rope_scaling='linear' is not an object"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e5}, "rope_parameters has type 'yarn'"),
        ("rope_parameters", {"rope_theta": 5e5, "rope_type": "default"}, "RoPE's base is given twice"),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e4}}, "rope_parameters.full_attention"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor=0.5"),
        ("partial_rotary_factor", 0.25, "partial_rotary_factor=0.25"),
        ("sliding_window", 4096, "sliding_window=4096"),
        ("use_sliding_window", True, "use_sliding_window=true"),
        ("layer_types", ["sliding_attention"] * 30, "'sliding_attention'"),
        ("layer_types", ["full_attention"] * 29, "layer_types has 29 entries for num_hidden_layers=30"),
        ("layer_types", "full_attention", "layer_types='full_attention' is not a list"),
        ("attention_bias", True, "attention_bias=true"),
        ("attention_bias", 1, "attention_bias=1"),
        ("mlp_bias", True, "mlp_bias=true"),
        ("hidden_act", "gelu", "hidden_act='gelu'"),
        ("attention_dropout", 0.1, "attention_dropout=0.1"),
        ("pretraining_tp", 2, "pretraining_tp=2"),
        ("quantization_config", {"quant_method": "fp8"}, 'quantization_config={"quant_method": "fp8"}'),
        ("rope_interleaved", True, "rope_interleaved=true"),
        ("auto_map", {"AutoModel": "x.Y"}, "auto_map="),
        ("is_encoder_decoder", True, "is_encoder_decoder=true"),
        ("logit_scale", 0.5, "logit_scale=0.5: unknown field"),
        ("num_experts", 8, "num_experts=8: unknown field"),
        ("vocab_size", 0, "vocab_size=0 is not a positive integer"),
        ("vocab_size", 49152.0, "vocab_size=49152.0 is not an integer"),
        ("hidden_size", "576", "hidden_size='576' is not an integer"),
        ("intermediate_size", -1, "intermediate_size=-1"),
        ("num_hidden_layers", True, "num_hidden_layers=true is not an integer"),
        ("num_key_value_heads", 2, "num_attention_heads=9 is not a multiple of num_key_value_heads=2"),
        ("num_key_value_heads", 0, "num_key_value_heads=0 is not a positive integer"),
        ("head_dim", 63, "head_dim=63 is odd"),
        ("hidden_size", 577, "head_dim is missing, and num_attention_heads=9 does not divide hidden_size=577"),
        ("rms_norm_eps", 0.0, "rms_norm_eps=0.0 is not between 0 and 1"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps=nan"),
        ("rms_norm_eps", "1e-5", "rms_norm_eps='1e-5' is not a number"),
        ("rope_theta", -1, "rope_theta=-1.0"),
        ("rope_theta", float("inf"), "rope_theta=inf"),
        ("max_position_embeddings", 0, "max_position_embeddings=0"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings='yes' is not true or false"),
        ("bos_token_id", 49152, "bos_token_id=49152 is not a token id below vocab_size=49152"),
        ("bos_token_id", [0, 1], "bos_token_id=[0, 1]: one id is expected"),
        ("eos_token_id", [2, 99999], "eos_token_id=99999 is not a token id"),
        ("eos_token_id", -2, "eos_token_id=-2"),
        ("eos_token_id", "</s>", "eos_token_id='</s>' is neither a token id nor a list of them"),
        ("pad_token_id", 49152, "pad_token_id=49152"),
    ],
)
def test_refused_by_name(key, value, says):
    found = faults(with_(SMOLLM2, **{key: value}))
    assert says in found and len(found.splitlines()) == 1, found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", {"rope_type": "default"}),
        ("rope_scaling", {"type": "default", "rope_theta": 100000.0}),
        ("rope_parameters", {"rope_theta": 1e5, "rope_type": "default", "partial_rotary_factor": 1.0}),
        ("partial_rotary_factor", 1.0),
        ("sliding_window", None),
        ("hidden_act", "swish"),
        ("attention_bias", None),
        ("quantization_config", None),
        ("head_dim", 64),
        ("head_dim", None),
        ("_name_or_path", "/somewhere"),
        ("pad_token_id", 2),
    ],
)
def test_spellings_that_change_nothing(key, value):
    assert ModelConfig.from_hf(with_(SMOLLM2, **{key: value})) == ModelConfig.from_hf(SMOLLM2)


def test_a_window_that_is_switched_off_is_no_window():
    old = with_(QWEN3_06B, sliding_window=32768, use_sliding_window=False)
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(QWEN3_06B)
    assert "sliding_window=32768" in faults(with_(old, use_sliding_window=True))


def test_pad_of_old_llama_files_is_none():
    assert ModelConfig.from_hf(with_(SMOLLM2, pad_token_id=-1)).pad_token_id is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, 'architectures=["MistralForCausalLM"]'),
        ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, '["Qwen3MoeForCausalLM"]'),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "gemma"}, "model_type='gemma' is not supported; supported: qwen3"),
        ({"architectures": None, "model_type": None}, "it names no architecture"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "qwen3"}, "contradicts"),
    ],
)
def test_architecture_refused_by_name(changes, says):
    """Alone: nothing else in the file of an unknown architecture can be judged."""
    found = faults(with_(SMOLLM2, **changes, mlp_bias=True))
    assert says in found and "mlp_bias" not in found


def test_all_faults_at_once():
    found = faults(
        with_(
            without(SMOLLM2, "hidden_size", "intermediate_size"),
            attention_bias=True,
            rope_scaling={"rope_type": "yarn"},
            novelty=1,
            num_key_value_heads=4,
            rms_norm_eps=-1.0,
            eos_token_id=50000,
        )
    ).splitlines()
    assert len(found) == 8
    for says in (
        *("attention_bias", "has type 'yarn'", "novelty", "hidden_size is missing", "intermediate_size is missing"),
        *("not a multiple of num_key_value_heads=4", "rms_norm_eps", "eos_token_id=50000"),
    ):
        assert any(says in fault for fault in found), says


def test_construction_checks_ranges_too():
    cfg = ModelConfig.from_hf(SMOLLM2)
    with pytest.raises(ConfigError, match="num_attention_heads=10 is not a multiple") as e:
        dataclasses.replace(cfg, num_heads=10, head_dim=7, eos_token_ids=(2, 10**6))
    assert len(e.value.faults) == 3
    with pytest.raises(ConfigError, match="family='gemma' is not supported"):
        dataclasses.replace(cfg, family="gemma")
    with pytest.raises(ConfigError, match="qk_norm"):
        dataclasses.replace(cfg, qk_norm=True)


sizes = st.integers(1, 10**6)


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.tuples(sizes, sizes, sizes, sizes, sizes),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(1, 128),
    st.floats(1e-12, 0.5),
    st.floats(1.0, 1e9),
    st.booleans(),
    st.lists(st.integers(0, 63), unique=True, max_size=3),
    st.one_of(st.none(), st.integers(0, 63)),
)
def test_round_trip(family, shape, kv_heads, groups, half, eps, theta, tied, eos, token):
    vocab, hidden, intermediate, layers, positions = shape
    cfg = ModelConfig(
        family=family,
        vocab_size=vocab + 63,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        head_dim=2 * half,
        rms_norm_eps=eps,
        rope_theta=theta,
        max_positions=positions,
        tie_embeddings=tied,
        qk_norm=FAMILIES[family].qk_norm,
        bos_token_id=token,
        eos_token_ids=tuple(eos),
        pad_token_id=token,
    )
    hf = json.loads(json.dumps(cfg.to_hf("bfloat16")))
    assert ModelConfig.from_hf(hf) == cfg
    assert ModelConfig.from_hf(hf, json.loads(json.dumps(cfg.to_hf_generation()))) == cfg


# Folders


def write(folder, config: str | dict, generation: str | dict | None = None):
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        if value is not None:
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return folder


def test_load_takes_token_ids_from_the_generation_file(tmp_path):
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "temperature": 0.2}
    cfg = ModelConfig.load(write(tmp_path, SMOLLM2, generation))
    assert (cfg.bos_token_id, cfg.eos_token_ids, cfg.pad_token_id) == (1, (2, 0), 0)


@pytest.mark.parametrize(
    ("config", "generation", "says"),
    [
        (None, None, "has no config.json"),
        ("{", None, "config.json cannot be used:\n  - it is not JSON"),
        ("[1]", None, "it holds [1], not a JSON object"),
        ('{"vocab_size": 1, "vocab_size": 2}', None, "key vocab_size appears twice"),
        ("\ufeff\udcff".encode("utf-8", "surrogatepass").decode("latin-1"), None, "it is not JSON"),
        (SMOLLM2, "nonsense", "generation_config.json cannot be used:\n  - it is not JSON"),
        (SMOLLM2, {"eos_token_id": 10**6}, "eos_token_id=1000000 is not a token id"),
    ],
)
def test_damaged_folders(tmp_path, config, generation, says):
    with pytest.raises(ConfigError) as e:
        ModelConfig.load(write(tmp_path, config, generation))
    assert says in str(e.value) and str(tmp_path) in str(e.value)


def test_config_that_is_not_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{}")
    with pytest.raises(ConfigError, match="it is not JSON"):
        ModelConfig.load(tmp_path)

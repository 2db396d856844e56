"""ModelConfig: the shape of a model, read from and written to a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class FaultyInput(ValueError):
    """A file or a value that cannot be used; the message lists every fault.

    Attributes:
      faults: one sentence each.
    """

    def __init__(self, source: str, faults: list[str]):
        self.faults = tuple(faults)
        super().__init__(f"{source} cannot be used:\n" + "\n".join(f"  - {fault}" for fault in faults))


class ConfigError(FaultyInput):
    """A model configuration that cannot be used."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: its names at Hugging Face and the values its class there gives to fields left out of a file.

    Attributes:
      model_type: `model_type` of its config.json.
      architecture: the only entry of `architectures` that is supported.
      qk_norm: queries and keys pass an RMSNorm of width head_dim before RoPE.
      defaults: field -> value, from configuration_<family>.py of transformers. head_dim None is hidden_size / heads.
    """

    model_type: str
    architecture: str
    qk_norm: bool
    defaults: Mapping[str, Any]


FAMILIES = {
    "qwen3": Family(
        "qwen3",
        "Qwen3ForCausalLM",
        qk_norm=True,
        defaults={"head_dim": 128, "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None},
    ),
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        qk_norm=False,
        defaults={"head_dim": None, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    ),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that its weights and its forward depend on. Sizes in elements.

    Raises:
      ConfigError: a field is out of range; all faults are listed.
    """

    family: str  # "qwen3" or "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tie_embeddings: bool
    qk_norm: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        faults = _range_faults(vars(self))
        if faults:
            raise ConfigError("model configuration", faults)

    @property
    def groups(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, source: str = "config.json"
    ) -> ModelConfig:
        """The model that a Hugging Face config.json describes.

        Args:
          hf: the parsed file, as transformers 4 (`rope_theta`, `torch_dtype`) or 5 (`rope_parameters`, `dtype`) writes.
          generation: the parsed generation_config.json; its bos, eos and pad ids win, as in transformers' `generate`.
          source: how error messages call the file.

        Raises:
          ConfigError: an unsupported architecture or setting, an unknown key, a missing or ill-typed field, a value out
            of range. Everything wrong is listed at once.
        """
        family, faults = _family(hf)
        if family is None:  # nothing else in the file can be judged
            raise ConfigError(source, faults)
        unknown = sorted(set(hf) - _USED - _HARMLESS - set(_REFUSALS))
        faults += [f"{key}={_show(hf[key])}: unknown field, which might change the model" for key in unknown]
        for key, refusal in _REFUSALS.items():
            if key in hf and not refusal.allowed(hf[key]):
                faults.append(f"{key}={_show(hf[key])}: {refusal.reason}")
        fields = {"family": family.model_type, "qk_norm": family.qk_norm}
        fields |= _read_fields(family, hf, generation or {}, faults)
        faults += _range_faults({key: value for key, value in fields.items() if value is not _BAD})
        if faults:
            raise ConfigError(source, faults)
        return cls(**fields)

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """The model of a folder: its config.json, and its generation_config.json if there is one.

        Raises:
          ConfigError: as `from_hf`; or a file is missing or not a JSON object.
        """
        folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(str(folder), ["it has no config.json; is this a Hugging Face model folder?"])
        generation = folder / "generation_config.json"
        return cls.from_hf(
            read_json_object(path),
            read_json_object(generation) if generation.is_file() else None,
            source=str(path),
        )

    def to_hf(self, dtype: str | None = None) -> dict[str, Any]:
        """A config.json that transformers 4 and 5, vLLM and `from_hf` read.

        Args:
          dtype: "bfloat16" or "float32": dtype of the weights beside it, written as `torch_dtype`.
        """
        family = FAMILIES[self.family]
        hf: dict[str, Any] = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _one_or_list(self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
        }
        if self.family == "llama":
            hf["mlp_bias"] = False
        if self.family == "qwen3":
            hf["use_sliding_window"] = False
        if dtype is not None:
            hf["torch_dtype"] = dtype
        return hf

    def to_hf_generation(self) -> dict[str, Any]:
        """A generation_config.json with the token ids alone: sampling parameters belong to requests."""
        return {
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _one_or_list(self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
        }


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ConfigError: the file cannot be read, is not JSON, holds no object, or names a key twice.
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(str(path), [f"key {key} appears twice" for key in twice])
        return dict(pairs)

    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
    except OSError as e:
        raise ConfigError(str(path), [f"it cannot be read: {e.strerror}"]) from e
    except ValueError as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(str(path), [f"it is not JSON: {e}"]) from e
    if not isinstance(value, dict):
        raise ConfigError(str(path), [f"it holds {_show(value)}, not a JSON object"])
    return value


@dataclasses.dataclass(frozen=True)
class _Refusal:
    allowed: Callable[[Any], bool]
    reason: str


def _only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(v) and value == v for v in values)


def _absent_or(*values: Any) -> Callable[[Any], bool]:
    return _only(None, *values)


# Fields that change what is computed; each is allowed at the one value that changes nothing.
_REFUSALS = {
    "attention_bias": _Refusal(_absent_or(False), "biases in the attention projections are not supported"),
    "mlp_bias": _Refusal(_absent_or(False), "biases in the MLP are not supported"),
    "hidden_act": _Refusal(_only("silu", "swish"), "only the silu activation is supported"),
    "attention_dropout": _Refusal(_absent_or(0, 0.0), "dropout is not supported"),
    "pretraining_tp": _Refusal(_absent_or(1), "only 1 is supported (other values change the order of sums)"),
    "use_sliding_window": _Refusal(_absent_or(False), "sliding-window attention is not supported"),
    "quantization_config": _Refusal(_absent_or(), "quantised weights are not supported; convert them to bf16"),
    "compression_config": _Refusal(_absent_or(), "compressed weights are not supported; convert them to bf16"),
    "partial_rotary_factor": _Refusal(_absent_or(1, 1.0), "rotating a part of head_dim only is not supported"),
    "rope_interleaved": _Refusal(_absent_or(False), "interleaved RoPE is not supported"),
    "use_mrope": _Refusal(_absent_or(False), "multimodal RoPE is not supported"),
    "auto_map": _Refusal(_absent_or(), "models with code of their own are not supported"),
    "is_encoder_decoder": _Refusal(_absent_or(False), "encoder-decoder models are not supported"),
    "add_cross_attention": _Refusal(_absent_or(False), "cross-attention is not supported"),
    "pruned_heads": _Refusal(_absent_or({}), "pruned heads are not supported"),
}

# Fields that say nothing about what is computed: provenance, output format, training-time init, defaults of `generate`.
_HARMLESS = frozenset(
    "_name_or_path transformers_version torch_dtype dtype initializer_range use_cache max_window_layers "
    "is_llama_config is_decoder cross_attention_hidden_size tokenizer_class tie_encoder_decoder finetuning_task "
    "task_specific_params prefix problem_type id2label label2id output_attentions output_hidden_states output_scores "
    "return_dict return_dict_in_generate torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward "
    "_attn_implementation _attn_implementation_autoset attn_implementation transformers.js_config unsloth_fixed "
    "unsloth_version max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id "
    "decoder_start_token_id sep_token_id".split()
)

_INTS = {  # Hugging Face name -> ours
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_positions",
}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_USED = frozenset(_INTS) | {
    "architectures",
    "model_type",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "tie_word_embeddings",
    *_TOKEN_IDS,
}
_BAD = object()  # stands for a field whose fault is already listed


def _family(hf: Mapping[str, Any]) -> tuple[Family | None, list[str]]:
    """The family a file names, or why there is none."""
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    architectures, model_type = hf.get("architectures"), hf.get("model_type")
    if architectures is None and model_type is None:
        return None, [f"it names no architecture; supported: {supported}"]
    if architectures is not None:
        names = architectures if isinstance(architectures, list) else [architectures]
        found = [family for family in FAMILIES.values() if names == [family.architecture]]
        if not found:
            return None, [f"architectures={_show(architectures)} is not supported; supported: {supported}"]
    else:
        found = [family for family in FAMILIES.values() if family.model_type == model_type]
        if not found:
            return None, [f"model_type={_show(model_type)} is not supported; supported: {', '.join(FAMILIES)}"]
    if model_type not in (None, found[0].model_type):
        return None, [f"model_type={_show(model_type)} contradicts architectures={_show(architectures)}"]
    return found[0], []


def _read_fields(family: Family, hf: Mapping, generation: Mapping, faults: list[str]) -> dict[str, Any]:
    """ModelConfig's fields, _BAD where a fault was added."""
    fields = {}
    for key, ours in _INTS.items():
        value = hf.get(key, family.defaults.get(key))
        if value is None and key == "num_key_value_heads":
            value = hf.get("num_attention_heads")
        if value is None and key == "head_dim":
            value = _hidden_by_heads(hf, faults)
        if value is None:
            faults.append(f"{key} is missing")
            value = _BAD
        elif value is not _BAD and not _is_int(value):
            faults.append(f"{key}={_show(value)} is not an integer")
            value = _BAD
        fields[ours] = value
    fields["rms_norm_eps"] = _number("rms_norm_eps", hf.get("rms_norm_eps", 1e-6), faults)
    fields["rope_theta"] = _rope_theta(hf, faults)
    fields["tie_embeddings"] = hf.get("tie_word_embeddings", False)
    if not isinstance(fields["tie_embeddings"], bool):
        faults.append(f"tie_word_embeddings={_show(fields['tie_embeddings'])} is not true or false")
        fields["tie_embeddings"] = _BAD
    _attention_span(family, hf, faults)
    ids = {key: _token_ids(key, family, hf, generation, faults) for key in _TOKEN_IDS}
    fields["eos_token_ids"] = ids["eos_token_id"]
    for key in ("bos_token_id", "pad_token_id"):
        if ids[key] is not _BAD and len(ids[key]) > 1:
            faults.append(f"{key}={_show(list(ids[key]))}: one id is expected")
            ids[key] = _BAD
        fields[key] = ids[key] if ids[key] is _BAD else next(iter(ids[key]), None)
    return fields


def _hidden_by_heads(hf: Mapping, faults: list[str]) -> Any:
    """head_dim of a file that leaves it out; _BAD where it cannot be derived, whose reason is listed."""
    hidden, heads = hf.get("hidden_size"), hf.get("num_attention_heads")
    if not (_is_int(hidden) and _is_int(heads) and heads > 0):
        return _BAD  # their own faults are listed
    if hidden % heads:
        faults.append(f"head_dim is missing, and num_attention_heads={heads} does not divide hidden_size={hidden}")
        return _BAD
    return hidden // heads


def _rope_theta(hf: Mapping, faults: list[str]) -> Any:
    """RoPE's base; anything but plain RoPE over the whole head is a fault."""
    bases = {}
    if hf.get("rope_theta") is not None:
        bases["rope_theta"] = hf["rope_theta"]
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            faults.append(f"{key}={_show(rope)} is not an object")
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            faults.append(f"{key} has type {_show(kind)}: RoPE scaling is not supported, only the type 'default'")
            continue
        if rope.get("partial_rotary_factor") not in (None, 1):
            factor = _show(rope["partial_rotary_factor"])
            faults.append(f"{key}.partial_rotary_factor={factor}: rotating a part of head_dim only is not supported")
        unknown = sorted(set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        faults += [f"{key}.{name}={_show(rope[name])}: unknown field" for name in unknown]
        if rope.get("rope_theta") is not None:
            bases[f"{key}.rope_theta"] = rope["rope_theta"]
    numbers = [_number(name, value, faults) for name, value in bases.items()]
    if _BAD in numbers:
        return _BAD
    if len(set(numbers)) > 1:
        faults.append("RoPE's base is given twice: " + ", ".join(f"{name}={_show(v)}" for name, v in bases.items()))
        return _BAD
    return numbers[0] if numbers else 10000.0


def _attention_span(family: Family, hf: Mapping, faults: list[str]) -> None:
    """Faults of the fields that would make a layer attend to less than everything before it."""
    window = hf.get("sliding_window")
    # Qwen3 files carry a window that use_sliding_window=false (its default) turns off.
    if window is not None and not (family.model_type == "qwen3" and hf.get("use_sliding_window", False) is False):
        faults.append(f"sliding_window={_show(window)}: sliding-window attention is not supported")
    kinds = hf.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list):
        faults.append(f"layer_types={_show(kinds)} is not a list")
        return
    for kind in dict.fromkeys(map(str, kinds)):
        if kind != "full_attention":
            faults.append(f"layer_types names {kind!r}: only 'full_attention' layers are supported")
    if _is_int(hf.get("num_hidden_layers")) and len(kinds) != hf["num_hidden_layers"]:
        faults.append(f"layer_types has {len(kinds)} entries for num_hidden_layers={hf['num_hidden_layers']}")


def _token_ids(key: str, family: Family, hf: Mapping, generation: Mapping, faults: list[str]) -> Any:
    """The ids under `key` as a tuple: the generation file's, else the model file's, else the family's default."""
    value = generation.get(key)
    value = hf.get(key, family.defaults.get(key)) if value is None else value
    if value is None or (key == "pad_token_id" and value == -1):  # old Llama files write -1 for none
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(_is_int(i) for i in ids):
        faults.append(f"{key}={_show(value)} is neither a token id nor a list of them")
        return _BAD
    return tuple(dict.fromkeys(ids))


def _number(key: str, value: Any, faults: list[str]) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        faults.append(f"{key}={_show(value)} is not a number")
        return _BAD
    return float(value)


def _range_faults(fields: Mapping[str, Any]) -> list[str]:
    """What is out of range, under the Hugging Face names that a user finds in the file. Absent fields are skipped."""
    family = FAMILIES.get(fields["family"])
    if family is None:
        return [f"family={_show(fields['family'])} is not supported; supported: {', '.join(FAMILIES)}"]
    faults = []
    if fields["qk_norm"] != family.qk_norm:
        faults.append(f"qk_norm={fields['qk_norm']}: family {family.model_type} has qk_norm={family.qk_norm}")
    sizes = {}
    for key, ours in _INTS.items():
        value = fields.get(ours)
        if value is not None and not (_is_int(value) and value > 0):
            faults.append(f"{key}={_show(value)} is not a positive integer")
        elif value is not None:
            sizes[key] = value
    heads, kv_heads = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        faults.append(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if sizes.get("head_dim", 0) % 2:
        faults.append(f"head_dim={sizes['head_dim']} is odd; RoPE rotates pairs")
    eps, theta = fields.get("rms_norm_eps"), fields.get("rope_theta")
    if eps is not None and not 0 < eps < 1:
        faults.append(f"rms_norm_eps={eps} is not between 0 and 1")
    if theta is not None and not (math.isfinite(theta) and theta >= 1):
        faults.append(f"rope_theta={theta} is not a finite number of at least 1")
    ids = [(key, fields.get(key)) for key in ("bos_token_id", "pad_token_id")]
    ids += [("eos_token_id", i) for i in fields.get("eos_token_ids", ())]
    for key, value in ids:
        if value is not None and not (_is_int(value) and 0 <= value < sizes.get("vocab_size", math.inf)):
            faults.append(f"{key}={_show(value)} is not a token id below vocab_size={sizes.get('vocab_size', '?')}")
    return faults


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else next(iter(ids), None)


def _show(value: Any) -> str:
    """A value as it stands in the file, cut to a line."""
    text = json.dumps(value, default=repr) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

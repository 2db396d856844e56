"""GGUF files in: the model's configuration and its Hugging Face tensors, dequantised as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from isomodel.config import FAMILIES, FaultyInput, ModelConfig
from isomodel.weights import StoredTensor, hf_places

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}
"""`general.architecture` -> gguf's own name of it. The key is also our family's name."""

# Metadata under "<architecture>." that is read here; any other could change the model and is refused.
_USED = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
}


class GGUFError(FaultyInput):
    """A GGUF file that cannot be used; the message lists every fault."""


class GGUFFile:
    """One GGUF file: `config`, `metadata`, and `tensors()` under Hugging Face names.

    Attributes:
      path: the file.
      metadata: every key-value pair of the file.
      config: the ModelConfig. RoPE's base, head_dim, eps, tied embeddings and token ids are read from the file.

    Raises:
      GGUFError: damaged or truncated, of several parts, or of a model that is not supported.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._tensors = self._read()
        self.config = self._config()

    def tensors(self) -> dict[str, StoredTensor]:
        """Tensors by Hugging Face name, float32 when read; for `weights.pack`, which reports missing and extra ones."""
        arch, cfg = self.metadata["general.architecture"], self.config
        names = gguf.get_tensor_name_map(ARCHITECTURES[arch], cfg.num_layers)
        hf_names = {names.get_name(name, try_suffixes=(".weight",)): name for name in hf_places(cfg)}
        heads = {}
        if arch == "llama":
            for layer in range(cfg.num_layers):
                heads[f"blk.{layer}.attn_q.weight"] = cfg.num_heads
                heads[f"blk.{layer}.attn_k.weight"] = cfg.num_kv_heads
        return {
            hf_names.get(name, name): StoredTensor(
                tuple(int(n) for n in reversed(tensor.shape)),
                np.dtype(np.float32),
                lambda tensor=tensor, heads=heads.get(name): _dequantize(tensor, heads),
                self.path.name,
            )
            for name, tensor in self._tensors.items()
        }

    def _read(self) -> dict[str, gguf.ReaderTensor]:
        if not self.path.is_file():
            raise GGUFError(str(self.path), ["there is no such file"])
        size = self.path.stat().st_size
        try:
            reader = gguf.GGUFReader(self.path)
            self.metadata = {key: field.contents() for key, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, OSError) as e:
            fault = f"it is damaged, truncated or no GGUF file ({size} bytes: {type(e).__name__}: {e})"
            raise GGUFError(str(self.path), [fault + "; download or copy it again"]) from e
        unsupported = sorted({t.tensor_type.name for t in reader.tensors if not _can_dequantize(t.tensor_type)})
        if unsupported:
            raise GGUFError(str(self.path), [f"quantisation {name} is not supported" for name in unsupported])
        return {tensor.name: tensor for tensor in reader.tensors}

    def _config(self) -> ModelConfig:
        meta = self.metadata
        arch = meta.get("general.architecture")
        if arch not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES)
            raise GGUFError(str(self.path), [f"architecture {arch!r} is not supported; supported: {supported}"])
        faults = []
        if meta.get("split.count", 0) > 1:
            faults.append(f"it is one of {meta['split.count']} parts; join them with `llama-gguf-split --merge` first")
        own = {key[len(arch) + 1 :]: value for key, value in meta.items() if key.startswith(f"{arch}.")}
        faults += [f"{arch}.{key}={own[key]!r}: not supported" for key in sorted(set(own) - _USED)]
        if own.get("rope.scaling.type", "none") != "none":
            faults.append(f"{arch}.rope.scaling.type={own['rope.scaling.type']!r}: RoPE scaling is not supported")
        if "rope_freqs.weight" in self._tensors:
            faults.append("rope_freqs.weight: RoPE scaling (of Llama 3.1 and later) is not supported")
        hidden, heads = own.get("embedding_length"), own.get("attention.head_count")
        head_dim = own.get("attention.key_length")
        if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            head_dim = hidden // heads  # GGUF's definition where the key is absent
        for key in ("attention.value_length", "rope.dimension_count"):
            if own.get(key, head_dim) != head_dim:
                faults.append(f"{arch}.{key}={own[key]} differs from the head dimension {head_dim}: not supported")
        if "attention.layer_norm_rms_epsilon" not in own:
            faults.append(f"{arch}.attention.layer_norm_rms_epsilon is missing")
        if "token_embd.weight" not in self._tensors:
            faults.append("token_embd.weight is missing")
        if faults:
            raise GGUFError(str(self.path), faults)
        hf: dict[str, Any] = {
            "architectures": [FAMILIES[arch].architecture],
            "model_type": arch,
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": own.get("feed_forward_length"),
            "num_hidden_layers": own.get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": own.get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": own.get("context_length"),
            "rms_norm_eps": _decimal(own["attention.layer_norm_rms_epsilon"]),
            "rope_theta": _decimal(own.get("rope.freq_base", 10000.0)),  # GGUF's definition where the key is absent
            "tie_word_embeddings": "output.weight" not in self._tensors,
        }
        return ModelConfig.from_hf(hf | _token_ids(meta), source=str(self.path))


def _token_ids(meta: Mapping[str, Any]) -> dict[str, Any]:
    """bos, eos and pad ids. An end-of-turn id, where the file names one, ends a completion as well."""
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(i for i in ends if i is not None))
    return {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends or None,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }


def _decimal(value: float) -> float:
    """The decimal that was stored as float32: 1e-05, not 9.999999747378752e-06. Its float32 has the same bits."""
    return float(str(np.float32(value)))


def _can_dequantize(kind: gguf.GGMLQuantizationType) -> bool:
    """Asks gguf with one block of zeros."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _dequantize(tensor: gguf.ReaderTensor, heads: int | None) -> np.ndarray:
    """fp32 values in Hugging Face's order.

    llama.cpp's converter turns each head's rows of q and k from RoPE's halves (x_i with x_{i + d/2}) into adjacent
    pairs (convert_hf_to_gguf.py, LlamaModel.permute); `heads` given, that is undone.
    """
    array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if heads is None:
        return array
    rows, columns = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)

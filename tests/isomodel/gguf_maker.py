"""Writes small GGUF files from Hugging Face folders, as llama.cpp's convert_hf_to_gguf.py does."""

from __future__ import annotations

import pathlib

import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy
from tokenizers import pre_tokenizers

from isomodel.config import ModelConfig

NAMES = {  # gguf's and llama.cpp's own words for Hugging Face's
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_of(hf: str) -> str:
    stem = hf.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[stem]}.weight"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of convert_hf_to_gguf.py: halves of each head's rows become pairs."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(
    path: pathlib.Path,
    folder: pathlib.Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    permuted: bool = True,
    meta: dict | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    tokenizer: dict | None = None,
) -> None:
    """A GGUF file of the model in `folder`.

    Args:
      kind: type of the matrices (vectors stay F32, as llama.cpp keeps them).
      permuted: turn q and k rows of a Llama model, as every real file has them.
      meta: further "{architecture}.*" or other keys; they replace the usual ones, None leaves a key out.
      drop: tensors (GGUF names) to leave out.
      extra: tensors to add.
      tokenizer: arguments of `tokenizer_meta`.
    """
    cfg = ModelConfig.load(folder)
    arch = cfg.family
    writer = gguf.GGUFWriter(path, arch)
    keys: dict[str, object] = {
        f"{arch}.block_count": cfg.num_layers,
        f"{arch}.context_length": cfg.max_positions,
        f"{arch}.embedding_length": cfg.hidden_size,
        f"{arch}.feed_forward_length": cfg.intermediate_size,
        f"{arch}.attention.head_count": cfg.num_heads,
        f"{arch}.attention.head_count_kv": cfg.num_kv_heads,
        f"{arch}.attention.key_length": cfg.head_dim,
        f"{arch}.attention.value_length": cfg.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": cfg.rms_norm_eps,
        f"{arch}.rope.freq_base": cfg.rope_theta,
        f"{arch}.rope.dimension_count": cfg.head_dim,
        "tokenizer.ggml.bos_token_id": cfg.bos_token_id,
        "tokenizer.ggml.eos_token_id": cfg.eos_token_ids[0],
        "tokenizer.ggml.padding_token_id": cfg.pad_token_id,
    }
    for key, value in (keys | ({} if tokenizer is None else tokenizer_meta(**tokenizer)) | (meta or {})).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add[type(value)](key, value)
    heads = {"self_attn.q_proj": cfg.num_heads, "self_attn.k_proj": cfg.num_kv_heads} if arch == "llama" else {}
    for file in sorted(folder.glob("*.safetensors")):
        for hf, tensor in safetensors.numpy.load_file(file).items():
            if name_of(hf) in drop:
                continue
            tensor = tensor.astype(np.float32)
            for projection, count in heads.items():
                if permuted and projection in hf:
                    tensor = permute(tensor, count)
            if tensor.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
                writer.add_tensor(name_of(hf), tensor)
            elif kind == gguf.GGMLQuantizationType.BF16:
                bits = tensor.astype(ml_dtypes.bfloat16).view(np.uint8)
                writer.add_tensor(name_of(hf), bits, raw_dtype=kind)
            else:
                writer.add_tensor(name_of(hf), gguf.quantize(tensor, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


MERGES = "h e|l l|he ll|hell o|Ġ w|o r|Ġw or|Ġwor l|Ġworl d|Ġ 1|1 2|12 3|t h|th e|' s|Ã ©|Ċ Ċ".split("|")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokens() -> list[str]:
    """Three special tokens, the 256 bytes in GPT-2's alphabet, what the merges make, and one user-defined token."""
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES), "<tool>"]


def tokenizer_meta(pre: str = "smollm", model: str = "gpt2", **changes) -> dict[str, object]:
    count = len(tokens())
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (count - 4), 4],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    } | changes



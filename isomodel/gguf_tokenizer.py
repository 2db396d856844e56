"""The tokenizer of a GGUF file, rebuilt as the Hugging Face files tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from isomodel.gguf_file import GGUFError
from isomodel.weights import write_json

# Splits of the models' own tokenizer.json (Qwen2 and later; Llama 3), as GGUF names them in tokenizer.ggml.pre.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, _byte_level(False)])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: _byte_level(True),
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(True)]),
    "qwen2": lambda: _split(_QWEN2),
    "llama-bpe": lambda: _split(_LLAMA3),
}
"""`tokenizer.ggml.pre` -> how text is cut before the merges."""


def build(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The byte-level BPE that a GGUF file's metadata describes.

    Raises:
      GGUFError: a kind of tokenizer that is not supported here, or inconsistent tables.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        supported = ", ".join(f"gpt2/{name}" for name in PRE_TOKENIZERS)
        fault = f"its tokenizer is {kind}/{pre}; supported: {supported}"
        raise GGUFError(source, [fault + "; name a folder with the model's tokenizer instead"])
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, (token, k) in enumerate(zip(tokens, kinds)) if k != gguf.TokenType.UNUSED}
    faults = []
    if not len(kinds) == len(tokens) == len(set(tokens)):
        faults.append("its token table names a token twice, or has no kind for some")
    wrong = [" ".join(merge) for merge in merges if len(merge) != 2 or "".join(merge) not in vocab]
    if wrong:
        faults.append(f"{len(wrong)} merges are not of two tokens that make a third; the first is {wrong[0]!r}")
    if faults:
        raise GGUFError(source, faults)
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    added = {gguf.TokenType.CONTROL: True, gguf.TokenType.USER_DEFINED: False}
    tokenizer.add_tokens(
        [AddedToken(tokens[i], special=added[k], normalized=False) for i, k in enumerate(kinds) if k in added]
    )
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = tokens[metadata["tokenizer.ggml.bos_token_id"]]
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocab[bos])]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, metadata: Mapping[str, Any], max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, the chat template in the latter.

    Args:
      tokenizer: what `build` made of `metadata`.
      max_length: `model_max_length`, in tokens.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    # Not the model's historical class (GPT2Tokenizer, ...): transformers 5 would rebuild that class's own splits
    # and drop the ones in tokenizer.json.
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if token_id is not None:
            config[f"{ours}_token"] = metadata["tokenizer.ggml.tokens"][token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    write_json(folder / "tokenizer_config.json", config)

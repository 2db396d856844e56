"""Makes the golden files beside it: what Hugging Face transformers computes with tiny random models and with SmolLM2.

    python tests/data/make_golden.py                         the tiny models
    python tests/data/make_golden.py --smollm2 FOLDER        SmolLM2, from the folder `isomodel fetch smollm2` prints

Needs torch and transformers (golden/versions.json says which were used), nothing of ours: the files are another
implementation's word, and CPU only. tests/data/golden.py reads them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil

import numpy as np
import torch
import transformers

OUT = pathlib.Path(__file__).parent / "golden"

# Every model: GQA ratio H / K, head_dim (d) that is not D / H unless said, lengths around and past one 128-token block.
TINY = {
    "qwen3_gqa1_tied_fp32": dict(
        family="qwen3", dtype="float32", V=128, D=32, F=96, L=2, H=2, K=2, d=32, theta=1e6, tied=True,
        lengths=(5, 140),
    ),
    "qwen3_gqa2_untied_bf16": dict(
        family="qwen3", dtype="bfloat16", V=160, D=48, F=128, L=2, H=4, K=2, d=32, theta=1e6, tied=False,
        lengths=(1, 129),
    ),
    "qwen3_gqa4_tied_bf16": dict(
        family="qwen3", dtype="bfloat16", V=200, D=64, F=64, L=2, H=8, K=2, d=16, theta=5e5, tied=True,
        lengths=(17, 270),
    ),
    "qwen3_gqa8_untied_fp32": dict(
        family="qwen3", dtype="float32", V=96, D=32, F=64, L=2, H=8, K=1, d=16, theta=3e4, tied=False,
        lengths=(128, 33),
    ),
    # F = 512 is eight leaves of the down projection's tree.
    "llama_gqa1_untied_bf16": dict(
        family="llama", dtype="bfloat16", V=130, D=24, F=512, L=2, H=3, K=3, d=32, theta=1e5, tied=False,
        lengths=(8, 150),
    ),
    "llama_gqa2_tied_fp32": dict(
        family="llama", dtype="float32", V=128, D=32, F=64, L=2, H=4, K=2, d=16, theta=5e5, tied=True,
        lengths=(3, 127, 64),
    ),
    "llama_gqa4_untied_fp32": dict(
        family="llama", dtype="float32", V=100, D=40, F=64, L=2, H=4, K=1, d=16, theta=2e4, tied=False,
        lengths=(260, 2),
    ),
    # Written as old files are: rope_theta on top, no head_dim (D / H).
    "llama_gqa8_tied_bf16": dict(
        family="llama", dtype="bfloat16", V=160, D=128, F=64, L=1, H=8, K=1, d=16, theta=1e4, tied=True,
        lengths=(30, 131),
    ),
}
PROMPTS = [
    "What is 17 + 26?",
    "Name three fruits that are red.",
    "Write one sentence about the sea.",
    "Translate to French: Good morning, my friend.",
    "Why is the sky blue?",
    "List the first eight prime numbers.",
    "Explain what a neural network is to a child.",
    "A train leaves at 14:05 and arrives at 16:50. How long does the trip take?",
]
SYSTEM = "Answer briefly. Ünïcode – 数字 123."
NEW_TOKENS = 32


def tiny_config(p: dict):
    kwargs = dict(
        vocab_size=p["V"],
        hidden_size=p["D"],
        intermediate_size=p["F"],
        num_hidden_layers=p["L"],
        num_attention_heads=p["H"],
        num_key_value_heads=p["K"],
        head_dim=p["d"],
        rope_parameters={"rope_theta": p["theta"], "rope_type": "default"},
        max_position_embeddings=512,
        rms_norm_eps=1e-5 if p["family"] == "llama" else 1e-6,
        tie_word_embeddings=p["tied"],
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="eager",
    )
    cls = transformers.Qwen3Config if p["family"] == "qwen3" else transformers.LlamaConfig
    return cls(**kwargs)


def randomise(model, generator: torch.Generator) -> None:
    """Weights large enough that attention is uneven and logits spread: at the usual 0.02 a wrong RoPE hardly shows."""
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            value = 0.5 + torch.rand(weight.shape, generator=generator)
        else:
            scale = 0.3 if "embed" in name else 1.5 / weight.shape[1] ** 0.5
            value = torch.randn(weight.shape, generator=generator) * scale
        with torch.no_grad():
            weight.copy_(value.to(weight.dtype))


def stored_rows(length: int) -> np.ndarray:
    """All rows of a short sequence; of a long one those around the 128-token edges, the last, and every fifth."""
    rows = [t for t in range(length) if length <= 40 or t % 5 == 0 or t % 128 in (0, 1, 126, 127) or t == length - 1]
    return np.array(rows, np.int32)


def make_tiny(name: str, p: dict, seed: int) -> None:
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    cls = transformers.Qwen3ForCausalLM if p["family"] == "qwen3" else transformers.LlamaForCausalLM
    model = cls(tiny_config(p)).to(getattr(torch, p["dtype"])).eval()
    randomise(model, generator)
    model.tie_weights()
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    if name == "llama_gqa8_tied_bf16":
        write_as_transformers_4(folder / "config.json")
    reference = {
        dtype: cls.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval() for dtype in DTYPES
    }
    arrays = {}
    for i, length in enumerate(p["lengths"]):
        ids = torch.randint(0, p["V"], (1, length), generator=generator)
        rows = stored_rows(length)
        arrays[f"ids_{i}"] = ids[0].numpy().astype(np.int32)
        arrays[f"rows_{i}"] = rows
        for dtype, model in reference.items():
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, rows]
            assert logits.dtype == dtype
            bits = logits.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else logits.numpy()
            arrays[f"{DTYPES[dtype]}_{i}"] = bits
    np.savez_compressed(folder / "golden.npz", **arrays)


DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def write_as_transformers_4(path: pathlib.Path) -> None:
    """The same model as an old config.json says it: rope_theta and torch_dtype on top, head_dim left to be derived."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    assert config.pop("head_dim") == config["hidden_size"] // config["num_attention_heads"]
    path.write_text(json.dumps(config, indent=2) + "\n")


def make_smollm2(folder: pathlib.Path) -> None:
    """Greedy tokens of 8 chat prompts in fp32 (past an end of turn too), and the logits of some rows."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    chats, logits = [], {}
    for i, prompt in enumerate(PROMPTS):
        messages = [{"role": "user", "content": prompt}]
        if i % 4 == 3:  # some with a system prompt of their own, the others with the template's
            messages.insert(0, {"role": "system", "content": SYSTEM})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens, margins, cache = [], [], None
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                step = torch.tensor([ids if cache is None else tokens[-1:]])
                out = model(input_ids=step, past_key_values=cache, use_cache=True)
                cache, row = out.past_key_values, out.logits[0, -1]
                best = torch.topk(row, 2)
                tokens.append(int(best.indices[0]))
                margins.append(float(best.values[0] - best.values[1]))
            if i in (0, 3, 7):  # rows of one plain forward over the whole sequence, the last two
                whole = model(input_ids=torch.tensor([ids + tokens])).logits[0]
                logits[f"rows_{i}"] = np.array([len(ids) - 1, len(ids) + NEW_TOKENS - 1], np.int32)
                logits[f"float32_{i}"] = whole[logits[f"rows_{i}"]].numpy()
        chats.append(
            {
                "messages": messages,
                "rendered": text,
                "prompt": ids,
                "greedy": tokens,
                "text": tokenizer.decode(tokens),
                "smallest_margin": min(margins),
            }
        )
    (OUT / "smollm2.json").write_text(json.dumps(chats, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    np.savez_compressed(OUT / "smollm2_logits.npz", **logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=pathlib.Path, metavar="FOLDER", help="make SmolLM2's files, from this folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    if args.smollm2:
        make_smollm2(args.smollm2)
    else:
        for seed, (name, p) in enumerate(TINY.items()):
            make_tiny(name, p, seed)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    (OUT / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()

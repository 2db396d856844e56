"""`isomodel convert`: a Hugging Face folder from a GGUF file or from another Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isomodel import gguf_file, gguf_tokenizer, weights
from isomodel.config import ModelConfig


def convert(
    source: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    notes: Mapping[str, Mapping[str, Any]] | None = None,
) -> ModelConfig:
    """Writes a Hugging Face folder from a GGUF file or another Hugging Face folder; whole or not at all.

    Args:
      dtype: "bfloat16" or "float32". None keeps a folder's; a GGUF file becomes bfloat16.
      tokenizer: folder to take the tokenizer from; None takes the source's own.
      max_shard_bytes, overwrite: as `weights.save`.
      notes: JSON files to put beside, by name; each gets `files`, the sizes of the folder's other files in bytes.

    Raises:
      GGUFError, ConfigError, WeightsError: the source cannot be used.
      FileExistsError, OSError: as `weights.save`.
    """
    source = Path(source)
    metadata, rebuilt = {}, None
    if source.is_dir():
        cfg = ModelConfig.load(source)
        tensors = weights.open_safetensors(source)
        if tokenizer is None and any((source / file).is_file() for file in weights.TOKENIZER_FILES):
            tokenizer = source
    else:
        file = gguf_file.GGUFFile(source)
        cfg, tensors, dtype = file.config, file.tensors(), dtype or "bfloat16"
        metadata = file.metadata
        if tokenizer is None:
            rebuilt = gguf_tokenizer.build(metadata, str(source))

    def also(temporary: Path) -> None:
        if rebuilt is not None:
            gguf_tokenizer.write(temporary, rebuilt, metadata, cfg.max_positions)
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        for name, note in (notes or {}).items():
            weights.write_json(temporary / name, {**note, "files": sizes})

    weights.save(
        folder,
        cfg,
        weights.pack(cfg, tensors, dtype, source=str(source)),
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        also=also,
    )
    return cfg


def add_commands(subparsers) -> None:
    """Adds `isomodel convert`."""
    parser = subparsers.add_parser(
        "convert",
        help="write a Hugging Face folder from a GGUF file or another folder",
        description="Reads a GGUF file or a Hugging Face folder, checks every tensor, writes a Hugging Face folder.",
    )
    parser.add_argument("source", type=Path, help="FILE.gguf, or a folder with config.json and safetensors")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: the source's; bfloat16 for GGUF")
    parser.add_argument("--tokenizer", type=Path, help="folder to take the tokenizer from; default: the source's own")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="largest safetensors file, in GB (default 5)")
    parser.add_argument("--overwrite", action="store_true", help="replace a model folder that is there")
    parser.set_defaults(run=_run_convert)


def _run_convert(args: argparse.Namespace) -> int:
    cfg = convert(
        args.source,
        args.folder,
        dtype=args.dtype,
        tokenizer=args.tokenizer,
        max_shard_bytes=int(args.max_shard_gb * 10**9),
        overwrite=args.overwrite,
    )
    print(f"{args.folder}: {cfg.family}, {cfg.num_layers} layers, hidden size {cfg.hidden_size}")
    return 0

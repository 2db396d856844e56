"""A tiny model and random trajectories for the trainer's tests; few shapes, so that programs are shared."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
from typing import Any

import numpy as np
import tokenizers

from isomodel import contract as contracts
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.specs import init_params
from isomodel.yaml_config import from_mapping
from trainer.config import ObjectiveSection, OptimizerSection, TrainConfig
from trainer.packing import Bucket, pack
from trainer.step import TrainState, TrainStep
from trainer.trajectory import Segment, Trajectory

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=128,
    tie_embeddings=True,
    qk_norm=True,
    eos_token_ids=(1,),
)
BUCKET = Bucket(rows=128, sequences=8, pages=4, page_size=16)


def trajectory(rng: np.random.Generator, prompt: int, completion: int, version: int = 0, inv_temp=1.0) -> Trajectory:
    """Random tokens with random log-probabilities."""
    return Trajectory(
        (
            Segment.context(rng.integers(0, CONFIG.vocab_size, prompt), version),
            Segment.sampled(
                rng.integers(0, CONFIG.vocab_size, completion),
                -rng.exponential(2.0, completion).astype(np.float32),
                version,
                np.float32(inv_temp),
            ),
        )
    )


def trajectories(count: int, seed: int = 0, longest: int = 24) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    return [trajectory(rng, int(rng.integers(1, 9)), int(rng.integers(1, longest))) for _ in range(count)]


@functools.cache
def step(numerics: Numerics = Numerics(), remat: bool | str = False, optimizer: tuple = (), objective: tuple = ()) -> TrainStep:
    """A TrainStep; `optimizer` and `objective` are tuples of (field, value)."""
    settings = dict(lr=1e-3, total_steps=100) | dict(optimizer)
    return TrainStep(CONFIG, numerics, ObjectiveSection(**dict(objective)), OptimizerSection(**settings), remat=remat)


def state(train_step: TrainStep, seed: int = 0) -> TrainState:
    """Random weights, larger than at initialisation, so that logits are far from uniform."""
    return train_step.init({n: w if "norm" in n else w * 4 for n, w in init_params(CONFIG, seed).items()})


def rescored(train_step: TrainStep, train_state: TrainState, given: list[Trajectory]) -> list[Trajectory]:
    """The trajectories with the model's own log-probabilities, as an engine would have recorded them."""
    out: list[Trajectory | None] = [None] * len(given)
    for packed in pack(given, np.zeros(len(given)), np.zeros(len(given)), [BUCKET]):
        for i, values in packed.unpack(train_step.score(train_state.params, packed)):
            t = given[i].flatten()
            n = given[i].prompt_length
            out[i] = Trajectory(
                (
                    Segment.context(t.token_ids[:n], int(t.versions[0])),
                    Segment.sampled(t.token_ids[n:], values[n - 1 :], int(t.versions[0]), t.inv_temp[-1]),
                )
            )
    return out


@contextlib.contextmanager
def contracts_derived_once():
    """Runs of equal shapes in one process share their contract: tracing it again is most of a tiny run's start."""
    derived: dict[str, contracts.Contract] = {}
    original = contracts.derive

    def derive(cfg, numerics, traces, *, deployment):
        key = repr((cfg, numerics, sorted(traces), deployment))
        if key not in derived:
            derived[key] = original(cfg, numerics, traces, deployment=deployment)
        return derived[key]

    contracts.derive = derive
    try:
        yield
    finally:
        contracts.derive = original


def tokenizer_folder(folder: pathlib.Path) -> pathlib.Path:
    """A tokenizer of single characters: 0 pad, 1 end, then digits and signs."""
    vocab = {"<pad>": 0, "<eos>": 1} | {c: i + 2 for i, c in enumerate("0123456789+-*=><#? ")}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    fast.decoder = tokenizers.decoders.Fuse()
    fast.add_special_tokens(["<pad>", "<eos>"])
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def run_config(folder: pathlib.Path, model: ModelConfig = CONFIG, **overrides: Any) -> TrainConfig:
    """A run of a few seconds: tiny model, digits to copy. `overrides` as on the command line, dots as "__"."""
    config = {
        "name": "run",
        "run_dir": str(folder / "runs"),
        "model": {"config": model.to_hf(), "tokenizer": str(tokenizer_folder(folder / "tokenizer"))},
        "data": {
            "source": "task:copy",
            "params": {"length": 2},
            "size": 64,
            "held_out": 8,
            "chat_template": False,
            "max_prompt_tokens": 4,
        },
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_tokens": 6,
            "engine": {"max_seqs": 16, "chunk_tokens": 48, "decode_steps": 6},
        },
        "optimizer": {"lr": 1e-3},
        "train": {"steps": 4, "microbatch_tokens": 64, "remat": False},
        "checkpoint": {"every": 2},
        "log": {"tensorboard": False},
    }
    return from_mapping(TrainConfig, config, [f"{k.replace('__', '.')}={v}" for k, v in overrides.items()])

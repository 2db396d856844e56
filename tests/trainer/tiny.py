"""A tiny model and random trajectories for the trainer's tests; few shapes, so that programs are shared."""

from __future__ import annotations

import functools

import numpy as np

from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.specs import init_params
from trainer.config import ObjectiveSection, OptimizerSection
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
def step(numerics: Numerics = Numerics(), remat: bool = False, optimizer: tuple = (), objective: tuple = ()) -> TrainStep:
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

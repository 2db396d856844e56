"""Tiny random models and engines for the rollout's tests, in few shapes: engines of one shape share their programs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from isomodel import model
from isomodel.batch import NO_SLOT, Batch, TrainPages
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.rollout import Completion, Engine, EngineConfig, SamplingParams
from isomodel.specs import Params, cast_params, init_params

BF16 = Numerics(compute_dtype="bfloat16")
CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=512,
    tie_embeddings=True,
    qk_norm=True,
)
ENGINE = EngineConfig(
    max_seqs=8,
    max_model_len=256,
    num_pages=64,
    chunk_tokens=48,
    decode_steps=4,
    return_logits=True,
    prompt_logprobs=False,
    seq_buckets=(8,),
    token_buckets=(64,),
)


@functools.cache
def params(seed: int = 0, cfg: ModelConfig = CONFIG, numerics: Numerics = BF16) -> Params:
    """Random weights, larger than at initialisation: attention and logits are then far from uniform."""
    masters = {n: w if "norm" in n else w * 8 for n, w in init_params(cfg, seed).items()}
    return jax.block_until_ready(cast_params(masters, numerics.dtype))


def engine(
    weights: Params | None = None, cfg: ModelConfig = CONFIG, numerics: Numerics = BF16, tokenizer=None, **changes
) -> Engine:
    """An engine of ENGINE's sizes with `changes`; programs compile when first used."""
    weights = params(0, cfg, numerics) if weights is None else weights
    return Engine(cfg, weights, numerics, dataclasses.replace(ENGINE, **changes), tokenizer=tokenizer, warmup=False)


def prompts(
    count: int, seed: int = 0, low: int = 3, high: int = 60, vocab: int = CONFIG.vocab_size
) -> list[np.ndarray]:
    """Random prompts of random lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, rng.integers(low, high + 1)).astype(np.int32) for _ in range(count)]


def bits(completion: Completion) -> bytes:
    """Everything that a neighbour must not change, as bytes: tokens, both log-probabilities, whole logits rows."""
    parts = [completion.token_ids, completion.logprobs, completion.truncated_logprobs]
    if completion.logits is not None:
        parts.append(completion.logits)
    if completion.prompt_logprobs is not None:
        parts.append(completion.prompt_logprobs)
    return b"".join(x.tobytes() for x in parts)


@functools.cache
def _alone_engine() -> Engine:
    return engine(prefix_cache=False)


def alone(prompt: np.ndarray, sampling: SamplingParams) -> Completion:
    """The completion of one prompt with nothing beside it and nothing before it."""
    (completion,) = _alone_engine().generate([prompt], sampling)
    return completion


def assert_same_bits(got: list[Completion], want: list[Completion]) -> None:
    different = [i for i, (g, w) in enumerate(zip(got, want, strict=True)) if bits(g) != bits(w)]
    assert not different, f"completions {different} of {len(want)} differ"


MIXED = [
    SamplingParams(seed=1, max_tokens=14, temperature=1.3),
    SamplingParams(seed=2, max_tokens=9, temperature=0.7, top_p=0.8),
    SamplingParams(seed=3, max_tokens=11, temperature=0),
    SamplingParams(seed=4, max_tokens=13, top_k=20, min_p=0.01),
]


def seeded(count: int, **changes) -> list[SamplingParams]:
    """One of four kinds of sampling for each request, each with a seed of its own."""
    return [dataclasses.replace(MIXED[i % 4], seed=100 + i, **changes) for i in range(count)]


@functools.cache
def work() -> tuple[list[np.ndarray], list[SamplingParams], list[Completion]]:
    """12 prompts, two longer than a KV block, their sampling parameters, and each one's completion alone."""
    texts = [*prompts(10), *prompts(2, seed=1, low=120, high=140)]
    sampling = seeded(len(texts))
    return texts, sampling, [alone(p, s) for p, s in zip(texts, sampling, strict=True)]


@functools.cache
def _trainer(numerics):
    """The scoring forward: pages of one layer at a time, as in training."""

    @jax.jit
    def score(weights, batch, targets, inv_temp):
        hidden, _ = model.forward(CONFIG, numerics, weights, batch, TrainPages(2, 128))
        return model.logprobs(CONFIG, numerics, weights, hidden, targets, inv_temp)

    return score


def score_as_trainer(weights, completion, numerics=BF16) -> np.ndarray:
    """Log-probabilities of the sampled tokens by the training forward."""
    ids = np.concatenate([completion.prompt_ids, completion.token_ids])
    T = len(ids) - 1
    rows = 192
    pad = lambda x, fill: np.concatenate([x, np.full(rows - T, fill)]).astype(np.int32)  # noqa: E731
    where = np.arange(T)
    batch = Batch(
        *map(jnp.asarray, (pad(ids[:-1], 0), pad(where, 0), pad(where, NO_SLOT))),
        jnp.array([0, T], jnp.int32),
        jnp.array([T], jnp.int32),
        jnp.arange(2, dtype=jnp.int32)[None],
    )

    inv_temp = jnp.full(rows, completion.inv_temp)
    scores = _trainer(numerics)(weights, batch, jnp.asarray(pad(ids[1:], 0)), inv_temp)
    return np.asarray(scores)[len(completion.prompt_ids) - 1 : T]

"""Logits against Hugging Face's, and SmolLM2's greedy text: the accuracy oracle beside the bits."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from isomodel import model, weights
from isomodel.batch import Rows, TrainPages, make_batch
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.rollout import Engine, EngineConfig, SamplingParams
from tests.data import golden
from tests.isomodel import smollm2


@functools.cache
def loaded(name: str, dtype: str):
    folder = golden.folder(name)
    cfg = ModelConfig.load(folder)
    return cfg, weights.load(folder, cfg, dtype)


def logits(cfg, numerics, params, ids) -> np.ndarray:
    """fp32 [n, V] of every position of one sequence, by the training forward."""
    n, pages = len(ids), -(-len(ids) // 128)
    batch = make_batch([Rows(ids, 0, n, range(pages))], 128, T=pages * 128, S=1, P=pages)

    @jax.jit
    def run(params, batch):
        hidden_TD, _ = model.forward(cfg, numerics, params, batch, TrainPages(pages, 128))
        return model.logits(cfg, numerics, params, hidden_TD)

    return np.asarray(run(params, batch))[:n, : cfg.vocab_size]


@pytest.mark.parametrize("name", golden.TINY)
def test_fp32_logits(name):
    cfg, params = loaded(name, "float32")
    worst = 0.0
    for sequence in golden.sequences(name):
        got = logits(cfg, Numerics(compute_dtype="float32"), params, sequence.ids)[sequence.rows]
        worst = max(worst, np.abs(got - sequence.float32).max() / np.abs(sequence.float32).max())
    assert 0 < worst <= 1e-5


@pytest.mark.parametrize("name", golden.TINY)
def test_bf16_logits_are_no_worse_than_hugging_faces(name):
    """Both bf16 forwards against the fp32 one: ours, whose logits stay fp32, may not be further away."""
    cfg, params = loaded(name, "bfloat16")
    ours, theirs = [], []
    for sequence in golden.sequences(name):
        got = logits(cfg, Numerics(), params, sequence.ids)[sequence.rows]
        ours.append(((got - sequence.float32) ** 2).mean())
        theirs.append(((sequence.bfloat16.astype(np.float32) - sequence.float32) ** 2).mean())
    assert np.sqrt(np.mean(ours)) <= 1.15 * np.sqrt(np.mean(theirs))


def test_control_rope_theta_shows():
    name = golden.TINY[0]
    cfg, params = loaded(name, "float32")
    other = dataclasses.replace(cfg, rope_theta=cfg.rope_theta * 2)
    sequence = max(golden.sequences(name), key=lambda s: len(s.ids))
    got = logits(other, Numerics(compute_dtype="float32"), params, sequence.ids)[sequence.rows]
    assert np.abs(got - sequence.float32).max() / np.abs(sequence.float32).max() > 1e-4


def test_smollm2_greedy_text_equals_hugging_faces():
    folder = smollm2.folder()
    cfg = ModelConfig.load(folder)
    config = EngineConfig(
        max_seqs=8, max_model_len=256, chunk_tokens=256, prompt_logprobs=False, seq_buckets=(8,), token_buckets=(256,)
    )
    engine = Engine(
        cfg, weights.load(folder, cfg, "float32"), Numerics(compute_dtype="float32"), config, warmup=False
    )
    chats = golden.smollm2_chats()
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    completions = engine.generate([chat["prompt"] for chat in chats], sampling)
    assert len(chats) == 8
    assert [c.token_ids.tolist() for c in completions] == [chat["greedy"] for chat in chats]

"""Sizes that a user picks reach no bit: page size, length of the decode loop; and what other numerics do."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from isomodel import replay
from isomodel.numerics import Numerics
from isomodel.rollout import SamplingParams
from pallas_kernels.attention import SPLIT, reference
from tests.isomodel.rollout import tiny


@pytest.fixture(scope="module")
def work():
    return tiny.work()


@pytest.mark.parametrize("page_size", [32, 128])
def test_page_size_does_not_reach_the_bits(work, page_size):
    prompts, sampling, want = work
    engine = tiny.engine(page_size=page_size, num_pages=1024 // page_size)
    got = engine.generate(prompts[4:], sampling[4:])
    tiny.assert_same_bits(got, want[4:])
    assert engine.config.table_width == 256 // page_size


@pytest.mark.parametrize("steps", [1, 16])
def test_length_of_the_decode_loop_does_not_reach_the_bits(work, steps):
    prompts, sampling, want = work
    engine = tiny.engine(decode_steps=steps)
    tiny.assert_same_bits(engine.generate(prompts, sampling), want)


@pytest.mark.parametrize("mode", ["iso", "native"])
def test_fp32_compute_and_the_control_that_native_numerics_do_not_keep_bits(work, mode):
    prompts, sampling, _ = work
    numerics = Numerics(mode=mode, compute_dtype="float32")
    together = tiny.engine(numerics=numerics).generate(prompts, sampling)
    apart = tiny.engine(numerics=numerics, prefix_cache=False)
    alone = [apart.generate([p], s)[0] for p, s in zip(prompts, sampling, strict=True)]
    scores = [tiny.score_as_trainer(tiny.params(numerics=numerics), c, numerics) for c in together]
    differ = sum(tiny.bits(a) != tiny.bits(b) for a, b in zip(together, alone, strict=True))
    off = sum(s.tobytes() != c.logprobs.tobytes() for s, c in zip(scores, together, strict=True))
    assert (differ, off) == (0, 0) if mode == "iso" else min(differ, off) > 0


def test_decode_over_the_edge_of_a_kv_split(monkeypatch):
    """The contract's own split: a sample that decodes across position 2048 against one prefill and against training.

    In fp32: bf16 rounds away most of what a split changes, and the control would not show it.
    """
    cfg = dataclasses.replace(tiny.CONFIG, max_positions=SPLIT + 128)
    numerics = Numerics(compute_dtype="float32")
    weights = tiny.params(0, cfg, numerics)
    sizes = dict(max_seqs=2, max_model_len=SPLIT + 64, num_pages=300, chunk_tokens=512, prefix_cache=False)
    buckets = dict(seq_buckets=(2,), token_buckets=(512,), prompt_logprobs=True, return_logits=False)
    engine = tiny.engine(weights, cfg, numerics, **sizes, **buckets)
    prompt = np.random.default_rng(0).integers(0, cfg.vocab_size, SPLIT - 4).astype(np.int32)
    (sampled,) = engine.generate([prompt], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    ids = np.concatenate([sampled.prompt_ids, sampled.token_ids])
    assert len(prompt) < SPLIT < len(ids) - 1, "it must decode over the edge"
    (read,) = engine.generate([ids], SamplingParams(max_tokens=1, seed=1, ignore_eos=True, prompt_logprobs=True))
    assert read.prompt_logprobs[len(prompt) :].tobytes() == sampled.logprobs.tobytes()

    def trained():
        return replay.trained_regions(cfg, numerics, weights, ids)["logprob"][len(prompt) - 1 : -1].tobytes()

    assert trained() == sampled.logprobs.tobytes()
    monkeypatch.setattr(reference, "SPLIT", SPLIT // 2)
    jax.clear_caches()
    try:
        assert trained() != sampled.logprobs.tobytes(), "control: another split must show"
    finally:
        jax.clear_caches()

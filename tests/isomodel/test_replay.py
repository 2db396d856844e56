"""The replay finds the region where bits part, and none where they do not."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from isomodel import replay, specs
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics

CFG = ModelConfig(
    family="qwen3", vocab_size=200, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=32, rms_norm_eps=1e-6, rope_theta=1e4, max_positions=256, tie_embeddings=True, qk_norm=True,
)  # fmt: skip
NUMERICS = Numerics()


@pytest.fixture(scope="module")
def params():
    return {name: w * (6 if w.ndim > 2 else 1) for name, w in specs.init_params(CFG, 3, jnp.bfloat16).items()}


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, CFG.vocab_size, 140)


def test_equal_bits_have_no_divergence(params, tokens):
    assert replay.first_divergence(CFG, NUMERICS, params, tokens, 120) is None
    assert replay.first_divergent_region(CFG, NUMERICS, params, tokens, 120).startswith("none")


@pytest.mark.parametrize("region, layer", [("silu_mul", 1), ("attention", 0), ("logprob", None), ("embed", None)])
def test_planted_ulp_is_found_in_its_region(params, tokens, monkeypatch, region, layer):
    clean = replay.rolled_regions

    def planted(*args):
        regions = {k: v.copy() for k, v in clean(*args).items()}
        array = regions[region] if layer is None else regions[region][layer]
        replay.bit_view(array)[131, ...] ^= 1
        return regions

    monkeypatch.setattr(replay, "rolled_regions", planted)
    found = replay.first_divergence(CFG, NUMERICS, params, tokens, 120)
    assert (found.region, found.layer, found.position, found.positions) == (region, layer, 131, 1)
    assert region in str(found)


def test_native_numerics_diverge_somewhere(params, tokens):
    assert replay.first_divergence(CFG, dataclasses.replace(NUMERICS, mode="native"), params, tokens, 120) is not None


def test_lengths_are_checked(params, tokens):
    with pytest.raises(ValueError, match="cannot replay 140 tokens with a prompt of 0"):
        replay.first_divergence(CFG, NUMERICS, params, tokens, 0)

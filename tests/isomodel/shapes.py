"""Shapes of real models, for tests that give them random weights; positions cut to what a test uses."""

from __future__ import annotations

import dataclasses

from isomodel.config import ModelConfig

SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    max_positions=4096,
    tie_embeddings=True,
    qk_norm=False,
)
QWEN3_06B = dataclasses.replace(
    SMOLLM2,
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    qk_norm=True,
)
QWEN3_8B = dataclasses.replace(
    QWEN3_06B, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, tie_embeddings=False
)

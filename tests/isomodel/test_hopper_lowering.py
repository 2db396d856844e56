"""The whole model on the Hopper kernels, lowered for CUDA on a CPU: layouts, shared memory and shapes fit, for every case."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from isomodel import model, specs
from isomodel.batch import Batch, TrainPages
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.rollout import programs


class Hopper(Numerics):
    """Numerics of a GPU process, as a CPU process lowers them."""

    impl = "hopper"


HOPPER = Hopper("iso", "hopper", "bfloat16")

SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    max_positions=512,
    tie_embeddings=True,
    qk_norm=False,
)
QWEN3_06B = dataclasses.replace(
    SMOLLM2,
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    qk_norm=True,
)
MODELS = {"smollm2": SMOLLM2, "qwen3-0.6b": QWEN3_06B}
SHAPES = programs.Shapes(num_pages=64, page_size=16, table_width=16, decode_steps=2, return_logits=True)


def lowered(fn, *args) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("remat", [False, True], ids=["train", "remat"])
def test_training_lowers(name, remat):
    cfg, T, S, P = MODELS[name], 256, 3, 2
    shape = jax.ShapeDtypeStruct
    row = shape((T,), jnp.int32)
    batch = Batch(row, row, row, shape((S + 1,), jnp.int32), shape((S,), jnp.int32), shape((S, P), jnp.int32))
    masters = {n: shape(s.shape, jnp.float32) for n, s in specs.weight_specs(cfg).items()}
    params = programs.abstract_params(cfg, HOPPER)

    def loss(masters, params, batch, targets_T, inv_temp_T):
        hidden_TD, _ = model.forward(cfg, HOPPER, params, batch, TrainPages(6, 128), masters=masters, remat=remat)
        return model.logprobs(cfg, HOPPER, params, hidden_TD, targets_T, inv_temp_T, masters=masters).sum()

    text = lowered(jax.grad(loss), masters, params, batch, row, shape((T,), jnp.float32))
    assert text.count("mosaic_gpu") >= 10  # its kernels are there, each as a custom call


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decode_lower(name):
    cfg = MODELS[name]
    for step, args in (
        (programs.mixed_step, programs.mixed_arguments(cfg, HOPPER, SHAPES, 256, 8)),
        (programs.decode_loop, programs.decode_arguments(cfg, HOPPER, SHAPES, 8)),
    ):
        text = lowered(functools.partial(step, cfg, HOPPER, SHAPES), *args)
        assert text.count("mosaic_gpu") >= 8

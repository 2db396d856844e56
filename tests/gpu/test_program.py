"""What XLA makes of a training step: each kernel runs once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from isomodel import model, specs
from isomodel.batch import Rows, TrainPages, make_batch
from isomodel.numerics import Numerics
from tests.isomodel import shapes

CONFIG = dataclasses.replace(
    shapes.QWEN3_06B, num_layers=3, hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=2, vocab_size=2000
)
T, PAGE = 1024, 128
A_LAYER = 9 + 5
"""Forward: two norms, qkv, rope, attention, o, gate_up, silu, down. Backward: all of these but the four GEMMs, which are XLA's dots."""
AROUND = 3
"""The last norm and its gradient, the embedding's gradient."""


def test_no_kernel_runs_twice():
    """Dynamic-slice fusion doubled every kernel whose result the backward keeps (`environment.FASTER` turns it off)."""
    batch = make_batch([Rows(np.zeros(T, np.int32), 0, T, range(T // PAGE))], PAGE, T=T, S=1, P=T // PAGE)
    masters = jax.eval_shape(lambda: specs.init_params(CONFIG, 0))
    params = jax.eval_shape(lambda p: specs.cast_params(p, jnp.bfloat16), masters)

    def step(masters, params, batch, cotangent):
        numerics, pages = Numerics("iso", "hopper", "bfloat16"), TrainPages(T // PAGE, PAGE)
        hidden, pull = jax.vjp(lambda m: model.forward(CONFIG, numerics, params, batch, pages, masters=m)[0], masters)
        return hidden, pull(cotangent)[0]

    cotangent = jax.ShapeDtypeStruct((T, CONFIG.hidden_size), jnp.bfloat16)
    text = jax.jit(step).lower(masters, params, batch, cotangent).compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu') == A_LAYER + AROUND  # layers are a loop: its body stands there once

"""The five cases of a model, traced at small shapes: what `isomodel contract show` derives a contract from.

A trainer and an engine trace their own steps instead. Bits do not depend on these shapes, so entries may not either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from isomodel import model
from isomodel.batch import Batch, KVCache, TrainPages
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.specs import weight_specs
from pallas_kernels import sample

ROWS = 256
SEQUENCES = 2
PAGE_SIZE = 128


def _batch(T: int, S: int, P: int) -> Batch:
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    return Batch(int32((T,)), int32((T,)), int32((T,)), int32((S + 1,)), int32((S,)), int32((S, P)))


def trace_cases(cfg: ModelConfig, numerics: Numerics) -> dict[str, Callable[[], None]]:
    """{case: function that traces it} for `derive`; computes nothing and needs no weights."""
    params = {name: jax.ShapeDtypeStruct(s.shape, numerics.dtype) for name, s in weight_specs(cfg).items()}
    masters = {name: jax.ShapeDtypeStruct(s.shape, jnp.float32) for name, s in weight_specs(cfg).items()}
    impl = numerics.impl
    pages = ROWS // PAGE_SIZE
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    cache = jax.eval_shape(lambda: KVCache.zeros(cfg, SEQUENCES * pages, PAGE_SIZE, numerics.dtype))

    def score(params, masters, batch, targets_T, inv_temp_T, remat=False):
        kv = TrainPages(SEQUENCES * pages, PAGE_SIZE)
        hidden_TD, _ = model.forward(cfg, numerics, params, batch, kv, masters=masters, remat=remat)
        return model.logprobs(cfg, numerics, params, hidden_TD, targets_T, inv_temp_T, masters=masters)

    def train(remat, masters, params, *rows):
        return jax.grad(lambda m: score(params, m, *rows, remat=remat).sum())(masters)

    def prefill(params, batch, cache, targets_T, inv_temp_T):
        hidden_TD, cache = model.forward(cfg, numerics, params, batch, cache)
        return model.logprobs(cfg, numerics, params, hidden_TD, targets_T, inv_temp_T), cache

    def decode(params, batch, cache, inv_temp_B, keys_B2, positions_B, top_k_B, top_p_B, min_p_B):
        hidden_BD, cache = model.forward(cfg, numerics, params, batch, cache)
        logits_BV = model.logits(cfg, numerics, params, hidden_BD)
        choice = (logits_BV, keys_B2, positions_B, inv_temp_B, top_k_B, top_p_B, min_p_B)
        return sample.sample(*choice, regions=("sample", "logprob"), impl=impl), cache

    rows = (_batch(ROWS, SEQUENCES, pages), int32((ROWS,)), float32((ROWS,)))
    B = SEQUENCES
    keys_B2 = jax.ShapeDtypeStruct((B, 2), jnp.uint32)
    requests = (float32((B,)), keys_B2, int32((B,)), int32((B,)), float32((B,)), float32((B,)))
    return {
        "train": lambda: jax.eval_shape(functools.partial(train, False), masters, params, *rows),
        "score": lambda: jax.eval_shape(lambda p, *r: score(p, None, *r), params, *rows),
        "remat": lambda: jax.eval_shape(functools.partial(train, True), masters, params, *rows),
        "prefill": lambda: jax.eval_shape(prefill, params, rows[0], cache, *rows[1:]),
        "decode": lambda: jax.eval_shape(decode, params, _batch(B, B, pages), cache, *requests),
    }

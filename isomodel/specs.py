"""Every weight of a model, declared once; loading, init, sharding and export derive from this table."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from isomodel.config import ModelConfig

Params = dict[str, jax.Array]
"""Weights by name, as `weight_specs` names them. A plain dict, so any JAX transformation takes it."""


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One weight.

    Attributes:
      shape: layers lead where the weight is stacked.
      axes: logical axis of each dimension (sharding.py maps them to the mesh); None is never sharded.
      init: "normal" (standard deviation 0.02, DeepSeek and Qwen's choice), "ones", or "scaled" (0.02 / sqrt(2 L), for the
        projections that write to the residual stream; GPT-2, section 2.3).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"


def weight_specs(cfg: ModelConfig) -> dict[str, WeightSpec]:
    """The weights of `cfg`, in a fixed order.

    Shapes: V vocabulary, D hidden, F intermediate, L layers, K KV heads, G query heads a KV head, H = K * G, d head_dim.
    qkv is grouped by KV head ([.., 0:G] queries, [.., G] key, [.., G + 1] value), so that a shard by KV head is a slice.
    """
    V, D, F, L = cfg.vocab_size, cfg.hidden_size, cfg.intermediate_size, cfg.num_layers
    H, K, G, d = cfg.num_heads, cfg.num_kv_heads, cfg.groups, cfg.head_dim
    S = WeightSpec
    specs = {
        "embed": S((V, D), ("vocab", "embed")),
        "layers.mixer_norm": S((L, D), ("layers", "embed"), "ones"),
        "layers.mixer.qkv": S((L, K, G + 2, d, D), ("layers", "kv_heads", None, None, "embed")),
    }
    if cfg.qk_norm:
        specs["layers.mixer.q_norm"] = S((L, d), ("layers", None), "ones")
        specs["layers.mixer.k_norm"] = S((L, d), ("layers", None), "ones")
    specs |= {
        "layers.mixer.o": S((L, D, H, d), ("layers", "embed", "heads", None), "scaled"),
        "layers.mlp_norm": S((L, D), ("layers", "embed"), "ones"),
        "layers.mlp.gate_up": S((L, 2, F, D), ("layers", None, "mlp", "embed")),
        "layers.mlp.down": S((L, D, F), ("layers", "embed", "mlp"), "scaled"),
        "final_norm": S((D,), ("embed",), "ones"),
    }
    if not cfg.tie_embeddings:
        specs["lm_head"] = S((V, D), ("vocab", "embed"))
    return specs


def init_params(cfg: ModelConfig, seed: int, dtype=jnp.float32) -> Params:
    """Random weights by each spec's `init`; the same bits for one seed on every machine of one JAX version."""
    params = {}
    for i, (name, spec) in enumerate(weight_specs(cfg).items()):
        if spec.init == "ones":
            params[name] = jnp.ones(spec.shape, dtype)
            continue
        scale = 0.02 / (math.sqrt(2 * cfg.num_layers) if spec.init == "scaled" else 1.0)
        key = jax.random.fold_in(jax.random.key(seed), i)
        params[name] = (jax.random.normal(key, spec.shape, jnp.float32) * scale).astype(dtype)
    return params


def cast_params(params: Params, dtype) -> Params:
    """The compute copy of the masters: one rounding each, made once per optimizer step."""
    return {name: w.astype(dtype) for name, w in params.items()}


def weight_faults(cfg: ModelConfig, params: Params, dtype) -> list[str]:
    """What keeps `params` from being the weights of `cfg` in `dtype`, in words; empty when nothing does."""
    specs = weight_specs(cfg)
    faults = [f"missing {n}" for n in specs if n not in params] + [f"unknown {n}" for n in params if n not in specs]
    return faults + [
        f"{n} is {params[n].dtype} {tuple(params[n].shape)}, expected {jnp.dtype(dtype)} {s.shape}"
        for n, s in specs.items()
        if n in params and (params[n].dtype != jnp.dtype(dtype) or tuple(params[n].shape) != s.shape)
    ]

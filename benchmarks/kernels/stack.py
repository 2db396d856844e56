"""Forward and backward of a Qwen3-8B-shaped stack of 8 layers over 16k tokens: our kernels against `native` numerics.

Native runs in a process of its own, under XLA's default flags: `python -m benchmarks.kernels.stack` starts both.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import separate, timing
from isomodel import model, specs
from isomodel.batch import Rows, TrainPages, make_batch
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=1024,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=8,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=16384,
    tie_embeddings=True,
    qk_norm=True,
)
PAGE = 128
WORK = {"8x2k": (8, 2048, "<= 1.03"), "1x16k": (1, 16384, "<= 1.06")}


def measure(mode: str) -> dict[str, float]:
    """Milliseconds of forward and of forward and backward of each piece of work under `mode`."""
    numerics = Numerics(mode, "auto", "bfloat16")
    masters = jax.jit(lambda: specs.init_params(CONFIG, 0))()
    params = jax.jit(lambda p: specs.cast_params(p, jnp.bfloat16))(masters)
    found = {}
    for name, (count, length, _) in WORK.items():
        rng = np.random.default_rng(0)
        pages = length // PAGE
        rows = [
            Rows(rng.integers(0, 1024, length), 0, length, range(i * pages, (i + 1) * pages)) for i in range(count)
        ]
        batch = make_batch(rows, PAGE, T=count * length, S=count, P=pages)
        cotangent = jax.random.normal(jax.random.key(1), (count * length, CONFIG.hidden_size), jnp.bfloat16)

        def forward(masters, params, batch, count=count, pages=pages):
            return model.forward(CONFIG, numerics, params, batch, TrainPages(count * pages, PAGE), masters=masters)[0]

        def both(masters, params, batch, cotangent, forward=forward):
            hidden, pull = jax.vjp(lambda m: forward(m, params, batch), masters)
            return hidden, pull(cotangent)[0]

        found[f"{name}-forward"] = timing.device_us(jax.jit(forward), None, params, batch, iterations=3) / 1e3
        found[name] = timing.device_us(jax.jit(both), masters, params, batch, cotangent, iterations=2) / 1e3
    return found


def rows() -> list[dict]:
    """One row a piece of work (benchmarks.report.record's fields)."""
    ours, native = (separate.call(mode, "stack", "measure", mode) for mode in ("iso", "native"))
    return [
        {
            "id": f"stack-{name}",
            "work": f"forward and backward of 8 layers of Qwen3-8B's shape, {count} x {length} tokens, fp32 masters",
            "metric": "ms",
            "ours": ours[name],
            "baseline": native[name],
            "baseline_name": "native numerics: XLA dots, cuDNN attention, XLA's default flags, own process",
            "target": target,
        }
        for name, (count, length, target) in WORK.items()
    ]


if __name__ == "__main__":
    print(json.dumps(rows(), indent=1))

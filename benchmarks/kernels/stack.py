"""Forward and backward of a Qwen3-8B-shaped stack of 8 layers over 16k tokens: our kernels against `native` numerics.

Native runs in a process of its own, under XLA's default flags: `python -m benchmarks.kernels.stack` starts both.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import separate, timing
from isomodel import model, specs
from isomodel.batch import Rows, TrainPages, make_batch
from isomodel.bench.work import SHAPES
from isomodel.numerics import Numerics

CONFIG = dataclasses.replace(
    SHAPES["qwen3-8b"], vocab_size=1024, num_layers=8, max_positions=16384, tie_embeddings=True
)
PAGE = 128
WORK = {"8x2k": (8, 2048, "<= 1.03"), "1x16k": (1, 16384, "<= 1.06")}


def measure(mode: str, name: str) -> float:
    """Milliseconds of forward and backward of WORK[name] under `mode`."""
    numerics = Numerics(mode, "auto", "bfloat16")
    masters = jax.jit(lambda: specs.init_params(CONFIG, 0))()
    params = jax.jit(lambda p: specs.cast_params(p, jnp.bfloat16))(masters)
    count, length, _ = WORK[name]
    rng = np.random.default_rng(0)
    pages = length // PAGE
    rows = [Rows(rng.integers(0, 1024, length), 0, length, range(i * pages, (i + 1) * pages)) for i in range(count)]
    batch = make_batch(rows, PAGE, T=count * length, S=count, P=pages)
    cotangent = jax.random.normal(jax.random.key(1), (count * length, CONFIG.hidden_size), jnp.bfloat16)

    # Of the layers alone: with 16 tokens to an entry of so small a vocabulary, the library's gradient of the embedding would
    # take 14 ms, ours next to nothing.
    layers = {name: w for name, w in masters.items() if name.startswith("layers.")}
    others = {name: w for name, w in masters.items() if name not in layers}

    def both(layers, others, params, batch, cotangent):
        def forward(layers):
            pages_of_layer = TrainPages(count * pages, PAGE)
            return model.forward(CONFIG, numerics, params, batch, pages_of_layer, masters=others | layers)[0]

        hidden, pull = jax.vjp(forward, layers)
        return hidden, pull(cotangent)[0]

    return timing.device_us(jax.jit(both), layers, others, params, batch, cotangent, iterations=2) / 1e3


def rows() -> list[dict]:
    """One row a piece of work (benchmarks.report.record's fields)."""

    def of(mode: str) -> dict[str, float]:
        """The pieces of work compile side by side; the modes do not: their memory together is more than a GPU's."""
        with concurrent.futures.ThreadPoolExecutor(len(WORK)) as pool:
            return dict(zip(WORK, pool.map(lambda name: separate.call(mode, "stack", "measure", mode, name), WORK)))

    ours, native = of("iso"), of("native")
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

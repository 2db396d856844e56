"""Another process, which compiles everything anew, has the same bits: a model's hidden rows, log-probabilities and gradients,
so every op's forward and backward."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from isomodel import model, specs
from isomodel.batch import Rows, TrainPages, make_batch
from isomodel.numerics import Numerics
from tests.isomodel import shapes
from tests.pallas_kernels import base

CONFIG = dataclasses.replace(
    shapes.QWEN3_06B, num_layers=2, hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=2, vocab_size=2000
)
NUMERICS = Numerics("iso", "hopper", "bfloat16")
PAGE, LENGTHS = 128, (1, 130, 257, 2100)
"""Packed sequences, around an edge of a KV block and past one of a split."""


def batch_and_pages():
    rng, rows, pages = np.random.default_rng(0), [], 0
    for n in LENGTHS:
        count = -(-n // PAGE)
        rows.append(Rows(rng.integers(0, CONFIG.vocab_size, n), 0, n, range(pages, pages + count)))
        pages += count
    T = 128 * -(-sum(LENGTHS) // 128)
    return make_batch(rows, PAGE, T=T, S=len(rows), P=max(len(r.pages) for r in rows)), pages, rng


def digests() -> dict[str, str]:
    """SHA-256 of each array of a forward and its gradient."""
    batch, pages, rng = batch_and_pages()
    T = batch.tokens_T.shape[0]
    targets = jnp.asarray(rng.integers(0, CONFIG.vocab_size, T), jnp.int32)
    inv_temp = jnp.asarray(rng.uniform(0.7, 1.4, T), jnp.float32)
    weight = jnp.asarray(rng.standard_normal(T), jnp.float32)
    masters = specs.init_params(CONFIG, 0)
    params = specs.cast_params(masters, jnp.bfloat16)

    def loss(masters):
        hidden, _ = model.forward(CONFIG, NUMERICS, params, batch, TrainPages(pages, PAGE), masters=masters)
        values = model.logprobs(CONFIG, NUMERICS, params, hidden, targets, inv_temp, masters=masters)
        return jnp.sum(values * weight), (hidden, values)

    (_, (hidden, values)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(masters)
    real = sum(LENGTHS)
    arrays = {"hidden": hidden[:real], "logprobs": values[:real]} | grads
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in arrays.values())
    return {name: hashlib.sha256(np.ascontiguousarray(x)).hexdigest() for name, x in arrays.items()}


def in_two_processes(run: Callable, module: str, *words: object, **environ: str) -> tuple[dict, dict]:
    """What `run(*words)` gives here, and what `python -m module *words`, with more variables in its environment, prints at the same
    time as its last line, in JSON."""
    root = pathlib.Path(__file__).parents[2]
    environ = os.environ | environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", module, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=root, env=environ) as other:
        mine = run(*words)
        said = other.communicate()[0]
    assert other.returncode == 0, said[-2000:]
    return mine, json.loads(said.splitlines()[-1])


def test_two_processes_have_the_same_bits():
    mine, theirs = in_two_processes(digests, "tests.gpu.test_processes")
    assert theirs.keys() == mine.keys() and len(mine) > 10
    words = lambda found: np.frombuffer(bytes.fromhex("".join(found[name] for name in mine)), np.uint32)  # noqa: E731
    assert base.differ(words(theirs), words(mine)) == 0, [name for name in mine if theirs[name] != mine[name]]


if __name__ == "__main__":
    print(json.dumps(digests()))

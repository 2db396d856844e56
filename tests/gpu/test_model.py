"""The whole model on the GPU: every gate of `isomodel verify`, on SmolLM2 and on random weights of Qwen3's shapes."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest

from isomodel import cli, specs, weights
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.verify import gates
from isomodel.verify.subject import Subject
from tests.isomodel import shapes, smollm2
from tests.pallas_kernels import base

HOPPER = Numerics("iso", "hopper", "bfloat16")

# A gate sees a fault in a layer of its shape, not in how many there are: four layers keep the run short.
QWEN3_8B = dataclasses.replace(shapes.QWEN3_8B, num_layers=4)


@functools.cache
def subject(name: str) -> Subject:
    if name == "smollm2":
        folder = smollm2.folder()
        cfg = ModelConfig.load(folder)
        return Subject(cfg, HOPPER, weights.load(folder, cfg, "bfloat16"))
    cfg = {"qwen3-0.6b": shapes.QWEN3_06B, "qwen3-8b": QWEN3_8B}[name]
    params = jax.jit(lambda: specs.init_params(cfg, 0, jnp.bfloat16))()
    # Ones and small normals hide reordering: norms off 1, and heavier tails than init gives.
    spread = lambda i, w: w * jnp.exp2(jax.random.randint(jax.random.key(i), w.shape, -2, 3).astype(jnp.bfloat16))  # noqa: E731
    params = {n: jax.jit(functools.partial(spread, i))(w) for i, (n, w) in enumerate(params.items())}
    return Subject(cfg, HOPPER, params)


MODELS = ("smollm2", "qwen3-0.6b", "qwen3-8b")
TOGETHER = (
    (gates.cases, gates.packing),
    (gates.preemption, gates.shapes),
    tuple(g for g in gates.ALL if g not in (gates.cases, gates.packing, gates.preemption, gates.shapes)),
)
"""Gates that run the same programs, so that one process compiles them once."""


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        pytest.param(name, gate, id=f"{name}-{gate.__name__}", marks=pytest.mark.xdist_group(f"{name}.{i}"))
        for name in MODELS
        for i, together in enumerate(TOGETHER)
        for gate in together
    ],
)
def test_gate(name, gate, request):
    result = gate(subject(name))
    base.COMPARED.append((result.compared, result.differing))
    request.node.user_properties.append(("row", f"{name}: {gate.__name__.replace('_', ' ')}"))
    assert result.compared > 0 and result.hazard_fired, result
    assert result.differing == 0, result


@pytest.mark.xdist_group("verify")
def test_verify_prints_zeros_and_a_fresh_process_agrees(tmp_path, capsys):
    """The command as a user runs it, with the gate that compiles everything again in another process."""
    config = dataclasses.replace(shapes.QWEN3_06B, num_layers=2, vocab_size=4096).to_hf()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["verify", str(tmp_path), "--random-weights", "0", "--tokens", "4", "--backend", "hopper"]) == 0
    assert "14 gates: 14 passed, 0 failed" in capsys.readouterr().out

"""Shardings from the weight table, on one device here and on eight virtual CPU devices in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from isomodel import sharding, specs, weights
from isomodel.config import ModelConfig
from isomodel.sharding import ShardingError
from tests.data import golden

NAME = "qwen3_gqa2_untied_bf16"

EIGHT_DEVICES = """
import json, sys, jax, numpy as np
from isomodel import sharding, weights
from isomodel.config import ModelConfig

folder = sys.argv[1]
cfg = ModelConfig.load(folder)
whole = {name: np.asarray(w) for name, w in weights.load(folder, cfg).items()}
out = {}
for sizes in [(8, 1, 1), (1, 8, 1), (1, 1, 2), (2, 2, 2), (1, 4, 2)]:
    mesh = sharding.make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
    shardings = sharding.weight_shardings(cfg, mesh)
    loaded = weights.load(folder, cfg, shardings=shardings)
    placed = sharding.place({name: jax.numpy.asarray(w) for name, w in whole.items()}, shardings)
    report = {}
    for name, w in loaded.items():
        shards = w.addressable_shards
        bits = whole[name].view(np.uint16)
        same, control = (
            all(np.array_equal(np.asarray(s.data).view(np.uint16), expected[s.index]) for s in shards)
            for expected in (bits, bits ^ 1)
        )
        report[name] = dict(
            shard=shards[0].data.shape,
            distinct=len({str(s.index) for s in shards}),
            same=same and not control and np.array_equal(np.asarray(w).view(np.uint16), bits),
            placed=placed[name].sharding == w.sharding,
            devices=len(w.sharding.device_set),
        )
    out[str(sizes)] = report
try:
    sharding.weight_shardings(cfg, sharding.make_mesh(1, 1, 8))
except sharding.ShardingError as e:
    out["refused"] = str(e)
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def eight() -> dict:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-c", EIGHT_DEVICES, golden.folder(NAME)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cfg() -> ModelConfig:
    return ModelConfig.load(golden.folder(NAME))


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (1, 1, 2), (2, 2, 2), (1, 4, 2)])
def test_every_shard_has_its_part_of_the_bytes(eight, cfg, sizes):
    report, table = eight[str(sizes)], specs.weight_specs(cfg)
    assert report.keys() == table.keys()
    _, fsdp, tensor = sizes
    cut = {"embed": fsdp, "vocab": tensor, "kv_heads": tensor, "heads": tensor, "mlp": tensor}
    for name, spec in table.items():
        parts = [cut.get(axis, 1) for axis in spec.axes]
        found = report[name]
        assert found["same"] and found["placed"], name
        assert found["shard"] == [size // part for size, part in zip(spec.shape, parts)], name
        assert found["distinct"] == np.prod(parts) and found["devices"] == np.prod(sizes), name
    assert report["layers.mixer.qkv"]["distinct"] == fsdp * tensor  # the loop above saw real cuts


def test_what_does_not_divide_is_refused_with_all_its_reasons(eight):
    assert eight["refused"].splitlines() == [
        "this mesh cannot hold the model:",
        "  - layers.mixer.qkv: kv_heads=2 does not divide by tensor=8",
        "  - layers.mixer.o: heads=4 does not divide by tensor=8",
    ]


def test_one_device_cuts_nothing(cfg):
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    shardings = sharding.weight_shardings(cfg, mesh)
    assert shardings.keys() == specs.weight_specs(cfg).keys()
    assert all(s.is_fully_replicated for s in shardings.values())
    params = weights.load(golden.folder(NAME), cfg, shardings=shardings)
    assert params["embed"].sharding == shardings["embed"]


def test_every_logical_axis_has_a_rule(cfg):
    axes = {axis for spec in specs.weight_specs(cfg).values() for axis in spec.axes if axis is not None}
    assert axes == sharding.RULES.keys()
    assert {axis for axis in sharding.RULES.values() if axis} <= set(sharding.MESH_AXES)


def test_other_rules(cfg):
    """Rules are data: a mesh of one name, everything whole but the vocabulary."""
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    rules = dict.fromkeys(sharding.RULES) | {"vocab": "x"}
    table = specs.weight_specs(cfg)
    assert sharding.partition_spec(table["embed"], mesh, rules) == jax.sharding.PartitionSpec("x", None)
    assert sharding.partition_spec(table["final_norm"], mesh, rules) == jax.sharding.PartitionSpec(None)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (2, 1, 1), (1, 3, 1), (-1, 1, -1)])
def test_a_mesh_that_the_devices_cannot_make(sizes):
    with pytest.raises(ShardingError, match="needs their product in devices; there are 1"):
        sharding.make_mesh(*sizes, devices=jax.devices()[:1])

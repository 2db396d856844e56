"""Where weights live on a device mesh, derived from the logical axes that specs.py declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isomodel.config import ModelConfig
from isomodel.specs import Params, WeightSpec, weight_specs

MESH_AXES = ("data", "fsdp", "tensor")
"""Replicas; weights cut along `embed`, gathered for use; heads, MLP columns and vocabulary cut (Megatron)."""

Rules = Mapping[str, str | None]
RULES: Rules = {
    "vocab": "tensor",
    "embed": "fsdp",
    "layers": None,
    "kv_heads": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
}
"""Logical axis -> mesh axis; None is not cut. `heads` and `kv_heads` are cut alike: a head stays with its KV head."""


class ShardingError(ValueError):
    """A model that a mesh cannot hold, or a mesh that the devices cannot make."""


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of `data * fsdp * tensor` devices, `tensor` innermost (on the fastest links).

    Args:
      devices: None takes all of the default backend.

    Raises:
      ShardingError: the sizes are not positive or do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = dict(zip(MESH_AXES, (data, fsdp, tensor)))
    shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    if min(sizes.values()) < 1 or data * fsdp * tensor != len(devices):
        raise ShardingError(f"a mesh of {shown} needs their product in devices; there are {len(devices)}")
    if len(devices) == 1:
        return Mesh(np.array(devices).reshape(1, 1, 1), MESH_AXES)
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=devices
    )


def partition_spec(spec: WeightSpec, mesh: Mesh, rules: Rules = RULES) -> PartitionSpec:
    """Mesh axis of each dimension of a weight. Mesh axes of size 1 are left out, so one device means no cut at all."""
    axes = [None if axis is None else rules[axis] for axis in spec.axes]
    return PartitionSpec(*(axis if axis is not None and mesh.shape[axis] > 1 else None for axis in axes))


def weight_shardings(cfg: ModelConfig, mesh: Mesh, rules: Rules = RULES) -> dict[str, NamedSharding]:
    """Sharding of every weight of `cfg`, for `weights.load` and `place`.

    Raises:
      ShardingError: a dimension does not divide by its mesh axis; all such are listed.
    """
    shardings, faults = {}, []
    for name, spec in weight_specs(cfg).items():
        partition = partition_spec(spec, mesh, rules)
        for size, logical, axis in zip(spec.shape, spec.axes, partition):
            if axis is not None and size % mesh.shape[axis]:
                faults.append(f"  - {name}: {logical}={size} does not divide by {axis}={mesh.shape[axis]}")
        shardings[name] = NamedSharding(mesh, partition)
    if faults:
        raise ShardingError("this mesh cannot hold the model:\n" + "\n".join(faults))
    return shardings


def place(params: Params, shardings: Mapping[str, NamedSharding]) -> Params:
    """Weights moved to their shardings; bytes only, no value changes."""
    return {name: jax.device_put(weight, shardings[name]) for name, weight in params.items()}

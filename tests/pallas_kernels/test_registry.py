"""Which backend serves on which machine: a clear refusal where ours cannot."""

from __future__ import annotations

import types

import jax
import pytest

from pallas_kernels import registry


def on(monkeypatch, capability):
    device = types.SimpleNamespace(compute_capability=capability, device_kind="NVIDIA Something")
    monkeypatch.setattr(jax, "devices", lambda: [device])


def test_a_hopper_gpu_runs_the_hopper_kernels(monkeypatch):
    on(monkeypatch, "9.0")
    assert registry.resolve_backend("auto", "gpu") == registry.resolve_backend("hopper", "gpu") == "hopper"


@pytest.mark.parametrize("backend", ["auto", "hopper", "reference"])
def test_another_gpu_is_refused_by_name(monkeypatch, backend):
    on(monkeypatch, "8.0")
    with pytest.raises(registry.Unsupported, match="JAX_PLATFORMS=cpu|backend=reference") as e:
        registry.resolve_backend(backend, "gpu")
    assert "NVIDIA Something has 8.0" in str(e.value)


def test_a_cpu_runs_the_reference_and_refuses_hopper():
    assert registry.resolve_backend("auto", "cpu") == "reference"
    with pytest.raises(registry.Unsupported, match="JAX runs on 'cpu'"):
        registry.resolve_backend("hopper", "cpu")

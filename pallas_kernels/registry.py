"""Which implementation of an op runs, and a record of what ran: the contract is derived from it."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import itertools
from typing import Any

import jax

from pallas_kernels import environment

IMPLEMENTATIONS = ("reference", "hopper", "native")
CAPABILITY = "9.0"
"""Compute capability that the Hopper kernels are written for and tested on."""

_recorder: contextvars.ContextVar[dict | None] = contextvars.ContextVar("recorder", default=None)
_recordings = itertools.count(1)
_trace_context = jax.make_user_context(0)


USE_BF16 = "set numerics.compute_dtype=bfloat16 (--dtype bfloat16)"
USE_CPU = "run this model with JAX_PLATFORMS=cpu, on the reference backend"
"""What to do where a Hopper kernel refuses a dtype, or a shape."""


class Unsupported(RuntimeError):
    """An implementation that was asked for by name cannot serve; the message says why."""


def resolve_backend(backend: str, platform: str) -> str:
    """Name of the iso implementation for `backend` ("auto", "reference", "hopper") on a JAX platform ("cpu", "gpu").

    Raises:
      Unsupported: "hopper" was asked for where it cannot run, or "auto" finds nothing that keeps bits.
    """
    reason = hopper_unsupported_reason(platform)
    if backend == "hopper":
        if reason:
            raise Unsupported(f"backend hopper cannot run here: {reason}; use backend=reference or backend=auto")
        return "hopper"
    if backend == "auto" and not reason:
        return "hopper"
    if platform != "cpu":
        raise Unsupported(
            f"backend reference keeps its bits on CPUs only, and JAX runs on {platform!r}; set JAX_PLATFORMS=cpu"
            + (f" (backend hopper cannot run here: {reason})" if reason else " or backend=hopper")
        )
    return "reference"


def hopper_unsupported_reason(platform: str) -> str | None:
    """Why the Hopper kernels cannot run on this platform; None if they can."""
    if platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU of compute capability {CAPABILITY}, and JAX runs on {platform!r}"
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != CAPABILITY:
        return (
            f"it needs compute capability {CAPABILITY} (H100, H200, GH200), and this {device.device_kind} has {capability}: "
            "its tensor cores may round otherwise, and nobody has tested them"
        )
    return None


def implementation(op: str, impl: str):
    """The module pallas_kernels.<op>.<impl>.

    Raises:
      Unsupported: that op has no such implementation.
      environment.EnvironmentFault: this process cannot keep the bits that an iso implementation claims.
    """
    if impl not in IMPLEMENTATIONS:
        raise Unsupported(f"unknown implementation {impl!r}; choose one of {', '.join(IMPLEMENTATIONS)}")
    if impl != "native":
        environment.check()
    try:
        return importlib.import_module(f"pallas_kernels.{op}.{impl}")
    except ModuleNotFoundError as e:
        raise Unsupported(f"op {op} has no implementation {impl!r} in this version") from e


@contextlib.contextmanager
def recording():
    """Collects {region: entry} of every op traced inside; `record` fills it.

    A function that was traced before is traced anew: JAX would answer from its cache, and nothing would be recorded.
    """
    entries: dict[str, dict[str, Any]] = {}
    token = _recorder.set(entries)
    try:
        with _trace_context(next(_recordings)):  # part of the key of JAX's caches
            yield entries
    finally:
        _recorder.reset(token)


def record(region: str, entry: dict[str, Any]) -> None:
    """Notes that `region` runs with `entry` (JSON values). Two different entries for one region are an error."""
    entries = _recorder.get()
    if entries is None:
        return
    if entries.setdefault(region, entry) != entry:
        raise AssertionError(f"region {region} is traced with two entries: {entries[region]} and {entry}")

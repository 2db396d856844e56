"""Device time of jitted calls on a GPU: medians, inputs too large for the cache or rotated, never zeros.

Processes that share a GPU compile side by side and measure one at a time: $ISOMODEL_GPU_LOCK names a file to lock meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler

BATCHES = 5


@contextlib.contextmanager
def alone():
    """The GPU to this process alone, among those with the same $ISOMODEL_GPU_LOCK. Not to be nested."""
    path = os.environ.get("ISOMODEL_GPU_LOCK")
    with open(path, "w") if path else contextlib.nullcontext() as f:
        if path:
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def compiled(f: Callable, *args) -> Callable:
    """jit(f), or f if it is jitted, compiled for these arguments; f if it is compiled.

    Alone where XLA is to pick kernels by trying them on the GPU, as its default flags have it.
    """
    if isinstance(f, jax.stages.Compiled):
        return f
    lowered = (f if hasattr(f, "lower") else jax.jit(f)).lower(*args)
    tries = "--xla_gpu_autotune_level=0" not in os.environ.get("XLA_FLAGS", "")
    with alone() if tries else contextlib.nullcontext():
        return lowered.compile()


def device_us(f: Callable, *args, iterations: int = 20) -> float:
    """Median over `BATCHES` batches of the mean device time of one call of jit(f)(*args), in microseconds.

    Calls are queued back to back and awaited once, so that the host stays out of it; a call shorter than about 100 us is
    bound by the host's dispatch: use `kernel_us` or `loop_us` there.
    """
    g = compiled(f, *args)
    times = []
    with alone():
        jax.block_until_ready(g(*args))
        jax.block_until_ready(g(*args))
        for _ in range(BATCHES):
            start = time.perf_counter()
            out = None
            for _ in range(iterations):
                out = g(*args)
            jax.block_until_ready(out)
            times.append((time.perf_counter() - start) / iterations * 1e6)
    return statistics.median(times)


def in_turn_us(programs: dict[str, tuple[Callable, tuple]], iterations: int = 3, rounds: int = 11) -> dict[str, float]:
    """Median over rounds of the mean device time of one call of each (compiled function, arguments), in microseconds.

    They are measured one after the other in each round, each round begins with another, and the GPU is kept busy and alone from
    the first to the last: what its clock does it does to all.
    """
    times: dict[str, list[float]] = {name: [] for name in programs}
    order = list(programs.items())
    with alone():
        for f, args in programs.values():
            jax.block_until_ready(f(*args))
        for _ in range(rounds):
            for name, (f, args) in order:
                jax.block_until_ready(f(*args))
                start = time.perf_counter()
                for _ in range(iterations):
                    out = f(*args)
                jax.block_until_ready(out)
                times[name].append((time.perf_counter() - start) / iterations * 1e6)
            order = order[1:] + order[:1]
    return {name: statistics.median(values) for name, values in times.items()}


def kernel_us(f: Callable, *args, iterations: int = 20) -> float:
    """Median of the summed time of the kernels of one call of jit(f)(*args) by CUPTI, in microseconds: no launch gaps."""
    g = compiled(f, *args)
    with alone():
        jax.block_until_ready(g(*args))
        _, milliseconds = profiler.measure(g, iterations=iterations)(*args)
    return statistics.median(milliseconds) * 1e3


def loop_us(step: Callable, x: jax.Array, *args, trips: int = 20, once: Callable | None = None) -> float:
    """Median time of one trip of a loop on the device that carries x, x = step(i, x, *args), in microseconds: launches
    and gaps as a model's own loop has them. once(x, *args), computed before the loop, is one more argument of step."""

    def loop(x, *args):
        more = () if once is None else (once(x, *args),)
        return lax.fori_loop(0, trips, lambda i, x: step(i, x, *args, *more), x)

    run = compiled(loop, x, *args)
    times = []
    with alone():
        jax.block_until_ready(run(x, *args))
        for _ in range(BATCHES):
            start = time.perf_counter()
            jax.block_until_ready(run(x, *args))
            times.append((time.perf_counter() - start) / trips * 1e6)
    return statistics.median(times)


@functools.cache
def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, bytes read plus bytes written: the ceiling of memory-bound work."""
    x = jax.random.bits(jax.random.key(0), (1 << 29,), jnp.uint32)  # of XLA's elementwise loops the one that copies fastest
    us = device_us(jax.jit(lambda x: x ^ 1), x, iterations=10)
    return 2 * x.nbytes / (us * 1e-6)

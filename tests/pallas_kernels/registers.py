"""Stand-ins for what JAX's GPU interpreter lacks, so that a kernel's own body runs in it: wgmma with an operand in registers
or an accumulator that begins at given values, TMA that adds, predicated copies, counters between programs.

Accumulators become values that the loops carry; the interpreter runs programs one after the other, in launch order, so that
a counter need not be waited for. Barriers, copies into shared memory and what reads it stay the interpreter's.
"""

from __future__ import annotations

import contextlib
import types

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic


class Accumulator:
    """A value in place of a wgmma accumulator."""

    def __init__(self, value):
        self.value = value

    def __getitem__(self, _):
        return self.value


class _Shape:
    """plgpu.ACC of the stand-in."""

    def __init__(self, shape, dtype=jnp.float32):
        self.start = jnp.zeros(shape, dtype)

    @classmethod
    def init(cls, value):
        made = cls(())
        made.start = value
        return made


class _Over:
    """A module with some names replaced."""

    def __init__(self, module, **names):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


@contextlib.contextmanager
def emulated(module: types.ModuleType, **names):
    """`module`'s plgpu, pl and lax replaced by the stand-ins inside, and its own `names`."""
    live: list[Accumulator] = []

    def with_accumulators(f, starts):
        accumulators = [Accumulator(x) for x in starts]
        live.extend(accumulators)
        out = f(*accumulators)
        del live[len(live) - len(accumulators) :]
        return out, tuple(a.value for a in accumulators)

    def run_scoped(f, *shapes, **options):
        if not any(isinstance(s, _Shape) for s in shapes):
            return pl.run_scoped(f, *shapes, **options)
        return with_accumulators(f, [s.start for s in shapes])[0]

    def run_state(f):
        return lambda shapes: with_accumulators(lambda *refs: f(refs), [s.start for s in shapes])[1]

    def fori_loop(low, high, body, init):
        carried = list(live)

        def step(i, state):
            values, carry = state
            for a, x in zip(carried, values, strict=True):
                a.value = x
            carry = body(i, carry)
            return tuple(a.value for a in carried), carry

        values, carry = lax.fori_loop(low, high, step, (tuple(a.value for a in carried), init))
        for a, x in zip(carried, values, strict=True):
            a.value = x
        return carry

    def wgmma(accumulator, a, b):
        if isinstance(a, jax.Array):
            product = jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32))
            plgpu.commit_smem()  # a plain read here, where the tensor core's needs no fence before TMA writes
        else:

            def multiply(acc):
                plgpu.wgmma(acc, a, b)
                return acc[...]

            product = pl.run_scoped(multiply, plgpu.ACC(accumulator.value.shape, jnp.float32))
        accumulator.value += product

    def copy_smem_to_gmem(source, target, predicate=None, *, reduction_op=None, **options):
        if reduction_op:
            target[...] += source[...]
        elif predicate is not None:
            pl.when(predicate)(lambda: plgpu.copy_smem_to_gmem(source, target, **options))
        else:
            plgpu.copy_smem_to_gmem(source, target, **options)

    def axis_index(name):
        # Two warps of the third warpgroup are the third and fourth thread: warps of their own would be four more.
        wg = lax.axis_index("wg")
        return (
            {"wg": jnp.minimum(wg, 2), "warp": wg - 2}.get(name, wg) if name in ("wg", "warp") else lax.axis_index(name)
        )

    def kernel(body, **options):
        return mosaic.kernel(body, **options | {"num_threads": 4})

    class Counters:
        at = property(lambda self: self)

        def __getitem__(self, _):
            return self

    replaced = {
        "plgpu": _Over(
            plgpu,
            ACC=_Shape,
            wgmma=wgmma,
            wgmma_wait=lambda n: None,
            copy_smem_to_gmem=copy_smem_to_gmem,
            semaphore_wait=lambda *args, **options: None,
            semaphore_signal=lambda *args, **options: None,
        ),
        "pl": _Over(
            pl,
            run_scoped=run_scoped,
            run_state=run_state,
            get_global=lambda what: Counters(),
            kernel=lambda body, **options: body,
        ),
        "lax": _Over(lax, fori_loop=fori_loop, axis_index=axis_index),
        "mosaic": _Over(mosaic, kernel=kernel),
    } | names
    before = {name: getattr(module, name) for name in replaced}
    try:
        for name, value in replaced.items():
            setattr(module, name, value)
        yield replaced
    finally:
        for name, value in before.items():
            setattr(module, name, value)

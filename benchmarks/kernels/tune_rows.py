"""Times the schedules of the row kernels and refuses one whose bits differ: what the `schedule` functions were set by.

`python -m benchmarks.kernels.tune_rows [norm|rope|silu ...]` prints, for each piece of work, microseconds and TB/s of each
schedule, the picked one first.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import timing
from pallas_kernels.qk_norm_rope import hopper as rope
from pallas_kernels.qk_norm_rope import hopper_backward as rope_backward
from pallas_kernels.rms_norm import hopper as norm
from pallas_kernels.rms_norm import hopper_backward as norm_backward
from pallas_kernels.silu_mul import hopper as silu

EPS = 1e-6
ROWS = (256, 16384)
WIDTHS, HEADS, INTERMEDIATES = (576, 1024, 4096, 8192), ((3, 5, 64), (8, 4, 128), (8, 6, 128)), (3072, 12288)
NORM_PLANS = [(r, s, p) for r in (2, 4, 8, 16) for s, p in ((2, 3), (2, 4), (3, 1), (3, 2), (4, 2))]
ROPE_PLANS = [(2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (4, 1)]
SILU_PLANS = [(r, s, p) for r in (4, 8, 16, 32) for s, p in ((4, 3), (4, 6), (3, 4))]
ROPE_BACKWARD_PLANS = [(8, 2, 1), (8, 2, 2), (8, 3, 1), (8, 4, 1), (4, 2, 3), (4, 3, 2)]


def make(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def norms():
    for T in ROWS:
        for D in WIDTHS:
            for residual in (None, make(1, T, D)):
                name = f"norm {T}x{D}{'' if residual is None else ' with residual'}"
                plans = [p for p in NORM_PLANS if p[0] >= 4 or norm.row_warps(D) == 4]
                args = (make(0, T, D), residual, make(2, D))
                yield (
                    name,
                    functools.partial(norm._call, eps=EPS),
                    args,
                    norm.schedule(T, D, residual is not None),
                    plans,
                )
            args = (make(0, T, D), make(2, D), make(3, T, D), make(4, T, D))
            call = functools.partial(norm_backward._call, eps=EPS)
            yield f"norm {T}x{D} backward", call, args, norm_backward.schedule(D), NORM_PLANS


def ropes():
    for T in ROWS:
        for K, g2, d in HEADS:
            args = (make(0, T, K, g2, d), make(1, T, 2, d // 2), (make(2, d), make(3, d)))
            name, picked = f"rope {T}x{K}x{g2}x{d}", rope.schedule((K, g2, d))
            yield name, functools.partial(rope._call, eps=EPS), args, picked, ROPE_PLANS
            args += (make(4, T, K, g2 - 2, d), make(5, T, K, d), make(6, T, K, d))
            call, picked = functools.partial(rope_backward._call, eps=EPS), rope_backward.schedule((K, g2, d))
            yield f"{name} backward", call, args, picked, ROPE_BACKWARD_PLANS


def silus():
    for T in ROWS:
        for F in INTERMEDIATES:
            yield f"silu {T}x2x{F}", silu._call, (make(0, T, 2 * F),), silu.schedule(T, F), SILU_PLANS


def same(a, b) -> bool:
    """Whether two results have the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(*(np.asarray(x).view(np.uint16) for x in pair)) for pair in pairs)


def main(ops: list[str]) -> None:
    for op, work in {"norm": norms, "rope": ropes, "silu": silus}.items():
        if ops and op not in ops:
            continue
        for name, call, args, picked, plans in work():
            want = call(*args, plan=picked)
            moved = sum(x.nbytes for x in jax.tree.leaves((args, want)))
            for plan in [picked, *(p for p in plans if p != picked)]:
                try:
                    got = call(*args, plan=plan)
                except ValueError:  # more shared memory than there is
                    continue
                if not name.endswith("backward") and not same(got, want):  # of gradients no bits are claimed
                    raise SystemExit(f"{name}: schedule {plan} has other bits than {picked}")
                us = timing.kernel_us(functools.partial(call, plan=plan), *args)
                print(
                    f"{name}: {plan} {us:.1f} us, {moved / us / 1e6:.2f} TB/s{' (picked)' * (plan == picked)}",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])

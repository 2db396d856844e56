"""Times the schedules of the row kernels and refuses one whose bits differ: what the `schedule` functions were set by.

`python -m benchmarks.kernels.tune_rows [norm|rope|silu ...]` prints, for each piece of work, microseconds and TB/s of each
schedule, the picked one first, and at the end where another was faster by more than 3 %.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
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
from pallas_kernels.silu_mul import hopper_backward as silu_backward
from pallas_kernels.weight import as_weight

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
                args = (make(0, T, D), residual, as_weight(make(2, D)))
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
            args = (make(0, T, K, g2, d), make(1, T, 2, d // 2), (as_weight(make(2, d)), as_weight(make(3, d))))
            name, picked = f"rope {T}x{K}x{g2}x{d}", rope.schedule((K, g2, d))
            yield name, functools.partial(rope._call, eps=EPS), args, picked, ROPE_PLANS
            args = (
                *args[:2],
                tuple(w.value for w in args[2]),
                make(4, T, K, g2 - 2, d),
                make(5, T, K, d),
                make(6, T, K, d),
            )
            call, picked = functools.partial(rope_backward._call, eps=EPS), rope_backward.schedule((K, g2, d))
            yield f"{name} backward", call, args, picked, ROPE_BACKWARD_PLANS


def silus():
    for T in ROWS:
        for F in INTERMEDIATES:
            args = (make(0, T, 2 * F),)
            yield f"silu {T}x2x{F}", silu._call, args, silu.schedule(T, F), SILU_PLANS
            args += (make(1, T, F),)
            yield f"silu {T}x2x{F} backward", silu_backward._call, args, silu_backward.schedule(T, F), SILU_PLANS


def same(a, b) -> bool:
    """Whether two results have the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(*(np.asarray(x).view(np.uint16) for x in pair)) for pair in pairs)


def compiled(call, args, plan):
    """`call` with this schedule, compiled; None where it needs more shared memory than there is."""
    try:
        return jax.jit(functools.partial(call, plan=plan)).lower(*args).compile()
    except ValueError:
        return None


def main(ops: list[str]) -> None:
    slow = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for op, work in {"norm": norms, "rope": ropes, "silu": silus}.items():
            if ops and op not in ops:
                continue
            todo = []
            for name, call, args, picked, plans in work():
                order = [picked, *(p for p in plans if p != picked)]
                todo.append((name, args, {plan: pool.submit(compiled, call, args, plan) for plan in order}))
            for name, args, programs in todo:
                us, want = {}, None
                for plan, program in programs.items():
                    run = program.result()
                    if run is None:
                        continue
                    with timing.alone():
                        got = run(*args)
                    want = got if want is None else want
                    if not name.endswith("backward") and not same(got, want):  # of gradients no bits are claimed
                        raise SystemExit(f"{name}: schedule {plan} has other bits than the picked one")
                    us[plan] = timing.kernel_us(run, *args, iterations=10)
                moved = sum(x.nbytes for x in jax.tree.leaves((args, want)))
                print(
                    name + ": " + ", ".join(f"{p} {t:.1f} us {moved / t / 1e6:.2f} TB/s" for p, t in us.items()),
                    flush=True,
                )
                picked, best = next(iter(us)), min(us, key=us.get)
                if us[picked] > 1.03 * us[best]:
                    slow.append(f"{name}: {picked} {us[picked]:.1f} us, {best} {us[best]:.1f} us")
    print("\n".join(slow) or "no schedule was faster than the picked one by more than 3 %")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Measures the attention schedules on a GPU and rewrites the tables in pallas_kernels/attention/schedules.py.

    python -m benchmarks.kernels.tune_attention

A schedule whose bits differ from the canonical one's is refused, however fast it is.
"""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import timing
from pallas_kernels.attention import SPLIT, hopper_decode, hopper_forward, schedules
from pallas_kernels.attention.hopper_tiles import Shape
from pallas_kernels.attention.schedules import SHARED_BYTES, Few, Many

PAGE = 64
HEADS = {64: (32, 8), 128: (32, 8), 256: (16, 4)}
"""Query and KV heads, by head_dim."""
KERNELS = {"MANY": hopper_forward, "FEW": hopper_decode}
CANONICAL = {"MANY": Many(1, 2, False, False, False), "FEW": Few(1, 2, False)}
CANDIDATES = {
    "MANY": [
        Many(warpgroups, slots, overlap, park, turns)
        for warpgroups, turns in ((2, True), (2, False), (3, True), (3, False))
        for slots in (2, 3, 4, 5, 6, 8)
        for overlap in (True, False)
        for park in (True, False)
    ],
    "FEW": [Few(pairs, slots, overlap) for pairs in (1, 2) for slots in (2, 3, 4, 6, 12) for overlap in (True, False)],
}


class BitsDiffer(RuntimeError):
    """A schedule reaches the bits."""


def candidates(table: str, d: int) -> list:
    """Those that fit an SM and leave no room for more slots; three warpgroups only where O is small."""
    fit = [
        s
        for s in CANDIDATES[table]
        if s.shared_bytes(d) <= SHARED_BYTES and (table == "FEW" or s.warpgroups < 3 or d == 64)
    ]
    alike = lambda s: tuple(v for name, v in vars(s).items() if name != "slots")  # noqa: E731
    most = {alike(s): max(t.slots for t in fit if alike(t) == alike(s)) for s in fit}
    return [s for s in fit if s.slots == most[alike(s)]]


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def sequences(d: int, q_len, kv_len) -> tuple:
    """Operands of the op: each sequence's newest q_len tokens, over kv_len positions."""
    H, K = HEADS[d]
    need = -(-np.asarray(kv_len) // PAGE)
    pages = np.random.default_rng(1).permutation(int(need.sum()))
    tables = np.zeros((len(need), need.max()), np.int32)
    tables[np.arange(need.max())[None] < need[:, None]] = pages
    q_start = jnp.asarray(np.cumsum([0, *q_len]), jnp.int32)
    paged = (draw(i, len(pages), PAGE, K, d) for i in (1, 2))
    return draw(0, int(sum(q_len)), H, d), *paged, q_start, jnp.asarray(kv_len, jnp.int32), jnp.asarray(tables)


def runner(table: str, schedule=None):
    """The kernel, jitted, of the op's operands."""

    def run(q, k_pages, v_pages, *where):
        N, page, K, d = k_pages.shape
        flat = (x.reshape(N * page, K * d) for x in (k_pages, v_pages))
        layer = jnp.zeros((1,), jnp.int32)
        return KERNELS[table].attention(q, *flat, *where, layer, Shape(q.shape[1], K, d, page), schedule)

    return jax.jit(run)


def check(table: str, d: int, schedule) -> None:
    """Raises BitsDiffer if one row of packed sequences over several splits differs from the canonical schedule's."""
    args = sequences(d, (1, 300, 77, 2 * SPLIT + 90), (1, 300, SPLIT + 200, 2 * SPLIT + 90))
    got, want = (runner(table, s)(*args)[0].view(jnp.int16) for s in (schedule, CANONICAL[table]))
    if differ := int((got != want).any((1, 2)).sum()):
        raise BitsDiffer(f"head_dim {d}, {schedule}: {differ} rows differ from {CANONICAL[table]}")


WORK = {
    "MANY": ((8192,) * 2, (8192,) * 2),
    "FEW": ((1,) * 256, tuple(np.random.default_rng(0).integers(2048, 8193, 256).tolist())),
}
"""What the tables are measured on: lengths of queries and of keys."""


def fastest(table: str, d: int):
    """The candidate with the least time; the first of equals within 1 %."""
    args = sequences(d, *WORK[table])
    times = {}
    for schedule in candidates(table, d):
        check(table, d, schedule)
        times[schedule] = timing.device_us(runner(table, schedule), *args, iterations=5)
        print(f"head_dim {d}: {times[schedule]:.0f} us, {schedule}", flush=True)
    return next(s for s, us in times.items() if us <= 1.01 * min(times.values()))


def source(table: str, entries: dict) -> str:
    """A table as Python source."""
    return f"{table} = {{\n" + "".join(f"    {d}: {s!r},\n" for d, s in entries.items()) + "}\n"


def main() -> None:
    path = pathlib.Path(schedules.__file__)
    text = path.read_text()
    for table in KERNELS:
        entries = {d: fastest(table, d) for d in HEADS}
        text, count = re.subn(
            rf"^{table} = {{\n.*?^}}\n", lambda _, e=entries, t=table: source(t, e), text, flags=re.DOTALL | re.M
        )
        if count != 1:
            raise RuntimeError(f"{path} has {count} tables {table}")
        path.write_text(text)
        print(source(table, entries), flush=True)


if __name__ == "__main__":
    main()

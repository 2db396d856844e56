"""Measures the attention schedules on a GPU and rewrites the tables in pallas_kernels/attention/schedules.py.

    python -m benchmarks.kernels.tune_attention

A schedule whose bits differ from the canonical one's is refused, however fast it is. Each table's head_dim has a process of
its own, since most of the time is the compiler's.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
import re
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import separate, timing
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


WORK = {
    "MANY": ((8192,) * 2, (8192,) * 2),
    "FEW": ((1,) * 256, tuple(np.random.default_rng(0).integers(2048, 8193, 256).tolist())),
}
"""What the tables are measured on: lengths of queries and of keys."""
CHECKED = {
    "MANY": ((1, 300, 77, 2 * SPLIT + 90), (1, 300, SPLIT + 200, 2 * SPLIT + 90)),
    "FEW": ((1, 100, 77, 1), (1, 300, SPLIT + 200, 2 * SPLIT + 90)),
}
"""What bits are compared on, as many of the rows: packed sequences around the ends of blocks and over several splits."""


def candidates(table: str, d: int) -> list:
    """The committed schedule, then those that fit an SM and leave no room for more slots; three warpgroups, or two pairs, only
    where O is small enough for their registers."""
    fit = [s for s in CANDIDATES[table] if s.shared_bytes(d) <= SHARED_BYTES and _fits_registers(s, d)]
    alike = lambda s: tuple(v for name, v in vars(s).items() if name != "slots")  # noqa: E731
    most = {alike(s): max(t.slots for t in fit if alike(t) == alike(s)) for s in fit}
    committed = getattr(schedules, table)[d]
    return [committed, *(s for s in fit if s.slots == most[alike(s)] and s != committed)]


def _fits_registers(schedule, d: int) -> bool:
    return d == 64 or (schedule.pairs < 2 or d < 256 if isinstance(schedule, Few) else schedule.warpgroups < 3)


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def where(q_len, kv_len, S: int | None = None, P: int | None = None) -> tuple:
    """(q_start, kv_len, page tables) of S sequences of at most P pages: each one's newest q_len tokens, over kv_len positions;
    sequences past those named have none."""
    q_len, kv_len = (np.pad(np.asarray(x), (0, (S or len(x)) - len(x))) for x in (q_len, kv_len))
    need = -(-kv_len // PAGE)
    tables = np.zeros((len(need), P or need.max()), np.int32)
    tables[np.arange(tables.shape[1])[None] < need[:, None]] = np.random.default_rng(1).permutation(int(need.sum()))
    return tuple(jnp.asarray(x, jnp.int32) for x in (np.cumsum([0, *q_len]), kv_len, tables))


def sequences(d: int, q_len, kv_len, S: int | None = None) -> tuple:
    """Operands of the op."""
    H, K = HEADS[d]
    pages = int((-(-np.asarray(kv_len) // PAGE)).sum())
    paged = (draw(i, pages, PAGE, K, d) for i in (1, 2))
    return draw(0, int(sum(q_len)), H, d), *paged, *where(q_len, kv_len, S)


def runner(table: str, schedule=None) -> Callable:
    """The kernel, jitted, of the op's operands."""

    def run(q, k_pages, v_pages, *where):
        N, page, K, d = k_pages.shape
        flat = (x.reshape(N * page, K * d) for x in (k_pages, v_pages))
        layer = jnp.zeros((1,), jnp.int32)
        return KERNELS[table].attention(q, *flat, *where, layer, Shape(q.shape[1], K, d, page), schedule)

    return jax.jit(run)


def compiled(programs: dict[str, Callable]) -> tuple[dict[str, Callable], dict[str, str]]:
    """(what became of each program, a function that compiles it; why there is none of the others).

    Mosaic loads its runtime with the first program, which must be alone then; the others are compiled side by side.
    """
    found, failed = {}, {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = {}
        for name, lower in programs.items():
            try:
                lowered = lower()
                if found or waiting:
                    waiting[name] = pool.submit(lowered.compile)
                else:
                    found[name] = lowered.compile()
            except Exception as e:  # noqa: BLE001  (of one program; the others are not lost)
                failed[name] = f"{type(e).__name__}: {str(e)[-300:]}"
        for name, program in waiting.items():
            try:
                found[name] = program.result()
            except Exception as e:  # noqa: BLE001
                failed[name] = f"{type(e).__name__}: {str(e)[-300:]}"
    return found, failed


def measure(table: str, d: int) -> list[tuple[float | None, str]]:
    """Of each candidate, in order: (microseconds, "") or (None, why it is refused).

    Raises:
      RuntimeError: the canonical schedule does not run.
    """
    q_len, kv_len = WORK[table]
    S = max(len(kv_len), len(CHECKED[table][0]))
    args = sequences(d, q_len, kv_len, S)
    to_check = *args[:3], *where(*CHECKED[table], *args[-1].shape)
    tried = candidates(table, d)
    plans = {"canonical": CANONICAL[table]} | {str(i): s for i, s in enumerate(tried)}
    programs, failed = compiled({n: lambda s=s: runner(table, s).lower(*args) for n, s in plans.items()})
    if "canonical" in failed:
        raise RuntimeError(failed["canonical"])
    with timing.alone():
        bits = {n: run(*to_check)[0].view(jnp.int16) for n, run in programs.items()}
        differ = {n: int((x != bits["canonical"]).any((1, 2)).sum()) for n, x in bits.items()}
    failed |= {n: f"{rows} rows differ from the canonical schedule's" for n, rows in differ.items() if rows}
    us = timing.in_turn_us({n: (run, args) for n, run in programs.items() if n not in failed})
    return [(us.get(str(i)), failed.get(str(i), "")) for i in range(len(tried))]


def fastest(table: str, d: int, measured: list[tuple[float | None, str]]):
    """The candidate with the least time; the committed one, or else the first, of equals within 2 %."""
    least = min((us for us, _ in measured if us is not None), default=0.0)
    tried = candidates(table, d)
    for schedule, (us, why) in zip(tried, measured, strict=True):
        print(f"head_dim {d}: {f'{us:.0f} us' if us else f'refused, {why}'}, {schedule}", flush=True)
    return next(
        (s for s, (us, _) in zip(tried, measured, strict=True) if us is not None and us <= 1.02 * least), tried[0]
    )


def source(table: str, entries: dict) -> str:
    """A table as Python source."""
    return f"{table} = {{\n" + "".join(f"    {d}: {s!r},\n" for d, s in entries.items()) + "}\n"


def main() -> int:
    """How many head_dims of a table could not be measured: they keep their entry."""
    path = pathlib.Path(schedules.__file__)
    text = path.read_text()
    jobs = [(table, d) for table in KERNELS for d in HEADS]
    lost = 0
    with separate.taking_turns(), concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        running = {job: pool.submit(separate.call, "iso", "tune_attention", "measure", *job) for job in jobs}
        for table in KERNELS:
            entries = {}
            for d in HEADS:
                try:
                    entries[d] = fastest(table, d, running[table, d].result())
                except RuntimeError as e:
                    print(f"{table}, head_dim {d}: {e}", file=sys.stderr, flush=True)
                    entries[d] = getattr(schedules, table)[d]
                    lost += 1
            text, count = re.subn(
                rf"^{table} = {{\n.*?^}}\n", lambda _, e=entries, t=table: source(t, e), text, flags=re.DOTALL | re.M
            )
            if count != 1:
                raise RuntimeError(f"{path} has {count} tables {table}")
            print(source(table, entries), flush=True)
    path.write_text(text)
    return lost


if __name__ == "__main__":
    sys.exit(main())

"""What the contract's constants cost: other values of them, measured beside the chosen ones before these are frozen.

Attention's KV block and split at each head_dim, the vocabulary's block, and the part of the vocabulary whose gradient is made
together. Schedules stay as they are tuned for the chosen values. `python -m benchmarks.kernels.constants` prints the rows.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.kernels import separate, timing
from benchmarks.kernels.tune_attention import HEADS, KERNELS, WORK, compiled, draw, sequences
from pallas_kernels import logprob
from pallas_kernels.attention import SPLIT, kv_block, schedules
from pallas_kernels.attention.hopper_tiles import Shape
from pallas_kernels.attention.schedules import Few, Many
from pallas_kernels.logprob import VOCAB_BLOCK, hopper_blocks, hopper_combine, hopper_head
from pallas_kernels.logprob import hopper as hopper_logprob

AREA = "constants"
ATTENTION_WORK = {
    "train": ("MANY", 5, WORK["MANY"], "causal forward, 2 x 8192 tokens"),
    "decode-8x2k": ("FEW", 300, ((1,) * 8, (2048,) * 8), "decode of 8 sequences of 2048"),
    "decode-4x32k": ("FEW", 100, ((1,) * 4, (32768,) * 4), "decode of 4 sequences of 32768"),
    "decode-256x2k-8k": ("FEW", 10, WORK["FEW"], "decode of 256 sequences of 2k to 8k"),
}
"""Which kernel serves it, calls in a loop on the device, lengths of queries and of keys, and in words."""
OTHER_BLOCK = {
    ("MANY", 256): Many(warpgroups=2, slots=2, overlap=False, park_in_shared=False, turns=False),
    ("FEW", 256): Few(pairs=1, slots=3, overlap=False),
}
"""Schedules of the block that the contract does not have, where the committed one with its slots in as many bytes is not best."""
VOCAB_BLOCKS = (64, 128, 256)
CHUNKS = (8192, 16384, 32768)
T, B, V, D = 4096, 256, 151936, 4096


@contextlib.contextmanager
def replaced(modules, **values) -> Iterator[None]:
    """The modules with other values of these globals, in those that have them."""
    ours = [(m, name, getattr(m, name)) for m in modules for name in values if hasattr(m, name)]
    try:
        for module, name, _ in ours:
            setattr(module, name, values[name])
        yield
    finally:
        for module, name, value in ours:
            setattr(module, name, value)


def choices(d: int) -> list[tuple[int, int]]:
    """KV block and split, the contract's first."""
    block = kv_block(d)
    return [(block, SPLIT), (block, SPLIT // 2), (block, SPLIT * 2), ({128: 64, 64: 128}[block], SPLIT)]


def attend(table: str, d: int, block: int, split: int, trips: int):
    """A loop of calls of a kernel that compute their lists once, as layers do, under any KV block and split."""
    schedule = getattr(schedules, table)[d]
    if block != kv_block(d):
        as_many_bytes = dataclasses.replace(schedule, slots=schedule.slots * kv_block(d) // block)
        schedule = OTHER_BLOCK.get((table, d), as_many_bytes)

    def run(q, k_pages, v_pages, *where):
        kernel = KERNELS[table]
        N, page, K, d = k_pages.shape
        flat = [x.reshape(N * page, K * d) for x in (k_pages, v_pages)]
        layer, shape = jnp.zeros((1,), jnp.int32), Shape(q.shape[1], K, d, page, block, split)
        schedule_of_list = (schedule,) if table == "MANY" else ()
        work = kernel.work_list(*where, len(q), shape, *schedule_of_list)
        call = lambda q: kernel.attention(q, *flat, *where, layer, shape, schedule, work)[0]  # noqa: E731
        return lax.fori_loop(0, trips, lambda i, q: call(q), q)

    return jax.jit(run)


def attention(d: int, name: str) -> tuple[dict[str, float], dict[str, str]]:
    """(microseconds of a piece of work under each choice that runs, why others do not), at one head_dim."""
    table, trips, lengths, _ = ATTENTION_WORK[name]
    args = sequences(d, *lengths)
    lower = {f"{b}-{s}": lambda b=b, s=s: attend(table, d, b, s, trips).lower(*args) for b, s in choices(d)}
    return _us(lower, args, trips)


def _us(lower: dict, args, trips: int = 1) -> tuple[dict[str, float], dict[str, str]]:
    """Of what there are functions to lower for; args: of all, or by name."""
    programs, failed = compiled(lower)
    of = args.get if isinstance(args, dict) else lambda _: args
    us = timing.in_turn_us({name: (program, of(name)) for name, program in programs.items()}, iterations=2)
    return {name: x / trips for name, x in us.items()}, failed


def vocabulary() -> tuple[dict[str, float], dict[str, str]]:
    """(microseconds of the forward and of decode's reduction by vocabulary block, of forward and backward by chunk; why others
    do not run)."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = draw(0, T, D), draw(1, V, D) * jnp.bfloat16(0.03)
    targets, inv_temp = jax.random.randint(keys[0], (T,), 0, V, jnp.int32), jnp.full(T, 1 / 0.9, jnp.float32)
    cotangent = jax.random.normal(keys[1], (T,))
    modules = (logprob, hopper_logprob, hopper_blocks, hopper_combine, hopper_head)
    lower, arguments = {}, {}

    def add(key, f, *args, **values):
        def lowered():
            with replaced(modules, **values):
                return jax.jit(f).lower(*args)

        lower[key], arguments[key] = lowered, args

    for block in VOCAB_BLOCKS:
        # As much shared memory at most, and each consumer its own slots: the loop's barriers rely on it.
        steps = hopper_blocks.STEPS * VOCAB_BLOCK // block // hopper_blocks.CONSUMERS * hopper_blocks.CONSUMERS
        values = dict(VOCAB_BLOCK=block, SHAPE=(hopper_head.ROWS, block), STEPS=steps)
        with replaced(modules, **values):
            z = jax.random.normal(keys[2], (B, logprob.padded_vocab(V))) * 3
        add(f"block-{block}-train", lambda *a: hopper_logprob.forward(*a), x, w, targets, inv_temp, **values)
        add(f"block-{block}-decode", lambda *a: hopper_logprob.reduce(*a), z, targets[:B], inv_temp[:B], **values)

    def loss(x, w):
        return jnp.sum(logprob.logprob(x, w, targets, inv_temp, regions=("a", "b"), impl="hopper") * cotangent)

    for chunk in CHUNKS:
        add(f"chunk-{chunk}-train", jax.grad(lambda *a: loss(*a), (0, 1)), x, w, CHUNK=chunk)
    return _us(lower, arguments)


def rows() -> list[dict]:
    """One row a value that is not the chosen one and a piece of work (benchmarks.report.record's fields)."""
    jobs = {("attention", d, name): (d, name) for d in HEADS for name in ATTENTION_WORK} | {("vocabulary",): ()}
    rows, found = [], {}
    with separate.taking_turns(), concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        running = {job: pool.submit(separate.call, "iso", "constants", job[0], *args) for job, args in jobs.items()}
        for job, future in running.items():
            try:
                found[job], failed = future.result()
            except RuntimeError as e:  # of one process; the others are not lost
                failed = {"all": e}
            for name, why in failed.items():
                print(*job, name, why, file=sys.stderr)
    if not any(found.values()):
        raise RuntimeError("nothing could be measured")

    def add(id: str, work: str, us: dict[str, float], key: str, chosen_key: str, chosen: str) -> None:
        if key != chosen_key and key in us and chosen_key in us:
            figures = {
                "metric": "us",
                "ours": us[key],
                "baseline": us[chosen_key],
                "baseline_name": f"as chosen: {chosen}",
            }
            rows.append({"id": id, "area": AREA, "work": work, **figures})

    for d in HEADS:
        heads = f"head_dim {d}, {HEADS[d][0]} query and {HEADS[d][1]} KV heads"
        chosen, *others = choices(d)
        for block, split in others:
            for name, (*_, what) in ATTENTION_WORK.items():
                us = found.get(("attention", d, name), {})
                work = f"attention, KV block {block}, split {split}, {heads}: {what}"
                keys = f"{block}-{split}", "-".join(map(str, chosen))
                add(f"attention-{d}-{keys[0]}-{name}", work, us, *keys, f"block {chosen[0]}, split {chosen[1]}")
    by_vocabulary = found.get(("vocabulary",), {})
    shape = f"vocabulary {V}, width {D}"
    for block in VOCAB_BLOCKS:
        for name, what in (("train", f"forward, {T} tokens"), ("decode", f"from logits, {B} rows")):
            keys = f"block-{block}-{name}", f"block-{VOCAB_BLOCK}-{name}"
            work = f"log-probability, vocabulary block {block}: {what}, {shape}"
            add(f"logprob-{keys[0]}", work, by_vocabulary, *keys, f"block {VOCAB_BLOCK}")
    for chunk in CHUNKS:
        keys = f"chunk-{chunk}-train", f"chunk-{hopper_head.CHUNK}-train"
        work = f"log-probability, gradient by {chunk} entries: forward + backward, {T} tokens, {shape}"
        add(f"logprob-{keys[0]}", work, by_vocabulary, *keys, f"{hopper_head.CHUNK} entries")
    return rows


if __name__ == "__main__":
    print(json.dumps(rows(), indent=1))

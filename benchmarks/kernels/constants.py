"""What the contract's constants cost: other values of them, measured beside the chosen ones before these are frozen.

Attention's KV block and split at each head_dim, the vocabulary's block, and the part of the vocabulary whose gradient is made
together. Schedules stay as they are tuned for the chosen values. `python -m benchmarks.kernels.constants` prints the rows.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.kernels import separate, timing
from benchmarks.kernels.tune_attention import HEADS, KERNELS, WORK, draw, sequences
from pallas_kernels import logprob
from pallas_kernels.attention import (
    BLOCK,
    SPLIT,
    hopper_decode,
    hopper_forward,
    hopper_softmax,
    hopper_tiles,
    hopper_walk,
    schedules,
)
from pallas_kernels.attention.hopper_tiles import Shape
from pallas_kernels.logprob import VOCAB_BLOCK, hopper_blocks, hopper_combine, hopper_head
from pallas_kernels.logprob import hopper as hopper_logprob

AREA = "constants"
ATTENTION = [(128, 1024), (128, 2048), (128, 4096), (64, 2048)]
"""KV block and split."""
ATTENTION_WORK = {
    "train": ("MANY", 5, WORK["MANY"], "causal forward, 2 x 8192 tokens"),
    "decode-8x2k": ("FEW", 300, ((1,) * 8, (2048,) * 8), "decode of 8 sequences of 2048"),
    "decode-4x32k": ("FEW", 100, ((1,) * 4, (32768,) * 4), "decode of 4 sequences of 32768"),
    "decode-256x2k-8k": ("FEW", 10, WORK["FEW"], "decode of 256 sequences of 2k to 8k"),
}
"""Which kernel serves it, calls in a loop on the device, lengths of queries and of keys, and in words."""
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


def attention_constants(block: int, split: int):
    """The kernels under another KV block and split than the contract's, in as much shared memory."""
    modules = (hopper_tiles, hopper_softmax, hopper_walk, hopper_forward, hopper_decode, schedules)
    return replaced(modules, BLOCK=block, SPLIT=split, PER_SPLIT=split // block)


def _attend(table: str, block: int, trips: int):
    """A loop of calls of a kernel that compute their lists once, as layers do."""

    def run(q, k_pages, v_pages, *where):
        kernel = KERNELS[table]
        N, page, K, d = k_pages.shape
        flat = [x.reshape(N * page, K * d) for x in (k_pages, v_pages)]
        layer, shape = jnp.zeros((1,), jnp.int32), Shape(q.shape[1], K, d, page)
        schedule = getattr(schedules, table)[d]
        schedule = dataclasses.replace(schedule, slots=schedule.slots * BLOCK // block)
        schedule_of_list = (schedule,) if table == "MANY" else ()
        work = kernel.work_list(*where[:2], where[2].shape[1], len(q), shape, *schedule_of_list)
        call = lambda q: kernel.attention(q, *flat, *where, layer, shape, schedule, work)[0]  # noqa: E731
        return lax.fori_loop(0, trips, lambda i, q: call(q), q)

    return jax.jit(run)


def attention(d: int) -> dict[str, float]:
    """Microseconds of each piece of work under each choice, at one head_dim."""
    work = {name: sequences(d, *lengths) for name, (_, _, lengths, _) in ATTENTION_WORK.items()}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = {}
        for block, split in ATTENTION:
            for name, (table, trips, _, _) in ATTENTION_WORK.items():
                with attention_constants(block, split):
                    lowered = _attend(table, block, trips).lower(*work[name])
                programs[f"{block}-{split}-{name}"] = pool.submit(lowered.compile), work[name], trips
        return {key: _us(*program) / trips for key, (*program, trips) in programs.items()}


def vocabulary() -> dict[str, float]:
    """Microseconds of the forward and of decode's reduction by vocabulary block, of forward and backward by chunk."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = draw(0, T, D), draw(1, V, D) * jnp.bfloat16(0.03)
    targets, inv_temp = jax.random.randint(keys[0], (T,), 0, V, jnp.int32), jnp.full(T, 1 / 0.9, jnp.float32)
    cotangent = jax.random.normal(keys[1], (T,))
    modules = (logprob, hopper_logprob, hopper_blocks, hopper_combine, hopper_head)
    programs = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:

        def submit(key, f, *args):
            programs[key] = pool.submit(jax.jit(f).lower(*args).compile), args

        for block in VOCAB_BLOCKS:
            # As much shared memory at most, and each consumer its own slots: the loop's barriers rely on it.
            steps = hopper_blocks.STEPS * VOCAB_BLOCK // block // hopper_blocks.CONSUMERS * hopper_blocks.CONSUMERS
            with replaced(modules, VOCAB_BLOCK=block, SHAPE=(hopper_head.ROWS, block), STEPS=steps):
                z = jax.random.normal(keys[2], (B, logprob.padded_vocab(V))) * 3
                submit(f"block-{block}-train", lambda *a: hopper_logprob.forward(*a), x, w, targets, inv_temp)
                submit(f"block-{block}-decode", lambda *a: hopper_logprob.reduce(*a), z, targets[:B], inv_temp[:B])

        def loss(x, w):
            return jnp.sum(logprob.logprob(x, w, targets, inv_temp, regions=("a", "b"), impl="hopper") * cotangent)

        for chunk in CHUNKS:
            with replaced(modules, CHUNK=chunk):
                submit(f"chunk-{chunk}-train", jax.grad(lambda *a: loss(*a), (0, 1)), x, w)
        return {key: _us(*program) for key, program in programs.items()}


def _us(program: concurrent.futures.Future, args: tuple) -> float:
    return timing.device_us(program.result(), *args, iterations=2)


def rows() -> list[dict]:
    """One row a value that is not the chosen one and a piece of work (benchmarks.report.record's fields)."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        of_head = {d: pool.submit(separate.call, "iso", "constants", "attention", d) for d in HEADS}
        of_vocabulary = pool.submit(separate.call, "iso", "constants", "vocabulary")
        by_head, by_vocabulary = {d: f.result() for d, f in of_head.items()}, of_vocabulary.result()
    rows = []

    def add(id: str, work: str, us: dict[str, float], key: str, chosen_key: str, chosen: str) -> None:
        if key != chosen_key:
            figures = {
                "metric": "us",
                "ours": us[key],
                "baseline": us[chosen_key],
                "baseline_name": f"as chosen: {chosen}",
            }
            rows.append({"id": id, "area": AREA, "work": work, **figures})

    for d, us in by_head.items():
        heads = f"head_dim {d}, {HEADS[d][0]} query and {HEADS[d][1]} KV heads"
        for block, split in ATTENTION:
            for name, (*_, what) in ATTENTION_WORK.items():
                keys = f"{block}-{split}-{name}", f"{BLOCK}-{SPLIT}-{name}"
                work = f"attention, KV block {block}, split {split}, {heads}: {what}"
                add(f"attention-{d}-{keys[0]}", work, us, *keys, f"block {BLOCK}, split {SPLIT}")
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

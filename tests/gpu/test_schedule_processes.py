"""Every schedule entry of an op, compiled anew in another process, gives the bits that it gives in this one.

Inside one process other tests compare each entry with a canonical one; here the two processes share nothing but the seed of their
operands, which is fresh in each run.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import secrets
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import SPLIT, hopper_decode, hopper_forward
from pallas_kernels.attention import schedules as attention_schedules
from pallas_kernels.gemm import hopper_small, schedules
from pallas_kernels.silu_mul.hopper_of_gemm import WIDE
from pallas_kernels.weight import Weight
from tests.gpu import (
    test_attention,
    test_attention_backward,
    test_gated,
    test_gemm,
    test_gemm_small,
    test_logprob,
    test_rows,
    test_sample,
)
from tests.gpu.test_processes import in_two_processes
from tests.pallas_kernels import base
from tests.pallas_kernels.ptx import early_reads

THREADS = 6
"""That compile side by side."""
Jobs = dict[str, Callable[[], object]]
"""By entry: what runs it, to its arrays."""


def large_gemm(rng: np.random.Generator) -> Jobs:
    x, w = base.spread(rng, 1000, 1024), base.spread(rng, 1096, 1024)
    run = lambda leaves, s: lambda: test_gemm.scheduled(x, w, leaves, s)  # noqa: E731
    return {f"{leaves} {s}": run(leaves, s) for leaves in (1, 8) for s in test_gemm.entries(leaves > 1)}


def few_tokens(rng: np.random.Generator) -> Jobs:
    x, w = base.spread(rng, 256, 2048), base.spread(rng, 1096, 2048)
    entries = dict.fromkeys((order, s) for (order, _), of in hopper_small.TABLE.items() for _, s in of)

    def run(order, s):
        rows = slice(0, s.tokens * s.join - 3)
        return lambda: test_gemm_small.run(x[rows], w, leaves=1 if order == "chain" else 8, schedule=s)

    return {f"{order} {s}": run(order, s) for order, s in entries}


def gated(rng: np.random.Generator) -> Jobs:
    F, K = test_gated.RAGGED
    x, w = base.spread(rng, 256, K), base.spread(rng, 2, F, K) * jnp.bfloat16(K**-0.5 / 16)

    def run(s):
        rows = slice(0, 253 if isinstance(s, schedules.Schedule) else s.tokens * s.join - 3)
        return lambda: test_gated.by(x[rows], w, s)

    return {str(s): run(s) for s in (*test_gated.FEW, *WIDE.values(), *test_gated.MANY)}


def attention(rng: np.random.Generator) -> Jobs:
    jobs: Jobs = {}
    tables = ((hopper_forward, attention_schedules.MANY), (hopper_decode, attention_schedules.FEW))
    for d, G in ((64, 3), (128, 4), (256, 8)):
        drawn = [test_attention.Sequence.draw(n, 2, G, d, seed=int(rng.integers(2**31))) for n in (SPLIT + 50, 300, 1)]
        pool = test_attention.Pool.of(drawn, page=64)
        whole = [(s, i, 0, len(s.q)) for i, s in enumerate(drawn)]
        last = [(s, i, len(s.q) - 1, len(s.q)) for i, s in enumerate(drawn)]
        for (kernel, table), work in zip(tables, (whole, last), strict=True):
            run = lambda kernel=kernel, work=work, pool=pool, s=table[d]: test_attention.run(kernel, work, pool, None, s)  # noqa: E731
            jobs[f"{kernel.__name__} {table[d]} {d}"] = run
        work = test_attention_backward.Work(test_attention_backward.WHOLE, 2 * G, 2, d, 128)
        q, *rest, o, lse, do = work.args
        do = base.spread(rng, *do.shape, binades=2)
        jobs[f"backward {d}"] = lambda args=(q, *rest, o, lse, do): test_attention_backward.backward(*args)
    return jobs


def rows(rng: np.random.Generator) -> Jobs:
    """Schedules of row kernels follow from the number of rows and their width."""
    jobs: Jobs = {}
    for name, operands in test_rows.CASES.items():
        for n in (37, 4096):
            x = [
                rng.integers(0, test_rows.MOST, n, np.int32) if shape == "positions" else base.spread(rng, n, *shape)
                for shape in operands
            ]
            jobs[f"{name} {n}"] = lambda name=name, x=x: test_rows.op(name, "hopper", *x)
            floats = [v for v in x if v.dtype == jnp.bfloat16]

            def gradient(*floats, name=name, rest=tuple(x[len(floats) :])):
                out, back = jax.vjp(lambda *f: test_rows.op.__wrapped__(name, "hopper", *f, *rest), *floats)
                return back(out)

            jobs[f"{name} {n} backward"] = lambda f=jax.jit(gradient), x=floats: f(*x)
    return jobs


def head(rng: np.random.Generator) -> Jobs:
    """Log-probabilities with their gradients, and samples."""
    V, D, T = 1000, 320, 1024
    x, w = base.spread(rng, T, D, binades=2), base.spread(rng, V, D, binades=2) * jnp.bfloat16(0.1)
    targets, inv_temp = jnp.asarray(rng.integers(0, V, T), jnp.int32), jnp.asarray(rng.uniform(0.5, 2, T), jnp.float32)
    weight = jnp.asarray(rng.standard_normal(T), jnp.float32)

    def loss(x, master):
        lp = test_logprob.train.__wrapped__(x, Weight(w, None, master), targets, inv_temp, "hopper")
        return jnp.sum(lp * weight), lp

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    jobs: Jobs = {
        "gradient": lambda: gradient(x, w.astype(jnp.float32)),
        "decode": lambda: test_logprob.decode(x[:257], w, targets[:257], inv_temp[:257]),
    }
    z, _, positions, *asked = test_sample.requests()
    z = z + jnp.asarray(rng.standard_normal(z.shape), jnp.float32)
    keys = jnp.asarray(rng.integers(0, 2**32, (test_sample.B, 2), dtype=np.uint32))
    for name, rest in (("whole", asked), ("truncated", test_sample.truncating()[3:])):
        jobs[f"sample {name}"] = lambda rest=tuple(rest): test_sample.draw(z, keys, positions, *rest)
    return jobs


FAMILIES = {f.__name__: f for f in (large_gemm, few_tokens, gated, attention, rows, head)}


def digests(family: str, seed: int, only: str | None = None) -> dict[str, tuple[str, int]]:
    """SHA-256 of each entry's arrays (of one entry's), and how many different words they hold."""
    jobs = FAMILIES[family](np.random.default_rng(seed))
    if only:
        jobs = {only: jobs[only]}

    def run(job):
        arrays = [np.ascontiguousarray(x) for x in jax.tree.leaves(job())]
        return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest(), sum(len(np.unique(base.bits(x))) for x in arrays)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(jobs, pool.map(run, jobs.values()), strict=True))


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.xdist_group(f"two processes, {f}")) for f in FAMILIES])
def test_every_entry_in_two_processes(family, tmp_path):
    """And no kernel reads a sum before it is complete, which some assembler may forgive."""
    seed = secrets.randbits(31)
    written = {"MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    mine, theirs = in_two_processes(digests, "tests.gpu.test_schedule_processes", family, seed, **written)
    kernels = {path.name: path.read_text() for path in tmp_path.glob("*.ptx")}
    assert {name: found for name, ptx in kernels.items() if (found := early_reads(ptx))} == {}
    assert any("wgmma" in ptx for ptx in kernels.values()) == (family != "rows"), "the control: products were looked at"
    assert list(theirs) == list(mine) and all(different > 100 for _, different in mine.values())
    words = lambda found: np.frombuffer(bytes.fromhex("".join(digest for digest, _ in found)), np.uint32)  # noqa: E731
    others = [name for name in mine if theirs[name][0] != mine[name][0]]
    assert base.differ(words(theirs.values()), words(mine.values())) == 0, (seed, others)
    first = next(iter(mine))
    control = digests(family, seed + 1, only=first)
    assert base.differ(words(control.values()), words([mine[first]])) > 0, "the control: other operands"


if __name__ == "__main__":
    print(json.dumps(digests(sys.argv[1], int(sys.argv[2]))))

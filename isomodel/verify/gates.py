"""The gates: each runs the same work under one hazard and compares bits with the work alone (DESIGN, section 9)."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from isomodel import model
from isomodel.batch import KVCache
from isomodel.contract import ContractMismatch, check, derive
from isomodel.contract.cases import trace_cases
from isomodel.rollout import SamplingParams
from isomodel.verify.subject import GateResult, Subject, Tally

Gate = Callable[[Subject], GateResult]


def needle(subject: Subject) -> GateResult:
    """One request alone, and inside batches of random order with strangers beside it."""
    tally, rng, strangers = Tally(), np.random.default_rng(1), 0
    engine = subject.engine()
    for _ in range(2):
        for _ in range(int(rng.integers(1, 5))):
            length = int(rng.integers(1, 120))
            engine.add_request(
                rng.integers(0, subject.cfg.vocab_size, length), SamplingParams(max_tokens=5, ignore_eos=True)
            )
            strangers += 1
        tally.add_completions(subject.run(engine, rng.permutation(len(subject.prompts)).tolist()), subject.alone)
    return tally.result("1 needle", "alone = in random batches", f"{strangers} strangers in 2 batches")


def cases(subject: Subject) -> GateResult:
    """Sampled log-probabilities of decode against scoring, training and rematerialised training, packed and alone."""
    tally = Tally()
    for mode, order in (("score", None), ("train", None), ("remat", None), ("train", range(len(subject.prompts)))):
        for got, want in zip(subject.score(subject.alone, mode, order), subject.alone, strict=True):
            tally.add(got, want.logprobs)
    edges = sum(len(c.prompt_ids) <= 128 < len(c.prompt_ids) + len(c.token_ids) for c in subject.alone)
    return tally.result(
        "2 cases", "decode = score = train = remat", f"{edges} sequences decode over the block edge", edges > 0
    )


def prefill(subject: Subject) -> GateResult:
    """Decode's log-probabilities against those of one prefill of the whole sequence."""
    tally = Tally()
    engine = subject.engine(prompt_logprobs=True)
    whole = [np.concatenate([c.prompt_ids, c.token_ids]) for c in subject.alone]
    sampling = [
        SamplingParams(max_tokens=1, seed=0, temperature=s.temperature, prompt_logprobs=True, ignore_eos=True)
        for s in subject.sampling
    ]
    for got, want in zip(engine.generate(whole, sampling), subject.alone, strict=True):
        tally.add(got.prompt_logprobs[len(want.prompt_ids) :], want.logprobs)
    rows = engine.stats().prefill_rows
    return tally.result("2 prefill", "decode = prefill", f"{rows} rows prefilled", rows >= sum(map(len, whole)))


def chunked_prefill(subject: Subject) -> GateResult:
    """Prompts cut in pieces of 7 and of 50 tokens."""
    tally, steps = Tally(), []
    for chunk in (7, 50):
        engine = subject.engine(chunk_tokens=chunk)
        tally.add_completions(subject.run(engine), subject.alone)
        steps.append(engine.stats().steps)
    fewest = sum(map(len, subject.prompts)) // 50
    return tally.result(
        "3 chunks", "prefill split anywhere", f"{steps[0]} and {steps[1]} steps", min(steps) > fewest // 2
    )


def prefix_cache(subject: Subject) -> GateResult:
    """A second run finds the pages of the first."""
    tally = Tally()
    engine = subject.engine(prefix_cache=True)
    subject.run(engine)
    before = engine.stats().prefix_hits
    tally.add_completions(subject.run(engine), subject.alone)
    hits = engine.stats().prefix_hits - before
    return tally.result("4 prefix", "prefix hit = cold cache", f"{hits} pages hit", hits > 0)


def preemption(subject: Subject) -> GateResult:
    """Too few pages for all: samples give theirs up and come back."""
    tally = Tally()
    prompts = subject.prompts[1:5]
    sampling = [dataclasses.replace(s, max_tokens=40) for s in subject.sampling[1:5]]
    wide = subject.engine()
    want = [wide.generate([p], [s])[0] for p, s in zip(prompts, sampling, strict=True)]
    # All prompts fit, what they grow to does not.
    engine = subject.engine(num_pages=sum(-(-len(p) // 16) for p in prompts) + 2)
    tally.add_completions(engine.generate(prompts, sampling), want)
    count = engine.stats().preemptions
    return tally.result("5 preempt", "preempted and resumed = not", f"{count} preemptions", count > 0)


def abort(subject: Subject) -> GateResult:
    """A neighbour is aborted while it decodes."""
    tally = Tally()
    engine = subject.engine()
    name = engine.add_request(subject.prompts[2], SamplingParams(max_tokens=60, seed=9, ignore_eos=True))
    others = [engine.add_request(p, s) for p, s in zip(subject.prompts[:6], subject.sampling[:6], strict=True)]
    done = {c.request_id: c for c in engine.step()}
    aborted = engine.abort(name)
    while engine.has_work:
        done |= {c.request_id: c for c in engine.step()}
    tally.add_completions([done[name_] for name_ in others], subject.alone[:6])
    return tally.result("5 abort", "a neighbour aborted = not there", f"{aborted} aborted", aborted > 0)


def packing(subject: Subject) -> GateResult:
    """Training batches packed in two orders, with a sequence twice: alone, permuted, duplicated."""
    tally = Tally()
    completions = [*subject.alone, subject.alone[4]]
    order = np.random.default_rng(2).permutation(len(completions)).tolist()
    scores = subject.score(completions, "train", order)
    for got, want in zip(scores, completions, strict=True):
        tally.add(got, want.logprobs)
    return tally.result("6 packing", "packed, permuted, duplicated = alone", f"{len(order)} sequences in one batch")


def garbage(subject: Subject) -> GateResult:
    """Unwritten rows of pages, and whole foreign pages, hold NaN."""
    tally = Tally()

    @jax.jit
    def step(params, batch, cache):
        hidden_TD, cache = model.forward(subject.cfg, subject.numerics, params, batch, cache)
        rows = model.logits(subject.cfg, subject.numerics, params, hidden_TD[-1:])
        return rows, cache

    for index in (2, 7):
        before, last = subject.cache_batch(index)
        zeros = KVCache.zeros(subject.cfg, 32, 16, subject.numerics.dtype)
        dirty = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), zeros)
        _, dirty = step(subject.params, before, dirty)
        row_V = np.asarray(step(subject.params, last, dirty)[0])[0, : subject.cfg.vocab_size]
        tally.add(row_V, subject.alone[index].logits[-1][: subject.cfg.vocab_size])
    count = int(jnp.isnan(dirty.k_LNpKd).sum())
    return tally.result("6 garbage", "NaN in unwritten rows = zeros", f"{count} NaN in the pages", count > 0)


def shapes(subject: Subject) -> GateResult:
    """Other buckets, page sizes and lengths of the decode loop."""
    tally = Tally()
    variants = (
        dict(page_size=128, num_pages=20, decode_steps=1),
        dict(page_size=32, num_pages=80, seq_buckets=(2, 8), token_buckets=(64, 192), chunk_tokens=100),
    )
    for changes in variants:
        tally.add_completions(subject.run(subject.engine(**changes)), subject.alone)
    return tally.result("7 shapes", "any bucket, page size, loop length", f"{len(variants)} other shapes")


class SecondProcess:
    """A process that samples the same work while this one runs its gates; ended with the `with` block at the latest.

    Args:
      command: prints `digest` of its own Subject of the same model as its last word.
    """

    def __init__(self, command: list[str]):
        # A file, not a pipe: nobody reads while it runs, and a full pipe would stop it.
        self._out, self._err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(command, stdout=self._out, stderr=self._err, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._err.close()

    def digest(self) -> bytes:
        """What it printed, when it is done.

        Raises:
          RuntimeError: it failed; the end of what it wrote.
        """
        code = self._process.wait()
        self._out.seek(0)
        self._err.seek(0)
        if code:
            raise RuntimeError(f"the second process ended with {code}: {self._err.read()[-2000:]}")
        return bytes.fromhex(self._out.read().split()[-1])


def fresh_process(subject: Subject, second: SecondProcess) -> GateResult:
    """Another process, which compiles everything again, samples the same work."""
    tally = Tally()
    words = lambda sha: np.frombuffer(sha, np.uint32).copy()  # noqa: E731
    tally.add(words(second.digest()), words(bytes.fromhex(digest(subject))))
    return tally.result("8 processes", "this process = a fresh one (SHA-256 words)", "1 fresh process")


def digest(subject: Subject) -> str:
    """SHA-256 over every completion's tokens, log-probabilities and logits rows."""
    sha = hashlib.sha256()
    for c in subject.alone:
        for array in (c.token_ids, c.logprobs, c.truncated_logprobs, c.logits):
            sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def _nudged(subject: Subject):
    """The weights with the largest entry of one matrix one unit in the last place away."""
    name = "layers.mlp.down"
    host = np.asarray(subject.params[name]).copy()
    view = host.view({2: np.uint16, 4: np.uint32}[host.dtype.itemsize]).reshape(-1)
    view[int(np.abs(host.astype(np.float32)).argmax())] ^= 1
    return subject.params | {name: jnp.asarray(host)}


def stale_state(subject: Subject) -> GateResult:
    """New weights, then the first ones again: no page of other weights may be read."""
    tally, changed = Tally(), Tally()
    engine = subject.engine(prefix_cache=True)
    subject.run(engine)
    engine.update_weights({n: -w if n == "layers.mixer.o" else w for n, w in subject.params.items()}, 1)
    changed.add_completions(subject.run(engine), subject.alone)
    engine.update_weights(subject.params, 2)
    tally.add_completions(subject.run(engine), subject.alone)
    dropped = engine.stats().dropped
    return tally.result(
        "9 stale state",
        "after two weight updates = a new engine",
        f"{changed.differing} values changed between, {dropped} pages dropped",
        changed.differing > 0 and dropped > 0,
    )


def tamper(subject: Subject) -> GateResult:
    """One constant, one flag, one ULP of eps in the contract: each must be refused."""
    contract = derive(subject.cfg, subject.numerics, trace_cases(subject.cfg, subject.numerics))
    check(contract, contract)
    missed, total = 0, 0
    for field in ("entries", "environment"):
        for path in _leaves(getattr(contract, field)):
            changed = copy.deepcopy(getattr(contract, field))
            # An entry that only some cases share would be refused for that alone: change it in all of them.
            cases_ = changed[path[0]] if field == "entries" else [None]
            for case in cases_:
                keys = (path[0], case, *path[2:]) if field == "entries" else path
                parent = functools.reduce(lambda node, key: node[key], keys[:-1], changed)
                parent[keys[-1]] = _other(parent[keys[-1]])
            total += 1
            try:
                check(contract, dataclasses.replace(contract, **{field: changed}))
                missed += 1
            except ContractMismatch:
                pass
    return GateResult("10 tamper", "one changed value is refused", total, missed, 0.0, f"{total} values changed")


def _leaves(node, path=()) -> list[tuple]:
    if isinstance(node, dict):
        return [leaf for key, value in node.items() for leaf in _leaves(value, (*path, key))]
    if isinstance(node, list):
        return [leaf for i, value in enumerate(node) for leaf in _leaves(value, (*path, i))]
    return [path]


def _other(value):
    if isinstance(value, bool) or value is None:
        return "tampered"
    if isinstance(value, int):
        return value + 1
    if value.startswith("0x") and "p" in value:
        return math.nextafter(float.fromhex(value), math.inf).hex()
    return value + "~"


def control(subject: Subject) -> GateResult:
    """The comparison itself: one weight moved by one unit in the last place must be seen."""
    tally = Tally()
    other = Subject(subject.cfg, subject.numerics, _nudged(subject), tokens=subject.sampling[0].max_tokens)
    for got, want in zip(other.score(subject.alone, "score"), subject.alone, strict=True):
        tally.add(got, want.logprobs)
    seen = tally.differing
    return GateResult("control", "one ULP in one weight is seen", tally.compared, 0 if seen else 1, tally.max_abs,
                      f"{seen} log-probabilities moved", seen > 0)  # fmt: skip


ALL: tuple[Gate, ...] = (
    needle,
    cases,
    prefill,
    chunked_prefill,
    prefix_cache,
    preemption,
    abort,
    packing,
    garbage,
    shapes,
    stale_state,
    tamper,
    control,
)
"""Gates that need this process alone; `fresh_process` needs another as well."""


def digest_command(argv: list[str]) -> list[str]:
    """Command of a process that prints the digest of the same model."""
    return [sys.executable, "-m", "isomodel.cli", "verify", *argv, "--digest"]

"""A runner without a model: pages hold token ids, so that any read of a foreign, stale or unwritten position shows.

The next token of a sequence is a hash of all its tokens (as found in its pages) and its key: what a correct engine
samples depends on nothing else, and neither does this.
"""

from __future__ import annotations

import hashlib

import numpy as np

from isomodel.rollout.outputs import Chosen
from isomodel.rollout.pages import PagePool
from isomodel.rollout.scheduler import Plan, Scheduler, StepResult
from isomodel.rollout.sequence import Request, Sample
from isomodel.rollout.slots import SlotTable

VOCAB = 50
EMPTY = -1


def next_token(history, key) -> int:
    digest = hashlib.blake2b(
        np.asarray(history, np.int32).tobytes() + np.asarray(key).tobytes(), digest_size=4
    ).digest()
    return int.from_bytes(digest, "little") % VOCAB


class FakeRunner:
    """Runs plans on a token store [pages, page size]."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.pool = scheduler.pool
        self.store = np.full((self.pool.num_pages, self.pool.page_size), EMPTY, np.int32)
        self.versions = np.full_like(self.store, EMPTY)  # of the weights that wrote a position
        self.stands: dict[Sample, tuple[int, int, int]] = {}  # of a decode loop's samples after it: token, position, room
        self.ahead: tuple[Plan, StepResult] | None = None  # run, not taken in
        self.followed = 0

    def _row(self, sample: Sample, position: int, token: int) -> int:
        """Writes the row's token to its page, reads the whole history through the page table, gives the next token."""
        size = self.pool.page_size
        table = self.scheduler.slots.page_table_MP[sample.slot]
        assert list(table[: len(sample.pages)]) == sample.pages, "the slot's page table is stale"
        if position >= sample.kv_ready:
            page = int(table[position // size])
            readers = sum(page in other.pages for other in self.scheduler.running)
            # The request may hold it too, for forks that will copy the prompt's part of it: that part must stay.
            held = page in (sample.request.held or ()) and position >= sample.prompt_len
            assert readers == 1 and self.pool.refs(page) == 1 + held, f"page {page} is written while it is shared"
            self.store[page, position % size] = token
            self.versions[page, position % size] = sample.request.version
        pages = table[: position // size + 1]
        history = self.store[pages].reshape(-1)[: position + 1]
        assert (self.versions[pages].reshape(-1)[: position + 1] == sample.request.version).all(), "a page of other weights"
        return next_token(history, sample.key)

    def run(self, plan: Plan, follows: bool = False) -> StepResult:
        """What the plan brings; `follows`: from where the loop before left its samples, of which the scheduler does not know."""
        for source, destination in plan.copies:
            self.store[destination] = self.store[source]
            self.versions[destination] = self.versions[source]
        samples = plan.samples
        assert {s.request.version for s in samples} == {plan.version}
        tokens = np.full((plan.steps, len(samples)), EMPTY, np.int32)
        counts = np.zeros(len(samples), np.int32)
        for i, sample in enumerate(plan.decode):
            token, position, room = int(sample.tokens[sample.computed]), sample.computed, sample.request.limit - sample.count
            if follows:
                token, position, room = self.stands[sample]
            for k in range(min(plan.steps, room)):
                token = tokens[k, i] = self._row(sample, position + k, token)
                counts[i] += 1
                room -= 1
                if token in sample.request.stop_ids:
                    room = 0
                    break
            self.stands[sample] = token, position + int(counts[i]), room
        for i, chunk in enumerate(plan.chunks, len(plan.decode)):
            assert chunk.count > 0 and plan.steps == 1
            for position in range(chunk.start, chunk.start + chunk.count):
                tokens[0, i] = self._row(chunk.sample, position, int(chunk.sample.tokens[position]))
            counts[i] = 1
        zeros = np.zeros(tokens.shape, np.float32)
        return StepResult(counts, Chosen(tokens, zeros, zeros))


def expected(request: Request, index: int) -> list[int]:
    """The sample's tokens, computed alone."""
    history, sample = request.prompt.tolist(), request.samples[index]
    while len(history) < request.limit:
        history.append(next_token(history, sample.key))
        if history[-1] in request.stop_ids:
            break
    return history[len(request.prompt) :]


def make(num_pages=64, page_size=4, max_seqs=8, chunk_tokens=16, decode_steps=4, prefix_cache=True, width=64, seq_buckets=()):
    pool = PagePool(num_pages, page_size)
    slots = SlotTable(max_seqs, width)
    sizes = dict(chunk_tokens=chunk_tokens, decode_steps=decode_steps, seq_buckets=seq_buckets)
    scheduler = Scheduler(pool, slots, prefix_cache=prefix_cache, **sizes)
    return scheduler, FakeRunner(scheduler)


def step(scheduler: Scheduler, runner: FakeRunner) -> list[Sample]:
    """As the engine does: the next decode loop runs before this one is taken in, where the scheduler can say it before."""
    now, runner.ahead = runner.ahead, None
    if now is None:
        plan = scheduler.schedule()
        scheduler.check()
        if plan is None:
            return []
        now = plan, runner.run(plan)
    plan, result = now
    if following := scheduler.follow(plan):
        scheduler.check()
        ahead = following, runner.run(following, follows=True)
        runner.followed += 1
    done = scheduler.update(plan, result)
    if following and any(s.finish_reason is None for s in following.decode):
        runner.ahead = ahead
    scheduler.check()
    return done


def drain(scheduler: Scheduler, runner: FakeRunner, most: int = 5000) -> list[Sample]:
    done = []
    for _ in range(most):
        if not scheduler.has_work:
            return done
        done += step(scheduler, runner)
    raise AssertionError(f"not finished after {most} steps")

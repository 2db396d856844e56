"""Scheduler: which rows run in the next step, on which pages.

Continuous batching over fixed slots. Every decision is a function of the calls made so far, but for the number of decode steps
until the next look, which a clock may bound; the schedule must not reach a request's bits (tests/isomodel/rollout shows that
it does not).

- Admission is first come, first served. A sample is admitted with pages for all its known tokens.
- A step runs one row of every decoding sample, and at most `chunk_tokens` prompt rows, oldest sample first.
- When a decoding sample needs a page and none is left, the youngest running sample gives up its pages and goes back to
  the head of the queue. It keeps its tokens and their log-probabilities; when it runs again their keys and values are
  recomputed (or found in the prefix cache), with the same bits.
- Samples of one prompt share its pages: the first computes the prompt, the others take its full pages by reference and
  a copy of the last, partly filled page. A copy moves bytes, so it has the same bits, and it costs one page of traffic
  where recomputing costs up to a page of rows through the whole model: with pages of 128 tokens and short prompts that
  is as much as not sharing at all.
- Full pages are found again by later requests through the prefix cache, under keys that hold the weight version.
- A request has the weights of when its first sample began. While samples of two versions are in flight, steps of one and of the
  other take turns.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable

import numpy as np

from isomodel.rollout.engine_config import bucket
from isomodel.rollout.outputs import Chosen
from isomodel.rollout.pages import PagePool, extend_keys
from isomodel.rollout.sequence import Request, Sample
from isomodel.rollout.slots import SlotTable, device_stops

IDLE_SHARE = 1 / 16
"""Of the rows of a batch, while others wait for their room: more idle rows are worth a look."""
MEMORY = 0.97
"""What a decode step leaves of the rate of stops before it."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Rows `start` to `start + count` (positions) of a sample."""

    sample: Sample
    start: int
    count: int


@dataclasses.dataclass
class Plan:
    """One step: the rows of `decode` (one each), then those of `chunks`.

    Attributes:
      copies: (source, destination) pages to copy, in order, before the rows run; no page is written twice.
      steps: decode steps to take on the device; above 1 only without chunks.
      version: of the weights, for all rows.
    """

    decode: list[Sample]
    chunks: list[Chunk]
    copies: list[tuple[int, int]]
    version: int
    steps: int = 1

    @property
    def samples(self) -> list[Sample]:
        """Samples in row order."""
        return self.decode + [chunk.sample for chunk in self.chunks]

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """Their slots, as they were when first asked for."""
        return np.array([s.slot for s in self.samples])

    @property
    def rows(self) -> int:
        return len(self.decode) + sum(chunk.count for chunk in self.chunks)


@dataclasses.dataclass
class StepResult:
    """What a step brought back. S samples in the plan's order, K steps.

    Attributes:
      counts_S: int32, steps in which the sample got a token (a prefix of the K).
      chosen: arrays of every step, with leading axes K, S.
      prompt_logprobs_T: float32 or None, of each row's next prompt token.
    """

    counts_S: np.ndarray
    chosen: Chosen
    prompt_logprobs_T: np.ndarray | None = None


@dataclasses.dataclass
class SchedulerStats:
    """Counters since the start.

    Attributes:
      preemptions: samples that gave up their pages.
      shared_pages: pages taken by reference from another sample of the same prompt; copied_pages: copied from one.
      prefill_rows, decode_rows: rows run. decode_steps: steps of the device with rows that decode.
      reused_tokens: prompt (or resumed) positions that were not run because their keys and values were there.
    """

    preemptions: int = 0
    shared_pages: int = 0
    copied_pages: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    decode_steps: int = 0
    reused_tokens: int = 0


def _ended_on_device(sample: Sample) -> bool:
    """Whether the decode loop saw the end of a sample that has ended: a stop string, an abort, or too many stop tokens, it does not."""
    stops = device_stops(sample.request.stop_ids)
    return sample.finish_reason == "length" or (sample.finish_reason == "stop" and sample.stop_reason in stops)


class Scheduler:
    """See the module's docstring. Knows nothing of arrays on a device: `schedule`, run the plan, `update`."""

    def __init__(
        self,
        pool: PagePool,
        slots: SlotTable,
        *,
        chunk_tokens: int,
        decode_steps: int,
        prefix_cache: bool,
        version: int = 0,
        seq_buckets: tuple[int, ...] = (),
    ):
        self.pool, self.slots, self.seq_buckets = pool, slots, seq_buckets
        self.chunk_tokens, self.decode_steps, self.prefix_cache = chunk_tokens, decode_steps, prefix_cache
        self.version = version
        self.waiting: collections.deque[Sample] = collections.deque()
        self.running: list[Sample] = []  # in order of admission
        self.most_steps = decode_steps  # until the next look: whoever has a clock sets it
        self._stops = 0.0  # samples that a token or a string ends, a decode step, lately
        self._last = version  # of the last plan
        self._short: int | None = None  # of a plan in the making: running samples that will want a page
        self.stats = SchedulerStats()
        self._holding: dict[str, Request] = {}  # requests that hold prompt pages, oldest first

    def add(self, request: Request) -> None:
        """Puts a request's samples at the end of the queue."""
        self.waiting.extend(request.samples)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def finishing(self) -> bool:
        """Whether samples of older weights than `version` are in flight."""
        return any(s.request.version not in (None, self.version) for s in (*self.running, *self.waiting))

    def schedule(self) -> Plan | None:
        """Decides the next step and takes its pages; None when there is no work."""
        plan = self._next_plan()
        if plan is None and self._holding and self.has_work:
            while self._release_hold():  # all room lies in prompt pages kept for later samples: those recompute instead
                pass
            plan = self._next_plan()
        if plan is None and self.has_work:
            raise RuntimeError("scheduler: work is left, nothing runs and no page can be freed; please report this")
        return plan

    def _next_plan(self) -> Plan | None:
        """A plan of the weights whose turn it is, else of the others."""
        versions = {self._version_of(s) for s in (*self.running, *itertools.islice(self.waiting, 1))}
        for version in sorted(versions, key=lambda v: (v == self._last, v)):
            if plan := self._plan(version):
                self._last = version
                return plan
        return None

    def _version_of(self, sample: Sample) -> int:
        """Of the weights that the sample runs under, or would if it began now."""
        return self.version if sample.request.version is None else sample.request.version

    def _plan(self, version: int) -> Plan | None:
        preemptions, self._short = self.stats.preemptions, None
        mine = [s for s in self.running if s.request.version == version]
        decoding = [s for s in mine if s.decodes]
        plan = Plan([s for s in decoding if s.slot >= 0 and self._grow(s)], [], [], version)
        budget = self.chunk_tokens
        open_ = self.stats.preemptions == preemptions  # nobody takes pages before those who are short of them
        for sample in mine:
            if sample.decodes or sample.slot < 0:
                continue
            if not sample.attached:
                if not open_ or not self._may_attach(sample, budget):
                    continue
                open_ = self._attach(sample, plan)
            budget -= self._add_chunk(sample, plan, budget)
        while open_ and budget > 0 and len(self.slots) and (sample := self._next_waiting(version)):
            self.slots.take(sample)
            begins, sample.request.version = sample.request.version is None, version
            if self._may_attach(sample, budget) and not self._attach(sample, plan):
                self.slots.give_back(sample)
                if begins:
                    sample.request.version = None
                break
            self.running.append(self.waiting.popleft())
            budget -= self._add_chunk(sample, plan, budget)
        if not plan.decode and not plan.chunks:
            return None
        if not plan.chunks:
            plan.steps = self._look_ahead(plan.decode)
        return plan

    def _next_waiting(self, version: int) -> Sample | None:
        """The first in the queue, if it is one of these weights."""
        return self.waiting[0] if self.waiting and self._version_of(self.waiting[0]) == version else None

    def _add_chunk(self, sample: Sample, plan: Plan, budget: int) -> int:
        if not sample.attached or budget <= 0:
            return 0
        count = min(budget, sample.remaining)
        plan.chunks.append(Chunk(sample, sample.computed, count))
        return count

    def _may_attach(self, sample: Sample, budget: int) -> bool:
        """False while the sample should wait for the one that computes its prompt, or when no row could run anyway."""
        return budget > 0 and (sample.request.held is not None or sample.request.leader is None)

    def _attach(self, sample: Sample, plan: Plan) -> bool:
        """Gives a running sample its pages, sharing what is computed already; False (nothing changed) without room."""
        request, pool = sample.request, self.pool
        size, shared, ready, source = pool.page_size, [], 0, None
        keys: list = []
        if self.prefix_cache:
            extend_keys(request.prompt_keys, request.prompt, size, request.version)
            keys = extend_keys(list(request.prompt_keys), sample.tokens[: sample.count], size, request.version)
            if request.scored:
                shared = pool.lookup(keys)
                ready = len(shared) * size
        cached = len(shared)
        if request.held is not None and sample.prompt_len > ready:
            ready = sample.prompt_len
            shared = request.held[: ready // size]
            source = request.held[-1] if ready % size else None
        pool.share(shared)
        need = pool.pages_for(sample.count) - len(shared)
        if pool.available < need + self._soon_needed():
            pool.release(shared)
            return False
        sample.pages = shared + pool.allocate(need)
        if source is not None:
            plan.copies.append((source, sample.pages[len(shared)]))
            self.stats.copied_pages += 1
        if self.prefix_cache and request.scored and request.held is None:
            pool.stats.queries += len(keys)
            pool.stats.hits += cached
        if request.held is not None:
            self.stats.shared_pages += len(shared)
        sample.keys, sample.registered = keys, 0
        sample.kv_ready = ready
        sample.computed = min(ready, sample.count - 1)
        self.stats.reused_tokens += sample.computed
        sample.attached = True
        self._short += self._wants(sample)
        request.unattached -= 1
        if request.held is None and request.unattached:
            if ready >= sample.prompt_len:
                self._hold(request, sample.pages[: pool.pages_for(sample.prompt_len)])
            else:
                request.leader = sample
        self._drop_useless_hold(request)
        self.slots.set_pages(sample)
        return True

    def _soon_needed(self) -> int:
        """Pages that running samples will want: without them, an admission would soon be preempted again."""
        if self._short is None:  # counted once a plan: every admission asks
            self._short = sum(s.attached and self._wants(s) for s in self.running)
        return self._short

    def _wants(self, sample: Sample) -> bool:
        return self.pool.pages_for(sample.request.limit - 1) > len(sample.pages)

    def _grow(self, sample: Sample) -> bool:
        """Makes sure a decoding sample's next row has a page; False if it had to give way itself."""
        have = len(sample.pages)
        need = self.pool.pages_for(sample.count) - have
        while need > self.pool.available:
            if self._release_hold():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sample:
                return False
        if need > 0:
            sample.pages += self.pool.allocate(need)
            self.slots.set_pages(sample, have)
        return True

    def _look_ahead(self, decode: list[Sample]) -> int:
        """Number of decode steps whose pages are all there, and takes these pages."""
        room_S = np.array([s.request.limit - s.count for s in decode])
        steps = min(self.decode_steps, self.most_steps, int(room_S.max()))
        if self.waiting:
            steps = self._worthwhile(steps, room_S)
        while not self._take_pages(decode, steps) and steps > 1:
            steps //= 2
        return steps

    def _take_pages(self, decode: list[Sample], steps: int) -> bool:
        """Takes the pages of `steps` decode steps; False, and nothing is taken, if they are not all there."""
        lasts = (min(s.count + steps - 1, s.request.limit - 1) for s in decode)
        wanted = [max(0, self.pool.pages_for(last) - len(s.pages)) for s, last in zip(decode, lasts, strict=True)]
        if sum(wanted) > self.pool.available:
            return False
        for sample, extra in zip(decode, wanted, strict=True):
            if extra:
                have = len(sample.pages)
                sample.pages += self.pool.allocate(extra)
                self.slots.set_pages(sample, have)
        return True

    def follow(self, plan: Plan) -> Plan | None:
        """A plan that goes on where `plan` ends, to be run before anyone knows what that brings: decode steps of the same samples in
        the same rows. None where others want a turn, or the pages are not there.

        Samples that have ended keep their rows where the device knows of their end, and writes nothing for them, and where it would run
        as many rows without them: else None.

        `plan` is the one that runs, not taken in yet. After this the next plan comes from `follow` again, or from `schedule` once both
        are taken in.
        """
        live = [s for s in plan.decode if s.finish_reason is None]
        ended = [s for s in plan.decode if s.finish_reason]
        if plan.chunks or self.waiting or not live or len(live) != len(self.running):
            return None
        if ended and (self._rows(len(live)) != self._rows(len(plan.decode)) or not all(map(_ended_on_device, ended))):
            return None
        steps = min(self.decode_steps, self.most_steps, max(s.request.limit - s.count for s in live) - plan.steps)
        if steps < 1 or not self._take_pages(live, plan.steps + steps):
            return None
        return Plan(plan.decode, [], [], plan.version, steps)

    def _rows(self, count: int) -> int:
        """Rows that the device runs for so many samples."""
        return bucket(self.seq_buckets, count) if self.seq_buckets else count

    def _worthwhile(self, steps: int, room_S: np.ndarray) -> int:
        """Most steps, up to `steps`, after which samples that have ended will have idled no more than IDLE_SHARE of the rows:
        those that reach their limit, at known steps, and those that stop before, as often as lately."""
        after_N = np.arange(1, steps + 1)
        idle_N = np.maximum(0, after_N[:, None] - room_S).sum(axis=1) + self._stops * after_N**2 / 2
        return max(1, int((idle_N <= IDLE_SHARE * len(room_S) * after_N).sum()))

    def _preempt(self, sample: Sample) -> None:
        assert sample is self.running[-1]
        self.stats.preemptions += sample.attached
        self.running.pop()
        self._detach(sample)
        self.waiting.appendleft(sample)

    def _detach(self, sample: Sample) -> None:
        """Takes slot and pages from a sample that runs no more."""
        request = sample.request
        if sample.attached:
            self.pool.release(sample.pages)
            request.unattached += 1
        if request.leader is sample:
            request.leader = None
        sample.pages, sample.keys = [], []
        sample.computed = sample.kv_ready = sample.registered = 0
        sample.attached = False
        self.slots.give_back(sample)

    def _hold(self, request: Request, pages: list[int]) -> None:
        self.pool.share(pages)
        request.held = pages
        self._holding[request.id] = request

    def _release_hold(self) -> bool:
        """Gives up the prompt pages held by the youngest request that holds any."""
        if not self._holding:
            return False
        _, request = self._holding.popitem()
        self.pool.release(request.held)
        request.held = None
        return True

    def _drop_useless_hold(self, request: Request) -> None:
        if request.held is not None and not request.unattached:
            del self._holding[request.id]
            self.pool.release(request.held)
            request.held = None

    def update(self, plan: Plan, result: StepResult) -> list[Sample]:
        """Takes in what a step brought; returns the samples that finished, in row order, already off their slots.

        What it brought to samples that had ended before, when the plan was on its way already, is nobody's.
        """
        finished, n_decode = [], len(plan.decode)
        live = [s for s in plan.samples if s.finish_reason is None]
        for i, sample in enumerate(plan.decode):
            if sample.finish_reason:
                continue
            n = result.counts_S[i]
            before = sample.count
            self._accept(sample, result, i, n)
            sample.computed += sample.count - before
            self.stats.decode_rows += int(n)
        row = len(plan.decode)
        for i, chunk in enumerate(plan.chunks, len(plan.decode)):
            sample, request = chunk.sample, chunk.sample.request
            end = chunk.start + chunk.count
            sample.computed = end
            if not request.scored:
                stop = min(end, sample.prompt_len - 1)
                request.prompt_logprobs[chunk.start + 1 : stop + 1] = result.prompt_logprobs_T[
                    row : row + stop - chunk.start
                ]
                request.scored = end >= sample.prompt_len - 1
            row += chunk.count
            self.stats.prefill_rows += chunk.count
            if request.leader is sample and end >= sample.prompt_len:
                request.leader = None
                if request.unattached:
                    self._hold(request, sample.pages[: self.pool.pages_for(sample.prompt_len)])
            if end == sample.count:
                self._accept(sample, result, i, 1)
        if n_decode:
            steps = max(1, int(result.counts_S[:n_decode].max()))
            self.stats.decode_steps += steps
            stops = sum(s.finish_reason == "stop" for s in live) / steps
            self._stops += (stops - self._stops) * (1 - MEMORY**steps)
        for sample in live:
            sample.kv_ready = max(sample.kv_ready, sample.computed)
            if self.prefix_cache:
                self._register(sample)
            if sample.finish_reason:
                finished.append(sample)
                self.running.remove(sample)
                self._retire(sample)
        return finished

    def _accept(self, sample: Sample, result: StepResult, i: int, n: int) -> None:
        """The first n tokens of the plan's sample number i."""
        sample.accept(Chosen(*(x if x is None else x[:n, i] for x in result.chosen)), sample.request.version)

    def _register(self, sample: Sample) -> None:
        """Tells the prefix cache of the pages that the sample has filled; of older weights nobody asks for any."""
        full = sample.kv_ready // self.pool.page_size
        if sample.registered == full or sample.request.version != self.version:
            return
        extend_keys(sample.keys, sample.tokens[: sample.kv_ready], self.pool.page_size, self.version)
        for i in range(sample.registered, full):
            self.pool.register(sample.pages[i], sample.keys[i])
        sample.registered = full

    def _retire(self, sample: Sample) -> None:
        """A running sample leaves for good."""
        self._detach(sample)
        sample.request.unattached -= 1
        self._drop_useless_hold(sample.request)

    def abort(self, request: Request) -> list[Sample]:
        """Ends the request's live samples; their neighbours do not notice. Returns them."""
        aborted = [s for s in request.samples if s.finish_reason is None]
        for sample in aborted:
            sample.finish_reason = "abort"
            if sample.slot >= 0:
                self.running.remove(sample)
                self._retire(sample)
            else:
                self.waiting.remove(sample)
                request.unattached -= 1
        self._drop_useless_hold(request)
        return aborted

    def begin_version(self, version: int) -> int:
        """From now on samples begin under these weights; those in flight finish under theirs. Returns how many cached pages were
        dropped."""
        self.version = version
        return self.pool.drop_cached()

    def change_weights(self, version: int, *, keep_tokens: bool) -> int:
        """Drops all state that old weights computed: held and cached pages, keys and values of samples in flight.

        These go back to the head of the queue in their order, without their sampled tokens unless `keep_tokens`.
        Returns how many cached pages were dropped.
        """
        while self._release_hold():
            pass
        while self.running:
            sample = self.running.pop()
            self._detach(sample)
            self.waiting.appendleft(sample)
        dropped = self.pool.drop_cached()
        for sample in self.waiting:
            if not keep_tokens:
                sample.restart()
            sample.request.weights_changed()
        self.version = version
        return dropped

    def check(self) -> None:
        """Verifies that pages and samples agree (for tests). Raises AssertionError."""
        holders: Iterable = [s.pages for s in self.running] + [r.held for r in self._holding.values()]
        self.pool.check(holders)
        for sample in self.running:
            assert sample.slot >= 0 and (sample.attached or not sample.pages), (
                f"sample {sample.request.id}/{sample.index}"
            )
        for sample in self.waiting:
            assert sample.slot < 0 and not sample.pages, f"sample {sample.request.id}/{sample.index}"
        assert len({s.slot for s in self.running}) == len(self.running), "two samples share a slot"

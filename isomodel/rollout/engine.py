"""Engine: takes requests, runs them in continuous batches, gives completions whose bits depend on no neighbour."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.rollout import memory
from isomodel.rollout.engine_config import ON_UPDATE, EngineConfig
from isomodel.rollout.outputs import Completion, EngineStats, Tail
from isomodel.rollout.pages import PagePool
from isomodel.rollout.progress import Bar
from isomodel.rollout.runner import Runner, Running
from isomodel.rollout.sampling_params import SamplingParams, assigned_seed
from isomodel.rollout.scheduler import Plan, Scheduler
from isomodel.rollout.sequence import Request, Sample
from isomodel.rollout.slots import SlotTable
from isomodel.specs import Params
from pallas_kernels import environment

Prompt = str | Sequence[int] | np.ndarray


class TextCodec(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""


class PromptsRefused(ValueError):
    """Prompts that cannot be served.

    Attributes:
      faults: what is wrong with each, by its index.
    """

    def __init__(self, faults: Mapping[int, str]):
        self.faults = dict(faults)
        super().__init__("; ".join(f"prompt {i}: {fault}" for i, fault in self.faults.items()))


class Engine:
    """Rollout engine. Not thread-safe: one thread calls it.

    A completion's tokens and log-probabilities depend on its prompt, seed, sampling parameters and the weights alone:
    not on what runs beside it, how prompts are chunked, whether pages were shared, found again or recomputed.

        engine = Engine(cfg, params, Numerics(), EngineConfig(max_seqs=64))
        completions = engine.generate([[1, 2, 3]], SamplingParams(n=8, max_tokens=32))
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        numerics: Numerics,
        config: EngineConfig = EngineConfig(),
        *,
        tokenizer: TextCodec | None = None,
        version: int = 0,
        warmup: bool = True,
        progress: bool | None = None,
    ):
        """Allocates the KV cache and compiles everything that a step can need.

        Args:
          params: weights in the compute dtype of `numerics`.
          tokenizer: needed for prompts that are text, for stop strings, and for the text of completions.
          version: of these weights.
          warmup: compile now; otherwise call `warmup` yourself, or let first uses compile.
          progress: show a bar while compiling; None: on a terminal only.

        Raises:
          ValueError: config or weights do not fit the model.
          OutOfDeviceMemory: the KV cache does not fit on the device.
          registry.Unsupported: the numerics' backend cannot serve here.
          environment.EnvironmentFault: iso numerics in a process whose XLA flags are not the contract's.
        """
        if numerics.mode == "iso":
            environment.check()
        self.cfg, self.numerics, self.tokenizer = cfg, numerics, tokenizer
        self.config = memory.sized(config, cfg, numerics).resolve(cfg, numerics.dtype)
        slots = SlotTable(self.config.max_seqs, self.config.table_width)
        self._runner = Runner(cfg, numerics, params, self.config, slots)
        self._pool = PagePool(self.config.num_pages, self.config.page_size)
        self._scheduler = Scheduler(
            self._pool,
            slots,
            chunk_tokens=self.config.chunk_tokens,
            decode_steps=self.config.decode_steps,
            prefix_cache=self.config.prefix_cache,
            version=version,
            seq_buckets=self.config.seq_buckets,
        )
        self._ahead: tuple[Plan, Running] | None = None  # runs, or will once what runs is done; not taken in yet
        self._came = 0.0  # when the last plan's result came
        self._requests: dict[str, Request] = {}
        self._finished: list[Completion] = []  # not returned by `step` yet
        self._requests_taken = self._completions = self._steps = self._tokens = 0
        self._busy_s = self._warmup_s = 0.0
        if warmup:
            self.warmup(progress)

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._scheduler.version

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return bool(self._scheduler.has_work or self._finished)

    @property
    def updating(self) -> bool:
        """Whether samples in flight finish under older weights than those that begin, see `update_weights`."""
        return bool(self._runner.older)

    def warmup(self, progress: bool | None = None) -> int:
        """Compiles every program for every bucket; returns how many. Nothing compiles after it."""
        start = time.perf_counter()
        count = self._runner.warmup(progress)
        self._warmup_s += time.perf_counter() - start
        return count

    def traces(self):
        """{case: function that traces what this engine runs}, for `contract.derive`."""
        return self._runner.traces()

    def _prompt_ids(self, prompt: Prompt) -> np.ndarray:
        """int32 [n]; raises ValueError when the prompt is no list of token ids."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the prompt is text, and the engine has no tokenizer; pass token ids or a tokenizer")
            prompt = self.tokenizer.encode(prompt)
        ids = np.asarray(prompt)
        if ids.size == 0:
            raise ValueError("the prompt is empty; it needs at least one token")
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"the prompt must be a list of token ids, got {ids.dtype} of shape {ids.shape}")
        outside = np.flatnonzero((ids < 0) | (ids >= self.cfg.vocab_size))
        if outside.size:
            at = int(outside[0])
            raise ValueError(
                f"token {at} of the prompt is {ids[at]}; the vocabulary has 0 to {self.cfg.vocab_size - 1}"
            )
        return ids.astype(np.int32)

    def _limit(self, ids: np.ndarray, params: SamplingParams) -> int:
        """Most tokens of a sample; raises ValueError when it cannot be served."""
        c, prompt_len = self.config, len(ids)
        if prompt_len >= c.max_model_len:
            raise ValueError(
                f"the prompt has {prompt_len} tokens; max_model_len={c.max_model_len} leaves no room for one more"
            )
        limit = c.max_model_len if params.max_tokens is None else min(c.max_model_len, prompt_len + params.max_tokens)
        pages = self._pool.pages_for(limit - 1)
        if pages > c.num_pages:
            raise ValueError(
                f"{limit} tokens (prompt {prompt_len}) need {pages} pages of {c.page_size}, and the KV cache has"
                f" {c.num_pages}; raise num_pages or kv_memory, or lower max_tokens"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; pass one to the engine, or use stop_token_ids")
        outside = [t for t in params.stop_token_ids if t >= self.cfg.vocab_size]
        if outside:
            raise ValueError(f"stop_token_ids {outside} are outside the vocabulary of {self.cfg.vocab_size}")
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(params, field) and not getattr(c, field):
                raise ValueError(f"{field} was asked for, and the engine was made with {field}=False")
        if params.top_logprobs > c.top_logprobs:
            raise ValueError(f"top_logprobs={params.top_logprobs}, and the engine was made with top_logprobs={c.top_logprobs}")
        return limit

    def _request(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> Request:
        ids = self._prompt_ids(prompt)
        limit = self._limit(ids, params)
        if request_id is None:
            request_id = str(self._requests_taken)
            while request_id in self._requests:  # someone chose that name
                request_id += "'"
        elif request_id in self._requests:
            raise ValueError(f"a request named {request_id!r} is running already")
        seed = assigned_seed(self.config.seed, self._requests_taken) if params.seed is None else int(params.seed)
        stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self.cfg.eos_token_ids)
        decode = self.tokenizer.decode if self.tokenizer else None
        return Request(request_id, ids, params, seed, limit, stop_ids, decode)

    def add_request(
        self, prompt: Prompt, sampling: SamplingParams = SamplingParams(), request_id: str | None = None
    ) -> str:
        """Queues a prompt; `step` brings its completions. Returns the request's name (a counter if none is given).

        Raises:
          ValueError: the prompt is empty, too long, or holds a token outside the vocabulary; the request is larger than
            the KV cache; stop strings without a tokenizer; a name in use. Nothing was queued.
        """
        request = self._request(prompt, sampling, request_id)
        self._requests_taken += 1
        self._requests[request.id] = request
        self._scheduler.add(request)
        return request.id

    def step(self) -> list[Completion]:
        """Runs one batch (or one decode loop); returns what has finished since the last call, aborted samples too."""
        self._advance()
        finished, self._finished = self._finished, []
        return finished

    def _advance(self) -> None:
        """One batch, if there is one. The device has been given the next decode loop by the time that this one is taken in, where that
        can be said before."""
        start = time.perf_counter()
        now, self._ahead = self._ahead, None
        if now is None:
            plan = self._scheduler.schedule()
            if plan is None:
                return
            now = plan, self._runner.start(plan)
        plan, running = now
        following = self._scheduler.follow(plan)
        ahead = following and (following, self._runner.start(following, running))
        before = sum(s.count for s in plan.samples)
        result = self._runner.result(running)
        came = time.perf_counter()
        if not plan.chunks:
            self._pace(came - max(start, self._came), int(result.counts_S.max()))
        self._came = came
        done = self._scheduler.update(plan, result)
        self._tokens += sum(s.count for s in plan.samples) - before
        self._finish(done)
        if following and any(s.finish_reason is None for s in following.decode):
            self._ahead = ahead  # only now: if this is interrupted, samples go on from what was taken in
        self._forget_older()
        self._steps += 1
        self._busy_s += time.perf_counter() - start

    def _pace(self, seconds: float, steps: int) -> None:
        """Keeps the time in which nobody is admitted, that of two loops, to look_s, by how long the last steps took."""
        self._scheduler.most_steps = max(1, int(self.config.look_s / 2 * max(1, steps) / seconds))

    def _finish(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._finished.append(self._completion(sample))
            self._completions += 1
            if all(s.finish_reason for s in sample.request.samples):
                self._requests.pop(sample.request.id, None)

    def _completion(self, sample: Sample) -> Completion:
        request, n = sample.request, sample.generated
        params = request.params
        token_ids = sample.tokens[sample.prompt_len : sample.count].copy()
        cut = lambda buffer, dtype: np.zeros(0, dtype) if buffer is None else buffer[:n].copy()  # noqa: E731
        text = self._text(sample, token_ids)
        return Completion(
            request_id=request.id,
            index=sample.index,
            prompt_ids=request.prompt,
            token_ids=token_ids,
            logprobs=cut(sample.logprobs, np.float32) if params.logprobs else None,
            truncated_logprobs=cut(sample.truncated, np.float32) if params.logprobs else None,
            versions=cut(sample.versions, np.int32),
            inv_temp=params.inv_temp,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            seed=request.seed,
            text=text,
            prompt_logprobs=request.prompt_logprobs.copy() if params.prompt_logprobs and request.scored else None,
            logits=np.stack(sample.logits) if sample.logits else None,
            error=sample.error,
            **_alternatives(sample, 0),
        )

    def _text(self, sample: Sample, token_ids: np.ndarray) -> str | None:
        """What the tokens say; None without a tokenizer, and where it raises, which is then the sample's error."""
        if self.tokenizer is None or sample.error:
            return None
        if isinstance(sample.stop_reason, str):
            return sample.stop_strings.text
        if isinstance(sample.stop_reason, int):
            token_ids = token_ids[:-1]
        try:
            return self.tokenizer.decode(token_ids.tolist())
        except Exception as e:
            sample.error, sample.finish_reason = e, "error"
            return None

    def validate(self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]) -> None:
        """Raises what `generate` would raise for these arguments; queues and compiles nothing."""
        self._validated(prompts, sampling)

    def _validated(self, prompts, sampling) -> tuple[list[np.ndarray], list[SamplingParams]]:
        """(token ids, sampling parameters) of each prompt."""
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(params)} sampling parameters; give one, or one for each")
        ids, faults = [], {}
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            try:
                ids.append(self._prompt_ids(prompt))
                self._limit(ids[-1], p)
            except ValueError as e:
                faults[i] = str(e)
        if faults:
            raise PromptsRefused(faults)
        return ids, params

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Completes every prompt; returns completions in the order of the prompts, the n samples of each together.

        Requests that were added before run along; what they bring is returned by the next `step`. If this is
        interrupted, its requests are aborted and the engine stays usable.

        Args:
          prompts: token ids, or text when the engine has a tokenizer.
          sampling: one for all prompts, or one for each.
          progress: show a bar on stderr when it is a terminal.

        Raises:
          PromptsRefused: naming every prompt that cannot be served, by its index; nothing was queued.
          ValueError: not as many sampling parameters as prompts.
          RuntimeError: the tokenizer raised on a sample's tokens.
        """
        ids, params = self._validated(prompts, sampling)
        names = [self.add_request(prompt, p) for prompt, p in zip(ids, params, strict=True)]
        order = {name: i for i, name in enumerate(names)}
        mine: list[Completion] = []
        others: list[Completion] = []
        total = sum(p.n for p in params)
        try:
            with Bar(total, progress) as bar:
                while len(mine) < total:
                    done = self.step()
                    mine += [c for c in done if c.request_id in order]
                    others += [c for c in done if c.request_id not in order]
                    for c in done:
                        if c.error and c.request_id in order:
                            what = f"prompt {order[c.request_id]}, sample {c.index}: the tokenizer failed: {c.error!r}"
                            raise RuntimeError(what) from c.error
                    bar.show(len(mine), self._tokens)
        finally:
            for name in names:
                self.abort(name)
            self._finished = others + [c for c in self._finished if c.request_id not in order]
        return sorted(mine, key=lambda c: (order[c.request_id], c.index))

    def abort(self, request_id: str) -> int:
        """Ends a request's samples where they are; the next `step` returns them with finish_reason "abort".

        Returns how many were ended: 0 when the request is unknown or has finished.
        """
        request = self._requests.get(request_id)
        if request is None:
            return 0
        aborted = self._scheduler.abort(request)
        self._finish(aborted)
        self._forget_older()
        return len(aborted)

    def tail(self, request_id: str, index: int, start: int) -> Tail | None:
        """What sample `index` of a request has beyond its first `start` tokens; None when it has finished.

        Costs what it returns: who looks after every step and moves `start` along copies each token once. New weights
        with on_update="restart" take back tokens that were seen here.
        """
        request = self._requests.get(request_id)
        if request is None or (sample := request.samples[index]).finish_reason:
            return None
        if sample.logprobs is None:
            return Tail(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), **_alternatives(sample, 0))
        new = slice(start, sample.generated)
        ids = sample.tokens[sample.prompt_len + start : sample.count]
        top = _alternatives(sample, start)
        return Tail(ids.copy(), sample.logprobs[new].copy(), sample.versions[new].copy(), **top)

    def reset_prefix_cache(self) -> int:
        """Forgets the keys and values kept for later requests; those in flight keep theirs. Returns how many pages."""
        return self._pool.drop_cached()

    def release_pages(self) -> int:
        """Gives the device memory of the KV cache to whoever needs it meanwhile, such as a trainer's update.

        The next step takes it again: the same size, and nothing compiles. Keys and values kept for later requests are
        forgotten; no bit of a completion depends on that. Returns how many pages were.

        Raises:
          ValueError: samples are in flight, and their keys and values are in the cache. Nothing has changed.
        """
        if self._scheduler.has_work:
            raise ValueError(f"{len(self._requests)} requests are in flight; finish or abort them before the pages go")
        self._ahead = None  # of samples that were aborted
        dropped = self._pool.drop_cached()
        self._runner.release_cache()
        return dropped

    def update_weights(self, params: Params, version: int, *, on_update: str | None = None) -> int:
        """Samples with new weights from now on; no request that begins now reads keys and values that the old ones computed.

        With "finish", samples in flight go on under the old weights, beside those that begin under the new ones; both sets of
        weights are held until the last has finished, while `updating` is true.

        Args:
          params: of the same shapes and dtypes as before; the arrays are kept, not copied.
          version: a number above the present version; it goes with every token sampled from now on.
          on_update: what happens to samples in flight, see EngineConfig; None: as configured. Samples that wait, and
            have not begun, simply begin under the new weights.

        Returns:
          How many cached pages were dropped.

        Raises:
          ValueError: weights that do not fit, a version that is not above the present one, or "finish" while samples of
            older weights are still finishing: two versions are kept, not three. Nothing has changed.
        """
        on_update = on_update or self.config.on_update
        if on_update not in ON_UPDATE:
            raise ValueError(f"on_update={on_update!r}; choose one of {', '.join(ON_UPDATE)}")
        version = operator.index(version)
        if not self.version < version < 2**31:
            raise ValueError(f"version={version} must be above the present version {self.version} and fit in 31 bits")
        if on_update == "finish" and self.updating:
            older = ", ".join(map(str, self._runner.older))
            raise ValueError(f"samples of version {older} still finish beside those of {self.version}; wait for them")
        params, runner = self._runner.checked(params), self._runner
        if on_update == "finish":
            runner.older[self.version] = runner.params
            dropped = self._scheduler.begin_version(version)
        else:
            self._ahead = None  # its samples go back to the queue without what it brings
            dropped = self._scheduler.change_weights(version, keep_tokens=on_update == "continue")
        runner.params = params
        self._forget_older()
        return dropped

    def _forget_older(self) -> None:
        """Lets older weights go once no sample needs them."""
        if self._runner.older and not self._scheduler.finishing:
            self._runner.older.clear()

    def stats(self) -> EngineStats:
        """Totals since the start."""
        scheduler, pool = self._scheduler.stats, self._pool.stats
        return EngineStats(
            requests=self._requests_taken,
            completions=self._completions,
            steps=self._steps,
            generated_tokens=self._tokens,
            tokens_per_s=self._tokens / self._busy_s if self._busy_s else 0.0,
            busy_s=self._busy_s,
            warmup_s=self._warmup_s,
            prefill_rows=scheduler.prefill_rows,
            decode_rows=scheduler.decode_rows,
            decode_steps=scheduler.decode_steps,
            reused_tokens=scheduler.reused_tokens,
            prefix_queries=pool.queries,
            prefix_hits=pool.hits,
            shared_pages=scheduler.shared_pages,
            copied_pages=scheduler.copied_pages,
            evictions=pool.evictions,
            dropped=pool.dropped,
            preemptions=scheduler.preemptions,
            pages_in_use=self._pool.num_pages - self._pool.available,
            pages=self._pool.num_pages,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
        )

    def check(self) -> None:
        """Verifies that pages, slots and samples agree. Raises AssertionError naming the faults."""
        self._scheduler.check()


def _alternatives(sample: Sample, start: int) -> dict[str, np.ndarray]:
    """top_ids and top_logprobs of the sampled tokens from number `start` on; nothing when they were not asked for."""
    if not (k := sample.request.params.top_logprobs):
        return {}
    rows = {"top_ids": (sample.top_ids, np.int32), "top_logprobs": (sample.top_logprobs, np.float32)}
    return {name: np.array(found[start:], dtype).reshape(-1, k) for name, (found, dtype) in rows.items()}

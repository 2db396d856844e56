"""Request (one prompt) and Sample (one of its completions): what the scheduler moves about."""

from __future__ import annotations

import numpy as np

from isomodel.rollout.detokenizer import StopStrings
from isomodel.rollout.outputs import Chosen
from isomodel.rollout.pages import Key
from isomodel.rollout.sampling_params import SamplingParams, sample_key


class Request:
    """One prompt with its n samples, and what they share.

    Attributes:
      id: name of the request.
      prompt: int32 [prompt_len].
      params: how it is sampled; `seed` is always set, the request's own or the engine's.
      limit: most tokens of a sample, prompt included.
      stop_ids: token ids that end a sample.
      samples: the n samples, in order.
      leader: the sample that computes the prompt now, while others wait to fork from its pages.
      held: pages of the whole prompt's keys and values, referenced here until every sample has forked; else None.
      unattached: live samples that have no pages now.
      prompt_keys: names of the prompt's full pages under the weights of now.
      prompt_logprobs: float32 [prompt_len] when asked for (entry 0 is NaN: nothing predicts the first token); or None.
      scored: prompt_logprobs are complete.
    """

    def __init__(
        self,
        id: str,
        prompt: np.ndarray,
        params: SamplingParams,
        seed: int,
        limit: int,
        stop_ids: frozenset[int] = frozenset(),
        decode=None,
    ):
        self.id, self.prompt, self.params, self.seed, self.limit, self.stop_ids = (
            id,
            prompt,
            params,
            seed,
            limit,
            stop_ids,
        )
        self.leader: Sample | None = None
        self.held: list[int] | None = None
        self.prompt_keys: list[Key] = []
        self.prompt_logprobs = None
        if params.prompt_logprobs:
            self.prompt_logprobs = np.full(len(prompt), np.nan, np.float32)
        self.scored = not params.prompt_logprobs
        self.decode = decode
        self.samples = [Sample(self, i) for i in range(params.n)]
        self.unattached = params.n

    def weights_changed(self) -> None:
        """Forgets what was computed under the old weights; the caller has released `held`."""
        self.prompt_keys = []
        self.scored = self.prompt_logprobs is None


class Sample:
    """One completion on its way.

    Positions below `computed` have been run as rows; the next row is position `computed`. Positions below `kv_ready`
    have their keys and values in `pages`: it is ahead of `computed` by one when the last row of a wholly shared prompt
    runs again for its logits, and such a row writes nothing.

    Attributes:
      index: which of the request's n samples.
      key: uint32 [2], the sampler's key.
      tokens: int32 buffer, prompt first; `count` of it are known.
      logprobs, truncated, versions: float32, float32, int32 buffers, one entry for each sampled token.
      logits: float32 rows [V] of the sampled tokens, when the engine returns them.
      top_ids, top_logprobs: rows [k] of the likeliest tokens at each sampled one, when the request asks for them.
      pages: its pages in order; `keys` names the full ones, the first `registered` of them are known to the cache.
      slot: its place in the slot table, -1 when not running.
      attached: it has pages; a running sample without waits to fork from its request's leader.
      begun: it was admitted once under the weights of now.
      finish_reason: None, "stop", "length", "abort" or "error"; `stop_reason`: the token id or string that ended it.
      error: what its own text raised, which ends it alone; or None.
    """

    def __init__(self, request: Request, index: int):
        self.request, self.index = request, index
        self.key = sample_key(request.seed, index)
        self.tokens = request.prompt
        self.count = len(request.prompt)
        self.logprobs = self.truncated = self.versions = None
        self.logits: list[np.ndarray] = []
        self.top_ids: list[np.ndarray] = []
        self.top_logprobs: list[np.ndarray] = []
        self.computed = self.kv_ready = self.registered = 0
        self.pages: list[int] = []
        self.keys: list[Key] = []
        self.slot = -1
        self.attached = self.begun = False
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self.stop_strings: StopStrings | None = None
        self._new_text()

    def _new_text(self) -> None:
        if self.request.params.stop:
            self.stop_strings = StopStrings(self.request.params.stop, self.request.decode)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return self.count - self.prompt_len

    @property
    def remaining(self) -> int:
        """Known positions that have not been run: 1 for a decoding sample."""
        return self.count - self.computed

    @property
    def decodes(self) -> bool:
        """Only its newest sampled token is left to run (a row of the prompt always runs in a chunk)."""
        return self.attached and self.remaining == 1 and self.prompt_len <= self.computed >= self.kv_ready

    def restart(self) -> None:
        """Forgets every sampled token; the seed stays, so the same weights would give the same tokens again."""
        self.count = self.prompt_len
        for rows in (self.logits, self.top_ids, self.top_logprobs):
            rows.clear()
        self._new_text()

    def accept(self, chosen: Chosen, version: int) -> None:
        """Appends sampled tokens up to the one that ends the sample, and sets `finish_reason` if one does.

        Args:
          chosen: of this sample alone, arrays with one leading axis, the steps.
          version: the weights that sampled them.
        """
        request, tokens = self.request, chosen.tokens
        if self.logprobs is None:  # buffers are made once the sample runs, not for everyone in the queue
            room = request.limit - self.prompt_len
            self.tokens = np.concatenate([request.prompt, np.zeros(room, np.int32)])
            self.logprobs = np.zeros(room, np.float32)
            self.truncated = np.zeros(room, np.float32)
            self.versions = np.zeros(room, np.int32)
        n = min(len(tokens), request.limit - self.count)
        if request.stop_ids or self.stop_strings:
            for i, token in enumerate(tokens[:n].tolist()):
                if token in request.stop_ids:
                    self.stop_reason = token
                elif self.stop_strings:
                    try:
                        self.stop_reason = self.stop_strings.push(token)
                    except Exception as e:  # of the tokenizer: it must not reach the neighbours
                        self.error, self.finish_reason, n = e, "error", i + 1
                        break
                if self.stop_reason is not None:
                    self.finish_reason, n = "stop", i + 1
                    break
        start = self.generated
        self.tokens[self.count : self.count + n] = tokens[:n]
        self.logprobs[start : start + n] = chosen.logprobs[:n]
        self.truncated[start : start + n] = chosen.truncated[:n]
        self.versions[start : start + n] = version
        if chosen.logits is not None:
            self.logits.extend(chosen.logits[:n])
        if k := request.params.top_logprobs:
            self.top_ids.extend(chosen.top_ids[:n, :k])
            self.top_logprobs.extend(chosen.top_logprobs[:n, :k])
        self.count += n
        if self.finish_reason is None and self.count == request.limit:
            self.finish_reason = "length"

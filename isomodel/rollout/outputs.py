"""Chosen: what a step gives its rows; Completion: what a request brings back; Tail: what is new of one on its way; EngineStats: what the engine did."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np


class Chosen(NamedTuple):
    """What comes of S final hidden rows (of K steps: with a leading axis K), on the device and on the host.

    Attributes:
      tokens: int32 [S]. logprobs, truncated: float32 [S], of each, over the whole vocabulary and after truncation.
      logits: float32 [S, V]. top_ids: int32 [S, k], the likeliest tokens, of equal ones the lowest index first.
        top_logprobs: float32 [S, k], of each of them. All three are None in engines that were not made for them.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    truncated: np.ndarray
    logits: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """One sample of one prompt, finished.

    Attributes:
      request_id: the request's name. index: which of its n samples.
      prompt_ids: int32 [prompt_len].
      token_ids: int32 [n], the sampled tokens, up to and with the one that ended them.
      logprobs: float32 [n], nats, <= 0: log-softmax of logits * inv_temp over the full vocabulary, before any
        truncation; None when the request did not ask for them.
      truncated_logprobs: float32 [n], under the distribution that was sampled from (top-k, top-p, min-p applied and
        renormalised; 0 for greedy). Not the quantity to train on. None as above.
      versions: int32 [n], weight version that sampled each token.
      inv_temp: 1 / temperature as it entered the log-probabilities; 1 for greedy.
      finish_reason: "stop", "length", "abort" or "error". stop_reason: the token id or the string that stopped it.
      seed: the request's, given or assigned: with it, the same prompt gives the same tokens again.
      text: what the tokens say, without special tokens and without the stop string; None without a tokenizer.
      prompt_logprobs: float32 [prompt_len] when asked for; entry 0 is NaN. None when not, or when aborted before.
      logits: float32 [n, V] rows that the tokens were sampled from, when the engine returns them.
      error: what the tokenizer raised on its tokens, where it ended by "error"; else None.
      top_ids, top_logprobs: int32, float32 [n, k]: the k likeliest tokens at each place, and their log-probabilities, bit
        for bit what they have where they are sampled. None when the request did not ask for them.
    """

    request_id: str
    index: int
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray | None
    truncated_logprobs: np.ndarray | None
    versions: np.ndarray
    inv_temp: np.float32
    finish_reason: str
    stop_reason: int | str | None
    seed: int
    text: str | None = None
    prompt_logprobs: np.ndarray | None = None
    logits: np.ndarray | None = None
    error: Exception | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def to_json(self) -> dict:
        """JSON values; floats keep every bit (a float32 is exact as a double). Logits and errors stay out."""
        values = {
            "request_id": self.request_id,
            "index": self.index,
            "text": self.text,
            "prompt_ids": self.prompt_ids.tolist(),
            "token_ids": self.token_ids.tolist(),
            "versions": self.versions.tolist(),
            "inv_temp": float(self.inv_temp),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "seed": self.seed,
        }
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs.tolist()
            values["truncated_logprobs"] = self.truncated_logprobs.tolist()
        if self.top_ids is not None:
            values["top_ids"] = self.top_ids.tolist()
            values["top_logprobs"] = self.top_logprobs.tolist()
        if self.prompt_logprobs is not None:
            values["prompt_logprobs"] = [None, *self.prompt_logprobs[1:].tolist()]
        return values


@dataclasses.dataclass(frozen=True, eq=False)
class Tail:
    """What an unfinished sample has got since someone last looked.

    Attributes:
      token_ids: int32 [n]. logprobs: float32 [n], as a Completion's, whether or not the request asked (0 if the engine computes none).
      versions: int32 [n], weight version that sampled each token. top_ids, top_logprobs: as a Completion's.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Totals since the engine started.

    Attributes:
      requests, completions: taken and finished (an aborted sample counts).
      steps: looks by the host; a decode loop is one.
      generated_tokens: tokens of finished and running samples. tokens_per_s: these over busy_s.
      busy_s: seconds inside `step`. warmup_s: seconds of compilation at the start.
      prefill_rows, decode_rows: rows that ran. decode_steps: steps of the device with rows that decode, each of a loop for itself.
      reused_tokens: positions that did not run, because their keys and values were there.
      prefix_queries, prefix_hits: full pages looked up in, and found in, the prefix cache.
      shared_pages, copied_pages: pages that samples of one prompt took from each other, by reference and by copy.
      evictions, dropped: cached pages that gave way to new ones, and that new weights made stale.
      preemptions: samples that gave up their pages and came back.
      pages_in_use, pages: held now, and there are.
      running, waiting: samples that have a slot now, and that wait for one.
    """

    requests: int
    completions: int
    steps: int
    generated_tokens: int
    tokens_per_s: float
    busy_s: float
    warmup_s: float
    prefill_rows: int
    decode_rows: int
    decode_steps: int
    reused_tokens: int
    prefix_queries: int
    prefix_hits: int
    shared_pages: int
    copied_pages: int
    evictions: int
    dropped: int
    preemptions: int
    pages_in_use: int
    pages: int
    running: int
    waiting: int

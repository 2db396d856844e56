"""EngineConfig: sizes of a rollout engine. None of them reaches the bits of a completion."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from isomodel.batch import NO_SLOT
from isomodel.config import ModelConfig
from isomodel.rollout.pages import KV_BLOCK

DEFAULT_KV_MEMORY = 2**30
GPU, CPU = dict(chunk_tokens=4096, decode_steps=64), dict(chunk_tokens=512, decode_steps=8)
"""What these fields are where they are None. A GPU's steps take milliseconds, and its GEMMs want thousands of rows."""
ON_UPDATE = ("finish", "restart", "continue")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and policies.

    Attributes:
      max_seqs: samples that run at one time.
      max_model_len: most tokens of a sample, prompt included; None: 2048, or the model's own limit where that is less.
      page_size: positions of a page; a divisor of 128.
      num_pages: pages of the KV cache; None: from `kv_memory`.
      kv_memory: bytes of the KV cache; None: enough for max_seqs samples of max_model_len, and at most 1 GiB (but never
        less than one such sample).
      memory_fraction: in place of kv_memory: the KV cache takes what is left of this share of the device memory that JAX
        may take, after all that is there (the weights) and the programs' scratch.
      reserved_memory: bytes of that share that are left free for others, such as a trainer.
      chunk_tokens: prompt rows of a step, at most; None: see GPU and CPU.
      decode_steps: most steps that the device takes between two looks by the host; None: see GPU and CPU. Fewer where others
        wait for room and samples end (scheduler.IDLE_SHARE).
      look_s: seconds of the two loops, at most, that the device has been given at any time, as far as one step allows. New requests
        wait so long; streams get their tokens twice as often.
      prefix_cache: full pages are found again by later requests.
      share_prompts: decode steps read pages that samples side by side hold together, their prompt's, once for all of them
        where that is faster (Hopper). Costs a launch of about 2 us a layer where nothing is shared; no bit differs.
      logprobs: requests may ask for log-probabilities of what is sampled; without, steps compute none.
      prompt_logprobs: requests may ask for prompt log-probabilities (one more program a token bucket).
      top_logprobs: most alternatives that a request may ask for at each sampled token; they are computed at each step
        for every sample, so 0 costs nothing.
      return_logits: completions carry the full fp32 logits row of every sampled token (for gates; large).
      on_update: what new weights do to samples in flight: "finish" them under the old ones, "restart" them from their prompts, or
        "continue": keep their tokens and recompute their keys and values (each token records its version).
      seed: from which requests without a seed get theirs.
      seq_buckets, token_buckets: sizes that steps are padded to; None: by factors of four (a GPU's token_buckets: of two), up
        to what can happen. Steps with prompt rows have room for max_seqs samples.
    """

    max_seqs: int = 64
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_memory: int | None = None
    memory_fraction: float | None = None
    reserved_memory: int = 0
    chunk_tokens: int | None = None
    decode_steps: int | None = None
    look_s: float = 0.5
    prefix_cache: bool = True
    share_prompts: bool = True
    logprobs: bool = True
    prompt_logprobs: bool = True
    top_logprobs: int = 0
    return_logits: bool = False
    on_update: str = "finish"
    seed: int = 0
    seq_buckets: tuple[int, ...] | None = None
    token_buckets: tuple[int, ...] | None = None

    def __post_init__(self):
        """Raises ValueError listing every field that is out of range."""
        faults = [
            f"{field}={getattr(self, field)!r} must be an integer >= 1"
            for field in ("max_seqs", "page_size")
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 1
        ]
        if not faults and KV_BLOCK % self.page_size:
            faults.append(f"page_size={self.page_size} does not divide {KV_BLOCK}; use 1, 2, 4, 8, 16, 32, 64 or 128")
        for field in ("max_model_len", "num_pages", "kv_memory", "chunk_tokens", "decode_steps"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or value < 1):
                faults.append(f"{field}={value!r} must be None or an integer >= 1")
        if self.max_model_len == 1:
            faults.append("max_model_len=1 has no room for a prompt and a token")
        sizes = {n: v for n in ("num_pages", "kv_memory", "memory_fraction") if (v := getattr(self, n)) is not None}
        if len(sizes) > 1:
            faults.append(" and ".join(f"{n}={v}" for n, v in sizes.items()) + " are given; give one of them")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            faults.append(f"memory_fraction={self.memory_fraction!r} must be above 0 and at most 1")
        if not isinstance(self.reserved_memory, int) or self.reserved_memory < 0:
            faults.append(f"reserved_memory={self.reserved_memory!r} must be an integer >= 0")
        if not isinstance(self.look_s, (int, float)) or not self.look_s > 0:
            faults.append(f"look_s={self.look_s!r} must be above 0")
        if self.on_update not in ON_UPDATE:
            faults.append(f"on_update={self.on_update!r}; choose one of {', '.join(ON_UPDATE)}")
        if not isinstance(self.top_logprobs, int) or self.top_logprobs < 0:
            faults.append(f"top_logprobs={self.top_logprobs!r} must be an integer >= 0")
        if not isinstance(self.seed, int) or self.seed < 0:
            faults.append(f"seed={self.seed!r} must be an integer >= 0")
        for field in ("seq_buckets", "token_buckets"):
            value = getattr(self, field)
            if value is not None and (not value or list(value) != sorted(set(value)) or value[0] < 1):
                faults.append(f"{field}={value!r} must be None or sizes >= 1 in rising order")
        if faults:
            raise ValueError("engine: " + "; ".join(faults))

    def resolve(self, cfg: ModelConfig, kv_dtype: jnp.dtype) -> EngineConfig:
        """The same with nothing left open for this model: sizes and buckets are numbers, kv_memory is None.

        memory_fraction is for `memory.sized` to turn into kv_memory before.

        Raises:
          ValueError: max_model_len is beyond the model's positions, top_logprobs beyond its vocabulary, the memory holds
            no page, or the pages are too many.
        """
        if self.top_logprobs > cfg.vocab_size:
            raise ValueError(f"engine: top_logprobs={self.top_logprobs}, but the vocabulary has {cfg.vocab_size}")
        max_len = self.max_model_len or min(2048, cfg.max_positions)
        if max_len > cfg.max_positions:
            raise ValueError(f"engine: max_model_len={max_len}, but the model has {cfg.max_positions} positions")
        page_bytes = self.page_bytes(cfg, kv_dtype)
        per_seq = -(-(max_len - 1) // self.page_size)
        num_pages = self.num_pages
        if num_pages is None and self.kv_memory is not None:
            num_pages = self.kv_memory // page_bytes
            if not num_pages:
                raise ValueError(f"engine: kv_memory={self.kv_memory} bytes hold no page of {page_bytes} bytes")
        elif num_pages is None:
            num_pages = max(per_seq, min(self.max_seqs * per_seq, DEFAULT_KV_MEMORY // page_bytes))
        if num_pages * self.page_size >= NO_SLOT:
            raise ValueError(f"engine: {num_pages} pages of {self.page_size} are more than {NO_SLOT - 1} positions")
        gpu = device_sizes() is GPU
        sizes = {name: getattr(self, name) or default for name, default in device_sizes().items()}
        most_rows = self.max_seqs + sizes["chunk_tokens"]
        rows = [*_ladder(256, sizes["chunk_tokens"], 2), most_rows] if gpu else _ladder(64, most_rows)
        return dataclasses.replace(
            self,
            max_model_len=max_len,
            num_pages=num_pages,
            kv_memory=None,
            **sizes,
            seq_buckets=_cover(self.seq_buckets or _ladder(16, self.max_seqs), self.max_seqs),
            token_buckets=_cover(self.token_buckets or tuple(rows), most_rows),
        )

    def page_bytes(self, cfg: ModelConfig, kv_dtype: jnp.dtype) -> int:
        """Bytes of a page: keys and values of all layers."""
        return 2 * cfg.num_layers * self.page_size * cfg.num_kv_heads * cfg.head_dim * jnp.dtype(kv_dtype).itemsize

    @property
    def table_width(self) -> int:
        """Columns of the page table: whole attention blocks."""
        return -(-self.max_model_len // KV_BLOCK) * (KV_BLOCK // self.page_size)


def device_sizes() -> dict[str, int]:
    """GPU or CPU, by where JAX runs."""
    return CPU if jax.default_backend() == "cpu" else GPU


def _ladder(first: int, last: int, factor: int = 4) -> tuple[int, ...]:
    """first, factor * first, factor^2 * first, ... below last, then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def bucket(sizes: tuple[int, ...], n: int) -> int:
    """The smallest size that holds n, one of which does."""
    return next(size for size in sizes if size >= n)


def _cover(buckets: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The buckets up to the first that holds `most`, which is added where none does."""
    return (*(b for b in buckets if b < most), next((b for b in buckets if b >= most), most))

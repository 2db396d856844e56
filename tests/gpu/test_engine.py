"""The rollout engine on the GPU, beyond the gates of test_model: alternatives, memory by share, a large prefix cache."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isomodel import device_memory, specs
from isomodel.device_memory import OutOfDeviceMemory
from isomodel.numerics import Numerics
from isomodel.rollout import Completion, Engine, EngineConfig, SamplingParams
from tests.isomodel import shapes
from tests.pallas_kernels import base

NUMERICS = Numerics("iso", "hopper", "bfloat16")
CONFIG = dataclasses.replace(shapes.QWEN3_06B, num_layers=2, vocab_size=4096, max_positions=4096)
SIZES = EngineConfig(
    max_seqs=16, max_model_len=2304, num_pages=4096, prompt_logprobs=False, seq_buckets=(16,), token_buckets=(4112,), chunk_tokens=4096
)
PROMPTS, LENGTH = 150, 2005
"""Of the large prefix cache: 300,000 tokens, each prompt's last page partly filled."""

pytestmark = pytest.mark.xdist_group("engine")


@functools.cache
def params():
    return jax.jit(lambda: specs.init_params(CONFIG, 0, jnp.bfloat16))()


def engine(**changes) -> Engine:
    return Engine(CONFIG, params(), NUMERICS, dataclasses.replace(SIZES, **changes))


def prompts(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (count, length)).tolist()


def differing(a: list[Completion], b: list[Completion]) -> int:
    """Tokens and log-probabilities that differ, as integers; notes the comparison."""
    flat = lambda cs, field: np.concatenate([getattr(c, field) for c in cs]).view(np.int32)  # noqa: E731
    pairs = [(flat(a, field), flat(b, field)) for field in ("token_ids", "logprobs")]
    found = sum(int((x != y).sum()) for x, y in pairs)
    base.COMPARED.append((sum(x.size for x, _ in pairs), found))
    return found


def test_alternatives_have_the_bits_of_sampled_tokens():
    work, k = prompts(8, 50), 20
    for temperature in (0.0, 0.7):
        ask = SamplingParams(max_tokens=40, seed=3, temperature=temperature, top_logprobs=k)
        found = engine(top_logprobs=k).generate(work, ask)
        plain = engine().generate(work, dataclasses.replace(ask, top_logprobs=0))
        assert differing(found, plain) == 0  # making alternatives changes nothing else
        ids, top = (np.concatenate([getattr(c, field) for c in found]) for field in ("top_ids", "top_logprobs"))
        tokens, logprobs = (np.concatenate([getattr(c, field) for c in found]) for field in ("token_ids", "logprobs"))
        rows, columns = np.nonzero(ids == tokens[:, None])
        assert len(rows) > 0 and (np.diff(top, axis=1) <= 0).all()
        assert (columns == 0).all() if temperature == 0 else (columns > 0).any()
        different = int((top[rows, columns].view(np.int32) != logprobs[rows].view(np.int32)).sum())
        base.COMPARED.append((len(rows), different))
        assert different == 0


def test_a_share_of_the_memory_is_filled_and_no_more():
    limit = device_memory.device_memory().limit
    fraction = (sum(w.nbytes for w in params().values()) + 3 * 2**30) / limit + device_memory.device_memory().in_use / limit
    made = engine(num_pages=None, memory_fraction=fraction)
    size = made.config.num_pages * made.config.page_bytes(CONFIG, NUMERICS.dtype)
    assert 2**30 < size < 4 * 2**30
    assert device_memory.device_memory().in_use <= fraction * limit
    work, ask = prompts(8, 50), SamplingParams(max_tokens=20, seed=1)
    assert differing(made.generate(work, ask), engine().generate(work, ask)) == 0
    with pytest.raises(OutOfDeviceMemory, match="raise memory_fraction"):
        engine(num_pages=None, memory_fraction=1e-6)


def test_hundreds_of_thousands_of_cached_tokens():
    size = SIZES.page_size
    made = engine(num_pages=PROMPTS * -(-(LENGTH + 8) // size))
    work, ask = prompts(PROMPTS, LENGTH), SamplingParams(max_tokens=6, seed=2)
    first = made.generate(work, ask)
    assert made.stats().prefix_hits == 0 and made.stats().prefill_rows == PROMPTS * LENGTH
    order = np.random.default_rng(1).permutation(PROMPTS)
    again = made.generate([work[i] for i in order], ask)
    stats = made.stats()
    assert stats.prefix_hits >= PROMPTS * (LENGTH // size) and stats.evictions == 0
    assert stats.prefill_rows <= PROMPTS * (LENGTH + size)
    assert differing(again, [first[i] for i in order]) == 0
    made.reset_prefix_cache()
    assert differing(made.generate(work[:4], ask), first[:4]) == 0  # computed anew
    assert made.stats().prefix_hits == stats.prefix_hits
    assert differing(made.generate(work[:4], dataclasses.replace(ask, seed=9)), first[:4]) > 0
    made.check()
    assert made.stats().pages_in_use == 0

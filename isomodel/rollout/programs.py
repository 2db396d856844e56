"""The device programs of a rollout: one step of mixed rows, a loop of decode steps, page copies, prompt scoring.

Each is compiled ahead of time for its buckets, and kept for every engine of equal shapes in the process. A compiled
program refuses other shapes, so nothing can compile later.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from isomodel import model
from isomodel.batch import NO_SLOT, Batch, KVCache
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.rollout.engine_config import EngineConfig
from isomodel.rollout.outputs import Chosen
from isomodel.rollout.slots import DEVICE_STOPS
from isomodel.specs import Params, weight_specs
from pallas_kernels import environment, logprob, sample

COPY_PAGES = 16
"""Pages that one copy program moves; more pages take more calls."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the S rows of a step are sampled.

    Attributes:
      keys_S2: uint32. inv_temp_S: float32, 0 is greedy.
      top_k_S: int32. top_p_S, min_p_S: float32.
    """

    keys_S2: jax.Array
    inv_temp_S: jax.Array
    top_k_S: jax.Array
    top_p_S: jax.Array
    min_p_S: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoding:
    """Where S decoding samples stand. Unused entries come last, with room 0 and kv_len 0.

    Attributes:
      tokens_S: int32, the newest token of each, not run yet.
      kv_len_S: int32, tokens of each sample, that one included.
      room_S: int32, tokens that each may still get.
      stops_SE: int32, token ids that end it; -1 is none.
      page_table_SP: int32, with pages for every step of the loop.
      steps: int32 scalar, most steps to take.
    """

    tokens_S: jax.Array
    kv_len_S: jax.Array
    room_S: jax.Array
    stops_SE: jax.Array
    page_table_SP: jax.Array
    steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What a program's shapes depend on, besides its buckets; without top_logprobs nothing is computed for it."""

    num_pages: int
    page_size: int
    table_width: int
    decode_steps: int
    return_logits: bool
    logprobs: bool = True
    top_logprobs: int = 0
    share_prompts: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> Shapes:
        """Of a resolved config."""
        return cls(
            config.num_pages,
            config.page_size,
            config.table_width,
            config.decode_steps,
            config.return_logits,
            config.logprobs,
            config.top_logprobs,
            config.share_prompts,
        )


def _choose(cfg, numerics, shapes: Shapes, params, hidden_SD, positions_S, sampling: Sampling, fixed=None) -> Chosen:
    """What comes of S final hidden rows; `fixed` of the sampling, where a loop has it."""
    logits_SV = model.logits(cfg, numerics, params, hidden_SD)
    keys_S2, *parameters = _parameters(sampling)
    tokens_S, logprob_S, truncated_S = sample.sample(
        logits_SV,
        keys_S2,
        positions_S,
        *parameters,
        regions=("sample", "logprob" if shapes.logprobs else None),
        impl=numerics.impl,
        fixed=fixed,
    )
    kept_SV = logits_SV[:, : cfg.vocab_size] if shapes.return_logits else None
    top = _likeliest(numerics, shapes.top_logprobs, logits_SV, sampling.inv_temp_S) if shapes.top_logprobs else ()
    return Chosen(tokens_S, logprob_S, truncated_S, kept_SV, *top)


def _parameters(sampling: Sampling) -> tuple[jax.Array, ...]:
    return sampling.keys_S2, sampling.inv_temp_S, sampling.top_k_S, sampling.top_p_S, sampling.min_p_S


def _likeliest(numerics, count: int, logits_SV: jax.Array, inv_temp_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(token ids, log-probabilities) [S, count], each the bits that the token has when it is the sampled one."""
    _, ids_Sk = lax.top_k(logits_SV, count)
    inv_temp_S = jnp.where(inv_temp_S == 0, 1, inv_temp_S)

    def one(ids_S):
        return logprob.from_logits(logits_SV, ids_S, inv_temp_S, region="logprob", impl=numerics.impl)

    return ids_Sk, lax.map(one, ids_Sk.T).T


def mixed_step(
    cfg, numerics, shapes: Shapes, params: Params, cache: KVCache, batch: Batch, sampling: Sampling, rope: jax.Array
):
    """Runs the rows of a batch and samples after each sequence's last row.

    Returns (cache, hidden [T, D], Chosen).
    """
    hidden_TD, cache = model.forward(cfg, numerics, params, batch, cache, rope=rope)
    last_S = jnp.maximum(batch.q_start_S1[1:] - 1, 0)
    return cache, hidden_TD, _choose(cfg, numerics, shapes, params, hidden_TD[last_S], batch.kv_len_S, sampling)


def decode_loop(
    cfg, numerics, shapes: Shapes, params: Params, cache: KVCache, state: Decoding, sampling: Sampling, rope: jax.Array
):
    """Decodes until every sample has stopped or `state.steps` steps are done.

    A sample that stopped runs on as the same row, writing nothing, so that shapes stay and neighbours do not notice.

    Returns:
      (cache, counts [S], Chosen of K = shapes.decode_steps steps, of which a sample's first counts[s] are its own, and tokens,
      kv_len and room of a `Decoding` that goes on from there: samples that stopped have no room, and 2 tokens).
    """
    S = state.tokens_S.shape[0]
    used_S = state.kv_len_S > 0
    q_start_S1 = jnp.minimum(jnp.arange(S + 1, dtype=jnp.int32), jnp.sum(used_S, dtype=jnp.int32))
    words = jnp.zeros((shapes.decode_steps, 3, S), jnp.int32)  # of `Chosen.tokens`, `logprobs` and `truncated`: written by one kernel
    others = Chosen(None, None, None)
    if shapes.return_logits:
        others = others._replace(logits=jnp.zeros((shapes.decode_steps, S, cfg.vocab_size), jnp.float32))
    if shapes.top_logprobs:
        top = jnp.zeros((shapes.decode_steps, S, shapes.top_logprobs), jnp.float32)
        others = others._replace(top_ids=top.astype(jnp.int32), top_logprobs=top)

    def lengths(counts_S, stopped_S):
        """With all new tokens but the newest of a sample that stopped, which is never run."""
        return jnp.where(used_S, state.kv_len_S + counts_S - stopped_S, 0)

    active_S, counts_S = used_S & (state.room_S > 0), jnp.zeros(S, jnp.int32)
    attention_work = model.attention_work_of(
        cfg,
        numerics,
        q_start_S1,
        lengths(counts_S, ~active_S),
        lengths(jnp.minimum(state.room_S, state.steps), True),
        state.page_table_SP,
        shapes.page_size,
        share_prompts=shapes.share_prompts,
    )

    as_words = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    fixed = sample.fixed_of(*_parameters(sampling), impl=numerics.impl)

    def goes_on(carry):
        k, active_S = carry[0], carry[1]
        return (k < state.steps) & jnp.any(active_S)

    def step(carry):
        k, active_S, counts_S, tokens_S, cache, outputs = carry
        kv_len_S = lengths(counts_S, ~active_S)
        position_S = jnp.maximum(kv_len_S - 1, 0)
        page_S = jnp.take_along_axis(state.page_table_SP, (position_S // shapes.page_size)[:, None], axis=1)[:, 0]
        slots_S = jnp.where(active_S, page_S * shapes.page_size + position_S % shapes.page_size, NO_SLOT)
        batch = Batch(tokens_S, position_S, slots_S, q_start_S1, kv_len_S, state.page_table_SP)
        hidden_SD, cache = model.forward(
            cfg,
            numerics,
            params,
            batch,
            cache,
            rope=rope,
            attention_work=attention_work(kv_len_S),
            unroll=numerics.impl == "hopper",
        )
        chosen = _choose(cfg, numerics, shapes, params, hidden_SD, kv_len_S, sampling, fixed)
        new = jnp.stack([chosen.tokens, *map(as_words, (chosen.logprobs, chosen.truncated))])
        rest = chosen._replace(tokens=None, logprobs=None, truncated=None)
        outputs = jax.tree.map(lambda o, new: lax.dynamic_update_index_in_dim(o, new, k, 0), outputs, (new, rest))
        counts_S = counts_S + active_S
        ends_S = jnp.any(chosen.tokens[:, None] == state.stops_SE, axis=1) | (counts_S >= state.room_S)
        goes_S = active_S & ~ends_S
        return k + 1, goes_S, counts_S, jnp.where(goes_S, chosen.tokens, tokens_S), cache, outputs

    carry = (jnp.int32(0), active_S, counts_S, state.tokens_S, cache, (words, others))
    _, goes_S, counts_S, tokens_S, cache, (words, others) = lax.while_loop(goes_on, step, carry)
    logprobs, truncated = (lax.bitcast_convert_type(words[:, i], jnp.float32) for i in (1, 2))
    outputs = others._replace(tokens=words[:, 0], logprobs=logprobs, truncated=truncated)
    # Of samples that have ended as little as can be read: they keep their rows in loops that follow.
    kv_len_S = jnp.where(used_S, jnp.where(goes_S, state.kv_len_S + counts_S, 2), 0)
    return cache, counts_S, outputs, (tokens_S, kv_len_S, jnp.where(goes_S, state.room_S - counts_S, 0))


def copy_pages(cache: KVCache, source_C: jax.Array, destination_C: jax.Array) -> KVCache:
    """Copies whole pages in every layer; destinations beyond the pool are dropped. Sources are read before any write.

    Destinations are made unique, those beyond the pool too, so that XLA's deterministic scatter is a plain parallel store.
    """
    N, C = cache.k_LNpKd.shape[1], destination_C.shape[0]
    destination_C = jnp.where(destination_C < N, destination_C, N + jnp.arange(C, dtype=destination_C.dtype))

    def copy(x_LNpKd):
        return x_LNpKd.at[:, destination_C].set(x_LNpKd[:, source_C], mode="drop", unique_indices=True)

    return KVCache(copy(cache.k_LNpKd), copy(cache.v_LNpKd))


def abstract_params(cfg: ModelConfig, numerics: Numerics) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the weights that the programs take."""
    return {name: jax.ShapeDtypeStruct(spec.shape, numerics.dtype) for name, spec in weight_specs(cfg).items()}


def _array(shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _abstract_cache(cfg, numerics, shapes: Shapes):
    return jax.eval_shape(lambda: KVCache.zeros(cfg, shapes.num_pages, shapes.page_size, numerics.dtype))


def _abstract_sampling(S: int) -> Sampling:
    f32 = _array((S,), jnp.float32)
    return Sampling(_array((S, 2), jnp.uint32), f32, _array((S,)), f32, f32)


def mixed_arguments(cfg, numerics, shapes: Shapes, T: int, S: int) -> tuple:
    """Abstract arguments of `mixed_step` for T rows of S sequences."""
    row = _array((T,))
    batch = Batch(row, row, row, _array((S + 1,)), _array((S,)), _array((S, shapes.table_width)))
    return _arguments(cfg, numerics, shapes, batch, S)


def decode_arguments(cfg, numerics, shapes: Shapes, S: int) -> tuple:
    """Abstract arguments of `decode_loop` for S samples."""
    seq = _array((S,))
    state = Decoding(seq, seq, seq, _array((S, DEVICE_STOPS)), _array((S, shapes.table_width)), _array(()))
    return _arguments(cfg, numerics, shapes, state, S)


def _arguments(cfg, numerics, shapes: Shapes, work, S: int) -> tuple:
    cache, rope = _abstract_cache(cfg, numerics, shapes), model.abstract_rope(cfg, numerics)
    return abstract_params(cfg, numerics), cache, work, _abstract_sampling(S), rope


def _with_rope(cfg, numerics, run):
    """`run` with the table of rotations as its last argument."""
    return lambda *args: run(*args, model.rope(cfg, numerics))


def _compiled_step(cfg, numerics, shapes: Shapes, program, arguments) -> jax.stages.Compiled:
    """`program` of (params, cache, work, sampling, rope), compiled for these arguments; the cache is donated."""
    lowered = jax.jit(functools.partial(program, cfg, numerics, shapes), donate_argnums=1).lower(*arguments)
    return lowered.compile(compiler_options=environment.one_graph() if numerics.impl == "hopper" else None)


@functools.lru_cache(maxsize=256)
def scratch_bytes(cfg: ModelConfig, numerics: Numerics, shapes: Shapes, T: int, S: int) -> int:
    """Device memory that a step takes beside weights and cache: of the larger one of `mixed_step` and `decode_loop`.

    It does not depend on the number of pages. Compiles both.
    """
    most = 0
    for step, arguments in (
        (mixed_step, mixed_arguments(cfg, numerics, shapes, T, S)),
        (decode_loop, decode_arguments(cfg, numerics, shapes, S)),
    ):
        found = _compiled_step(cfg, numerics, shapes, step, arguments).memory_analysis()
        most = max(most, found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes)
    return most


@functools.lru_cache(maxsize=256)
def compiled_mixed(cfg: ModelConfig, numerics: Numerics, shapes: Shapes, T: int, S: int):
    """`mixed_step(params, cache, batch, sampling)`, compiled; the cache is donated."""
    arguments = mixed_arguments(cfg, numerics, shapes, T, S)
    return _with_rope(cfg, numerics, _compiled_step(cfg, numerics, shapes, mixed_step, arguments))


@functools.lru_cache(maxsize=256)
def compiled_decode(cfg: ModelConfig, numerics: Numerics, shapes: Shapes, S: int):
    """`decode_loop(params, cache, state, sampling)`, compiled; the cache is donated."""
    arguments = decode_arguments(cfg, numerics, shapes, S)
    return _with_rope(cfg, numerics, _compiled_step(cfg, numerics, shapes, decode_loop, arguments))


@functools.lru_cache(maxsize=256)
def compiled_copy(cfg: ModelConfig, numerics: Numerics, shapes: Shapes):
    """`copy_pages(cache, source, destination)` for COPY_PAGES pages, compiled; the cache is donated."""
    pages = _array((COPY_PAGES,))
    return jax.jit(copy_pages, donate_argnums=0).lower(_abstract_cache(cfg, numerics, shapes), pages, pages).compile()


@functools.lru_cache(maxsize=256)
def compiled_score(cfg: ModelConfig, numerics: Numerics, T: int):
    """`model.logprobs(params, hidden, targets, inv_temp)` of T rows, compiled."""
    hidden_TD = _array((T, cfg.hidden_size), numerics.dtype)
    fn = jax.jit(functools.partial(model.logprobs, cfg, numerics))
    return fn.lower(abstract_params(cfg, numerics), hidden_TD, _array((T,)), _array((T,), jnp.float32)).compile()

"""The one definition of the dense model, run by one forward in every case; no arithmetic of its own, only calls of ops."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from isomodel.batch import NO_SLOT, Batch, KVCache, TrainPages
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.specs import Params, weight_faults
from pallas_kernels import attention as attention_op
from pallas_kernels import embed, gemm, logprob, mlp, qk_norm_rope, rms_norm, silu_mul
from pallas_kernels.weight import Weight

_tap: contextvars.ContextVar[dict | None] = contextvars.ContextVar("tap", default=None)


@contextlib.contextmanager
def _tapping(on: bool):
    """Collects {region: output} of what is traced inside, where `on`."""
    seen: dict[str, jax.Array] = {}
    token = _tap.set(seen if on else None)
    try:
        yield seen
    finally:
        _tap.reset(token)


def _note(region: str, x: jax.Array) -> jax.Array:
    seen = _tap.get()
    if seen is not None:
        seen[region] = x
    return x


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """What every layer of one forward shares; `layer` is set where weights and pages are stacks."""

    cfg: ModelConfig
    numerics: Numerics
    batch: Batch
    rotations_T2h: jax.Array
    pages: TrainPages | None
    attention_work: attention_op.Work | None
    layer: jax.Array | None = None


class Attention(nnx.Module):
    """Mixer: fused projection, norm and rotation of queries and keys, paged attention, output projection."""

    def __init__(self, weights: dict[str, Weight], qk_norm: bool):
        self.qkv = nnx.Param(weights["qkv"])
        self.q_norm = nnx.Param(weights["q_norm"]) if qk_norm else None
        self.k_norm = nnx.Param(weights["k_norm"]) if qk_norm else None
        self.o = nnx.Param(weights["o"])

    def __call__(self, x_TD: jax.Array, kv: tuple | None, ctx: LayerContext):
        """Returns (mixed rows [T, D], the pages with this batch's keys and values, or None in training)."""
        cfg, impl = ctx.cfg, ctx.numerics.impl
        T = x_TD.shape[0]
        options = dict(
            eps=cfg.rms_norm_eps,
            theta=cfg.rope_theta,
            max_positions=cfg.max_positions,
            impl=impl,
            rotations_T2h=ctx.rotations_T2h,
        )
        w_KgdD, positions_T = self.qkv.get_value(), ctx.batch.positions_T
        norms = [None if norm is None else norm.get_value() for norm in (self.q_norm, self.k_norm)]
        places = None if ctx.layer is None else (*kv, ctx.batch.slots_T, ctx.layer)
        if places is None or _tap.get() is not None:  # a gradient, or someone who looks, needs what is projected
            qkv_TN = _note("qkv", gemm.chain(x_TD, w_KgdD, region="qkv", impl=impl))
            rows = qkv_TN.reshape(T, cfg.num_kv_heads, cfg.groups + 2, cfg.head_dim), positions_T, *norms
            options["region"] = "qk_norm_rope"
            if places is None:
                q_THd, k_TKd, v_TKd = qk_norm_rope.qk_norm_rope(*rows, **options)
                k_pages, v_pages = _own_pages(k_TKd, ctx), _own_pages(v_TKd, ctx)
            else:
                q_THd, k_pages, v_pages = qk_norm_rope.to_pages(*rows, *places, **options)
        else:
            options["regions"] = ("qkv", "qk_norm_rope")
            q_THd, k_pages, v_pages = qk_norm_rope.of_gemm(x_TD, w_KgdD, positions_T, *norms, *places, **options)
        _note("qk_norm_rope", q_THd)
        o_THd = attention_op.attention(
            q_THd,
            k_pages,
            v_pages,
            ctx.batch.q_start_S1,
            ctx.batch.kv_len_S,
            ctx.batch.page_table_SP,
            layer=ctx.layer,
            work=ctx.attention_work,
            region="attention",
            impl=impl,
        )
        _note("attention", o_THd)
        y_TD = gemm.tree(o_THd, self.o.get_value(), region="o_proj", impl=impl, contract_dims=2)
        return _note("o_proj", y_TD), None if ctx.layer is None else (k_pages, v_pages)


def _own_pages(x_TKd, ctx: LayerContext) -> jax.Array:
    """Keys or values of a training batch in pages of one layer, made here. Bytes move, nothing rounds.

    Every padding row gets a slot of its own out of range: all indices are unique, and XLA's deterministic scatter is then
    a plain parallel store.
    """
    slots_T, pages = ctx.batch.slots_T, ctx.pages
    slots_T = jnp.where(slots_T >= NO_SLOT, NO_SLOT + jnp.arange(slots_T.shape[0], dtype=jnp.int32), slots_T)
    flat = jnp.zeros((pages.num_pages * pages.page_size, *x_TKd.shape[1:]), x_TKd.dtype)
    flat = flat.at[slots_T].set(x_TKd, mode="drop", unique_indices=True)
    return flat.reshape(pages.num_pages, pages.page_size, *x_TKd.shape[1:])


class DenseMLP(nnx.Module):
    """silu(gate) * up, and down."""

    def __init__(self, weights: dict[str, Weight]):
        self.gate_up = nnx.Param(weights["gate_up"])
        self.down = nnx.Param(weights["down"])

    def __call__(self, x_TD: jax.Array, ctx: LayerContext) -> jax.Array:
        impl = ctx.numerics.impl
        w_2FD = self.gate_up.get_value()
        w_DF = self.down.get_value()
        if ctx.layer is not None and _tap.get() is None:
            return mlp.mlp(x_TD, w_2FD, w_DF, regions=("gate_up", "silu_mul", "down_proj"), impl=impl)
        # A gradient, or someone who looks, needs gates and ups.
        gate_up_TN = _note("gate_up", gemm.chain(x_TD, w_2FD, region="gate_up", impl=impl))
        h_TF = _note("silu_mul", silu_mul.silu_mul(gate_up_TN, region="silu_mul", impl=impl))
        return _note("down_proj", gemm.tree(h_TF, w_DF, region="down_proj", impl=impl))


class Layer(nnx.Module):
    """A mixer and an MLP, each after a norm that also adds what came before to the residual stream."""

    def __init__(self, cfg: ModelConfig, weights: dict[str, Weight]):
        inner = lambda part: {n.removeprefix(part): w for n, w in weights.items() if n.startswith(part)}  # noqa: E731
        self.mixer_norm = nnx.Param(weights["mixer_norm"])
        self.mixer = Attention(inner("mixer."), cfg.qk_norm)
        self.mlp_norm = nnx.Param(weights["mlp_norm"])
        self.mlp = DenseMLP(inner("mlp."))

    def __call__(self, x_TD, residual_TD, kv, ctx: LayerContext):
        """x is the last block's output, not yet added to the residual. Returns (x, residual, kv)."""
        options = dict(eps=ctx.cfg.rms_norm_eps, impl=ctx.numerics.impl)
        h_TD, residual_TD = rms_norm.add_rms_norm(
            x_TD, residual_TD, self.mixer_norm.get_value(), region="mixer_norm", **options
        )
        x_TD, kv = self.mixer(_note("mixer_norm", h_TD), kv, ctx)
        h_TD, residual_TD = rms_norm.add_rms_norm(
            x_TD, residual_TD, self.mlp_norm.get_value(), region="mlp_norm", **options
        )
        return self.mlp(_note("mlp_norm", h_TD), ctx), residual_TD, kv


_LAYERS = "layers."


def _layer_weights(params: Params, masters: Params, layer) -> dict[str, Weight]:
    """The weights of one layer by their name inside it: index `layer` of the stacks, which ops read in place, and that
    layer's slices of the masters, if there are any."""
    return {
        name.removeprefix(_LAYERS): Weight(w, layer, masters.get(name))
        for name, w in params.items()
        if name.startswith(_LAYERS)
    }


def rope(cfg: ModelConfig, numerics: Numerics) -> jax.Array:
    """The table of rotations that `forward` takes, on the default device; one array a process."""
    return qk_norm_rope.rope_array(cfg.max_positions, cfg.head_dim, cfg.rope_theta, numerics.dtype)


def abstract_rope(cfg: ModelConfig, numerics: Numerics) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `rope`."""
    return jax.ShapeDtypeStruct((cfg.max_positions, 2, cfg.head_dim // 2), numerics.dtype)


def forward(
    cfg: ModelConfig,
    numerics: Numerics,
    params: Params,
    batch: Batch,
    kv: KVCache | TrainPages,
    *,
    masters: Params | None = None,
    remat: bool = False,
    rope: jax.Array | None = None,
    attention_work: attention_op.Work | None = None,
    unroll: bool = False,
) -> tuple[jax.Array, KVCache | None]:
    """Final hidden rows of a batch, in any case: training, scoring, prefill, decode.

    Args:
      cfg: the model.
      numerics: how it computes.
      params: weights in `numerics.dtype`, named and shaped as `specs.weight_specs(cfg)`.
      batch: T token rows and their metadata.
      kv: a KVCache (inference; donate it) or TrainPages (training and scoring: pages live for one layer).
      masters: fp32 weights of the same names; they get the gradients, in fp32, and `params` gets none.
      remat: recompute each layer in the backward pass instead of keeping its activations; "save_attention" keeps those
        of attention (output and log-sum-exp), so that it is not run again. Forward bits are the same.
      rope: `rope(cfg, numerics)`, an argument of programs that are kept; None makes the table a constant of the program.
      attention_work: what `attention_work_of` gives for the batch's lengths; None to compute it here.
      unroll: of inference: layers one after the other in the program, not in a loop, whose counter and condition are kernels.

    Returns:
      (hidden [T, D] after the final norm, the cache with this batch's keys and values; None for TrainPages).

    Raises:
      ValueError: weights missing, extra or of another dtype or shape.
    """
    return _forward(cfg, numerics, params, batch, kv, masters, remat, False, rope, attention_work, unroll)[:2]


def trace(cfg: ModelConfig, numerics: Numerics, params: Params, batch: Batch, kv: KVCache | TrainPages):
    """`forward`, and every region's output: (hidden, kv, {region: [T, ...], or [L, T, ...] for a region of each layer}).

    The regions stand in the order in which a layer computes them.
    """
    return _forward(cfg, numerics, params, batch, kv, None, False, True, None, None, False)


def _forward(cfg, numerics, params, batch, kv, masters, remat, tap, rope, attention_work, unroll):
    if faults := weight_faults(cfg, params, numerics.dtype):
        raise ValueError("weights do not fit the model: " + "; ".join(faults))
    inference = isinstance(kv, KVCache)
    top = lambda name: Weight(params[name], None, None if masters is None else masters[name])  # noqa: E731
    rotations_T2h = qk_norm_rope.rotations(
        batch.positions_T,
        theta=cfg.rope_theta,
        max_positions=cfg.max_positions,
        head_dim=cfg.head_dim,
        dtype=numerics.dtype,
        table=rope,
    )
    if attention_work is None:
        where = batch.q_start_S1, batch.kv_len_S, batch.page_table_SP
        attended = _attended(cfg, numerics, batch.tokens_T.shape[0], kv.page_size)
        attention_work = attention_op.work_list(*attended, *where, impl=numerics.impl)

    def layer(carry, step):
        x_TD, residual_TD, pages = carry
        index, masters_of_layer = step
        weights = _layer_weights(params, masters_of_layer, index)
        pages_of_layer, page_stack = (None, index) if inference else (kv, None)
        ctx = LayerContext(cfg, numerics, batch, rotations_T2h, pages_of_layer, attention_work, page_stack)
        with _tapping(tap) as seen:
            x_TD, residual_TD, pages = Layer(cfg, weights)(x_TD, residual_TD, pages, ctx)
        return (x_TD, residual_TD, pages), seen

    with _tapping(tap) as seen:
        x_TD = _note("embed", embed.embed(batch.tokens_T, top("embed"), region="embed", impl=numerics.impl))
        # The first layer adds the embedding to a residual of zeros: exact, and every layer is alike.
        carry = (x_TD, jnp.zeros_like(x_TD), (kv.k_LNpKd, kv.v_LNpKd) if inference else None)
        if inference and not tap:
            if unroll:

                @jax.jit  # traced and lowered once
                def one_layer(i, carry):
                    return layer(carry, (i, {}))[0]

                for i in range(cfg.num_layers):
                    carry = one_layer(jnp.int32(i), carry)
            else:
                # The loop's counter is the layer's index: a scan slices it out of a list, one more kernel a layer.
                carry = lax.fori_loop(0, cfg.num_layers, lambda i, carry: layer(carry, (i, {}))[0], carry)
        else:
            stacked_masters = {name: w for name, w in (masters or {}).items() if name.startswith(_LAYERS)}
            steps = jnp.arange(cfg.num_layers), stacked_masters
            if remat:
                kept = (attention_op.SAVED,) if remat == "save_attention" else ()
                layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*kept))
            carry, of_layers = lax.scan(layer, carry, steps)
            seen.update(of_layers)
        x_TD, residual_TD, pages = carry
        hidden_TD, _ = rms_norm.add_rms_norm(
            x_TD, residual_TD, top("final_norm"), eps=cfg.rms_norm_eps, region="final_norm", impl=numerics.impl
        )
        _note("final_norm", hidden_TD)
    return hidden_TD, KVCache(*pages) if inference else None, seen


def _attended(cfg: ModelConfig, numerics: Numerics, T: int, page_size: int) -> list[jax.ShapeDtypeStruct]:
    """Queries and pages as attention takes them."""
    heads = (T, cfg.num_heads), (1, page_size, cfg.num_kv_heads)
    return [jax.ShapeDtypeStruct((*s, cfg.head_dim), numerics.dtype) for s in heads]


def attention_work_of(
    cfg: ModelConfig,
    numerics: Numerics,
    q_start_S1: jax.Array,
    shortest_S: jax.Array,
    longest_S: jax.Array,
    page_table_SP: jax.Array,
    page_size: int,
    *,
    share_prompts: bool = False,
) -> Callable[[jax.Array], attention_op.Work | None]:
    """For a loop whose S sequences of at most one row each grow: what attention derives from lengths alone, most of it once, here.

    Args:
      q_start_S1, page_table_SP: as in a Batch, the same in all steps.
      shortest_S, longest_S: int32, the lengths between which each sequence's stay.
      share_prompts: attention may read pages that neighbours have in common once for all.

    Returns:
      A function of a step's kv_len_S to `forward`'s `attention_work`.
    """
    attended, options = _attended(cfg, numerics, len(longest_S), page_size), dict(impl=numerics.impl)
    where = q_start_S1, longest_S, page_table_SP
    work = attention_op.work_list(*attended, *where, share=share_prompts, shortest_S=shortest_S, **options)
    return lambda kv_len_S: attention_op.shortened(work, *attended, longest_S, kv_len_S, **options)


def _head(params: Params, masters: Params | None) -> Weight:
    name = "lm_head" if "lm_head" in params else "embed"
    return Weight(params[name], None, None if masters is None else masters[name])


def logits(cfg: ModelConfig, numerics: Numerics, params: Params, hidden_BD: jax.Array) -> jax.Array:
    """fp32 logits [B, V padded to a multiple of 1024 with -inf] of a few final hidden rows [B, D]."""
    del cfg
    return logprob.logits(hidden_BD, _head(params, None), region="lm_head", impl=numerics.impl)


def logprobs(
    cfg: ModelConfig,
    numerics: Numerics,
    params: Params,
    hidden_TD: jax.Array,
    targets_T: jax.Array,
    inv_temp_T: jax.Array,
    *,
    masters: Params | None = None,
) -> jax.Array:
    """Log-probability of each row's target in nats, fp32 [T], <= 0; differentiable; never [T, V] in memory.

    Args:
      hidden_TD: final hidden rows, as `forward` gives them.
      targets_T: int32 token ids.
      inv_temp_T: fp32, 1 / temperature of each row's request.
      masters: as in `forward`.
    """
    del cfg
    head = _head(params, masters)
    return logprob.logprob(hidden_TD, head, targets_T, inv_temp_T, regions=("lm_head", "logprob"), impl=numerics.impl)

"""Log-probability on Hopper: block sums that end as integers, from logits in memory (decode) or in the registers of the kernel that
multiplies them (training), and one kernel that combines them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.gemm import hopper as gemm
from pallas_kernels.gemm import hopper_large
from pallas_kernels.logprob import EIGHTHS, VOCAB_BLOCK, padded_vocab
from pallas_kernels.logprob.hopper_blocks import COLUMNS, FIXED_POINT_BITS, FLOOR, LOG2E, ROWS, block_stats
from pallas_kernels.logprob.hopper_choice import Choice
from pallas_kernels.logprob.hopper_combine import GROUP, LN2, LN2_LOW, LOG1P, combine
from pallas_kernels.logprob.hopper_head import gradient, sums

VERSION = 1


def logits_entry(V: int, D: int, dtype) -> dict:
    """The logits' line in the contract: a chain, never rounded below fp32."""
    return gemm.entry(padded_vocab(V), D, 1, "column", dtype, "float32")


def entry(V8: int) -> dict:
    """The reduction's line in the contract: all that reaches the bits. No tile does."""
    return {
        "implementation": "hopper",
        "version": VERSION,
        "arch": "sm90",
        "semantics": "log-softmax of logits * inv_temp over the full vocabulary, nats",
        "vocab_padded": V8,
        "vocab_block": VOCAB_BLOCK,
        "scale": "mul.rn(inv_temp, log2e)",
        "maximum": "per block, times scale (mul.rp), rounded up to a whole number",
        "maximum_floor": FLOOR,
        "term": "ex2.approx.ftz(fma(logit, scale, -maximum))",
        "fixed_point_bits": FIXED_POINT_BITS,
        "log2e": LOG2E.hex(),
        "order": f"halving to {COLUMNS} columns and integers in a block, tree({GROUP}) over blocks, in order in an eighth, "
        f"tree({EIGHTHS}) over eighths",
        "accumulate": "float32",
        "log": [x.hex() for x in (LN2, LN2_LOW, *LOG1P)],
        "result": "sum = 2^k e^l; d + lost = target * scale - (maximum + k); low = fma(-scale, ln2, inv_temp) / scale; "
        "rest = fma(-k, low - ln2_low, l); fma(d, ln2, fma(d, low, fma(lost, ln2, -rest)))",
        "clamp": "<= 0",
    }


def logits(x_BD: jax.Array, w_VD: jax.Array) -> jax.Array:
    """fp32 [B, padded V]; pads are -inf.

    Raises:
      registry.Unsupported: operands are not bf16, or D or V do not fit the GEMM.
    """
    return gemm.gemm(x_BD, w_VD, None, 1, "column", jnp.float32, padded_N=padded_vocab(w_VD.shape[0]), fill=-jnp.inf)


def reduce(logits_BV: jax.Array, targets_B: jax.Array, inv_temp_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log-probability of the target [B], log-sum-exp [B]), nats, fp32."""
    inv_temp_P = jnp.pad(inv_temp_B, (0, -inv_temp_B.shape[0] % ROWS), constant_values=1)
    return finish(*block_stats(_whole_loads(logits_BV), inv_temp_P), logits_BV, targets_B, inv_temp_P)


def finish(max_nP, sum_nP, logits_BV, targets_B, inv_temp_P) -> tuple[jax.Array, jax.Array]:
    """`reduce` of rows whose block sums are known, `block_stats` of them: P is B rounded up to a multiple of 64."""
    B, V = logits_BV.shape
    target_B = jnp.take_along_axis(logits_BV, targets_B[:, None], axis=1)[:, 0]
    target_P = jnp.pad(target_B, (0, inv_temp_P.shape[0] - B))
    logprob_P, lse_P = combine(V // VOCAB_BLOCK, max_nP, sum_nP, target_P, inv_temp_P)
    return logprob_P[:B], lse_P[:B]


def finish_choice(max_nP, sum_nP, choice: Choice, inv_temp_P) -> tuple[jax.Array, jax.Array]:
    """(what is chosen, int32 [B]; its log-probability, fp32 [B], nats): `finish` of targets that are still to be chosen."""
    B, V = choice.logits_BV.shape
    logprob_P, _, target_P = combine(V // VOCAB_BLOCK, max_nP, sum_nP, choice, inv_temp_P)
    return target_P[:B], logprob_P[:B]


def forward(x_TD, w_VD, targets_T, inv_temp_T) -> tuple[jax.Array, jax.Array]:
    """(log-probability of the target [T], log-sum-exp [T]), nats, fp32, without logits in memory: the bits of `reduce`.

    Raises:
      registry.Unsupported: as `logits`.
    """
    T = x_TD.shape[0]
    _check(x_TD, w_VD)
    max_nP, sum_nP, target_P, inv_temp_P = sums(_whole_loads(x_TD), w_VD, *map(_whole_loads, (targets_T, inv_temp_T)))
    logprob_P, lse_P = combine(padded_vocab(w_VD.shape[0]) // VOCAB_BLOCK, max_nP, sum_nP, target_P, inv_temp_P)
    return logprob_P[:T], lse_P[:T]


def backward(x_TD, w_VD, targets_T, inv_temp_T, lse_T, dlp_T, dw_dtype) -> tuple[jax.Array, jax.Array]:
    """(dx [T, D] in x's dtype, dw [V, D] in dw_dtype); the same bits from run to run."""
    T = x_TD.shape[0]
    rows = map(_whole_loads, (targets_T, inv_temp_T, lse_T, dlp_T))
    dx_TD, dw_VD = gradient(_whole_loads(x_TD), w_VD, *rows, dw_dtype)
    return dx_TD[:T].astype(x_TD.dtype), dw_VD


def _check(x_TD, w_VD) -> None:
    (V, D), dtypes = w_VD.shape, {x_TD.dtype, w_VD.dtype}
    if dtypes != {jnp.dtype(jnp.bfloat16)}:
        raise registry.Unsupported(f"Hopper log-probability multiplies bfloat16, got {x_TD.dtype} and {w_VD.dtype}; {registry.USE_BF16}")
    if D % hopper_large.STEP or V % 8:
        raise registry.Unsupported(
            f"Hopper log-probability needs D a multiple of {hopper_large.STEP} and V a multiple of 8, got D={D}, V={V}; {registry.USE_CPU}"
        )


def _whole_loads(x_T: jax.Array) -> jax.Array:
    """Zero rows added where TMA's tiles want them; a padding row's gradient is zero."""
    extra = -x_T.shape[0] % gemm.LOAD_ROWS if x_T.shape[0] > gemm.LOAD_ROWS else 0
    return jnp.pad(x_T, ((0, extra),) + ((0, 0),) * (x_T.ndim - 1)) if extra else x_T

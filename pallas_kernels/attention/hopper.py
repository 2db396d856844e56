"""Paged causal attention on Hopper tensor cores: which kernel serves a call. The bits are one function of a row and its keys.

Every schedule walks the same KV blocks with the same wgmma tiles of 64 rows, (token, query head of the group), so that a
row has one expression. A tile's blocks that the row does not see add exact zeros, as does a block that is left out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mosaic, registry
from pallas_kernels.attention import SPLIT, hopper_decode, hopper_forward, hopper_shared, kv_block
from pallas_kernels.attention.hopper_backward import attention_backward as attention_backward
from pallas_kernels.attention.hopper_softmax import COLUMNS
from pallas_kernels.attention.hopper_tiles import ROWS, Shape
from pallas_kernels.attention.reference import NEVER, softmax_scale
from pallas_kernels.attention.schedules import MANY

VERSION = 3
HEAD_DIMS = (64, 128, 256)
MOST_GROUP = 16
LEAST_PAGE = 8
"""TMA writes tiles of 8 rows."""
FEW_TOKENS = 2
"""Tokens per sequence up to which a call is served split by split."""


def entry(G: int, K: int, d: int, dtype) -> dict:
    """This implementation's line in the contract: all that reaches the bits. No schedule does."""
    del G, K
    return {
        "implementation": "hopper",
        "version": VERSION,
        "arch": "sm90",
        "operands": str(dtype),
        "accumulate": "float32",
        "instruction": f"wgmma, {ROWS} rows, K in order",
        "block": kv_block(d),
        "split": SPLIT,
        "initial_maximum": NEVER,
        "maximum": "largest score * scale, rounded to nearest",
        "scale": float(np.float32(softmax_scale(d))).hex(),
        "exp2": "ex2.approx.ftz of fma(score, scale, -maximum)",
        "order": "blocks in order, splits in order",
        "rescale": "ex2.approx.ftz of the maximum before - after; O by mul, the sum with its next addend by fma",
        "sum_of_p": f"before rounding, in {COLUMNS} columns from the left, summed at the end of a split",
        "round": [f"P: {dtype}", "1 / sum: float32", f"O * (1 / sum) + 0: {dtype}"],
    }


def unsupported_reason(q_THd, k_pages) -> str | None:
    """Why the kernels cannot serve such arrays; None if they can."""
    H, d = q_THd.shape[1:]
    page, K = k_pages.shape[-3:-1]
    if q_THd.dtype != jnp.bfloat16:
        return f"multiplies bfloat16, got {q_THd.dtype}"
    if d not in HEAD_DIMS:
        return f"serves head_dim {', '.join(map(str, HEAD_DIMS))}, got {d}"
    if H // K > MOST_GROUP:
        return f"serves at most {MOST_GROUP} query heads a KV head, got {H // K}"
    if page % LEAST_PAGE:
        return f"needs pages of a multiple of {LEAST_PAGE} positions, got {page}"
    return None


def few_rows(T: int, S: int, shape: Shape) -> bool:
    """Whether splits are worth computing in parallel; by static sizes alone."""
    tiles = T // (MANY[shape.d].warpgroups * shape.tokens) + S
    return T <= FEW_TOKENS * S or tiles * shape.K <= mosaic.SMS


def _kernel(q_THd, k_pages, S: int):
    """(the module that serves a call of S sequences, its `Shape`)."""
    T, H, _ = q_THd.shape
    N, page, K, d = k_pages.shape[-4:]
    shape = Shape(H, K, d, page, layer_rows=N * page if len(k_pages.shape) == 5 else 0)
    return hopper_decode if few_rows(T, S, shape) else hopper_forward, shape


def work_list(
    q_THd, k_pages, q_start_S1, kv_len_S, page_table_SP, share: bool = False, shortest_S=None
) -> tuple[jax.Array, ...] | None:
    """The integers that the kernel walks by; None where no kernel serves such arrays, which `attention` says, and where lists
    of the kernel of many rows are to be shortened."""
    if unsupported_reason(q_THd, k_pages):
        return None
    T, S = q_THd.shape[0], kv_len_S.shape[0]
    kernel, shape = _kernel(q_THd, k_pages, S)
    if shortest_S is not None and kernel is not hopper_decode:
        return None
    sharing = share and kernel is hopper_decode and T == S and hopper_shared.may_pay(*page_table_SP.shape, shape)
    options = {"share": hopper_shared.pays, "shortest_S": shortest_S} if sharing else {}
    return kernel.work_list(q_start_S1, kv_len_S, page_table_SP, T, shape, **options)


def shortened(work, q_THd, k_pages, longest_S, kv_len_S) -> tuple[jax.Array, ...]:
    """The work of longest_S for kv_len_S."""
    return hopper_decode.shortened(work, longest_S, kv_len_S, _kernel(q_THd, k_pages, kv_len_S.shape[0])[1])


def attention(
    q_THd, k_pages, v_pages, q_start_S1, kv_len_S, page_table_SP, layer, work=None
) -> tuple[jax.Array, jax.Array]:
    """(o [T, H, d], log-sum-exp in log2 units, fp32 [T, H]; 0 where a row has no key).

    Raises:
      registry.Unsupported: dtypes or shapes that the kernels do not serve.
    """
    if reason := unsupported_reason(q_THd, k_pages):
        hint = registry.USE_BF16 if q_THd.dtype != jnp.bfloat16 else registry.USE_CPU
        raise registry.Unsupported(f"Hopper attention {reason}; {hint}")
    K, d = k_pages.shape[-2:]
    kernel, shape = _kernel(q_THd, k_pages, kv_len_S.shape[0])
    k_Rd, v_Rd = (x.reshape(-1, K * d) for x in (k_pages, v_pages))
    layer = jnp.zeros((1,), jnp.int32) if layer is None else jnp.asarray(layer, jnp.int32).reshape(1)
    return kernel.attention(q_THd, k_Rd, v_Rd, q_start_S1, kv_len_S, page_table_SP, layer, shape, work=work)

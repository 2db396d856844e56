"""Gates and ups of one GEMM in one tile, so that a thread's accumulator holds both of an element: no exchange is needed.

Few tokens: weights are the rows of wgmma's accumulator, of which a thread holds r and r + 8 of sixteen. The copy engine lays
eight gates and then their eight ups beside each other in shared memory, and those two are a gate and its up. Many tokens:
weights are the columns, of which a thread holds some of each eight: a tile is so many gates, and as many ups after them.

JAX's interpreter multiplies no reshaped reference: there, gates and ups take turns in the weight before the kernel starts.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array

from pallas_kernels import mosaic

EIGHT = 8
ROWS = 64
"""Of an instruction."""
PAIRS = ROWS // (2 * EIGHT)
"""Of eight gates and eight ups in an instruction's rows."""
LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 8), (8, 8), (2, 2), (2, 1))), warp_dims=(-8,), lane_dims=(-6, -3, -5), vector_dim=-2
)
"""Of [32, tokens]: what is left of [64, tokens] in WGMMA_TRANSPOSED if every other eight rows are dropped."""
SWIZZLED = plgpu.SwizzleTransform(128)


def in_turn(value: jax.Array, size: int) -> jax.Array:
    """[..., 2, F, K] as [all before, 2 F', K]: `size` gates, their ups, and so on; the last of them are zeros, if F is short."""
    *_, F, K = value.shape
    value = jnp.pad(value.reshape(-1, 2, F, K), ((0, 0), (0, 0), (0, -F % size), (0, 0)))
    return value.reshape(len(value), 2, -1, size, K).swapaxes(1, 2).reshape(len(value), -1, K)


def _both(layer) -> pl.Slice:
    return pl.ds(0 if layer is None else 2 * layer, 2)


# Few tokens: gates and ups are rows.


def by_eights(value: jax.Array) -> jax.Array:
    """[..., 2, F, K] as [all before F, F / 8, 8, K]; no byte moves."""
    if mosaic.interpreting():
        return in_turn(value, EIGHT)
    *_, F, K = value.shape
    return value.reshape(-1, F // EIGHT, EIGHT, K)


def rows_of(stages: int, warpgroups: int, k_tile: int):
    """Shared memory for gates and ups: [stages, pairs, 2, 8, k_tile], laid out as so many rows of K for wgmma."""
    if mosaic.interpreting():
        return plgpu.SMEM((stages, warpgroups * ROWS, k_tile), jnp.bfloat16)
    transforms = (plgpu.TilingTransform((1, 1, EIGHT, 64)), SWIZZLED)
    return plgpu.SMEM((stages, warpgroups * PAIRS, 2, EIGHT, k_tile), jnp.bfloat16, transforms=transforms)


def rows(w_g, layer, first, count: int, at_k, w_s) -> tuple:
    """(source, target) of one copy of `count` / 2 gates from `first` on, and of their ups.

    Args:
      w_g: what `by_eights` gives.
      layer: index in the stack, or None.
      at_k: slice of K.
      w_s: one stage of `rows_of`.
    """
    if mosaic.interpreting():
        return w_g.at[0 if layer is None else layer, pl.ds(2 * first, count), at_k], w_s.at[pl.ds(0, count)]
    pairs = count // (2 * EIGHT)
    source = w_g.at[_both(layer), pl.ds(lax.div(first, EIGHT), pairs), :, at_k]
    return source, w_s.at[pl.ds(0, pairs)].transpose((1, 0, 2, 3))


def operand(w_s, warpgroup):
    """The 64 rows [64, k_tile] of a warpgroup in a stage of `rows_of`."""
    if mosaic.interpreting():
        return w_s.at[pl.ds(warpgroup * ROWS, ROWS)]
    w_s = w_s.at[pl.ds(warpgroup * PAIRS, PAIRS)]
    return w_s.reshape((ROWS, w_s.shape[-1]))


def halves(y_NT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gates and ups, [32, T] in `LAYOUT` each, of bf16 [64, T] in WGMMA_TRANSPOSED; no register moves."""
    N, T = y_NT.shape
    if mosaic.interpreting():
        return tuple(y_NT.reshape(PAIRS, 2, EIGHT, T)[:, i].reshape(N // 2, T) for i in range(2))
    half = plgpu.ShapeDtypeStruct((N // 2, T), y_NT.dtype, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA_TRANSPOSED,), return_type=(half, half))
    def emit(_, y):
        layout = LAYOUT.to_mgpu()
        registers = y.registers.reshape(T // EIGHT, 2)  # by eights of tokens, and gate or up
        shape = layout.registers_shape(half.shape)
        array = fragmented_array.FragmentedArray
        take = lambda i: np.ascontiguousarray(registers[:, i]).reshape(shape)  # noqa: E731
        return tuple(array(_registers=take(i), _layout=layout, _is_signed=y.is_signed) for i in range(2))

    return emit(y_NT)


# Many tokens: gates and ups are columns.


def flat_stack(value: jax.Array, tile_n: int) -> jax.Array:
    """[..., 2, F, K] as [all before F, F, K]; no byte moves."""
    if mosaic.interpreting():
        return in_turn(value, tile_n // 2)
    return value.reshape(-1, *value.shape[-2:])


def columns_of(steps: int, tile_n: int, k_tile: int):
    """Shared memory for a tile's gates and ups: [steps, 2, tile_n / 2, k_tile], laid out as tile_n rows of K for wgmma."""
    if mosaic.interpreting():
        return plgpu.SMEM((steps, tile_n, k_tile), jnp.bfloat16)
    transforms = (plgpu.TilingTransform((1, EIGHT, 64)), SWIZZLED)
    return plgpu.SMEM((steps, 2, tile_n // 2, k_tile), jnp.bfloat16, transforms=transforms)


def columns(w_g, layer, first, tile_n: int, at_k):
    """The source of a copy of the tile of gates and ups that begins at column `first` of both together.

    Args:
      w_g: what `flat_stack` gives.
      layer: index in the stack, or None.
      at_k: slice of K.
    """
    if mosaic.interpreting():
        return w_g.at[0 if layer is None else layer, pl.ds(first, tile_n), at_k]
    half = tile_n // 2
    return w_g.at[_both(layer), pl.ds(pl.multiple_of(lax.div(first, 2), half), half), at_k]


def flat(w_s):
    """A stage of `columns_of` as [tile_n, k_tile]."""
    if mosaic.interpreting():
        return w_s
    return w_s.reshape((w_s.shape[0] * w_s.shape[1], w_s.shape[2]))

"""A weight as an op receives it: the array that is read, where in a stack it lies, who gets its gradient."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight, or one layer of a stack of weights.

    Attributes:
      value: the array whose bits the op reads, in the compute dtype. [L, ...] when `layer` is set, else [...].
      layer: int32 scalar, the index in a stack. Ops that read a stack index it themselves: slicing it first would
        copy the weight at every use.
      master: fp32 array of one layer's shape. When set, the gradient goes there in fp32 and `value` gets none: a
        gradient in bf16 would lose the bits that accumulation over microbatches needs.
    """

    value: jax.Array
    layer: jax.Array | None = None
    master: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one layer's weight."""
        return self.value.shape if self.layer is None else self.value.shape[1:]

    @property
    def dtype(self):
        return self.value.dtype

    def slice(self) -> jax.Array:
        """The one layer's array; copies when this is a layer of a stack (fine for small vectors)."""
        if self.layer is None:
            return self.value
        return jax.lax.dynamic_index_in_dim(self.value, self.layer, keepdims=False)

    def index(self) -> tuple[jax.Array, ...]:
        """Operands of a kernel that reads `value` in place: the layer, int32 [1], or nothing."""
        return () if self.layer is None else (jnp.asarray(self.layer, jnp.int32).reshape(1),)

    def trainable(self) -> jax.Array:
        """One layer's array in the compute dtype for plain autodiff: the master, rounded, where there is one."""
        return self.slice() if self.master is None else self.master.astype(self.dtype)


def of_backward(value: jax.Array, layer: jax.Array | None, to_master: bool) -> jax.Array:
    """One layer's array for an op's backward.

    Raises:
      NotImplementedError: the gradient would go to a stack: it has a layer's shape and no master to go to.
    """
    if layer is not None and not to_master:
        raise NotImplementedError("no gradient to a stack of weights: give a master of one layer, or one layer's slice")
    return Weight(value, layer).slice()


def as_weight(w: Weight | jax.Array) -> Weight:
    """Wraps a plain array; a Weight passes through."""
    return w if isinstance(w, Weight) else Weight(w)

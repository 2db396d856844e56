"""What every op's implementations must show: one set of tests, run over each op by inheriting RowOp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import registry

ISO = ("reference",)
"""Implementations that keep the contract's bits here; the Hopper kernels join where there is such a GPU."""


COMPARED: list[tuple[int, int]] = []
"""(values, how many differed) of every comparison of bits so far in this process; tests/gpu makes its tables of it."""


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def spread(rng: np.random.Generator, *shape: int, binades: int = 6, dtype=jnp.bfloat16) -> jax.Array:
    """Random values over many binades: an order of summation that changes, changes their sum."""
    return jnp.asarray(rng.standard_normal(shape) * 2.0 ** rng.integers(-binades, binades, shape), dtype)


def relative(got, want) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


ACCURACY: list[tuple[str, float, float]] = []
"""(what, our relative error, the library's) of every comparison with exact results so far in this process."""


def errors(what: str, ours, library, want) -> tuple[float, float]:
    """Relative errors (2-norm) of two implementations against float64 results; noted for tests/gpu's tables."""
    ACCURACY.append((what, relative(ours, want), relative(library, want)))
    return ACCURACY[-1][1:]


def differ(got, want) -> int:
    """How many values of two arrays have other bits; all of them where the shapes are not the same."""
    got, want = bits(got), bits(want)
    count = int((got != want).sum()) if got.shape == want.shape else max(got.size, want.size, 1)
    COMPARED.append((got.size, count))
    return count


def same(got, want) -> bool:
    """Whether the arrays of two lists have the same bits."""
    return sum([differ(g, w) for g, w in zip(got, want, strict=True)]) == 0


class RowOp:
    """Tests of an op that maps rows to rows. A subclass gives the four methods below."""

    tolerance = {"bfloat16": 1e-2, "float32": 1e-5}

    def rows(self, rng: np.random.Generator, T: int, dtype) -> tuple[jax.Array, ...]:
        """Arrays [T, ...] that the op takes."""
        raise NotImplementedError

    def call(self, impl: str, *rows: jax.Array) -> tuple[jax.Array, ...]:
        """Arrays [T, ...] that it gives."""
        raise NotImplementedError

    def exact(self, *rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """The same in float64."""
        raise NotImplementedError

    def jitted(self, impl: str):
        return jax.jit(lambda *rows: self.call(impl, *rows))

    @pytest.mark.parametrize("impl", ISO)
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_a_row_has_its_own_bits_in_any_batch(self, impl, dtype):
        rng = np.random.default_rng(0)
        rows = self.rows(rng, 150, dtype)
        run = self.jitted(impl)
        whole = run(*rows)
        for T in (1, 2, 15, 17, 64, 65):
            pick = rng.permutation(150)[:T]
            assert same(run(*(x[pick] for x in rows)), [y[pick] for y in whole]), f"{T} rows"

    @pytest.mark.parametrize("impl", ISO)
    def test_inside_a_larger_program(self, impl):
        """Neighbouring operations must not be fused into it: they would change what is contracted."""
        rows = self.rows(np.random.default_rng(1), 20, "bfloat16")

        def around(*rows):
            scaled = [x * 2 if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 1 else x for x in rows]
            halved = [x * 0.5 if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 1 else x for x in scaled]
            out = self.call(impl, *halved)
            return out, [y.astype(jnp.float32) * 3 + 1 for y in out]

        out, _ = jax.jit(around)(*rows)
        assert same(out, self.jitted(impl)(*rows))

    @pytest.mark.parametrize("impl", ISO)
    def test_nan_in_the_neighbours(self, impl):
        rows = self.rows(np.random.default_rng(2), 40, "bfloat16")
        clean = self.jitted(impl)(*rows)
        odd = np.arange(40) % 2 == 1
        poison = [
            jnp.where(odd.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x).astype(x.dtype)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
            for x in rows
        ]
        dirty = self.jitted(impl)(*poison)
        assert same([y[::2] for y in dirty], [y[::2] for y in clean])

    @pytest.mark.parametrize("impl", ISO)
    def test_control_one_ulp_changes_its_row_and_no_other(self, impl):
        rows = list(self.rows(np.random.default_rng(3), 40, "float32"))
        before = self.jitted(impl)(*rows)
        changed = np.array(rows[0])
        changed[7] = np.nextafter(changed[7], np.inf)
        after = self.jitted(impl)(jnp.asarray(changed), *rows[1:])
        differs = np.any([(bits(a) != bits(b)).reshape(40, -1).any(axis=1) for a, b in zip(after, before)], axis=0)
        assert np.flatnonzero(differs).tolist() == [7]

    @pytest.mark.parametrize("impl", [*ISO, "native"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_accuracy_against_float64(self, impl, dtype):
        rows = self.rows(np.random.default_rng(4), 33, dtype)
        wide = [np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None) for x in rows]
        for got, want in zip(self.jitted(impl)(*rows), self.exact(*wide), strict=True):
            assert relative(got, want) < self.tolerance[dtype]

    @pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 2e-2)])
    def test_gradient_against_autodiff_of_the_plain_op(self, dtype, tolerance):
        rows = self.rows(np.random.default_rng(5), 33, dtype)
        floats = [i for i, x in enumerate(rows) if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 1]
        weights = [np.random.default_rng(6).standard_normal(y.shape) for y in self.jitted("native")(*rows)]

        def loss(impl, dtype):
            def run(*inputs):
                full = list(rows)
                for i, x in zip(floats, inputs, strict=True):
                    full[i] = x
                outs = self.call(impl, *[x.astype(dtype) if x.dtype == jnp.float32 and i in floats else x
                                         for i, x in enumerate(full)])  # fmt: skip
                return sum(jnp.sum(y.astype(jnp.float32) * w) for y, w in zip(outs, weights, strict=True))

            return jax.jit(jax.grad(run, argnums=tuple(range(len(floats)))))(*(rows[i] for i in floats))

        plain = loss("native", dtype)
        for impl in ISO:
            ours = loss(impl, dtype)
            again = loss(impl, dtype)
            assert same(ours, again), "the gradient changes from run to run"
            for a, b in zip(ours, plain, strict=True):
                assert a.dtype == b.dtype
                assert relative(a, b) < tolerance

    def test_an_unknown_implementation_is_refused(self):
        rows = self.rows(np.random.default_rng(7), 4, "bfloat16")
        with pytest.raises(registry.Unsupported, match="choose one of"):
            self.call("fast", *rows)

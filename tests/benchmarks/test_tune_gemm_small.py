"""The tuner of the few-token GEMM's table: what it writes, what it keeps, what it measures. No GPU."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import pytest

from benchmarks.kernels import tune_gemm_small as tune
from pallas_kernels.gemm import hopper_small
from pallas_kernels.gemm.hopper_small import Schedule

OLD, FASTER, WRONG = Schedule(stages=2), Schedule(stages=3), Schedule(stages=4)


def test_the_table_is_what_the_tuner_writes():
    assert tune.source(tune.cells()) in pathlib.Path(hopper_small.__file__).read_text()


def test_a_new_entry_takes_its_place():
    cell = ("tree", 64, 66)
    scope = {"Schedule": Schedule}
    exec(tune.source(tune.cells() | {cell: WRONG}), scope)
    expected = dict(hopper_small.TABLE)
    expected["tree", 64] = tuple((limit, WRONG if limit == 66 else s) for limit, s in expected["tree", 64])
    assert scope["TABLE"] == expected != hopper_small.TABLE


@pytest.mark.parametrize(
    "times, refused, chosen",
    [
        ({OLD: 10.0, FASTER: 9.95}, set(), OLD),
        ({OLD: 10.0, FASTER: 9.8}, set(), FASTER),
        ({OLD: 10.0, FASTER: 9.8, WRONG: 1.0}, {WRONG}, FASTER),
        ({OLD: 1.0, FASTER: 9.8}, {OLD}, FASTER),
    ],
)
def test_one_per_cent_and_the_right_bits_make_an_entry(times, refused, chosen):
    assert tune.choice(times, OLD, refused) == chosen


def test_no_entry_without_the_right_bits():
    with pytest.raises(RuntimeError, match="no schedule"):
        tune.choice({OLD: 1.0}, OLD, {OLD})


@pytest.mark.parametrize("cell", tune.cells(), ids=str)
def test_every_entry_has_rivals_that_the_kernel_takes(cell):
    order, tokens, limit = cell
    N, leaves = tune.columns(cell), tune.LEAVES[order]
    assert hopper_small.schedule_for(tokens, N, tune.K, leaves) == tune.cells()[cell]
    rivals = set(tune.candidates(cell)) - {tune.cells()[cell]}
    assert rivals and not any(hopper_small.fault(tokens, N, tune.K, leaves, N, s, jnp.dtype(jnp.bfloat16)) for s in rivals)

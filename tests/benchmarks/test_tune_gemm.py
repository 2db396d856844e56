"""The tuner of the large GEMM's tables: what it writes, what it keeps, what it measures. No GPU."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks.kernels import tune_gemm as tune
from pallas_kernels.gemm import schedules
from pallas_kernels.gemm.schedules import Schedule

TEXT = pathlib.Path(schedules.__file__).read_text()
TABLES = {name: getattr(schedules, name) for name in ("ONE_WAVE", "LONG_TREE", "FEW", "TABLE")}
CELL = ("tree", 2048, 4096)


def equal_times() -> dict[tune.Cell, dict[str, float]]:
    """Times of every cell that differ by less than 1 %."""
    return {
        cell: {tune.compact(s): 10 + 0.005 * i for i, s in enumerate(tune.measured(*cell[:3]))} | {"few": 10.05}
        for cell in tune.cells()
    }


def test_the_tables_are_what_the_tuner_writes():
    assert tune.source(TEXT, TABLES) == TEXT


@pytest.mark.parametrize(
    "name, new",
    [
        ("ONE_WAVE", schedules.ONE_WAVE[1:]),
        ("LONG_TREE", 4321),
        ("LONG_TREE", None),
        ("FEW", schedules.FEW | {("tree", 4096): 128}),
        ("TABLE", schedules.TABLE | {CELL: Schedule(64, 128, split="n", steps=3)}),
    ],
)
def test_a_new_value_takes_its_place_and_no_other(name, new):
    scope: dict = {}
    exec(
        compile(tune.source(TEXT, TABLES | {name: new}), schedules.__file__, "exec"),
        scope | {"__name__": schedules.__name__},
        scope,
    )
    found = {table: repr(scope[table]) for table in TABLES}
    assert found == {table: repr((TABLES | {name: new})[table]) for table in TABLES}


def test_differences_of_less_than_one_per_cent_change_nothing():
    assert tune.choose(equal_times()) == TABLES


def test_what_takes_one_per_cent_less_time_is_chosen():
    us = equal_times()
    faster = next(s for s in tune.measured(*CELL) if s != schedules.TABLE[CELL])
    us[*CELL, tune.K][tune.compact(faster)] = 9.8
    us["chain", tune.FEW_ROWS, 8192, tune.K]["few"] = 11.0
    us["tree", tune.FEW_ROWS, 16384, tune.K]["few"] = 9.0
    tables = tune.choose(us)
    assert tables["TABLE"] == schedules.TABLE | {CELL: faster}
    assert tables["FEW"] == schedules.FEW | {("chain", 8192): 128, ("tree", 16384): 256}


@pytest.mark.parametrize("us, kept", [(9.0, True), (10.07, True), (11.0, False)])
@pytest.mark.parametrize("columns, schedule", schedules.ONE_WAVE)
def test_a_wave_stays_where_it_is_no_slower_than_what_would_run_else(us, kept, columns, schedule):
    times = equal_times()
    times["chain", tune.FEW_ROWS, tune.width(columns), tune.K][tune.compact(schedule)] = us
    waves = dict(tune.choose(times)["ONE_WAVE"])
    assert (waves.get(columns) == schedule) == kept and len(waves) >= len(schedules.ONE_WAVE) - 1


def test_every_entry_is_measured_and_checked():
    for (order, T, N), schedule in schedules.TABLE.items():
        assert schedule in tune.measured(order, T, N) and len(tune.measured(order, T, N)) > 3
    for columns, schedule in schedules.ONE_WAVE:
        assert columns in tune.WAVES and schedule in tune.rivals("chain")
        assert all(schedules.large(T, N, tune.K, 1) == schedule for T in (129, 256) for N in (columns[0], columns[-1]))
    for order in tune.LEAVES:
        assert set(schedules.every(order)) < set(tune.rivals(order))

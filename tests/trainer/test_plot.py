"""Plot: exact zeros stand in a band of their own, a mismatch never does; several runs; errors."""

from __future__ import annotations

import math

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest

from trainer import plot as module
from trainer.metrics import REQUIRED, MetricsError, encode_row
from trainer.plot import plot


def make(folder, n, **columns):
    folder.mkdir()
    rows = []
    for i in range(n):
        values = {key: column[i] for key, column in columns.items()}
        rows.append(dict.fromkeys(REQUIRED, 0.0) | {"step": i + 1, "parity/tokens": 10, "ratio/max": 1.0} | values)
    (folder / "metrics.jsonl").write_bytes(b"".join(map(encode_row, rows)))
    return folder


def parity_lines(*runs):
    """[(band's lower and upper end, [values drawn of each run])] of the parity panel."""
    figure, ax = plt.subplots()
    try:
        module._parity(ax, {str(i): module.read_metrics(run) for i, run in enumerate(runs)})
        low = ax.get_ylim()[0]
        edge = next(
            line.get_ydata()[0] for line in ax.lines if len(set(line.get_ydata())) == 1 and len(line.get_ydata()) == 2
        )
        drawn = [line.get_ydata() for line in ax.lines if line.get_marker() == "."]
        return low, edge, ax.get_ylim()[1], drawn
    finally:
        plt.close(figure)


def test_png_of_one_and_of_several_runs(tmp_path):
    zero = make(tmp_path / "iso", 30, **{"reward/mean": np.linspace(0, 1, 30)})
    other = make(tmp_path / "native", 20, **{"parity/max_abs": np.full(20, 1e-3), "parity/mismatched_tokens": [3] * 20})
    (zero / "evaluations.jsonl").write_text('{"step": 0, "eval/reward_mean": 0.5}\n')
    for name, runs in (("one.png", [zero]), ("two.png", [zero, other / "metrics.jsonl"])):
        path = plot(runs, tmp_path / name)
        image = matplotlib.image.imread(path)
        assert image.shape[0] > 500 and image.shape[1] > 800
        assert image[..., :3].std() > 0.02
    assert plot([zero], tmp_path / "one.svg").read_text().startswith("<?xml")
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "two.png").read_bytes()


def test_exact_zeros_lie_in_their_band_and_nothing_else_does(tmp_path):
    nan, inf = math.nan, math.inf
    values = [0.0, 1e-7, 1e-2, 0.0, nan, inf]
    mixed = make(tmp_path / "mixed", 6, **{"parity/max_abs": values, "parity/mismatched_tokens": [0, 1, 2, 1, 3, 3]})
    zero = make(tmp_path / "zero", 6)
    low, edge, top, (drawn, zeros) = parity_lines(mixed, zero)
    assert low < drawn[0] < edge
    assert drawn[1] == 1e-7 and drawn[2] == 1e-2
    assert drawn[3] > edge, "a differing token (0.0 against -0.0) was drawn as exactly 0"
    assert drawn[4] == drawn[5] == top
    assert ((low < zeros) & (zeros < edge)).all()
    assert zeros[0] != drawn[0]


def test_steps_without_a_comparison_are_not_drawn(tmp_path):
    run = make(tmp_path / "r", 4, **{"parity/tokens": [10, 0, 10, 0]})
    *_, (drawn,) = parity_lines(run)
    assert len(drawn) == 2


def test_moving_mean():
    got = module._moving_mean(np.array([1.0, 2.0, 6.0, 2.0]), 2)
    assert got.tolist() == [1.0, 1.5, 4.0, 4.0]


def test_names_of_runs(tmp_path):
    a, b, c = tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "other" / "metrics.jsonl"
    assert module._labels([a, b, c]) == [str(a), str(b), "other"]


def test_all_runs_that_cannot_be_drawn_are_named(tmp_path):
    good = make(tmp_path / "good", 2)
    empty = make(tmp_path / "empty", 0)
    with pytest.raises(MetricsError) as e:
        plot([tmp_path / "none", good, empty], tmp_path / "p.png")
    assert "none" in str(e.value) and "empty: has no steps yet" in str(e.value) and "good" not in str(e.value)
    assert not (tmp_path / "p.png").exists()

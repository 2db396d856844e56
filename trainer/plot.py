"""`isomodel plot`: reward, parity, ratio and timing of one or several runs, as a PNG."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)
import numpy as np  # noqa: E402

from trainer.metrics import MetricsError, read_metrics  # noqa: E402

Row = dict[str, float]

EVALUATIONS = "evaluations.jsonl"

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
"""Okabe and Ito's palette, told apart by colour-blind readers too; runs beyond it differ by line style."""

STYLES = ("-", "--", ":", "-.")


def plot(runs: Sequence[str | pathlib.Path], output: str | pathlib.Path, *, smooth: int = 0) -> pathlib.Path:
    """Draws the runs (folders or metrics.jsonl files) into `output`.

    Args:
      smooth: steps of the moving mean of reward and timing; 0 chooses a fiftieth of the longest run.

    Raises:
      MetricsError: a run has no metrics yet, or they are damaged; lists all.
      OSError: the file cannot be written.
    """
    rows_by_run, evaluations_by_run, faults = {}, {}, []
    for name, run in zip(_labels(runs), runs, strict=True):
        try:
            rows = read_metrics(run)
        except MetricsError as e:
            faults.append(str(e))
            continue
        if rows:
            rows_by_run[name] = rows
            evaluations_by_run[name] = _evaluations(run)
        else:
            faults.append(f"{run}: has no steps yet")
    if faults:
        raise MetricsError("\n".join(faults))
    smooth = smooth or max(1, max(len(rows) for rows in rows_by_run.values()) // 50)
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    try:
        _reward(axes[0, 0], rows_by_run, evaluations_by_run, smooth)
        _parity(axes[0, 1], rows_by_run)
        _ratio(axes[1, 0], rows_by_run)
        _timing(axes[1, 1], rows_by_run, smooth)
        for ax in axes.flat:
            ax.set_xlabel("step")
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
        # One legend for all panels: a colour is a run everywhere.
        handles = [
            plt.Line2D([], [], color=_color(i), ls=_style(i), lw=2, label=name) for i, name in enumerate(rows_by_run)
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(handles)), frameon=False)
        output = pathlib.Path(output)
        figure.savefig(output, dpi=110, format=output.suffix.removeprefix(".") or "png")
    finally:
        plt.close(figure)
    return output


def _reward(ax, runs: dict[str, list[Row]], evaluations: dict[str, list[Row]], smooth: int) -> None:
    for i, (name, rows) in enumerate(runs.items()):
        steps, mean = _series(rows, "reward/mean")
        ax.plot(steps, mean, color=_color(i), alpha=0.25, lw=1)
        ax.plot(steps, _moving_mean(mean, smooth), color=_color(i), ls=_style(i), lw=2)
        steps, held_out = _series(evaluations[name], "eval/reward_mean")
        ax.plot(steps, held_out, color=_color(i), ls="none", marker="o", mfc="white", ms=6)
    ax.set_title("Reward" + (", held-out prompts as circles" if any(evaluations.values()) else ""))
    ax.set_ylabel(f"mean reward (line: mean of {smooth} steps)" if smooth > 1 else "mean reward")


def _parity(ax, runs: dict[str, list[Row]]) -> None:
    """|difference| on a log axis, with a band of its own below it for exact zeros, which a log axis cannot show."""
    positive = [v for rows in runs.values() for v in _series(rows, "parity/max_abs")[1] if 0 < v < np.inf]
    low, high = (min(positive), max(positive)) if positive else (1e-6, 1e-1)
    bottom, top = 10.0 ** np.floor(np.log10(low)), 10.0 ** np.ceil(np.log10(high) + 0.3)
    bottom = min(bottom, top / 1e3)
    zero = bottom * (bottom / top) ** 0.15
    edge = bottom * (bottom / top) ** 0.06
    floor = bottom * (bottom / top) ** 0.24
    ax.set_yscale("log")
    ax.axhspan(floor, edge, color="#009e73", alpha=0.12, lw=0)
    ax.axhline(edge, color="0.5", lw=0.8)
    summary = []
    for i, (name, rows) in enumerate(runs.items()):
        steps, value = _series(rows, "parity/max_abs")
        compared = _series(rows, "parity/tokens")[1]
        mismatched = _series(rows, "parity/mismatched_tokens")[1]
        # Runs that are all zero lie on one another; a little apart, each can be seen. A mismatch is never drawn as zero.
        apart = zero * (bottom / top) ** (0.03 * (i - (len(runs) - 1) / 2))
        shown = np.where(
            (value == 0) & (mismatched == 0), apart, np.clip(np.nan_to_num(value, nan=np.inf), bottom, top)
        )
        seen = compared > 0
        ax.plot(steps[seen], shown[seen], color=_color(i), ls=_style(i), lw=1, marker=".", ms=4)
        summary.append(f"{name}: {int(np.nansum(mismatched)):,} of {int(np.nansum(compared)):,} tokens differ")
    ax.set_ylim(floor, top)
    ticks = 10.0 ** np.arange(np.log10(bottom), np.log10(top) + 0.5, max(1, round(np.log10(top / bottom) / 6)))
    ax.set_yticks([zero, *ticks], ["exactly 0", *(f"$10^{{{round(np.log10(t))}}}$" for t in ticks)])
    ax.minorticks_off()
    ax.text(0.99, 0.98, "\n".join(summary), transform=ax.transAxes, ha="right", va="top", fontsize=9)
    ax.set_title("Parity: rollout against trainer")
    ax.set_ylabel("max |Δ log-probability| (nats)")


def _ratio(ax, runs: dict[str, list[Row]]) -> None:
    for i, rows in enumerate(runs.values()):
        steps, ratio = _series(rows, "ratio/max")
        ax.plot(steps, ratio, color=_color(i), ls=_style(i), lw=1.2)
    ax.axhline(1.0, color="0.5", lw=0.8)
    values = np.concatenate([_series(rows, "ratio/max")[1] for rows in runs.values()])
    values = values[np.isfinite(values)]
    if len(values) and values.max() > 10 and values.min() > 0:
        ax.set_yscale("log")
    elif len(values) and np.ptp(np.append(values, 1.0)) < 1e-6:
        ax.set_ylim(0.99, 1.01)  # all 1: without limits the axis would zoom in on nothing
    if ax.get_yscale() == "linear":
        ax.ticklabel_format(axis="y", useOffset=False)
    ax.set_title("Largest importance ratio of a token")
    ax.set_ylabel("max ratio")


def _timing(ax, runs: dict[str, list[Row]], smooth: int) -> None:
    for i, rows in enumerate(runs.values()):
        # The first step may still warm up: it would spoil the mean, and flatten the rest.
        later = rows[1:] or rows
        steps, total = _series(later, "time/step_s")
        ax.plot(steps, _moving_mean(total, smooth), color=_color(i), ls=_style(i), lw=2)
        steps, generate = _series(later, "time/generate_s")
        ax.fill_between(steps, 0, _moving_mean(generate, smooth), color=_color(i), alpha=0.15, lw=0)
    rest = np.concatenate([_series(rows[1:] or rows, "time/step_s")[1] for rows in runs.values()])
    rest = rest[np.isfinite(rest)]
    top = 1.3 * np.percentile(rest, 99) if len(rest) else 0.0
    ax.set_ylim(0, top or None)
    ax.set_title("Time of a step (shaded: generation)")
    ax.set_ylabel("seconds")


def _evaluations(run: str | pathlib.Path) -> list[Row]:
    """Rows of a run's evaluations on held-out prompts; none where it has none."""
    folder = pathlib.Path(run)
    path = (folder.parent if folder.suffix == ".jsonl" else folder) / EVALUATIONS
    return read_metrics(path) if path.is_file() else []


def _series(rows: list[Row], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of the rows that have the key."""
    pairs = [(row["step"], row[key]) for row in rows if key in row]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.asarray(steps, np.int64), np.asarray(values, np.float64)


def _moving_mean(values: np.ndarray, n: int) -> np.ndarray:
    """Mean of each value and up to n - 1 before it."""
    if n <= 1 or not len(values):
        return values
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - n)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _labels(runs: Sequence[str | pathlib.Path]) -> list[str]:
    """Short names of the runs: the folder's, or the whole path where names repeat."""
    paths = [pathlib.Path(run) for run in runs]
    names = [(p.parent if p.suffix == ".jsonl" else p).resolve().name for p in paths]
    return [str(p) if names.count(n) > 1 else n for p, n in zip(paths, names, strict=True)]


def _color(i: int) -> str:
    return COLORS[i % len(COLORS)]


def _style(i: int) -> str:
    return STYLES[i // len(COLORS) % len(STYLES)]

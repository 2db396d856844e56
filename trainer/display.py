"""What a person sees of a run: a live progress display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

import rich.console
import rich.live
import rich.progress
import rich.table
import rich.text

COLUMNS = ("step", "reward", "parity", "ratio max", "length", "loss", "grad", "generate", "train", "step time")

RECENT = 8
"""Steps that the live table shows."""


class Display:
    """Progress of a run; a context manager. Not for several threads."""

    def __init__(self, name: str, total_steps: int, *, first_step: int = 0, every: int = 1, file: TextIO | None = None):
        """
        Args:
          name: of the run.
          total_steps: steps of the whole run.
          first_step: steps done before (resume).
          every: steps between plain lines (the live display shows every step).
          file: where to; standard output by default. Live where it is a terminal.
        """
        self._name, self._total, self._every = name, total_steps, every
        self._done = self._first = first_step
        self._timed: tuple[int, float] | None = None  # a finished step and when it was; compilation lies before it
        self._console = rich.console.Console(file=file or sys.stdout, highlight=False, soft_wrap=True)
        self._live: rich.live.Live | None = None
        self._rows: list[dict[str, str]] = []
        self._phase = ""
        if self._console.is_terminal:
            self._progress = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeElapsedColumn(),
                rich.progress.TextColumn("left"),
                rich.progress.TimeRemainingColumn(elapsed_when_finished=False),
                rich.progress.TextColumn("[dim]{task.fields[phase]}"),
                console=self._console,
            )
            self._task = self._progress.add_task(name, total=total_steps, completed=first_step, phase="")
            self._live = rich.live.Live(self._render(), console=self._console, refresh_per_second=4)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc) -> None:
        if self._live is not None:
            self._update(phase="")
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        """What is going on within a step ("generate 12/64"); shown on a terminal only."""
        if text != self._phase:
            self._phase = text
            if self._live is not None:
                self._update(phase=text)

    def note(self, text: str) -> None:
        """A line that stays: a checkpoint, an evaluation, a warning."""
        self._console.print(rich.text.Text(text))

    def step(self, row: Mapping[str, float]) -> None:
        """A finished step, as its row of metrics.jsonl."""
        self._done = int(row["step"])
        self._timed = self._timed or (self._done, time.monotonic() - row["time/step_s"])
        cells = describe(row)
        if self._live is None:
            if self._done % self._every == 0 or self._done in (self._first + 1, self._total):
                self._console.print(rich.text.Text(self._plain(cells)))
            return
        self._rows = [*self._rows[-RECENT + 1 :], cells]
        self._progress.update(self._task, completed=self._done)
        self._update(phase="")

    def _plain(self, cells: Mapping[str, str]) -> str:
        step, since = self._timed
        pace = (time.monotonic() - since) / (self._done - step + 1)
        left = _clock(pace * (self._total - self._done))
        width = len(str(self._total))
        body = "  ".join(f"{name} {cells[name]}" for name in COLUMNS[1:])
        return f"step {self._done:{width}d}/{self._total}  {body}  left {left}"

    def _update(self, phase: str) -> None:
        self._progress.update(self._task, phase=phase)
        self._live.update(self._render())

    def _render(self) -> rich.console.RenderableType:
        table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for cells in self._rows:
            style = None if cells["parity"].startswith(("0 of", "-")) else "red"
            table.add_row(*(cells[name] for name in COLUMNS), style=style)
        return rich.console.Group(table, self._progress) if self._rows else self._progress


def describe(row: Mapping[str, float]) -> dict[str, str]:
    """A metrics row as short text, by COLUMNS. Parity: tokens that differ, of those compared, and by how much."""
    tokens, mismatched = int(row["parity/tokens"]), int(row["parity/mismatched_tokens"])
    parity = f"{mismatched} of {tokens}" if tokens else "-"
    if mismatched:
        parity += f" (max {row['parity/max_abs']:.1e})"
    return {
        "step": str(int(row["step"])),
        "reward": f"{row['reward/mean']:.3f} ±{row['reward/std']:.3f}",
        "parity": parity,
        "ratio max": f"{row['ratio/max']:.4g}",
        "length": f"{row['length/mean']:.1f}",
        "loss": f"{row['loss']:.4f}",
        "grad": f"{row['grad_norm']:.3g}",
        "generate": f"{row['time/generate_s']:.2f}s",
        "train": f"{row['time/train_s']:.2f}s",
        "step time": f"{row['time/step_s']:.2f}s",
    }


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

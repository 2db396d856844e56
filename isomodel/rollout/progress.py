"""Bar: how far a call of the engine is, on a terminal."""

from __future__ import annotations

import sys
import time


class Bar:
    """A progress bar of completions on stderr, when asked for and a terminal is there."""

    def __init__(self, total: int, wanted: bool):
        self._progress = None
        if wanted and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("generating"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[rate]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._progress.add_task("generating", total=total, rate="")
        self._start, self._tokens = time.perf_counter(), None

    def __enter__(self):
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *exc):
        if self._progress:
            self._progress.stop()

    def show(self, done: int, tokens: int) -> None:
        """`done` completions of the total; `tokens`: all that the engine has sampled since it started."""
        if self._progress is None:
            return
        self._tokens = tokens if self._tokens is None else self._tokens
        rate = (tokens - self._tokens) / max(time.perf_counter() - self._start, 1e-9)
        self._progress.update(self._task, completed=done, rate=f"{rate:.0f} tokens/s")

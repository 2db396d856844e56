"""Interrupts: Ctrl-C and SIGTERM end a run at a place where nothing is lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class Interrupted(BaseException):
    """Raised out of work that may be abandoned. No Exception, so that nobody's `except Exception` swallows it."""


class Interrupts:
    """A context manager that takes SIGINT and SIGTERM while it is open.

    The first signal raises Interrupted inside an `abandonable` block; elsewhere it is remembered, `requested` becomes
    true, and the next `abandonable` block raises at its start. A second Ctrl-C is KeyboardInterrupt, at once.

    Outside a main thread no handler can be set, and signals do what they did.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.requested: signal.Signals | None = None
        self._abandonable = False
        self._old: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._old = {s: signal.signal(s, self._handle) for s in self.SIGNALS}
        return self

    def __exit__(self, *exc) -> None:
        for s, old in self._old.items():
            signal.signal(s, old)

    def _handle(self, number: int, frame) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number)
        if self._abandonable:
            self._abandonable = False
            raise Interrupted

    @contextlib.contextmanager
    def abandonable(self) -> Iterator[None]:
        """Work that changes nothing that would be missed."""
        if self.requested is not None:
            raise Interrupted
        self._abandonable = True
        try:
            yield
        finally:
            self._abandonable = False

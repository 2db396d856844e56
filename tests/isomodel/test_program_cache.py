"""isomodel.program_cache: where it keeps programs, and when it does not. JAX's settings are put back."""

import jax
import pytest

from isomodel import program_cache


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    names = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("ISOMODEL_CACHE", str(tmp_path))
    jax.config.update(names[0], None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_gpu_keeps_programs_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert program_cache.keep() == tmp_path / "programs"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "programs")


def test_the_users_folder_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert program_cache.keep() is None
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")


def test_a_cache_that_is_switched_off_stays_off(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.config.update("jax_enable_compilation_cache", False)
    assert program_cache.keep() is None and jax.config.jax_compilation_cache_dir is None


def test_a_cpu_keeps_none():
    assert jax.default_backend() == "cpu"
    assert program_cache.keep() is None and jax.config.jax_compilation_cache_dir is None

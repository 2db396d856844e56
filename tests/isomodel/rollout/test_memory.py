"""The engine's device memory: a share of the device, and what does not fit."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from isomodel import device_memory, weights
from isomodel.device_memory import DeviceMemory, OutOfDeviceMemory
from isomodel.rollout import command, programs
from tests.isomodel.rollout import tiny

PAGE = tiny.ENGINE.page_bytes(tiny.CONFIG, tiny.BF16.dtype)


def device(monkeypatch, limit: int, in_use: int = 0) -> None:
    """Gives the process a device that tells its memory."""
    monkeypatch.setattr(device_memory, "device_memory", lambda: DeviceMemory("fake:0", limit, in_use))


def test_a_share_of_the_device_holds_what_weights_and_scratch_leave(monkeypatch):
    small = dataclasses.replace(tiny.ENGINE, num_pages=16).resolve(tiny.CONFIG, tiny.BF16.dtype)  # one longest sample
    scratch = programs.scratch_bytes(tiny.CONFIG, tiny.BF16, programs.Shapes.of(small), 64, 8)
    assert scratch > 8 * 300 * 4  # the logits, at least
    in_use, pages = 3 * 2**20, 100
    device(monkeypatch, 2 * (in_use + scratch + pages * PAGE + PAGE // 2), in_use)
    assert tiny.engine(num_pages=None, memory_fraction=0.5).stats().pages == pages
    assert tiny.engine(num_pages=None, memory_fraction=0.5, reserved_memory=30 * PAGE).stats().pages == pages - 30


def test_what_does_not_fit_is_told_in_bytes_with_the_setting_to_change(monkeypatch):
    device(monkeypatch, 100 * PAGE, 40 * PAGE)
    with pytest.raises(OutOfDeviceMemory) as e:
        tiny.engine(num_pages=61)
    needed, free = f"{61 * PAGE:,} bytes", f"{60 * PAGE:,} bytes"
    assert needed in str(e.value) and free in str(e.value) and "lower kv_memory, num_pages or memory_fraction" in str(e.value)
    with pytest.raises(OutOfDeviceMemory, match=f"{40 * PAGE:,} bytes are in use.*raise memory_fraction, or lower max_model_len"):
        tiny.engine(num_pages=None, memory_fraction=0.5)
    assert tiny.engine(num_pages=60).stats().pages == 60


def test_a_device_that_does_not_tell_its_memory_takes_no_share_of_it():
    with pytest.raises(OutOfDeviceMemory, match="does not; set kv_memory"):
        tiny.engine(num_pages=None, memory_fraction=0.9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(memory_fraction=0.5), "num_pages=64 and memory_fraction=0.5 are given; give one"),
        (dict(num_pages=None, memory_fraction=1.5), "memory_fraction=1.5 must be above 0 and at most 1"),
        (dict(reserved_memory=-1), "reserved_memory=-1"),
    ],
)
def test_shares_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny.engine(**changes)


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(monkeypatch, tmp_path):
    weights.save(tmp_path / "model", tiny.CONFIG, tiny.params())
    size = sum(w.nbytes for w in tiny.params().values())
    device(monkeypatch, size - 1)
    with pytest.raises(OutOfDeviceMemory, match=f"the model needs {size:,} bytes"):
        weights.load(tmp_path / "model", tiny.CONFIG, "bfloat16")
    device(monkeypatch, size)
    assert weights.load(tmp_path / "model", tiny.CONFIG, "bfloat16").keys() == tiny.params().keys()


def test_the_command_lines_take_one_size_or_the_other(capsys):
    parser = argparse.ArgumentParser()
    command.add_engine_options(parser, most_tokens="enough")
    kv_size = lambda *words: command.kv_size(parser.parse_args(words))  # noqa: E731
    assert kv_size("--memory-fraction", "0.6") == {"kv_memory": None, "memory_fraction": 0.6}
    assert kv_size("--kv-memory-mb", "2") == {"kv_memory": 2**21, "memory_fraction": None}
    with pytest.raises(SystemExit):
        kv_size("--kv-memory-mb", "2", "--memory-fraction", "0.6")
    assert "not allowed with" in capsys.readouterr().err

"""Metrics: whole rows or none, resume takes later rows away, samples; what the display says of a row."""

from __future__ import annotations

import errno
import io
import json
import math
import sys

import numpy as np
import pytest
import rich.console

from trainer import display, metrics
from trainer.config import LogSection
from trainer.display import Display
from trainer.metrics import REQUIRED, MetricsError, MetricsWriter, encode_row, read_metrics, rollout_metrics

QUIET = LogSection(tensorboard=False)


def row(step, **values):
    return dict.fromkeys(REQUIRED, 0.0) | {"step": step, "reward/mean": step / 10} | values


def steps(folder):
    return [r["step"] for r in read_metrics(folder)]


def test_rows_are_on_the_disk_when_written(tmp_path):
    with MetricsWriter(tmp_path, QUIET) as writer:
        for step in (1, 2):
            writer.write(row(step, extra=np.float32(0.1), count=np.int64(3)))
            assert steps(tmp_path)[-1] == step
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    first = json.loads(lines[0])
    assert tuple(first)[: len(REQUIRED)] == REQUIRED and tuple(first)[len(REQUIRED) :] == ("count", "extra")
    assert first["extra"] == float(np.float32(0.1)) and type(first["count"]) is int


def test_special_values_stay_valid_json(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        encode_row(row(1, a=math.nan, b=math.inf, c=np.float32(-math.inf), d=-0.0))
    )
    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    back = read_metrics(tmp_path)[0]
    assert math.isnan(back["a"]) and back["b"] == math.inf and back["c"] == -math.inf
    assert math.copysign(1, back["d"]) == -1


def test_floats_keep_their_bits(tmp_path):
    values = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(encode_row(row(i, v=v)) for i, v in enumerate(values)))
    back = np.array([r["v"] for r in read_metrics(tmp_path)], np.float32)
    assert np.array_equal(back.view(np.uint32), values.view(np.uint32))


def test_a_faulty_row_writes_nothing(tmp_path):
    bad = row(1, note="text", flag=True, vector=np.ones(3))
    del bad["loss"]
    with MetricsWriter(tmp_path, QUIET) as writer, pytest.raises(MetricsError) as e:
        writer.write(bad)
    for part in ("loss is missing", "note is 'text'", "flag is True", "vector is"):
        assert part in str(e.value)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "rew', b"\x00\x00"])
def test_resume_takes_later_rows_and_a_torn_line_away(tmp_path, torn):
    with MetricsWriter(tmp_path, QUIET) as writer:
        for step in range(1, 6):
            writer.write(row(step))
    with open(tmp_path / "metrics.jsonl", "ab") as f:
        f.write(torn)
    kept = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:3]
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    with MetricsWriter(tmp_path, QUIET, resumed_step=3) as writer:
        assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(kept)
        writer.write(row(4))
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_damage_before_the_last_line_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(encode_row(row(1)) + b'{"step"\n' + encode_row(row(3)))
    for use in (lambda: read_metrics(tmp_path), lambda: MetricsWriter(tmp_path, QUIET, resumed_step=3)):
        with pytest.raises(MetricsError, match="line 2 is damaged"):
            use()


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path, QUIET) as writer:
        writer.write(row(1))

        def full(fd):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(metrics.os, "fsync", full)
        with pytest.raises(OSError, match=r"cannot write .*metrics.jsonl: No space left"):
            writer.write(row(2))
        with pytest.raises(OSError, match=r"cannot write .*step_000001.jsonl"):
            writer.write_samples(1, [{"a": 1}])
    assert list((tmp_path / "samples").iterdir()) == []


def test_samples(tmp_path):
    log = LogSection(tensorboard=False, samples=2, samples_every=5)
    samples = [{"response": f"ü{i}", "row": object} for i in range(4)]
    with MetricsWriter(tmp_path, log) as writer:
        for step in range(1, 12):
            writer.write_samples(step, samples)
    names = sorted(p.name for p in (tmp_path / "samples").iterdir())
    assert names == ["step_000001.jsonl", "step_000005.jsonl", "step_000010.jsonl"]
    lines = (tmp_path / "samples" / names[0]).read_text().splitlines()
    assert [json.loads(line)["response"] for line in lines] == ["ü0", "ü1"]
    MetricsWriter(tmp_path, log, resumed_step=5).close()
    assert sorted(p.name for p in (tmp_path / "samples").iterdir()) == names[:2]
    with MetricsWriter(tmp_path / "samples", LogSection(tensorboard=False, samples=0)) as writer:
        writer.write_samples(1, samples)
    assert not (tmp_path / "samples" / "samples").exists()


def test_tensorboard_events(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with MetricsWriter(tmp_path, LogSection()) as writer:
        writer.write(row(1, **{"reward/mean": 0.25}))
    data = next((tmp_path / "tensorboard").iterdir()).read_bytes()
    seen, at = {}, 0
    while at < len(data):  # TFRecord: length, its checksum, record, its checksum
        length = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += length + 16
        seen |= {v.tag: (event.step, v.simple_value) for v in event.summary.value}
    assert seen["reward/mean"] == (1, 0.25)
    assert set(seen) == set(REQUIRED) - {"step"}


def test_wandb_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MetricsError, match="pip install wandb"):
        MetricsWriter(tmp_path, LogSection(tensorboard=False, wandb="project"))


def test_rollout_metrics():
    got = rollout_metrics(np.array([1, 1, 0, 1, 0.5, 0.5]), 2, [3, 5, 4, 4, 8, 6], ["stop", "length", *["stop"] * 4])
    assert got["reward/mean"] == pytest.approx(4 / 6) and got["reward/std"] == pytest.approx(
        np.std([1, 1, 0, 1, 0.5, 0.5])
    )
    assert got["reward/group_std"] == pytest.approx(0.5 / 3) and got["reward/flat_groups"] == pytest.approx(2 / 3)
    assert (got["length/mean"], got["length/min"], got["length/max"], got["length/truncated"]) == (5.0, 3, 8, 1 / 6)


# Display


def test_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    with Display("r", 10, every=4, file=out) as d:
        d.phase("generate")
        for step in range(1, 11):
            d.step(row(step, **{"parity/tokens": 100.0}))
        d.note("saved [step 10]")
    lines = out.getvalue().splitlines()
    assert [line.split("/")[0] for line in lines[:-1]] == [f"step {n:2d}" for n in (1, 4, 8, 10)]
    assert lines[-1] == "saved [step 10]"
    assert "reward 0.400 ±0.000" in lines[1] and "parity 0 of 100" in lines[1]
    assert "\x1b" not in out.getvalue()


def test_live_display_on_a_terminal(monkeypatch):
    out = io.StringIO()
    console = rich.console.Console
    monkeypatch.setattr(display.rich.console, "Console", lambda **kw: console(**kw, force_terminal=True, width=140))
    with Display("myrun", 3, file=out) as d:
        for step in (1, 2, 3):
            d.phase(f"generate {step}")
            d.step(row(step, **{"parity/tokens": 7.0, "parity/mismatched_tokens": 2.0, "parity/max_abs": 0.5}))
    text = out.getvalue()
    assert "myrun" in text and "3/3" in text and "2 of 7 (max 5.0e-01)" in text


def test_no_comparison_is_not_shown_as_parity():
    assert display.describe(row(1))["parity"] == "-"
    assert display.describe(row(1, **{"parity/tokens": 5.0}))["parity"] == "0 of 5"

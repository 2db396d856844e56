"""What other constants cost, and the tuning of attention's schedules, without a GPU: every choice lowers, none is lost by another."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from benchmarks import report
from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import constants, tune_attention
from pallas_kernels.attention import schedules
from pallas_kernels.logprob import hopper_blocks, hopper_head


def test_every_other_value_stands_beside_the_chosen_one(tmp_path, monkeypatch, capsys):
    def call(mode, module, function, *args):
        if args == (128, "train"):
            raise RuntimeError("no memory")
        if function == "vocabulary":
            names = [f"block-{n}-{work}" for n in constants.VOCAB_BLOCKS for work in ("train", "decode")]
            names += [f"chunk-{n}-train" for n in constants.CHUNKS]
            chosen = ["block-128-train", "block-128-decode", "chunk-16384-train"]
        else:
            names = [f"{block}-{split}" for block, split in constants.choices(args[0])]
            chosen = names[:1]
        failed = {names[-1]: "does not fit"} if args == (64, "train") else {}
        return {name: 100.0 if name in chosen else 125.0 for name in names if name not in failed}, failed

    monkeypatch.setattr(constants.separate, "call", call)
    rows = constants.rows()
    assert len(rows) == len({row["id"] for row in rows}) == 3 * 3 * 4 - 3 - 1 + 2 * 2 + 2
    lost = capsys.readouterr().err
    assert "attention 128 train all no memory" in lost and "attention 64 train 64-2048 does not fit" in lost
    results = tmp_path / "results.jsonl"
    record_all = report.record_all
    monkeypatch.setattr(report, "record_all", lambda found: record_all(found, results))
    measured = tmp_path / "out.json"
    facts = {"gpu": "1 x NVIDIA H200", "versions": {"jax": "0.11.2"}, "commit": "abc", "date": "2026-11-30"}
    rows = [{"command": "c"} | row for row in rows]
    measured.write_text(json.dumps({"facts": facts, "rows": rows, "failed": {}}))
    assert kernels.main(["--record", str(measured)]) == 0
    found = report.load(results)
    assert {(r.area, r.ratio, r.target) for r in found} == {("constants", 1.25, None)}
    assert "| - | - |" in report.render(found)


def test_constants_are_put_back():
    values = lambda: (hopper_blocks.VOCAB_BLOCK, hopper_head.CHUNK)  # noqa: E731
    chosen = values()
    with pytest.raises(RuntimeError), constants.replaced((hopper_blocks, hopper_head), VOCAB_BLOCK=64, CHUNK=8192):
        assert values() == (64, 8192)
        raise RuntimeError
    assert values() == chosen


@pytest.mark.parametrize("table", tune_attention.KERNELS)
@pytest.mark.parametrize("d", constants.HEADS)
def test_every_choice_lowers_for_a_gpu(d, table):
    H, K = constants.HEADS[d]
    whole = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)  # noqa: E731
    q, paged = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, H, d), (80, 64, K, d)))
    texts = set()
    for block, split in constants.choices(d):
        traced = constants.attend(table, d, block, split, 3).trace(q, paged, paged, whole(3), whole(2), whole(2, 40))
        texts.add(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert len(texts) == len(constants.choices(d)), "a choice had no effect"


def test_a_table_of_schedules_keeps_an_entry_for_every_head_dim(tmp_path, monkeypatch, capsys):
    """The fastest, the committed one among equals, never a refused one; and the committed one where nothing was measured."""
    path = tmp_path / "schedules.py"
    path.write_text(pathlib.Path(schedules.__file__).read_text())
    monkeypatch.setattr(schedules, "__file__", str(path))

    def call(mode, module, function, table, d):
        others = len(tune_attention.candidates(table, d)) - 1
        if (table, d) == ("FEW", 64):
            raise RuntimeError("no memory")
        if d == 128:
            return [[100.0, ""]] + [[99.5, ""]] * others
        return [[100.0, ""], [None, "rows differ"]] + [[80.0, ""]] * (others - 1)

    monkeypatch.setattr(tune_attention.separate, "call", call)
    assert tune_attention.main() == 1
    out = capsys.readouterr()
    assert "refused, rows differ" in out.out and "FEW, head_dim 64: no memory" in out.err
    tuned = {}
    exec(path.read_text(), {"__name__": schedules.__name__}, tuned)  # noqa: S102
    for table in tune_attention.KERNELS:
        committed, found = getattr(schedules, table), tuned[table]
        assert list(found) == list(tune_attention.HEADS)
        assert str(found[128]) == str(committed[128])
    assert str(tuned["FEW"][64]) == str(schedules.FEW[64])
    assert str(tuned["MANY"][64]) == str(tune_attention.candidates("MANY", 64)[2])


def test_what_compiles_is_not_lost_by_what_does_not():
    def broken():
        raise ValueError("K must be a multiple of 64")

    f = jax.jit(lambda x: x + 1)
    programs, failed = tune_attention.compiled({"a": broken, "b": lambda: f.lower(1), "c": lambda: f.lower(1.0)})
    assert list(programs) == ["b", "c"] and programs["c"](1.0) == 2
    assert failed == {"a": "ValueError: K must be a multiple of 64"}

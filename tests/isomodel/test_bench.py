"""`isomodel bench`: the work is the same for every engine, what did not run is not a figure, bad usage is named."""

from __future__ import annotations

import json
import sys

import pytest

from isomodel import cli, weights
from isomodel.bench import arm, command
from isomodel.bench.work import SHAPES, Work
from tests.isomodel import shapes
from tests.isomodel.rollout import tiny

SMALL = ["--prompts", "2", "--samples", "2", "--prompt-tokens", "5", "--max-tokens", "3", "--repeats", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    weights.save(path, tiny.CONFIG, tiny.params())
    return path


def test_our_engine_is_measured_and_a_missing_one_is_not_run(folder, tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = ["bench", "engine", str(folder), *SMALL, "--arms", "iso,vllm", "--option", "iso.seq_buckets=[4]"]
    assert cli.main([*arguments, "--json", str(out)]) == 1
    found = json.loads(out.read_text())["arms"]
    assert found["iso"]["tokens"] == [2 * 2 * 3] * 2 and len(found["iso"]["seconds"]) == 2 == len(found["iso"]["ttft_s"])
    assert all(s > 0 for s in (*found["iso"]["seconds"], found["iso"]["copy_tb_per_s"], found["iso"]["start_s"]))
    stats = found["iso"][
        "stats"
    ]  # a run that is not measured before two that are, and one token of one more prompt after each
    assert stats["completions"] == 3 * (2 * 2 + 1) and stats["generated_tokens"] == 3 * (2 * 2 * 3 + 1)
    assert stats["preemptions"] == 0 and stats["pages"] == 2 * 1 + 4 * 2, "a prompt's pages once for its samples"
    assert "No module named 'vllm'" in found["vllm"]["failed"]
    captured = capsys.readouterr()
    assert "not run" in captured.out and "floor:" in captured.out and "No module named 'vllm'" in captured.err


def test_an_arm_that_takes_too_long_is_named(folder):
    arguments = dict(folder=str(folder), random_weights=False, works=[vars(Work(prompts=1))], repeats=1, options={})
    with pytest.raises(arm.ArmFailed, match="iso took longer than 0 s; raise --seconds"):
        arm.measure("iso", sys.executable, 0.01, **arguments)


def test_prompts_of_a_file_end_where_the_model_ends_them(folder, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt_ids": [1, 2, 3]}\n{"prompt_ids": [4]}\n')
    arguments = ["bench", "engine", str(folder), *SMALL, "--no-logprobs", "--prompts-from", str(prompts)]
    assert cli.main([*arguments, "--json", str(out)]) == 0
    whole = json.loads(out.read_text())
    assert (whole["work"]["prompts"], whole["work"]["prompt_tokens"]) == (2, 3)
    assert all(0 < n <= 2 * 2 * 3 for n in whole["arms"]["iso"]["tokens"])
    prompts.write_text('{"prompt_ids": "1"}\n')
    assert cli.main([*arguments, "--json", str(out)]) == 2
    assert "line 1" in capsys.readouterr().err


def test_every_engine_gets_the_same_prompts_and_no_two_are_alike():
    work = Work(prompts=64, prompt_tokens=8)
    prompts = work.token_ids(49152)
    assert prompts == work.token_ids(49152) != work.token_ids(49152, seed=1)
    assert len({tuple(p) for p in prompts}) == 64 and {len(p) for p in prompts} == {8}
    assert max(map(max, prompts)) < 49152


def test_what_a_step_reads():
    for name, cfg in (("qwen3-0.6b", shapes.QWEN3_06B), ("qwen3-8b", shapes.QWEN3_8B)):
        assert SHAPES[name].hidden_size == cfg.hidden_size and SHAPES[name].num_layers == cfg.num_layers
    weights_bytes, kv_bytes = Work().step_bytes(SHAPES["qwen3-8b"])
    assert weights_bytes == pytest.approx(
        2 * 7.57e9, rel=1e-2
    )  # 8.19e9 parameters, less the embedding's, which is not read
    assert kv_bytes == 256 * (128 + 256) * 36 * 2 * 8 * 128 * 2
    groups = Work(prompts=16, samples=16, prompt_tokens=2048)  # a prompt is read once for all its samples
    assert groups.step_bytes(SHAPES["qwen3-8b"])[1] == (16 * 2048 + 256 * 256) * 36 * 2 * 8 * 128 * 2
    assert Work().floor_s(SHAPES["qwen3-8b"], 1e12) == pytest.approx(512 * (weights_bytes + kv_bytes) / 1e12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "iso,sglang"], "unknown arm sglang; choose from iso, native, vllm"),
        (["--prompts", "0"], "prompts=0 must be 1 or more"),
        (["--repeats", "0"], "--repeats 0"),
        (["--option", "decode_steps=3"], "must be ARM.NAME=VALUE"),
        (["--option", "vllm.x=3"], "must be ARM.NAME=VALUE, ARM one of iso"),
        (["--max-tokens", "100000"], "positions"),
    ],
)
def test_bad_usage(folder, arguments, message, capsys):
    assert cli.main(["bench", "engine", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_options_are_json_or_text():
    assert command.parse_options(["iso.a=3", "iso.b=x", "vllm.c=[1]"], ["iso", "vllm"]) == {
        "iso": {"a": 3, "b": "x"},
        "vllm": {"c": [1]},
    }

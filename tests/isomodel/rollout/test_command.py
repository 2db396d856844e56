"""`isomodel generate` on a tiny model folder: prompts in, JSONL out; what is wrong is named and nothing is written."""

from __future__ import annotations

import dataclasses
import json
import os
import re

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from isomodel import cli, tokenizer, weights
from isomodel.rollout import SamplingParams
from tests.isomodel.rollout import tiny

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('role ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>"
    "{% endfor %}<|im_start|>{{ mood | default('') }}assistant:"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with random weights and a byte-level tokenizer of 256 + 3 ids."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    cfg = dataclasses.replace(tiny.CONFIG, eos_token_ids=(258,))
    weights.save(folder, cfg, tiny.params())
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = tokenizers.decoders.ByteLevel()
    byte_level.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="<|im_end|>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    return folder


def run(*words) -> int:
    return cli.main(["generate", *map(str, words)])


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


SMALL = ("--max-tokens", 6, "--max-seqs", 4)


def test_a_file_of_prompts(folder, tmp_path, capsys):
    source = write(
        tmp_path / "in.jsonl",
        {"prompt": "2 + 2 = ?", "answer": 4, "id": "sum"},
        "",
        {"messages": [{"role": "user", "content": "Hi"}], "sampling": {"seed": 3, "n": 2}},
        {"prompt_ids": [1, 2, 3], "sampling": {"temperature": 0, "max_tokens": 4}},
    )
    out = tmp_path / "out.jsonl"
    assert run(folder, "--input", source, "--output", out, "--seed", 1, "--temperature", 0.7, *SMALL) == 0
    a, b, c, d = read(out)
    assert [x["line"] for x in (a, b, c, d)] == [1, 3, 3, 4] and a["id"] == "sum" and "id" not in b
    assert (a["seed"], b["seed"], d["seed"]) == (1, 3, 1) and (b["index"], c["index"]) == (0, 1)
    assert a["prompt"] == "2 + 2 = ?" and b["messages"] == [{"role": "user", "content": "Hi"}]
    assert len(d["token_ids"]) <= 4 and d["prompt_ids"] == [1, 2, 3] and "prompt" not in d
    for x in (a, b, c, d):
        assert len(x["token_ids"]) == len(x["logprobs"]) == len(x["truncated_logprobs"]) == len(x["versions"]) > 0
        assert x["finish_reason"] in ("stop", "length") and isinstance(x["text"], str) and max(x["logprobs"]) <= 0
    text = tokenizer.Tokenizer(folder).decode(a["prompt_ids"], skip_special_tokens=False)
    assert text == "<|im_start|>user:2 + 2 = ?<|im_end|><|im_start|>assistant:"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    # The same bits as the engine gives alone.
    alone = tiny.alone(np.int32(a["prompt_ids"]), SamplingParams(seed=1, temperature=0.7, max_tokens=6))
    n = len(a["token_ids"])
    assert np.float32(a["logprobs"]).tobytes() == alone.logprobs[:n].tobytes()
    assert a["inv_temp"] == float(np.float32(1) / np.float32(0.7))


def test_prompts_on_the_command_line(folder, tmp_path, capsys):
    assert run(folder, "--prompt", "Hi", "--seed", 5, *SMALL) == 0
    one = capsys.readouterr().out
    assert run(folder, "--prompt", "Hi", "--prompt", "Ho", "--seed", 5, "--output", "-", *SMALL) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["text"] + "\n" == one and (first["line"], second["line"]) == (1, 2)
    assert run(folder, "--prompt", "Hi", "--prompt", "Ho", "--seed", 5, *SMALL) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("--- prompt 1, completion 1\n" + first["text"]) and second["text"] in printed


def test_raw_system_and_template_arguments(folder, capsys):
    codec = tokenizer.Tokenizer(folder)

    def prompt_text(*words):
        assert run(folder, "--prompt", "Hi", "--output", "-", *SMALL, *words) == 0
        ids = json.loads(capsys.readouterr().out)["prompt_ids"]
        return codec.decode(ids, skip_special_tokens=False)

    assert prompt_text("--raw") == "Hi"
    assert prompt_text("--system", "Be kind", "--template-arg", "mood=happy ") == (
        "<|im_start|>system:Be kind<|im_end|><|im_start|>user:Hi<|im_end|><|im_start|>happy assistant:"
    )
    assert run(folder, "--prompt", "Hi", "--raw", "--system", "x") == 2
    assert "--raw switches it off" in capsys.readouterr().err


def test_prompt_log_probabilities_and_stop_strings(folder, capsys):
    words = (folder, "--prompt", "Hi", "--raw", "--output", "-", "--seed", 2, *SMALL)
    assert run(*words, "--prompt-logprobs") == 0
    free = json.loads(capsys.readouterr().out)
    assert free["prompt_logprobs"][0] is None and len(free["prompt_logprobs"]) == 2 and free["prompt_logprobs"][1] < 0
    stop = next(c for c in free["text"] if c.isprintable() and c != "\ufffd")
    assert run(*words, "--stop", stop) == 0
    cut = json.loads(capsys.readouterr().out)
    assert cut["finish_reason"] == "stop" and cut["stop_reason"] == stop
    assert cut["text"] == free["text"].split(stop)[0] and free["token_ids"][: len(cut["token_ids"])] == cut["token_ids"]


BAD_LINES = [
    ("{oops", "line 1: not JSON"),
    ("[1]", "line 1: a list, not an object"),
    ({}, "line 1: it has none of prompt, messages, prompt_ids; give one"),
    ({"prompt": "a", "prompt_ids": [1]}, "line 1: it has prompt and prompt_ids of"),
    ({"prompt": ""}, "line 1: `prompt` must be text"),
    ({"prompt": 3}, "line 1: `prompt` must be text"),
    ({"messages": ["x"]}, "line 1: `messages` must be a list of objects"),
    ({"messages": [{"content": "x"}]}, "line 1: this is not a chat: message 0 has no role"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "line 1: the chat template of .* refuses"),
    ({"prompt_ids": [1, "x"]}, "line 1: `prompt_ids` must be a list of integers"),
    ({"prompt_ids": [1, 300]}, "line 1: token 1 of the prompt is 300"),
    ({"prompt": "a", "sampling": {"temprature": 1}}, "line 1: `sampling` has unknown fields temprature"),
    ({"prompt": "a", "sampling": {"top_p": 0}}, "line 1: sampling: top_p=0 must be above 0"),
    ({"prompt": "a", "sampling": {"stop_token_ids": 3}}, "line 1: `stop` must be a list of strings"),
    ({"prompt": "a", "sampling": 3}, "line 1: `sampling` must be an object"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=lambda x: str(x)[:30])
def test_a_bad_line_is_named_and_nothing_is_written(folder, tmp_path, capsys, line, message):
    source = write(tmp_path / "in.jsonl", line, {"prompt": "fine"}, line)
    assert run(folder, "--input", source, "--output", tmp_path / "out.jsonl", *SMALL) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and re.search(message.replace("line 1", "line 3"), error) and "line 2" not in error
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_files_that_cannot_be_used(folder, tmp_path, capsys):
    out = tmp_path / "out.jsonl"

    def fails(*words) -> str:
        assert run(*words) == 2
        assert not out.exists() and not list(tmp_path.glob(".*"))
        return capsys.readouterr().err

    assert "No such file" in fails(folder, "--input", tmp_path / "none.jsonl", "--output", out)
    assert "it holds no prompt" in fails(folder, "--input", write(tmp_path / "empty.jsonl", ""), "--output", out)
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert "line 2 is not UTF-8" in fails(folder, "--input", tmp_path / "bytes.jsonl", "--output", out)
    good = write(tmp_path / "good.jsonl", {"prompt": "a"})
    assert "cannot write" in fails(folder, "--input", good, "--output", tmp_path / "nowhere" / "out.jsonl")
    assert "it is a folder" in fails(folder, "--input", good, "--output", tmp_path)
    assert "no config.json" in fails(tmp_path, "--input", good, "--output", out)
    assert "temperature=-1.0 must be" in fails(folder, "--input", good, "--output", out, "--temperature", -1)
    assert "leaves no room" in fails(folder, "--input", good, "--output", out, "--max-model-len", 10)
    assert "backend hopper cannot run here" in fails(folder, "--input", good, "--output", out, "--backend", "hopper")
    many = write(tmp_path / "many.jsonl", *["x"] * 50)
    assert "line 20: " in (error := fails(folder, "--input", many, "--output", out))
    assert "and 30 more" in error and "line 21: " not in error


def test_an_old_output_survives_an_error_and_is_replaced_by_a_success(folder, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    assert run(folder, "--prompt", "a", "--output", out, "--max-model-len", 5) == 2
    assert out.read_text() == "old"
    assert run(folder, "--prompt", "a", "--output", out, *SMALL) == 0
    assert len(read(out)) == 1
    umask = os.umask(0)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_full_disk(folder, tmp_path, capsys, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert run(folder, "--prompt", "a", "--output", tmp_path / "out.jsonl", *SMALL) == 2
    assert "No space left on device" in capsys.readouterr().err and not list(tmp_path.iterdir())

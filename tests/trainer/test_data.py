"""Data and tasks: bad rows by number, the split, an order that is a pure function of (seed, step), tasks' verifiers."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from isomodel.tokenizer import Tokenizer
from isomodel.yaml_config import ConfigError
from trainer import tasks
from trainer.config import DataSection
from trainer.data import MAX_LISTED, DataError, Dataset, items_of, read_file

ROOT = pathlib.Path(__file__).parents[2]


class Characters:
    """One token a character; a chat is its roles' first letters and contents."""

    def encode(self, text):
        return [ord(c) for c in text]

    def apply_chat_template(self, messages, **template_args):
        return self.encode("".join(f"{m['role'][0]}:{m['content']};" for m in messages) + "".join(template_args))


def section(source, **fields) -> DataSection:
    return DataSection(source=str(source), **({"seed": 0} | fields))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def numbers(tmp_path):
    return write(tmp_path / "numbers.jsonl", [{"prompt": f"p{i}", "answer": i} for i in range(10)])


def prompts(items):
    return [item.prompt for item in items]


# Files


def test_rows_of_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "p", "answer": "x"}\n\n'
        + json.dumps({"messages": chat, "answer": 3, "extra": [1]}).encode()
        + b'\r\n{"prompt": "q"}'
    )
    items = Dataset(section(path), Characters()).train
    assert [i.id for i in items] == ["a.jsonl line 1", "a.jsonl line 3", "a.jsonl line 4"]
    assert [i.answer for i in items] == ["x", "3", None]
    assert items[1].row["extra"] == [1]
    decoded = ["".join(map(chr, i.prompt_ids)) for i in items]
    assert decoded == ["u:p;", "s:s;u:u;", "u:q;"]


def test_prompt_ids_without_and_with_a_template(numbers):
    plain = Dataset(section(numbers, chat_template=False, system_prompt="S "), Characters()).train[0]
    assert "".join(map(chr, plain.prompt_ids)) == "S p0"
    chat = Dataset(section(numbers, system_prompt="S", template_args={"think": False}), Characters()).train[0]
    assert "".join(map(chr, chat.prompt_ids)) == "s:S;u:p0;think"
    assert chat.prompt == "p0"


def test_bad_lines_are_named_by_number(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a"}\nnot json\n[1]\n{"prompt": "\xff"}\n{"prompt": "b"\n')
    with pytest.raises(DataError) as e:
        read_file(section(path))
    assert "4 bad lines" in str(e.value)
    for number, says in ((2, "not valid JSON"), (3, "must be an object"), (4, "not UTF-8"), (5, "not valid JSON")):
        assert f"line {number}: {says}" in str(e.value)
    assert "line 1:" not in str(e.value)


def test_bad_rows_are_named_by_number(tmp_path):
    rows = [
        {"prompt": "fine"},
        {"question": "q"},
        {"prompt": ""},
        {"prompt": 3},
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    ]
    path = write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(DataError) as e:
        items_of(read_file(section(path)), section(path))
    for number, says in (
        (2, "has neither 'prompt' nor 'messages'; it has: question"),
        (3, "must be text that is not empty"),
        (4, "not 3"),
        (5, "list that is not empty"),
        (6, "message 0 must be"),
        (7, "nothing to answer"),
    ):
        line = next(text for text in str(e.value).splitlines() if f"line {number}:" in text)
        assert says in line
    assert "line 1:" not in str(e.value)


def test_at_most_so_many_bad_lines_are_listed(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("x\n" * (MAX_LISTED + 5))
    with pytest.raises(DataError, match="and 5 more") as e:
        read_file(section(path))
    assert str(e.value).count("line ") == MAX_LISTED


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [
        {"prompt": [{"role": "user", "content": "u"}], "reward_model": {"ground_truth": "7"}},
        {"prompt": [{"role": "user", "content": "v"}], "reward_model": {"ground_truth": "8"}},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    items = Dataset(section(path, answer="reward_model.ground_truth"), Characters()).train
    assert [(i.id, i.prompt, i.answer) for i in items] == [("a.parquet row 0", "u", "7"), ("a.parquet row 1", "v", "8")]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable parquet file"):
        read_file(section(path))


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match="no file"):
        read_file(section(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="neither reasoning_gym:TASK"):
        read_file(section("chain_sum"))
    with pytest.raises(DataError, match="has no rows"):
        read_file(section(write(tmp_path / "empty.jsonl", [])))
    with pytest.raises(DataError, match="only tasks take parameters"):
        read_file(section(tmp_path / "none.jsonl", params={"a": 1}))


def test_long_prompts(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "x" * n} for n in (3, 30, 4, 40)])
    cfg = dict(chat_template=False, max_prompt_tokens=10)
    with pytest.raises(DataError) as e:
        Dataset(section(path, **cfg), Characters())
    assert "line 2: 30 tokens" in str(e.value) and "line 4: 40 tokens" in str(e.value) and "line 1" not in str(e.value)
    dataset = Dataset(section(path, long_prompts="drop", **cfg), Characters())
    assert prompts(dataset.train) == ["xxx", "xxxx"] and dataset.dropped == 2
    with pytest.raises(DataError, match="all 4 prompts"):
        Dataset(section(path, chat_template=False, max_prompt_tokens=1, long_prompts="drop"), Characters())


# Order and split


def test_a_batch_depends_on_seed_and_step_alone(numbers):
    first, second = (Dataset(section(numbers, seed=5), Characters()) for _ in range(2))
    forward = [prompts(first.batch(k, 4)) for k in range(12)]
    backward = [prompts(second.batch(k, 4)) for k in reversed(range(12))][::-1]
    assert forward == backward
    assert forward != [prompts(Dataset(section(numbers, seed=6), Characters()).batch(k, 4)) for k in range(12)]


def test_every_epoch_has_every_prompt_once_in_another_order(numbers):
    dataset = Dataset(section(numbers), Characters())
    flat = [p for k in range(15) for p in prompts(dataset.batch(k, 4))]
    epochs = [flat[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(e) == sorted(epochs[0]) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 6
    in_order = Dataset(section(numbers, shuffle=False), Characters())
    assert prompts(in_order.batch(2, 4)) == ["p8", "p9", "p0", "p1"]


def test_a_batch_larger_than_the_source(numbers):
    batch = prompts(Dataset(section(numbers), Characters()).batch(0, 25))
    assert len(batch) == 25 and max(batch.count(p) for p in set(batch)) == 3


def test_rounds_of_a_step_take_other_prompts(numbers):
    dataset = Dataset(section(numbers), Characters(), rounds=2)
    assert len({*prompts(dataset.batch(0, 5, 0)), *prompts(dataset.batch(0, 5, 1))}) == 10
    with pytest.raises(ValueError, match="round 2"):
        dataset.batch(0, 5, 2)


def test_held_out_prompts_are_in_no_batch(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"p{i % 12}", "answer": str(i)} for i in range(40)])
    dataset = Dataset(section(path, held_out=5), Characters())
    held = set(prompts(dataset.held_out))
    assert len(dataset.held_out) == len(held) == 5
    assert held.isdisjoint(prompts(dataset.train))
    assert held | set(prompts(dataset.train)) == {f"p{i}" for i in range(12)}
    assert prompts(dataset.evaluation(2)) == prompts(dataset.held_out)[:2]
    other = Dataset(section(path, held_out=5, seed=1), Characters())
    assert set(prompts(other.held_out)) != held
    with pytest.raises(DataError, match="12 distinct"):
        Dataset(section(path, held_out=12), Characters())


def test_fingerprint_tells_data_apart(numbers, tmp_path):
    def of(**fields):
        return Dataset(section(fields.pop("source", numbers), **fields), Characters()).fingerprint

    assert of() == of()
    changed = write(tmp_path / "b.jsonl", [{"prompt": f"p{i}", "answer": i + (i == 9)} for i in range(10)])
    assert len({of(), of(seed=1), of(held_out=2), of(size=9), of(source=changed), of(shuffle=False)}) == 6


# Tasks


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("copy", {"length": 3}, lambda p: p[:-1]),
        ("reverse", {"length": 3}, lambda p: p[:-1][::-1]),
        ("sort", {"length": 5, "symbols": 3}, lambda p: "".join(sorted(p[:-1]))),
        ("add", {"digits": 2}, lambda p: f"{sum(map(int, p[:-1].split('+'))):03d}"),
    ],
)
def test_builtin_tasks(name, params, expected):
    task = tasks.resolve(f"task:{name}", params)
    rows = task.rows(50, 1)
    assert all(row["answer"] == expected(row["prompt"]) for row in rows)
    assert all(task.score(row["answer"], row) == 1.0 for row in rows)
    assert all(task.score(text, rows[0]) == 0.0 for text in (None, "", "xyzvw"))
    assert rows[:20] == task.rows(20, 1) and rows != task.rows(50, 2)


@pytest.mark.parametrize(
    ("answer", "reward"), [("1234", 1.0), ("1239", 0.75), ("12", 0.5), ("12345678", 0.5), ("2341", 0.0), ("", 0.0)]
)
def test_graded(answer, reward):
    assert tasks.graded(answer, "1234") == reward


def test_reasoning_gym_rows_and_verifier():
    task = tasks.resolve("reasoning_gym:chain_sum", {"min_terms": 2, "max_terms": 2})
    rows = task.rows(5, 3)
    assert rows[:3] == task.rows(3, 3) and rows != task.rows(5, 4)
    assert all(task.score(row["answer"], row) == 1.0 for row in rows)
    assert all(task.score(text, rows[0]) < 0.5 for text in (None, str(int(rows[0]["answer"]) + 1)))


def test_reasoning_gym_mixture():
    specs = [{"name": "chain_sum"}, {"name": "letter_counting", "weight": 2.0, "config": {}}]
    task = tasks.resolve("reasoning_gym:composite", {"datasets": specs})
    rows = task.rows(20, 0)
    assert {row["metadata"]["source_dataset"] for row in rows} == {"chain_sum", "letter_counting"}
    assert all(task.score(row["answer"], row) == 1.0 for row in rows)


@pytest.mark.parametrize(
    ("source", "params", "says"),
    [
        ("reasoning_gym:chain_sums", {}, "near it: chain_sum"),
        ("reasoning_gym:chain_sum", {"min_term": 2}, "did you mean 'min_terms'"),
        ("reasoning_gym:chain_sum", {"seed": 2}, "is set by data.seed"),
        ("reasoning_gym:chain_sum", {"min_terms": 9}, "max_terms must be >= min_terms"),
        ("reasoning_gym:composite", {"datasets": [{"nam": "x"}]}, "want a list of"),
        ("task:copi", {}, "did you mean 'copy'"),
        ("task:copy", {"len": 3}, "did you mean 'length'"),
        ("task:copy", {"length": 0}, "at least 1"),
        ("task:copy", {"length": True}, "whole number"),
        ("task:copy", {"symbols": 11}, "10 digits"),
    ],
)
def test_tasks_that_do_not_exist(source, params, says):
    with pytest.raises(ConfigError, match=says):
        tasks.resolve(source, params)


def test_demo_tokenizer_covers_the_tasks():
    tokenizer = Tokenizer(ROOT / "configs" / "demo_tokenizer")
    for name in ("add", "copy", "reverse", "sort"):
        for row in tasks.resolve(f"task:{name}", {}).rows(20, 0):
            for text in (row["prompt"], row["answer"]):
                ids = tokenizer.encode(text)
                assert len(ids) == len(text) and tokenizer.decode(ids) == text
    unknown = tokenizer.hf.unk_token_id
    assert tokenizer.encode("1x") == [tokenizer.encode("1")[0], unknown]
    assert tokenizer.eos_token_id == 1 and len(tokenizer) == 18


def test_demo_tokenizer_is_what_its_script_makes(tmp_path):
    subprocess.run([sys.executable, ROOT / "scripts" / "make_demo_tokenizer.py", tmp_path], check=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (ROOT / "configs" / "demo_tokenizer" / name).read_bytes()

"""Rewards: verifiers, functions of the user's, and what happens when one raises, hangs or returns no number."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

from isomodel.yaml_config import ConfigError
from trainer import rewards
from trainer.config import DataSection, RewardSection, RewardTerm
from trainer.data import Item, items_of
from trainer.rewards import Response, RewardError, Rewards
from trainer.tasks import resolve
from trainer.verifiers import EXTRACT

FILE = DataSection(source="x.jsonl", seed=0)
HERE = str(pathlib.Path(__file__).parent)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(HERE)


def item(answer="42", name="x.jsonl line 7", **row) -> Item:
    return Item(name, "p", (), answer, row)


def judge(section: RewardSection, answer, *texts, data=FILE):
    with Rewards(section, data) as r:
        it = answer if isinstance(answer, Item) else item(answer)
        return r([it] * len(texts), [Response(t) for t in texts])


def user(name, **fields) -> RewardSection:
    return RewardSection(kind=f"reward_functions:{name}", **fields)


# Verifiers


@pytest.mark.parametrize(
    ("extract", "text", "expected"),
    [
        ("text", " 42\n", "42"),
        ("tag", "<answer>1</answer> no, <answer> 42 </answer>.", "42"),
        ("tag", "42", None),
        ("boxed", r"\boxed{1} then \boxed{\frac{4}{2}}", r"\frac{4}{2}"),
        ("boxed", r"\boxed{unclosed", None),
        ("number", "from 7 to -1,042.5, I think", "-1042.5"),
        ("number", "12-5", "5"),
        ("number", "it is \u22127", "-7"),
        ("number", "none", None),
        ("line", "work\n\n 42 \n\n", "42"),
        ("line", " \n", None),
    ],
)
def test_extract(extract, text, expected):
    assert EXTRACT[extract](text) == expected


def test_exact():
    assert judge(RewardSection(kind="exact"), "a b", "a b", " a  b ", "A b", "ab").total_N.tolist() == [1, 1, 0, 0]
    loose = RewardSection(kind="exact", args={"ignore_case": True}, extract="tag")
    assert judge(loose, "Yes", "<answer>YES</answer>", "yes").total_N.tolist() == [1, 0]


def test_math_verify():
    boxed = RewardSection(kind="math_verify", extract="boxed")
    texts = (r"\boxed{0.5}", r"\boxed{\frac12}", r"\boxed{\frac{2}{4}}", r"\boxed{2}", "0.5")
    assert judge(boxed, "1/2", *texts).total_N.tolist() == [1, 1, 1, 0, 0]
    plain = RewardSection(kind="math_verify")
    assert judge(plain, r"\frac{1}{2}", "The answer is $0.5$.", "so 0.25").total_N.tolist() == [1, 0]


def test_task_verifier():
    data = DataSection(source="reasoning_gym:chain_sum", seed=0, params={"min_terms": 2, "max_terms": 2})
    rows = [("row", row) for row in resolve(data.source, data.params).rows(3, 0)]
    items = items_of(rows, data)
    with Rewards(RewardSection(extract="number"), data) as r:
        got = r(items, [Response(f"It is {i.answer}.") for i in items])
        assert got.total_N.tolist() == [1, 1, 1]
        assert (r(items, [Response("I do not know")] * 3).total_N < 0.5).all()


def test_terms_add_up_with_their_weights():
    section = RewardSection(
        kind="exact",
        weight=2.0,
        terms=(RewardTerm("reward_functions:length", -0.5, {"scale": 2.0}), RewardTerm("exact")),
    )
    got = judge(section, "ab", "ab", "abc")
    assert got.terms["exact"].tolist() == [1, 0]
    assert got.terms["reward_functions:length"].tolist() == [4, 6]
    assert got.terms["exact.1"].tolist() == [1, 0]
    assert got.total_N.tolist() == [2 - 2 + 1, -3]


# Functions of the user's


def test_user_function_gets_what_it_asks_for():
    with Rewards(user("with_facts", args={"bonus": 1}), FILE) as r:
        got = r([item()] * 2, [Response("a", "stop", 5), Response("a", "length", 8)])
    assert got.total_N.tolist() == [6, 109]


def test_numbers_of_every_kind():
    assert judge(user("returns"), "", "true", "fp32", "zero_dim").total_N.tolist() == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nan", "returned nan, not a finite number"),
        ("inf", "returned inf, not a finite number"),
        ("none", "returned None, not a number"),
        ("text", "returned '1', not a number"),
        ("list", "not a number"),
        ("array", "not a number"),
        ("raises", "raised KeyError: 'raises'"),
    ],
)
def test_a_failing_function_names_itself_and_the_item(text, says):
    with pytest.raises(RewardError) as e:
        judge(user("returns"), "", "true", text)
    for part in (says, "reward_functions:returns", "x.jsonl line 7", f"completion: {text!r}"):
        assert part in str(e.value)
    zero = judge(user("returns", on_error="zero"), "", "true", text)
    assert zero.total_N.tolist() == [1.0, 0.0] and zero.errors == 1 and zero.timeouts == 0


def test_all_faults_of_a_section_at_once():
    section = RewardSection(
        kind="reward_functions:lenth",
        terms=(
            RewardTerm("reward_functions:length", args={"scal": 2}),
            RewardTerm("no_such_module:f"),
            RewardTerm("reward_functions:NOT_A_FUNCTION"),
            RewardTerm("task"),
            RewardTerm("exakt"),
            RewardTerm("exact", args={"nope": 1}),
        ),
    )
    with pytest.raises(ConfigError) as e:
        Rewards(section, FILE)
    expected = {
        "reward.kind": "no attribute 'lenth'",
        "reward.terms.0.args": "unexpected keyword argument 'scal'",
        "reward.terms.1.kind": "No module named 'no_such_module'",
        "reward.terms.2.kind": "not a function",
        "reward.terms.3.kind": "is a file",
        "reward.terms.4.kind": "none of task, exact, math_verify",
        "reward.terms.5.args": "unexpected keyword argument 'nope'",
    }
    found = {f.partition(": ")[0]: f for f in e.value.faults}
    assert set(found) == set(expected)
    for path, text in expected.items():
        assert text in found[path]


def test_items_that_cannot_be_judged_are_named_before_anything_runs():
    with Rewards(RewardSection(kind="exact"), FILE) as r:
        r.check([item("a")])
        with pytest.raises(ValueError, match="line 3: has no answer"):
            r.check([item("a"), item(None, "x.jsonl line 3")])
    with Rewards(RewardSection(kind="math_verify"), FILE) as r:
        with pytest.raises(ValueError, match="line 4: math-verify reads nothing"):
            r.check([item("1"), item("", "x.jsonl line 4")])


# Worker processes


def test_workers_give_what_the_trainers_process_gives():
    section = dict(kind="exact", terms=(RewardTerm("reward_functions:length", 0.07),))
    texts = ["a" * n for n in range(20)]
    alone = judge(RewardSection(**section), "aaa", *texts)
    pooled = judge(RewardSection(**section, workers=2), "aaa", *texts)
    assert np.array_equal(alone.total_N.view(np.int64), pooled.total_N.view(np.int64))
    assert len(set(alone.total_N.tolist())) == 20


def test_a_function_that_hangs_or_dies_costs_its_time_limit(monkeypatch):
    monkeypatch.setattr(rewards, "GRACE_S", 0.5)
    texts = ["a", "slow", "b", "deaf", "c", "dies", "d"]
    section = user("misbehaves", workers=2, timeout_s=1.0)
    with Rewards(section, FILE) as r:
        got = r([item()] * 7, [Response(t) for t in texts])
        assert got.total_N.tolist() == [1, 0, 1, 0, 1, 0, 1] and got.timeouts == 3
        assert r([item()], [Response("e")]).total_N.tolist() == [1]
    stop = user("misbehaves", workers=1, timeout_s=0.3, on_timeout="stop")
    with pytest.raises(RewardError, match="x.jsonl line 7: did not answer within reward.timeout_s = 0.3 s"):
        judge(stop, "", "slow")


def test_a_function_that_raises_in_a_worker_keeps_its_traceback():
    with pytest.raises(RewardError) as e:
        judge(user("misbehaves", workers=1), "", "raises")
    assert "raised KeyError: 'answer'" in str(e.value) and "reward_functions.py" in str(e.value)


def test_the_current_folder_is_searched_for_functions(tmp_path, monkeypatch):
    (tmp_path / "my_reward_in_cwd.py").write_text("def f(item, completion):\n    return 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert judge(RewardSection(kind="my_reward_in_cwd:f"), "", "x").total_N.tolist() == [7]

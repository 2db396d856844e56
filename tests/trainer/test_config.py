"""TrainConfig and the YAML layer below it: every fault at once, overrides, shorthands, and back to YAML."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from isomodel import yaml_config
from trainer.config import OBJECTIVES, ConfigError, TrainConfig

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
BASE = {"model": {"path": "m"}, "data": {"source": "x.jsonl"}}


def config(*overrides: str, **sections: Any) -> TrainConfig:
    return yaml_config.from_mapping(TrainConfig, BASE | sections, overrides)


def faults(*overrides: str, **sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as e:
        config(*overrides, **sections)
    return list(e.value.faults)


# The configs that ship


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_load_and_dump_to_themselves(path):
    cfg = TrainConfig.load(path)
    again = yaml_config.from_mapping(TrainConfig, yaml_config.parse_yaml(cfg.to_yaml()))
    assert again == cfg
    assert again.to_yaml() == cfg.to_yaml()
    assert TrainConfig.load(path, ["numerics=native"]).numerics.mode == "native"


def test_the_guide_explains_the_real_runs_config():
    text = (ROOT / "docs/training.md").read_text().split("```yaml\n")[1].split("```")[0]
    explained = yaml_config.from_mapping(TrainConfig, yaml_config.parse_yaml(text))
    real = TrainConfig.load(ROOT / "configs/smollm2_h200.yaml")
    for part in ("model", "data", "reward", "objective", "optimizer", "train", "parity", "eval", "checkpoint"):
        assert getattr(explained, part) == getattr(real, part)


def test_there_are_configs():
    assert {"demo", "smollm2_cpu", "qwen3_0.6b"} <= {path.stem for path in CONFIGS}


# Faults


def test_all_faults_at_once_with_their_paths():
    found = faults(
        "train.step=3",
        "optimizer.lr=-1",
        rolout={},
        data={"source": 3, "sed": 1},
        objective={"kind": "ppo"},
        reward={"terms": [{"kind": "exact", "weigth": 2.0}]},
    )
    expected = {
        "train.step": "did you mean 'steps'",
        "rolout": "did you mean 'rollout'",
        "data.source": "valid string, not 3",
        "data.sed": "did you mean 'seed'",
        "objective.kind": "'dr_grpo'",
        "reward.terms.0.weigth": "did you mean 'weight'",
        "optimizer.lr": "greater than or equal to 0, not -1",
    }
    assert {f.partition(":")[0] for f in found} == set(expected)
    for fault in found:
        path, _, text = fault.partition(":")
        assert expected[path] in text


def test_cross_field_faults_are_listed_together():
    found = faults(
        "rollout.prompts_per_step=3",
        "rollout.samples_per_prompt=3",
        "train.minibatches=2",
        "rollout.engine.max_model_len=100",
        "train.microbatch_tokens=64",
        "optimizer.warmup_steps=1000",
        "eval.every=5",
        "parity.check=off",
    )
    assert {f.partition(":")[0] for f in found} == {
        "train.minibatches",
        "rollout.engine.max_model_len",
        "train.microbatch_tokens",
        "optimizer.warmup_steps",
        "eval.every",
        "parity.check",
    }


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.steps=true", "valid integer"),
        ("train.steps=1.5", "valid integer"),
        ("train.steps='3'", "valid integer"),
        ("train.steps=0", "greater than or equal to 1"),
        ("optimizer.lr=.inf", "finite"),
        ("optimizer.lr=.nan", "finite"),
        ("optimizer.betas=[0.9]", "required and missing"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "at most 2"),
        ("rollout.temperature=0", "greater than 0"),
        ("rollout.top_p=0", "greater than 0"),
        ("rollout.samples_per_prompt=1", "greater than or equal to 2"),
        ("rollout.engine.page_size=48", "16"),
        ('rollout.stop=[""]', "at least 1 character"),
        ("name=a/b", "pattern"),
        ("numerics=bf16", "choose one of iso, native"),
        ("seed=4294967296", "less than"),
        ("objective.ratio=sequence and objective.aggregation=token", "aggregation"),
        ("data.held_out=5 and data.size=5", "nothing to train on"),
        ("model.config={}", "not both"),
        ("rollout.engine.num_pages=1", "do not hold one sequence"),
        ("parity.on_mismatch=record", "numerics=native"),
        ("data.chat_template=false and data.template_args={a: 1}", "no use"),
        ("train.steps.x=1", "not a section"),
        ("train.steps", "written key=value"),
        ("train.steps=[", "not valid YAML"),
        ("optimizer=3", "section"),
    ],
)
def test_refuses(override, says):
    found = faults(*override.split(" and "))
    assert any(says in f for f in found), found


def test_missing_sections_are_named():
    with pytest.raises(ConfigError) as e:
        yaml_config.from_mapping(TrainConfig, None)
    assert {f.partition(":")[0] for f in e.value.faults} == {"model", "data"}


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "c.yaml"
    with pytest.raises(ConfigError, match="cannot be read"):
        TrainConfig.load(path)
    for text, says in (("a: [", "not valid YAML"), ("- 1", "mapping"), ("seed: 1\nseed: 2", "'seed' appears twice")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            TrainConfig.load(path)
    path.write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        TrainConfig.load(path)


# Defaults that depend on other fields


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_defaults_of_an_objective(kind):
    objective = config(f"objective={kind}", "rollout.max_tokens=100").objective
    expected = OBJECTIVES[kind]
    for name in ("clip_low", "clip_high", "aggregation", "normalize_std", "ratio"):
        assert getattr(objective, name) == expected[name]
    assert objective.dynamic_sampling.enabled == (kind == "dapo")
    assert objective.overlong.buffer == (20 if kind == "dapo" else 0)
    assert objective.constant == 100
    assert config(f"objective={kind}", "objective.clip_high=0.5").objective.clip_high == 0.5


def test_defaults_of_numerics_and_lengths():
    cfg = config("data.max_prompt_tokens=100", "rollout.max_tokens=50", "seed=7")
    assert (cfg.parity.check, cfg.parity.on_mismatch) == ("first", "stop")
    assert cfg.rollout.engine.max_model_len == 150
    assert cfg.data.seed == 7
    native = config("numerics=native")
    assert (native.parity.check, native.parity.on_mismatch) == ("first", "record")
    assert config("numerics=native", "parity=off").parity.check == "off"


def test_a_constant_schedule_has_no_end():
    assert config("train.steps=10").optimizer == config("train.steps=20").optimizer
    assert config("optimizer.schedule=linear", "train.minibatches=2", "train.steps=10").optimizer.total_steps == 20


def test_nothing_that_was_passed_in_is_changed():
    first = config()
    section = dataclasses.replace(first.rollout.engine, max_model_len=None)
    rollout = dataclasses.replace(first.rollout, engine=section, max_tokens=10)
    second = dataclasses.replace(first, rollout=rollout)
    assert second.rollout.engine.max_model_len == first.data.max_prompt_tokens + 10
    assert section.max_model_len is None


# Overrides and shorthands


def test_overrides():
    cfg = config(
        "numerics=native",
        "numerics.compute_dtype=float32",
        "reward=exact",
        "optimizer.lr=1e-5",
        "rollout.stop=['a', \"b c\"]",
        "data.params={x: 1}",
        "data.params.y=on",
        "optimizer.max_grad_norm=null",
        "reward.terms=[{kind: 'm:f', args: {a: [1, 2]}}]",
        "rollout.engine={max_seqs: 5}",
        "rollout.engine.page_size=32",
    )
    assert (cfg.numerics.mode, cfg.numerics.compute_dtype) == ("native", "float32")
    assert cfg.reward.kind == "exact"
    assert cfg.optimizer.lr == 1e-5
    assert cfg.optimizer.max_grad_norm is None
    assert cfg.rollout.stop == ("a", "b c")
    assert cfg.data.params == {"x": 1, "y": "on"}
    assert [t.kind for t in cfg.reward.all_terms] == ["exact", "m:f"]
    assert (cfg.rollout.engine.max_seqs, cfg.rollout.engine.page_size) == (5, 32)


def test_an_override_of_a_section_keeps_its_other_keys():
    cfg = config("numerics=native", "train={steps: 3}", numerics={"compute_dtype": "float32"}, train={"minibatches": 2})
    assert (cfg.numerics.mode, cfg.numerics.compute_dtype) == ("native", "float32")
    assert (cfg.train.steps, cfg.train.minibatches) == (3, 2)


# The YAML layer


@dataclasses.dataclass(frozen=True)
class Inner:
    number: float = 0.5
    words: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)
    text: str | None = None
    flag: bool = False
    count: Annotated[int, Field(ge=0)] = 0
    free: dict[str, Any] = dataclasses.field(default_factory=dict)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3), max_leaves=6)


@settings(max_examples=100)
@given(
    st.builds(
        Outer,
        st.builds(Inner, st.floats(allow_nan=False, allow_infinity=False), st.lists(TEXT, max_size=3).map(tuple)),
        st.none()
        | TEXT
        | st.sampled_from(
            ["1e5", "on", "no", "null", "~", "1", "0x10", "1_000", "12:30", "2020-01-01", "=", "<<", "true"]
        ),
        st.booleans(),
        st.integers(0, 2**60),
        st.dictionaries(TEXT, VALUES, max_size=3),
    )
)
def test_dump_then_load_is_the_same_object(value):
    text = yaml_config.dump(value)
    assert yaml_config.from_mapping(Outer, yaml_config.parse_yaml(text)) == value


def test_scalars_mean_what_people_expect():
    text = "[1e-6, 1.e3, .5, 010, 0x1F, on, no, yes, 12:30, 2020-01-01, 1_000, true, null, ~, .inf, 1.0]"
    expected = [
        1e-6,
        1e3,
        0.5,
        10,
        31,
        "on",
        "no",
        "yes",
        "12:30",
        "2020-01-01",
        "1_000",
        True,
        None,
        None,
        math.inf,
        1.0,
    ]
    got = yaml_config.parse_yaml(text)
    assert got == expected
    assert [type(v) for v in got] == [type(v) for v in expected]

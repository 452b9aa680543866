"""Config files, overrides and the canonical text."""

from __future__ import annotations

import dataclasses
import json
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll import config
from jaxroll.config.parsing import leaves
from jaxroll.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_every_config_file_is_a_valid_experiment_with_a_docstring(path: Path) -> None:
    loaded = config.load(path)
    assert loaded.run.name == path.stem
    first = path.read_text().split('"""')[1]
    assert "Command" in first


def test_defaults_are_the_dataclass_defaults() -> None:
    assert config.parse(config.defaults()) == config.Config()
    assert config.parse({}) == config.Config()


def test_the_demo_has_unequal_meshes_and_its_control_differs_in_the_rewards_alone() -> None:
    demo, control = config.load(CONFIGS / "demo.py"), config.load(CONFIGS / "demo_shuffled.py")
    assert demo.learner.mesh != demo.sampler.mesh
    assert demo.learner.mesh.devices == demo.sampler.mesh.devices == 2
    assert demo.schedule.alpha == 1
    renamed = dataclasses.replace(
        demo, run=control.run, learner=dataclasses.replace(demo.learner, shuffle_rewards=True)
    )
    assert renamed == control


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("schedule.alpha=2", 2.0),
        ("learner.learning_rate=1e-4", 1e-4),
        ("schedule.steps=1_000", 1000),
        ("learner.shuffle_rewards=true", True),
        ("sampler.prefill_buckets=(16,32)", (16, 32)),
        ("sampler.prefill_buckets=[16, 32]", (16, 32)),
        ("sampler.prefill_buckets=64", (64,)),
        ("model.path=a=b", "a=b"),
        ("task.args.max_word_len=6", 6),
        ("task.args.words=[1,2]", [1, 2]),
        ("task.args.word=abc", "abc"),
        ('task.args={"n": 1}', {"n": 1}),
        ("learner.mesh.fsdp=2", 2),
    ],
)
def test_override_is_typed_by_its_key(text: str, value: object) -> None:
    key = text.partition("=")[0]
    parsed = config.parse(config.override(config.defaults().to_dict(), [f"--config.{text}"]))
    found = parsed.task.args[key.split(".")[2]] if key.startswith("task.args.") else attrgetter(key)(parsed)
    assert found == value and type(found) is type(value)


def test_override_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="without a value"):
        config.override({}, ["--config.run.seed"])


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from jaxroll.config import defaults\n\n\ndef get_config():\n    c = defaults()\n    c.run.seed = 3\n"
        "    c.task.args = {'min_word_len': 4}\n    return c\n"
    )
    assert config.load(file).run.seed == 3
    assert config.load(file).task.args == {"min_word_len": 4}
    assert config.load(file, ["run.seed=5"]).run.seed == 5


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return None", "no ConfigDict"),
        ("return undefined", "NameError"),
        ("import not_there", "ModuleNotFoundError"),
        ("c = defaults()\n    c.lerner.minibatches = 2\n    return c", "lerner"),
        ("c = defaults()\n    c.learner.lr = 2\n    return c", "learner.learning_rate"),
        ("c = defaults()\n    c.learner.minibatches = 'two'\n    return c", "a whole number"),
        ("c = defaults()\n    c.learner.minibatches = True\n    return c", "a whole number"),
        ("c = defaults()\n    c.learner.mesh = 2\n    return c", "a section"),
        ("c = defaults()\n    c.task.args.x = {1, 2}\n    return c", "JSON"),
    ],
)
def test_broken_file_is_a_config_error(tmp_path: Path, body: str, words: str) -> None:
    file = tmp_path / "x.py"
    file.write_text(f"from jaxroll.config import defaults\n\n\ndef get_config():\n    {body}\n")
    with pytest.raises(ConfigError, match=words):
        config.load(file)


@pytest.mark.parametrize("text", ["", "def get_config(:\n", "x = 1\n"])
def test_file_without_a_working_get_config_is_a_config_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match="get_config"):
        config.load(file)
    with pytest.raises(ConfigError, match="no such file"):
        config.load(tmp_path / "y.py")


CHANGED = st.fixed_dictionaries(
    {},
    optional={
        "run": st.fixed_dictionaries({"seed": st.integers(0, 2**31)}),
        "schedule": st.fixed_dictionaries({"alpha": st.floats(0, 8), "steps": st.integers(1, 10**6)}),
        "task": st.fixed_dictionaries({"args": st.dictionaries(st.text(max_size=5), st.integers() | st.text())}),
        "sampler": st.fixed_dictionaries({"prefill_buckets": st.sets(st.integers(16, 999), min_size=1).map(sorted)}),
        "evaluator": st.fixed_dictionaries({"every": st.integers(0, 99)}),
    },
)


@given(CHANGED)
def test_canonical_json_holds_the_whole_config(values: dict) -> None:
    values.get("schedule", {})["steps"] = min(values.get("schedule", {}).get("steps", 1), 1000)
    made = config.parse(values)
    text = config.canonical_json(made)
    again = config.parse(json.loads(text))
    assert again == made and config.digest(again) == config.digest(made)


def test_digest_tells_every_key_apart() -> None:
    plain = config.to_dict(config.Config())
    digests = {config.digest(config.Config())}
    for path in leaves(config.Config):
        section, values, *deeper = path.split("."), json.loads(json.dumps(plain))
        here = values
        for name in section[:-1]:
            here = here[name]
        here[section[-1]] = {int: 7777, float: 0.8125, bool: True, str: "other", list: [9], dict: {"q": 1}}[
            type(here[section[-1]])
        ]
        assert not deeper
        digests.add(config.digest(_unchecked(values)))
    assert len(digests) == len(leaves(config.Config)) + 1


def _unchecked(values: dict) -> config.Config:
    """The Config of these values, without the rules and the derived values."""
    parts = {}
    for field in dataclasses.fields(config.Config):
        part = dict(values[field.name])
        for name in ("mesh",):
            if name in part:
                part[name] = config.MeshConfig(**part[name])
        parts[field.name] = type(getattr(config.Config(), field.name))(**part)
    return config.Config(**parts)


def config_file(folder: Path, *lines: str) -> Path:
    path = folder / "mine.py"
    body = "".join(f"    {line}\n" for line in ("config = defaults()", *lines, "return config"))
    path.write_text("from jaxroll.config import defaults\n\n\ndef get_config():\n" + body)
    return path


@pytest.mark.parametrize(
    ("lines", "overrides", "steps", "rate"),
    [
        ([], [], 300, 3e-4),
        (["config.model.path = 'm'"], [], 0, 1e-6),
        (["config.model.path = 'm'", "config.learner.lora_rank = 4"], [], 0, 1e-5),
        (["config.model.path = 'm'", "config.sft.steps = 20"], ["learner.learning_rate=2e-6"], 20, 2e-6),
        ([], ["model.path=m"], 0, 1e-6),
        ([], ["sft.steps=0", "learner.learning_rate=1e-3"], 0, 1e-3),
    ],
)
def test_an_imported_model_is_not_trained_over(tmp_path, lines, overrides, steps, rate) -> None:
    """A warm start of 300 steps at 3e-3 would overwrite the model, and so would RL at a rate of 3e-4."""
    found = config.load(config_file(tmp_path, *lines), overrides)
    assert (found.sft.steps, found.learner.learning_rate) == (steps, rate)
    assert config.parse(config.to_dict(found)) == found, "run.json holds what was chosen"


@pytest.mark.parametrize("learner", [{}, {"lora_rank": 4}])
def test_a_config_without_defaults_has_the_same_automatic_values(tmp_path: Path, learner: dict) -> None:
    """`parse` of a few keys, and a file whose ConfigDict does not start from `defaults()`."""
    values = {"model": {"path": "/m"}, "learner": learner}
    found = config.parse(values)
    wanted = config.load(config_file(tmp_path), ["model.path=/m", *(f"learner.{k}={v}" for k, v in learner.items())])
    assert found == wanted and found.sft.steps == 0
    file = tmp_path / "bare.py"
    file.write_text(f"from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({values})\n")
    assert config.load(file) == wanted


@pytest.mark.parametrize(
    ("line", "overrides", "shown"),
    [
        ("config.lerner.x = 1", [], "lerner: unknown key. Did you mean 'learner'?"),
        ("config.lerner = 1", [], "lerner = 1: unknown key. Did you mean 'learner'?"),
        ("pass", ["schedul.alpha=1"], "schedul.alpha = '1': unknown key. Did you mean 'schedule.alpha'?"),
        (
            "pass",
            ["sample.temperature=1"],
            "sample.temperature = '1': unknown key. Did you mean 'sampling.temperature'?",
        ),
        ("pass", ["samplr.http_prt=4"], "samplr.http_prt = '4': unknown key. Did you mean 'sampler.http_port'?"),
        ("pass", ["lerner.kc=1"], "lerner.kc = '1': unknown key. Did you mean 'learner.kl_coef'?"),
        ("pass", ["samplr.zzz=4"], "samplr.zzz = '4': unknown key. Did you mean 'sampler'?"),
        ("pass", ["run.nam.x=1"], "run.nam.x = '1': unknown key. Did you mean 'run.name'?"),
        ("config.run.name = ('a', ('b',))", [], "run.name = ['a', ['b']]: a tuple where a string"),
        ("config.run.name = lambda: 0", [], "<function get_config.<locals>.<lambda>>"),
    ],
)
def test_a_mistake_in_a_file_is_shown_as_it_was_written(tmp_path, line, overrides, shown) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(config_file(tmp_path, line), overrides)
    assert shown in str(caught.value)


def test_paths_in_a_config_file_are_relative_to_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir("/")
    file = config_file(
        tmp_path, "config.model.path = '../m'", "config.task.source = 'jsonl'", "config.task.path = '/data/rows.jsonl'"
    )
    found = config.load(file)
    assert found.model.path == str(tmp_path.parent / "m")
    assert found.task.path == "/data/rows.jsonl"
    assert config.load(file, ["model.path=other"]).model.path == "other", "relative to the working directory"


def test_prompts_from_files_are_part_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "system.txt").write_text("Be brief.\n")
    (tmp_path / "shots.json").write_text('[["1+1", "2"]]')
    text = "from jaxroll.config import defaults\ndef get_config():\n    c = defaults()\n"
    (tmp_path / "configs" / "a.py").write_text(text + "    c.task.system_prompt = 'file:system.txt'\n    return c\n")
    monkeypatch.chdir(tmp_path)
    loaded = config.load("configs/a.py", ["task.few_shot=file:shots.json"])
    assert (loaded.task.system_prompt, loaded.task.few_shot) == ("Be brief.", [["1+1", "2"]])
    (tmp_path / "configs" / "system.txt").write_text("Be long.")
    assert config.parse(json.loads(config.canonical_json(loaded))) == loaded
    (tmp_path / "shots.json").write_text("[")
    with pytest.raises(ConfigError, match=r"task\.few_shot.*not JSON"):
        config.load("configs/a.py", ["task.few_shot=file:shots.json"])


def test_functions_in_a_config_file_are_relative_to_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir("/")
    file = config_file(
        tmp_path,
        "config.task.extract = 'file:../cut.py:cut'",
        "config.task.reward = 'exact + 0.5*file:mine.py:half + file:/a/b.py:c'",
    )
    found = config.load(file).task
    assert found.extract == f"file:{tmp_path.parent}/cut.py:cut"
    assert found.reward == f"exact + 0.5*file:{tmp_path}/mine.py:half + file:/a/b.py:c"
    assert config.load(file, ["task.reward=file:x.py:f"]).task.reward == "file:x.py:f"


def test_paths_of_a_mixture_are_relative_to_the_config(tmp_path: Path) -> None:
    text = "from jaxroll.config import defaults\ndef get_config():\n    c = defaults()\n"
    (tmp_path / "a.py").write_text(
        text + "    c.task.mixture = [{'source': 'jsonl', 'path': 'rows/x.jsonl'}]\n    return c\n"
    )
    assert config.load(tmp_path / "a.py").task.mixture[0]["path"] == str(tmp_path / "rows" / "x.jsonl")

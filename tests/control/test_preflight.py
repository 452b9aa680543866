"""Preflight: the command refuses what a role would refuse, with key, value and remedy, before JAX starts."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxroll import config as configs
from jaxroll.config import MODEL_SIZES
from jaxroll.control import cli, preflight
from jaxroll.errors import ConfigError, InfraError
from jaxroll.models import families, hf_config

ROOT = Path(__file__).parents[2]
SMOKE = str(ROOT / "configs" / "smoke.py")
HUGGING_FACE = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "tie_word_embeddings": True,
}

# name: (files in the working folder, overrides, the key in the error, its value, words of the reason or remedy)
Make = Callable[[Path], object]
Case = tuple[Make | None, list[str], str, str, str]


def rows(*lines: dict | str) -> Make:
    """A file x.jsonl with these rows."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return lambda here: (here / "x.jsonl").write_text(text + "\n" * bool(lines))


def folder(**files: object) -> Make:
    """A folder hf: `config` becomes config.json, `tokenizer` tokenizer.json, and so on; text is written unchanged."""

    def make(here: Path) -> None:
        (here / "hf").mkdir()
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (here / "hf" / (f"{name}.json" if "_j" not in name else name.replace("_j", ".j"))).write_text(text)

    return make


def weights(counts: dict[str, int], **files: object) -> Make:
    """A folder hf with a checkpoint whose tensors have these names and numbers of elements."""

    def make(here: Path) -> None:
        folder(**{"config": HUGGING_FACE} | files)(here)
        tensors = {name: np.zeros(count, np.float32) for name, count in counts.items()}
        save_file(tensors, here / "hf" / "model.safetensors")

    return make


def named(count: int) -> dict[str, int]:
    """The tensors of the model that HUGGING_FACE describes, each with `count` elements."""
    spec = hf_config.from_huggingface(HUGGING_FACE)
    return {hf_config.name(spec, ours): count for ours in hf_config.ours(spec)}


def module(text: str) -> Make:
    """A module game.py in the working folder."""
    return lambda here: (here / "game.py").write_text(text)


GOOD = {"question": "1+1", "answer": "2"}
JSONL = ["task.source=jsonl", "task.path=x.jsonl", "task.heldout_items=1"]
GAME = [
    "task.source=game",
    "task.name=frozen_lake",
    "task.env=frozen_lake",
    "task.args={}",
    "task.max_prompt_tokens=24",
    "task.max_episode_tokens=128",
]
GYM = ["task.source=game", "task.name=gymnasium", "task.env=gymnasium"]
HF = ["tokenizer.kind=hf", "tokenizer.path=hf"]
PATH = ["model.path=hf"]
REWARD_MODEL = ["task.reward=reward_model", 'task.reward_args={"reward_model": {"path": "hf"}}']
SCORES = {**HUGGING_FACE, "architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
WORDS = {"model": {"type": "WordLevel", "vocab": {"a": 0, "<e>": 1}, "unk_token": "a"}, "version": "1.0"}
EOS = {"eos_token": "<e>"}
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"

CASES: dict[str, Case] = {
    "a kernel in float32": (
        None, ["learner.attention=splash", "placement.platform=tpu"], "learner.attention", "splash", "is float32"),
    "a kernel on another platform": (
        None, ["sampler.paged_attention=pallas", "model.dtype=bfloat16"],
        "sampler.paged_attention", "pallas", "this is cpu"),
    "a share of a CPU's memory": (
        None, ["sampler.memory_fraction=0.5"], "sampler.memory_fraction", "0.5", "platform cpu report no limit"),
    "a cache that a loop would copy": (
        None, ["sampler.paged_attention=dense", "sampler.scan_layers=True"],
        "sampler.paged_attention", "dense", "layers are in a loop"),
    "a kernel for short prompts": (
        None, ["sampler.prefill_attention=cudnn", "model.dtype=bfloat16", "placement.platform=auto"],
        "sampler.prefill_attention", "cudnn", "blocks of 128"),
    "routing of no experts": (
        None, ["learner.routing_replay=True"], "learner.routing_replay", "True", "has no experts"),
    "biases of no experts": (None, ["model.router_bias=True"], "model.router_bias", "True", "has no experts"),
    "biases under adapters": (
        None, ["model.size=tiny_moe", "model.router_bias=True", "learner.lora_rank=4"],
        "learner.router_bias_rate", "0.001", "routers are frozen"),
    "records too large": (
        None, ["model.size=qwen3_30b_a3b", "learner.routing_replay=True", "learner.row_tokens=32768",
               "sampling.max_tokens=32000", "sampler.prefill_buckets=(16,)"],
        "learner.routing_replay", "True", "400 bytes"),
    "sampler's heads": (None, ["sampler.mesh.tensor=3"], "sampler.mesh.tensor", "3", "Use one of [1, 2]"),
    "learner's heads": (None, ["learner.mesh.tensor=8"], "learner.mesh.tensor", "8", "4 query heads"),
    "learner's width": (
        None, ["learner.mesh.fsdp=5", "learner.micro_batch_rows=10"], "learner.mesh.fsdp", "5", "32 of width"),
    "evaluator's heads": (None, ["evaluator.mesh.tensor=3"], "evaluator.mesh.tensor", "3", "does not divide"),
    "task unknown": (None, ["task.name=spell_backwards"], "task.name", "spell_backwards", "'spell_backward'"),
    "mixture of tasks": (
        None, ["task.name=composite", "task.prompt_style=full"], "task.args", "{}", "Set datasets=["),
    "task's setting unknown": (
        None, ["task.args.min_word_length=2"], "task.args", "min_word_length", "Did you mean 'min_word_len'?"),
    "task's setting wrong": (None, ["task.args.min_word_len=-1"], "task.args", "-1", "min_word_len"),
    "task's range": (None, ["task.args.seed=3"], "task.args.seed", "3", "task.train_start"),
    "no compact prompt": (
        None, ["task.name=leg_counting", "task.args={}"], "task.prompt_style", "compact", "task.prompt_style='full'"),
    "task too small": (
        None, ["task.name=count_bits", 'task.args={"max_n": 9}'], "task.heldout_items", "16", "distinct questions"),
    "prompts too long": (None, ["task.max_prompt_tokens=1"], "task.heldout_items", "16", "max_prompt_tokens"),
    "agent's function absent": (
        None, ["task.env=agent", "task.agent=nowhere_at_all:f"], "task.agent", "nowhere_at_all", "cannot be loaded"),
    "reward's function absent": (
        module("def f(): 1"), ["task.reward=file:game.py:g"], "task.reward", "game.py:g", "no attribute 'g'"),
    "environment unknown": (None, ["task.env=single-turn"], "task.env", "single-turn", "Did you mean 'single_turn'?"),
    "environment's module absent": (None, ["task.env=nowhere_at_all:x"], "task.env", "nowhere_at_all:x", "imported"),
    "environment's module broken": (module("x ="), ["task.env=game:x"], "task.env", "game:x", "SyntaxError"),
    "environment absent in its module": (
        module("from jaxroll.envs import registry\nregistry.register('chase')(print)"), ["task.env=game:chess"],
        "task.env", "game:chess", "Did you mean 'chase'?"),
    "filter unknown": (None, ["schedule.filter=mean"], "schedule.filter", "mean", "mean_band"),
    "filter's band empty": (
        None, ["schedule.filter=pass_rate", "schedule.filter_low=1"], "schedule.filter_low", "1", "filter_high"),
    "filter's module absent": (
        None, ["schedule.filter=nowhere_at_all:f"], "schedule.filter", "nowhere_at_all", "cannot be loaded"),
    "filter that fails": (
        module("def f(rewards): return rewards[9]"), ["schedule.filter=game:f"], "schedule.filter", "game:f",
        "IndexError"),
    "no such game": (None, [*GAME, "task.name=frozen_like"], "task.name", "frozen_like", "Did you mean 'frozen_lake'?"),
    "another game's environment": (None, [*GAME, "task.env=single_turn"], "task.env", "single_turn", "'frozen_lake'"),
    "game's setting unknown": (
        None, [*GAME, "task.args.seize=4"], "task.args.seize", "4", "Did you mean 'size'?"),
    "game's setting wrong": (None, [*GAME, "task.args.size=1"], "task.args", "'size': 1", "2..16"),
    "game's share": (None, [*GAME, "task.args.noise=2"], "task.args.noise", "2", "between 0 and 1"),
    "game's module absent": (None, [*GAME, "task.name=nowhere_at_all:X"], "task.name", "nowhere_at_all:X", "imported"),
    "tool without arithmetic": (
        None, ["task.source=game", "task.name=calculator", "task.env=calculator", 'task.args={"problem": "product"}'],
        "task.args.problem", "product", "Did you mean 'products'?"),
    "gymnasium's environment absent": (
        None, [*GYM, 'task.args={"id": "Nope-v9"}'], "task.args.id", "Nope-v9", "gymnasium cannot make it"),
    "function of observations absent": (
        None, [*GYM, 'task.args={"observation": "nowhere_at_all:f"}'], "task.args.observation", "nowhere_at_all:f",
        "there is no such function"),
    "environment without text": (
        None, [*GYM, 'task.args={"id": "CartPole-v1", "observation": "ansi"}'], "task.args.observation", "ansi",
        "renders no text"),
    "environment without discrete actions": (
        None, [*GYM, 'task.args={"id": "Pendulum-v1"}'], "task.args.id", "Box", "neither discrete nor text"),
    "a name for one of two actions": (
        None, [*GYM, 'task.args={"actions": ["hit"]}'], "task.args.actions", "hit", "there are 2 actions"),
    "no turn": (None, [*GYM, 'task.args={"max_turns": 0}'], "task.args.max_turns", "0", "integer above 0"),
    "problems absent": (
        None,
        ["task.source=game", "task.name=tool_calls", "task.env=tool_calls", 'task.args={"problems": "absent:f"}'],
        "task.args.problems", "absent:f", "not found"),
    "algorithm's module absent": (
        None, ["learner.algorithm=nowhere_at_all.inner:x"], "learner.algorithm", "nowhere_at_all.inner:x", "no module"),
    "algorithm absent in its module": (
        module("from jaxroll.algorithms.registry import register\n@register('mine')\ndef f(learner): ..."),
        ["learner.algorithm=game:main"], "learner.algorithm", "game:main", "Did you mean 'mine'?"),
    "algorithm not registered": (
        module("def mine(learner): ..."), ["learner.algorithm=game:mine"], "learner.algorithm", "game:mine",
        "@register('mine')"),
    "no such rows": (None, JSONL, "task.path", "x.jsonl", "no such file"),
    "rows, nearly": (rows(GOOD), [*JSONL, "task.path=x.json"], "task.path", "x.json", "Did you mean 'x.jsonl'?"),
    "no such rows of a set": (
        None, ['evaluator.sets={"a": {"source": "jsonl", "path": "y.jsonl"}}'],
        "evaluator.sets.a.path", "y.jsonl", "no such file"),
    "a malformed row of a set": (
        rows(GOOD, "{"), ['evaluator.sets={"a": {"source": "jsonl", "path": "x.jsonl"}}'],
        "evaluator.sets.a.path", "x.jsonl:2", "layouts of rows"),
    "a malformed row of a mixture": (
        rows(GOOD, "{"), ['task.mixture=[{"source": "jsonl", "path": "x.jsonl"}]'],
        "task.mixture[0].path", "x.jsonl:2", "layouts of rows"),
    "no folder of a reward model": (
        None, REWARD_MODEL, "task.reward_args.reward_model.path", "hf", "hf download ORGANIZATION/hf"),
    "another model for a reward model": (
        folder(config=HUGGING_FACE), REWARD_MODEL, "task.reward_args.reward_model.path", "hf",
        "not a model for sequence classification"),
    "a reward model of two labels": (
        folder(config={**SCORES, "id2label": {"0": "a", "1": "b"}}), REWARD_MODEL,
        "task.reward_args.reward_model.path", "hf", "2 labels"),
    "a reward model that leaves its labels out": (
        folder(config={key: SCORES[key] for key in SCORES if key != "id2label"}), REWARD_MODEL,
        "task.reward_args.reward_model.path", "hf", "2 labels"),
    "a reward model of an unknown family": (
        folder(config={**SCORES, "model_type": "bert"}), REWARD_MODEL, "task.reward_args.reward_model.path", "hf",
        "config.json model_type = 'bert': not a family that JaxRoll knows"),
    "a reward model without a score head": (
        weights(named(12), config=SCORES), REWARD_MODEL, "task.reward_args.reward_model.path", "hf",
        "no tensor 'score.weight'"),
    "a reward model without a template": (
        weights({**named(12), "score.weight": 12}, config=SCORES, tokenizer=WORDS, tokenizer_config=EOS),
        REWARD_MODEL, "task.reward_args.reward_model.path", "hf", "no chat template"),
    "a reward model of both kinds": (
        None, [REWARD_MODEL[0], 'task.reward_args={"reward_model": {"path": "hf", "url": "http://a/b"}}'],
        "task.reward_args.reward_model.url", "http://a/b", "nothing reads it"),
    "no folder of a model": (
        None, ["model.path=models/Qwen3-0.6B"], "model.path", "models/Qwen3-0.6B",
        "hf download ORGANIZATION/Qwen3-0.6B --local-dir models/Qwen3-0.6B"),
    "no rows": (rows(), JSONL, "task.path", "x.jsonl", "no rows"),
    "a malformed row": (rows(GOOD, "{"), JSONL, "task.path", "x.jsonl:2", "layouts of rows"),
    "no saved dataset": (rows(GOOD), ["task.source=hf_dataset", "task.path=x.jsonl"], "task.path", "x.jsonl", "folder"),
    "tools in a row": (rows(GOOD | {"tools": [{}]}, GOOD), JSONL, "tokenizer.kind", "char", "tools"),
    "a source of a mixture held out": (
        rows(GOOD), ['task.mixture=[{"source": "jsonl", "path": "x.jsonl", "heldout_items": 1}]'],
        "task.mixture[0].path", "x.jsonl", "gives no prompts"),
    "a set with too few rows": (
        rows(GOOD), ['evaluator.sets={"a": {"source": "jsonl", "path": "x.jsonl", "items": 2}}'],
        "evaluator.sets.a.items", "2", "not in the alphabet"),
    "no parquet": (rows(GOOD), ["task.source=parquet", "task.path=x.jsonl"], "task.path", "x.jsonl", "Parquet"),
    "too few rows": (rows(GOOD), [*JSONL, "task.train_start=1"], "task.train_start", "1", "1 rows"),
    "rows held out first": (
        rows(GOOD, GOOD), [*JSONL, "task.train_start=1", "task.heldout_start=0"], "task.heldout_start", "0", "before"),
    "every row held out": (rows(GOOD), JSONL, "task.path", "x.jsonl", "gives no prompts"),
    "a character that is reserved": (
        rows({"question": "\ufffd", "answer": "1"}), JSONL, "tokenizer.kind", "char", "is reserved"),
    "rows for the warm start too long": (
        rows(*({"question": f"{n}", "answer": "9" * 400} for n in range(30))), JSONL, "learner.row_tokens", "128",
        "tokens with its question"),
    "every row of the warm start held out": (
        rows(*({"question": f"{n}", "answer": "9"} for n in range(4))),
        [*JSONL, "task.heldout_items=2", "task.heldout_start=2", "sft.start=2"], "sft.steps", "5", "held out"),
    "a pool without a source": (
        None, ['placement.pools={"a": {"samplers": 1, "tags": ["b"]}}'], "placement.pools.a.tags", "b", "no source"),
    "curriculum's band empty": (
        None, ["schedule.curriculum=band", "schedule.curriculum_low=1"], "schedule.curriculum_low", "1.0",
        "no value between"),
    "no such tokenizer": (None, HF, "tokenizer.path", "hf", "no such file"),
    "folder without a tokenizer": (folder(), HF, "tokenizer.path", "hf", "no tokenizer.json"),
    "tokenizer unreadable": (folder(tokenizer="{"), HF, "tokenizer.path", "tokenizer.json", "cannot be read"),
    "tokenizer's settings unreadable": (
        folder(tokenizer=WORDS, tokenizer_config="{"), HF, "tokenizer.path", "tokenizer_config.json", "not JSON"),
    "tokenizer's settings a list": (
        folder(tokenizer=WORDS, tokenizer_config=[]), HF, "tokenizer.path", "tokenizer_config.json", "JSON object"),
    "tokenizer without an end": (folder(tokenizer=WORDS), HF, "tokenizer.path", "hf", "ends a sequence"),
    "chat template no text": (
        folder(tokenizer=WORDS, tokenizer_config={**EOS, "chat_template": 3}), HF, "tokenizer.path", "hf", "not text"),
    "chat template broken": (
        folder(tokenizer=WORDS, tokenizer_config={**EOS, "chat_template": "{%"}), HF, "tokenizer.path", "hf", "parse"),
    "chat template without an end": (
        folder(tokenizer=WORDS, tokenizer_config={**EOS, "chat_template": LOOPS}), HF, "tokenizer.path", "hf",
        "does too much"),
    "an argument of no template": (
        folder(tokenizer=WORDS, tokenizer_config=EOS), [*HF, "tokenizer.template_args.a=1"], "tokenizer.template_args",
        "a", "no chat template"),
    "an argument that the template does not read": (
        folder(tokenizer=WORDS, tokenizer_config={**EOS, "chat_template": "a"}), [*HF, "tokenizer.template_args.a=1"],
        "tokenizer.template_args.a", "1", "does not read it"),
    "tools without a template": (
        folder(tokenizer=WORDS, tokenizer_config=EOS), [*HF, "task.tools=[{}]"], "task.tools", "?", "no chat template"),
    "tools that the template does not show": (
        folder(tokenizer=WORDS, tokenizer_config={**EOS, "chat_template": "a"}), [*HF, "task.tools=[{}]"],
        "task.tools", "?", "does not show tools"),
    "no such model": (None, PATH, "model.path", "hf", "no such file"),
    "folder without a model": (folder(), PATH, "model.path", "hf", "config.json cannot be read"),
    "another architecture": (
        folder(config={**HUGGING_FACE, "model_type": "gpt2"}), PATH, "config.json model_type", "gpt2", "Known: gemma3"),
    "an unknown option": (
        folder(config={**HUGGING_FACE, "use_gating": True}), PATH, "config.json use_gating", "True", "not an option"),
    "another rope": (
        folder(config={**HUGGING_FACE, "rope_parameters": {"rope_type": "dynamic"}}), PATH,
        "config.json rope_scaling", "dynamic", "Supported"),
    "a rope without a context": (
        folder(config={**HUGGING_FACE, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5,
                                                           "original_max_position_embeddings": 8}}), PATH,
        "model.rope_scaling.low", "1.0", "Use less than 0.5"),
    "a text model that is a list": (
        folder(config={"model_type": "gemma3", "text_config": [1]}), PATH, "config.json text_config", "[1]", "object"),
    "a rope base that is no number": (
        folder(config={**HUGGING_FACE, "rope_theta": "x"}), PATH, "config.json rope_theta", "x", "a number"),
    "a flag that is a number": (
        folder(config={**HUGGING_FACE, "tie_word_embeddings": 1}), PATH, "config.json tie_word_embeddings", "1",
        "true or false"),
    "a model of ours with another key": (folder(model={"a": 1}), PATH, "model.path", "hf", "a key that is unknown"),
    "model without a size": (folder(config={"model_type": "qwen3"}), PATH, "config.json", "model_type", "lacks"),
    "model of no layers": (
        folder(config={**HUGGING_FACE, "num_hidden_layers": 0}), PATH, "config.json num_hidden_layers", "0", "least 1"),
    "adapters that are not there": (
        lambda here: (here / "sft").mkdir(), ["learner.lora_rank=4", "learner.lora_path=sft"],
        "learner.lora_path", "sft", "cannot be read"),
    "model of odd heads": (folder(config={**HUGGING_FACE, "head_dim": 7}), PATH, "model.head_dim", "7", "even"),
    "heads without keys": (
        folder(config={**HUGGING_FACE, "num_key_value_heads": 3}), PATH, "model.kv_heads", "3", "does not divide"),
    "more experts a token than experts": (
        folder(config={**HUGGING_FACE, "model_type": "qwen3_moe", "moe_intermediate_size": 8, "num_experts": 2,
                       "num_experts_per_tok": 3}), PATH, "model.experts", "2", "a token has 3 experts"),
    "no number of layers": (
        folder(config={**HUGGING_FACE, "num_hidden_layers": None}), PATH, "config.json num_hidden_layers", "None",
        "whole number"),
    "a list for a config.json": (folder(config=[]), PATH, "model.path", "hf", "not a JSON object"),
    "a model smaller than its tokenizer": (
        folder(config={**HUGGING_FACE, "vocab_size": 8}), PATH, "model.path", "hf", "8 token ids"),
    "model without weights": (folder(config=HUGGING_FACE), PATH, "model.path", "hf", "holds neither"),
    "weights of another model": (
        weights({"model.norm.weight": 12}), PATH, "model.path", "hf", "no tensor 'model.embed_tokens.weight'"),
    "weights too few": (weights(named(12)), PATH, "model.path", "hf", "hold 156 numbers"),
    "weights unreadable": (
        folder(config=HUGGING_FACE, model_j="", **{"model.safetensors.index": {"weight_map": {"a": "nowhere"}}}), PATH,
        "model.path", "hf", "nowhere"),
    "an index of nothing": (
        folder(config=HUGGING_FACE, **{"model.safetensors.index": {}}), PATH, "model.path", "hf", "weight_map"),
    "a mesh for the model of the path": (
        folder(config={**HUGGING_FACE, "num_attention_heads": 6}), [*PATH, "sampler.mesh.tensor=4"],
        "sampler.mesh.tensor", "4", "6 query heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_command_refuses_what_a_role_would(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, overrides, key, value, words = case
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "game", raising=False)
    if make is not None:
        make(tmp_path)
    assert cli.main(["config", f"--config={SMOKE}", *(f"--config.{text}" for text in overrides)]) == 64
    printed = capsys.readouterr()
    assert printed.out == "", "nothing is resolved"
    (line,) = printed.err.splitlines()
    assert line.startswith(f"error: {key} = ")
    assert value in line and words in line, line
    assert line.endswith((".", "?")), "the last sentence must be a remedy"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_the_configs_pass(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = configs.load(path)
    assert preflight.check_described(loaded) is None  # it raises what does not pass
    _check_here(path.stem, loaded)


# Configs of packages that have an environment of their own (.venv-more): they are refused with the extra.
NEEDS = {"pettingzoo_tictactoe": "pettingzoo", "textarena_frozen_lake": "textarena", "textworld_home": "textworld"}


def _check_here(name: str, config: configs.Config) -> None:
    if name.startswith("verifiers_"):  # tests/peers/test_verifiers.py plays them where the package is installed
        absent = dataclasses.replace(config.task, args={**config.task.args, "python": "/nowhere/python"})
        with pytest.raises(ConfigError, match="make venv-verifiers"):
            preflight.check(dataclasses.replace(config, task=absent))
    elif name.startswith("openenv_"):  # its server does not run
        with pytest.raises(InfraError, match=r"cannot be reached.*task\.args\.url"):
            preflight.check(config)
    elif name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        with pytest.raises(ConfigError, match=r"pip install 'jaxroll\[(envs-more|textworld)\]'"):
            preflight.check(config)
    else:
        assert config.model.path or preflight.check(config) is None


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("gsm8k_*.py")), ids=lambda path: path.stem)
def test_the_configs_of_released_models_fit_their_sizes(path: Path) -> None:
    """Their folders are not here, so the model is that of `model.size`."""
    loaded = configs.load(path)
    spec = families.spec(loaded.model.size, compute_dtype=loaded.model.dtype)
    for role, mesh in preflight.meshes(loaded).items():
        families.check_mesh(spec, mesh, f"{role}.mesh")
    assert path.stem == f"gsm8k_{spec.name}" == loaded.run.name
    assert loaded.learner.row_tokens >= loaded.task.max_prompt_tokens + loaded.sampling.max_tokens


TYPED_COMMANDS = [
    (path.stem, line)
    for path in sorted((ROOT / "configs").glob("*.py"))
    for line in re.findall(r"\bjaxroll (?:train|sft|demo) [^)\n]*", path.read_text())
    if "--config=" in line
]


@pytest.mark.parametrize(("name", "line"), TYPED_COMMANDS, ids=[line for _, line in TYPED_COMMANDS])
def test_the_commands_in_the_configs_are_accepted(name: str, line: str) -> None:
    overrides, words = cli.split_overrides(shlex.split(line)[1:])
    options = cli.parser().parse_args(words)
    assert options.config == f"configs/{name}.py"
    config = configs.load(ROOT / options.config, overrides)
    assert preflight.check_described(config) is None  # it raises what does not pass
    _check_here(name, config)


@pytest.mark.parametrize(
    "module_text",
    [
        "from jaxroll.algorithms import registry\n@registry.register('mine')\ndef f(learner): ...",
        "from jaxroll.algorithms.registry import register\nfor name in ('mine', 'yours'): register(name)(print)",
    ],
)
def test_an_algorithm_of_your_own_is_found_without_jax(module_text: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "game", raising=False)
    module(module_text)(tmp_path)
    assert preflight.check(configs.load(SMOKE, ["learner.algorithm=game:mine"])) is None
    assert "game" not in sys.modules, "its source is read, not run"


def test_the_sizes_of_the_schema_are_those_of_the_families() -> None:
    assert families.names() == MODEL_SIZES


def test_a_whole_checkpoint_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts = named(1)
    counts["model.norm.weight"] += families.parameter_count(hf_config.from_huggingface(HUGGING_FACE)) - len(counts)
    weights(counts)(tmp_path)
    assert preflight.check(configs.load(SMOKE, ["model.path=hf"])) is None  # it raises what does not pass


@pytest.mark.process
def test_refusing_and_accepting_work_without_jax(tmp_path: Path) -> None:
    """JAX and grain cannot be imported here: a refusal that took a device would need them."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('jax', 'jaxlib', 'flax', 'grain', 'optax')))\n"  # None: ImportError
        "from jaxroll.control import cli\n"
        f"print(cli.main(['config', '--config={SMOKE}', '--config.sampler.mesh.tensor=3']),\n"
        f"      cli.main(['config', '--config={SMOKE}']))\n"
    )
    words = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1] == "64 0", done.stderr


# --- every refusal in the roles' packages happens before a role starts, or cannot

ROOMS = (
    "rpc",
    "algorithms",
    "sharding",
    "text",
    "policy",
    "kernels",
    "models",
    "engine",
    "data",
    "rewards",
    "envs",
    "rollout",
    "store",
    "learner",
    "transfer",
    "serving",
    "roles",
)
TYPED = "the schema or a bound refuses the value first"
RULED = "a rule of config/rules.py is at least as strict"
CODE = "only a programming mistake"
CALLED = "an adapter for a user's program; no role starts it"
OWN = "a custom algorithm, whose module only the learner loads; a rule refuses the presets"
HERE = "what this machine is or has: an address, a device, a package, a file of the run"

# Functions in the roles' packages that raise ConfigError: the cases above in which the command refuses first, or the
# reason why it cannot. A file without a function covers all of its functions that have no entry.
REFUSALS: dict[str, str | tuple[str, ...]] = {
    "rpc/protocol.py::right_of": CODE,
    "rpc/protocol.py": HERE,
    "rpc/protocol.py::check_exposure": HERE,
    "rpc/client.py::GrpcTransport._written": HERE,
    "rpc/tls.py": HERE,
    "rpc/server.py::RawServer.bind": HERE,
    "algorithms/losses.py::loss": CODE,
    "algorithms/registry.py::_custom": (
        "algorithm's module absent",
        "algorithm absent in its module",
        "algorithm not registered",
    ),
    "sharding.py::platform": HERE,
    "sharding.py::build": HERE,
    "sharding.py::spec": CODE,
    "sharding.py::sharding": CODE,
    "sharding.py::_mesh_axes": CODE,
    "text/tokenizers.py::jinja_format": ("chat template broken",),
    "text/tokenizers.py::jinja_format.rendered": ("chat template without an end",),
    "text/tokenizers.py::jinja_format.render": ("tools that the template does not show",),
    "text/tokenizers.py::plain_format": ("tools without a template",),
    "text/tokenizers.py::_check_args": ("an argument that the template does not read",),
    "text/tokenizers.py::_reading": ("folder without a tokenizer",),
    "text/tokenizers.py::HFTokenizer.__init__": RULED,
    "text/tokenizers.py::HFTokenizer._eos_id": ("tokenizer without an end",),
    "text/tokenizers.py::HFTokenizer._chat_format": ("chat template no text", "an argument of no template"),
    "text/tokenizers.py::_load": ("folder without a tokenizer", "tokenizer unreadable"),
    "text/tokenizers.py::_read_json": ("tokenizer's settings unreadable", "tokenizer's settings a list"),
    "text/tokenizers.py::CharTokenizer.__init__": ("a character that is reserved",),
    "text/tokenizers.py::CharTokenizer.render": ("tools in a row",),
    "text/tokenizers.py::of_run": HERE,
    "text/tokenizers.py::build": TYPED,
    "policy/routing.py::Pools.of": ("a pool without a source",),
    "roles/session.py::Session._pool": HERE,
    "policy/limiter.py::Curriculum.__post_init__": ("curriculum's band empty",),
    "policy/selection.py::Filter.__post_init__": ("filter unknown", "filter's band empty"),
    "policy/selection.py::Filter.check": ("filter's module absent", "filter that fails"),
    "policy/limiter.py::AgeLimiter.__post_init__": RULED,
    "kernels/choice.py::check": ("a kernel in float32", "a kernel on another platform", "a kernel for short prompts"),
    "models/families.py::ModelSpec.__post_init__": ("model of odd heads", "heads without keys"),
    "models/families.py::ModelSpec._check_windows": CODE,
    "models/families.py::ModelSpec._check_experts": ("more experts a token than experts", "biases of no experts"),
    "models/families.py::RopeScaling.__post_init__": ("a rope without a context",),
    "models/families.py::check_size": ("model of no layers", "no number of layers"),
    "models/families.py::check_number": ("a rope base that is no number",),
    "models/families.py::check_flag": ("a flag that is a number",),
    "models/hf_config.py::_not_supported": ("another rope", "a text model that is a list"),
    "models/hf_config.py::_refuse_unknown": ("an unknown option",),
    "models/hf_config.py::_values": ("another architecture",),
    "models/hf_config.py::_check_readable": CODE,
    "models/families.py::spec": TYPED,
    "models/hf_config.py::from_huggingface": ("model without a size",),
    "models/families.py::check_routing": ("routing of no experts", "biases under adapters", "records too large"),
    "models/families.py::check_mesh": ("sampler's heads", "learner's width", "a mesh for the model of the path"),
    "models/folders.py::spec": ("a model smaller than its tokenizer",),
    "models/folders.py::described": ("a model of ours with another key",),
    "models/folders.py::weight_tensors": ("model without weights", "weights unreadable", "an index of nothing"),
    "models/folders.py::check_weights": ("weights of another model", "weights too few"),
    "models/folders.py::classifier": (
        "another model for a reward model",
        "a reward model of two labels",
        "a reward model without a score head",
    ),
    "models/folders.py::read_json": ("folder without a model", "a list for a config.json"),
    "learner/peft.py": ("adapters that are not there",),
    "models/params.py::leaves": ("weights of another model", "weights too few"),
    "engine/engine.py::check_sizes": RULED,
    "engine/sequence.py::fitting_pages": HERE,  # the memory of its devices
    "serving/jetstream_proxy.py": CALLED,
    "rpc/http.py::listen": HERE,
    "data/files.py::TableSource.__init__": ("no parquet",),
    "data/files.py::TableSource._refused": ("no parquet",),
    "data/files.py::DatasetSource._files": ("no saved dataset",),
    "data/files.py::_existing": ("no such rows",),
    "data/files.py::_some_rows": ("no rows",),
    "data/files.py::bad_row": ("a malformed row",),
    "envs/calculator.py::CalculatorSource.__init__": ("tool without arithmetic",),
    "data/sources.py::check_game": ("no such game", "another game's environment"),
    "data/sources.py::_loaded": ("game's module absent",),
    "envs/registry.py::check": ("reward's function absent",),
    "envs/agent.py::check": ("agent's function absent",),
    "envs/adapters/games.py::_turns": ("no turn",),
    "envs/adapters/games.py::library": HERE,
    "envs/adapters/gymnasium_env.py::_formatter": ("function of observations absent",),
    "envs/adapters/gymnasium_env.py::_labels": (
        "environment without discrete actions",
        "a name for one of two actions",
    ),
    "envs/adapters/gymnasium_env.py::shown": HERE,  # an environment of the user
    "envs/adapters/gymnasium_env.py::text_env": ("gymnasium's environment absent", "environment without text"),
    "envs/adapters/openenv_env.py::Settings.address": HERE,
    "envs/adapters/gymnasium_env.py::text_aec": HERE,
    "envs/adapters/gymnasium_env.py::_function": HERE,
    "envs/adapters/text_games.py": HERE,
    "envs/adapters/tool_calls.py::ToolCallGame.__init__": ("problems absent",),
    "envs/adapters/verifiers_env.py": HERE,
    "envs/executors.py::Executors.raise_when_worn_out": HERE,  # a budget that a run spends
    "envs/registry.py::share": ("game's share",),
    "envs/registry.py::settings_of": ("game's setting wrong",),
    "envs/registry.py::refuse_unknown": ("game's setting unknown",),
    "data/sources.py::GymSource.__init__": ("no compact prompt",),
    "data/sources.py::_create_dataset": ("task's setting unknown", "task's setting wrong", "task's range"),
    "data/sources.py::_settings_in_mixture": ("mixture of tasks",),
    "data/sources.py::allowed": ("task unknown",),
    "data/tasks.py::_set_tasks": ("a set with too few rows",),
    "data/tasks.py::_errors_about": ("a malformed row of a set", "a malformed row of a mixture"),
    "data/tasks.py::_hold_out": ("task too small", "prompts too long"),
    "data/tasks.py::PromptPipeline.__next__": ("every row held out",),
    "data/tasks.py::PromptPipeline.restore": HERE,
    "data/tasks.py::of": ("too few rows", "rows held out first"),
    "data/tasks.py::_endless": RULED,
    "data/sources.py::open_source": TYPED,
    "data/preparation.py::_check_part": ("every row held out", "a source of a mixture held out"),
    "data/preparation.py::_check_length": ("rows for the warm start too long",),
    "data/preparation.py::no_example": ("every row of the warm start held out",),
    "envs/registry.py::factory": ("environment unknown", "environment absent in its module"),
    "envs/registry.py::_load": ("environment's module absent", "environment's module broken"),
    "store/core/admission.py::Settings.__post_init__": TYPED,
    "store/log/database.py": HERE,
    "store/server/server.py::serve": HERE,
    "roles/store.py::_serve": HERE,
    "learner/checkpoint.py::Checkpoints.__init__": TYPED,
    "learner/checkpoint.py::Checkpoints.at": HERE,
    "learner/checkpoint.py::_check_same": HERE,
    "learner/checkpoint.py::_check_base": HERE,
    "learner/packing.py::row_buckets": RULED,
    "learner/shared_prompts.py": RULED,
    "learner/trainer.py::Trainer.__init__": OWN,
    "learner/packing.py::pack": ("rows for the warm start too long",),
    "learner/state.py::placed": HERE,
    "learner/state.py::_on_devices": HERE,
    "transfer/channel_shm.py::SharedSegments.__init__": HERE,  # a system without memfd
    "transfer/channel_tensorstore.py::url_of": HERE,
    "learner/weights.py::load": HERE,
    "learner/weights.py::model_spec": HERE,
    "learner/weights.py::_json": HERE,
    "learner/weights.py::_file": HERE,
    "roles/store.py::FeederProcess.next": ("every row held out",),
    "learner/multihost.py": HERE,
    "roles/learner.py::LearnerSession._cannot_start": HERE,
    "roles/learner.py::_run_follower.start": HERE,
    "roles/learner.py::_check_known": HERE,
    "roles/learner.py::first_params": HERE,
}


def test_every_refusal_of_a_role_is_on_the_list() -> None:
    rooms = {room: ROOT / "jaxroll" / room for room in ROOMS}
    paths = {room: list(path.rglob("*.py")) or [path.with_suffix(".py")] for room, path in rooms.items()}
    found = {site for of_room in paths.values() for path in of_room for site in sites(path)}
    new = sorted(site for site in found - REFUSALS.keys() if site.partition("::")[0] not in REFUSALS)
    assert not new, f"can `jaxroll config` refuse these first? Say so in REFUSALS: {new}"
    files = {site.partition("::")[0] for site in found}
    assert not (gone := sorted(REFUSALS.keys() - found - files)), f"not raised any more: {gone}"


def test_the_list_names_existing_cases() -> None:
    named = {case for entry in REFUSALS.values() if isinstance(entry, tuple) for case in entry}
    assert named <= CASES.keys()


def sites(path: Path) -> set[str]:
    """package/file.py::function of every ConfigError that is constructed in the file."""
    found = set()
    file = path.relative_to(ROOT / "jaxroll").as_posix()

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}" if name else child.name
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == "ConfigError":
                found.add(f"{file}::{name}")
            walk(child, inner)

    walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def test_what_the_rules_accept_the_limiter_and_the_engine_accept() -> None:
    """For the RULED entries: over a grid of settings, the rules are at least as strict as the constructors."""
    smoke, refused, accepted = configs.load(SMOKE), 0, 0
    for alpha, groups, publish_every, buffer in itertools.product(
        (0.0, 0.1, 0.5, 0.7, 1.0, 1.5, 2.0), (1, 3, 10, 30), (1, 2, 3), (0, 1, 5, 17, 33, 60, 90)
    ):
        schedule = dataclasses.replace(
            smoke.schedule, alpha=alpha, groups_per_step=groups, publish_every=publish_every, buffer_groups=buffer
        )
        made = dataclasses.replace(smoke, schedule=schedule)
        try:
            configs.check(made)
        except ConfigError:
            refused += 1
            continue
        preflight.check_described(made)
        accepted += 1
    assert refused > 100 and accepted > 100

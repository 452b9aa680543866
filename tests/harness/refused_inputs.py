"""Configs and files that `jaxroll config` must refuse, with the key, the value and words of the error."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

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


def draft_of_others(here: Path) -> None:
    """A draft model in the folder small, with another tokenizer than that in hf."""
    words = {"type": "WordLevel", "vocab": {"<e>": 0, "a": 1}, "unk_token": "a"}
    weights(named(1000), tokenizer={**WORDS, "model": words}, tokenizer_config={"eos_token": "<e>"})(here)
    (here / "hf").rename(here / "small")
    folder(tokenizer=WORDS, tokenizer_config={"eos_token": "<e>"})(here)


def module(text: str) -> Make:
    """A module game.py in the working folder."""
    return lambda here: (here / "game.py").write_text(text)


def package(text: str) -> Make:
    """A package game in the working folder, with `text` in one of its modules."""

    def make(here: Path) -> None:
        (here / "game").mkdir()
        (here / "game" / "__init__.py").write_text("from game.inner import *\n")
        (here / "game" / "inner.py").write_text(text)

    return make


GOOD = {"question": "1+1", "answer": "2"}
JSONL = ["task.source=jsonl", "task.path=x.jsonl", "task.heldout_items=1"]
OF_SOURCE = 'task.mixture=[{{"label": "a", {}}}]'
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
DRAFTS = ["sampler.draft_tokens=4", "sampler.draft_model=hf"]
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
    "quantised experts": (
        None, ["model.size=tiny_moe", "sampler.weight_dtype=int8"], "sampler.weight_dtype", "int8", "has experts"),
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
    "a game's environment for questions": (
        None, ["task.env=sokoban"], "task.env", "sokoban", "task.source is 'reasoning_gym'"),
    "environment of a source unknown": (
        None, [OF_SOURCE.format('"name": "gcd", "env": "single-turn"')], "task.mixture[0].env", "single-turn",
        "a: there is no such environment"),
    "environment of a held-out set unknown": (
        None, ['evaluator.sets={"a": {"name": "gcd", "env": "single-turn"}}'], "evaluator.sets.a.env", "single-turn",
        "Did you mean 'single_turn'?"),
    "a source with the environment of the others": (
        None, [OF_SOURCE.format('"source": "game", "name": "frozen_lake"')], "task.env", "single_turn",
        "Or set task.mixture[0].env"),
    "reward's function of a source absent": (
        None, [OF_SOURCE.format('"name": "gcd", "reward": "file:no.py:f"')], "task.mixture[0].reward", "no.py",
        "a: it cannot be loaded"),
    "game's setting unknown": (
        None, [*GAME, "task.args.seize=4"], "task.args.seize", "4", "Did you mean 'size'?"),
    "game's setting of another type": (
        None, ["task.source=game", "task.name=sokoban", "task.env=sokoban", "task.args={\"rows\": \"4\"}"],
        "task.args.rows", "'4'", "Expected int, got str"),
    "text for a list of moves": (
        None, [*GYM, 'task.args={"actions": "(0, 1)"}'], "task.args.actions", "(0, 1)", "Expected array, got str"),
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
    "no games": (None, [*GYM, 'task.args={"games": 0}'], "task.args.games", "0", "integer above 0"),
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
    "algorithm of a library": (
        None, ["learner.algorithm=math:sqrt"], "learner.algorithm", "math:sqrt", "registers no algorithm"),
    "algorithm absent in its package": (
        package("from jaxroll.algorithms.registry import register\n@register('mine')\ndef f(learner): ..."),
        ["learner.algorithm=game:main"], "learner.algorithm", "game:main", "Did you mean 'mine'?"),
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
    "a source without worked answers": (
        rows(*({"question": f"{n}"} for n in range(30))),
        ['task.mixture=[{"name": "gcd"}, {"source": "jsonl", "path": "x.jsonl", "answer_column": "none"}]'],
        "sft.steps", "5", "of the source x"),
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
        folder(config={**HUGGING_FACE, "num_hidden_layers": None}), PATH, "config.json num_hidden_layers", "size",
        "whole number"),
    "a list for a config.json": (folder(config=[]), PATH, "model.path", "hf", "not a JSON object"),
    "a model smaller than its tokenizer": (
        folder(config={**HUGGING_FACE, "vocab_size": 8}), PATH, "model.path", "hf", "8 token ids"),
    "model without weights": (folder(config=HUGGING_FACE), PATH, "model.path", "hf", "holds neither"),
    "weights of another model": (
        weights({"model.norm.weight": 12}), PATH, "model.path", "hf", "no tensor 'model.embed_tokens.weight'"),
    "weights too few": (weights(named(12)), PATH, "model.path", "hf", "hold 156 numbers"),
    "a draft model that is not there": (None, DRAFTS, "sampler.draft_model", "hf", "no such file"),
    "a draft model without weights": (
        folder(config=HUGGING_FACE), DRAFTS, "sampler.draft_model", "hf", "holds neither"),
    "a draft model of odd heads": (
        folder(config={**HUGGING_FACE, "head_dim": 7}), DRAFTS, "sampler.draft_model", "hf", "model.head_dim = 7"),
    "a draft model that is a critic": (
        folder(model={**dataclasses.asdict(families.spec("nano")), "value_head": True}), DRAFTS, "sampler.draft_model",
        "hf", "no language model"),
    "a draft model with another tokenizer": (
        draft_of_others, ["sampler.draft_tokens=4", "sampler.draft_model=small", *HF], "sampler.draft_model", "small",
        "other tokens"),
    "a draft model that drafts nothing": (
        None, ["sampler.draft_model=hf"], "sampler.draft_model", "hf", "sampler.draft_tokens is 0"),
    "weights unreadable": (
        folder(config=HUGGING_FACE, model_j="", **{"model.safetensors.index": {"weight_map": {"a": "nowhere"}}}), PATH,
        "model.path", "hf", "nowhere"),
    "an index of nothing": (
        folder(config=HUGGING_FACE, **{"model.safetensors.index": {}}), PATH, "model.path", "hf", "weight_map"),
    "a mesh for the model of the path": (
        folder(config={**HUGGING_FACE, "num_attention_heads": 6}), [*PATH, "sampler.mesh.tensor=4"],
        "sampler.mesh.tensor", "4", "6 query heads"),
}  # fmt: skip

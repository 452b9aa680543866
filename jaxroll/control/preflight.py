"""Config checks that the roles make, done before any role starts and before a device is used.

`check_described` judges the config alone. `check` also opens what the config names on this machine:
files, the task's library, the tokenizer, the environment's module. Neither loads JAX. tests/control/test_preflight.py
lists the refusals of the roles' packages and the check here that comes first.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

from jaxroll.config import Config, MeshConfig
from jaxroll.config.derived import episode_tokens, page_size, sample_tokens
from jaxroll.config.parsing import nearest
from jaxroll.config.prompt_rules import evaluation_set, task_parts
from jaxroll.config.rewards import RewardModelSettings, terms
from jaxroll.data import gym, prompts, sources
from jaxroll.envs import agent, registry
from jaxroll.errors import ConfigError
from jaxroll.kernels import choice
from jaxroll.learner import peft
from jaxroll.models import families, folders
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import Progress
from jaxroll.report import trackers
from jaxroll.rewards import grader
from jaxroll.store.core.admission import Settings
from jaxroll.text.hf import HFTokenizer


def check_described(config: Config) -> None:
    """Raise ConfigError for what is wrong wherever the run takes place."""
    for part in task_parts(config.task):
        if part.task.source == "reasoning_gym":
            gym.allowed(part.task.name)
        if part.task.source == "game":
            sources.check_game(part.task)
    if not config.model.path:
        model = families.spec(config.model.size, compute_dtype=config.model.dtype)
        _check_meshes(config, model)
        _check_attention(config, model)
        families.check_routing(model, config)
    Settings.of(config)


def check(config: Config, report: Progress | None = None) -> None:
    """Raise ConfigError for what is wrong here: what a role on this machine would end with exit code 64 for.

    `report` receives a line about the rows of a file.
    """
    check_described(config)
    _check_files(config)
    see_working_folder()
    _check_algorithm(config.learner.algorithm)
    registry.factory(config.task.env)
    grader.check(config.task)
    agent.check(config.task)
    trackers.check(config)
    _check_reward_models(config)
    Settings.of(config).filter.check()
    tokenizer = prompts.check(config, report)
    model = folders.spec(config.model, tokenizer.vocab_size)
    _check_meshes(config, model)
    _check_attention(config, model)
    families.check_routing(model, config)
    if config.model.path:
        folders.check_weights(config.model, model)
    if config.learner.lora_path:
        peft.check(config.learner, model)


def _check_meshes(config: Config, model: ModelSpec) -> None:
    for role, mesh in meshes(config).items():
        families.check_mesh(model, mesh, f"{role}.mesh")


def _check_attention(config: Config, model: ModelSpec) -> None:
    """The kernels that are named, on the platform that is named; on one still to be found, what fits nowhere."""
    platform = "" if config.placement.platform == "auto" else config.placement.platform
    learner, sampler = config.learner, config.sampler
    site = choice.Site(model, platform, learner.mesh.tensor * learner.mesh.sequence, sample_tokens(learner))
    choice.check("packed", learner.attention, site)
    for role, mesh in meshes(config).items():
        if role != "learner":
            site = choice.Site(model, platform, mesh.tensor, sampler.prefill_buckets[-1])
            choice.check("prefill", sampler.prefill_attention, site)
            longest = max(episode_tokens(config), sampler.prefill_buckets[-1])
            limited = sampler.cache_pages > 0
            pages = replace(site, tokens=page_size(sampler.page_tokens, longest), longest=longest, limited=limited)
            choice.check("paged", sampler.paged_attention, pages)


def meshes(config: Config) -> dict[str, MeshConfig]:
    """The mesh of every role that has one, by the role's name."""
    found = {"learner": config.learner.mesh, "sampler": config.sampler.mesh}
    return found | ({"evaluator": config.evaluator.mesh} if config.evaluator.every else {})


def _check_files(config: Config) -> None:
    data = [(f"{part.key}.path", part.task.path) for part in task_parts(config.task)]
    for name in config.evaluator.sets:
        task, _ = evaluation_set(config, name)
        if task.path != config.task.path:
            data.append((f"evaluator.sets.{name}.path", task.path))
    for key, path in (("model.path", config.model.path), ("tokenizer.path", config.tokenizer.path),
                      ("learner.lora_path", config.learner.lora_path), *data):  # fmt: skip
        if path and not Path(path).expanduser().exists():
            raise ConfigError(
                key, path, "no such file or folder on this machine", _beside(Path(path)) + _how(key, path)
            )


def _how(key: str, path: str) -> str:
    """The way to get the missing folder of a released model; empty for another key."""
    if key not in ("model.path", "tokenizer.path", "task.reward_args.reward_model.path"):
        return ""
    return (
        " Put the folder of a Hugging Face checkpoint there (config.json, *.safetensors, tokenizer.json), as by"
        f" `hf download ORGANIZATION/{Path(path).name} --local-dir {os.path.relpath(path)}`,"
        f" or name another one with --config.{key}=FOLDER."
    )


def _check_reward_models(config: Config) -> None:
    """Refuse folders of reward models that the process which serves them would end with."""
    for term in terms(config.task.reward, config.task.reward_args):
        if not isinstance(term.settings, RewardModelSettings) or not term.settings.path:
            continue
        key, path = f"task.reward_args.{term.label}.path", term.settings.path
        if not Path(path).is_dir():
            raise ConfigError(key, path, "no such folder on this machine", _beside(Path(path)) + _how(key, path))
        try:
            folders.classifier(Path(path))
            template = HFTokenizer(path).has_template
        except ConfigError as error:
            here = "" if path in str(error.value) else f"{error.key} = {error.value!r}: "
            raise ConfigError(key, path, f"{here}{error.reason}", error.remedy) from error
        if not template:
            raise ConfigError(key, path, "its tokenizer has no chat template, which shows prompt and answer",
                              "Add chat_template.jinja to the folder.")  # fmt: skip


def _check_algorithm(name: str) -> None:
    """Check that your own algorithm is in its module. Loading it would load JAX, so its source is read instead."""
    module, _, short = name.rpartition(":")
    if not module:
        return
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:  # of a package that contains it
        spec = None
    if spec is None:
        raise ConfigError("learner.algorithm", name, f"there is no module {module} here",
                          "Run where it can be found, or install it.")  # fmt: skip
    names = _registered(spec)
    if names is not None and short not in names:
        raise ConfigError("learner.algorithm", name, f"{spec.origin} registers no algorithm of that name",
                          nearest(short, names) if names else f"Put @register({short!r}) before it.")  # fmt: skip


def _registered(spec: ModuleSpec) -> tuple[str, ...] | None:
    """The names that the source of a module registers; None if only its execution can tell."""
    if not spec.has_location or not spec.origin or not spec.origin.endswith(".py") or spec.submodule_search_locations:
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None  # the learner gives the reason
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _callee(node.func) == "register"]
    names = [node.args[0].value for node in calls if node.args and isinstance(node.args[0], ast.Constant)]
    return tuple(map(str, names)) if len(names) == len(calls) else None


def _callee(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _beside(path: Path) -> str:
    """The files next to the missing `path`, the nearest name first."""
    folder = path.expanduser().absolute().parent
    if not folder.is_dir():
        return f"Looked in {Path.cwd()}; there is no folder {folder} either."
    names = tuple(entry.name for entry in folder.iterdir())
    likely = nearest(path.name, names) if names else ""
    return f"Looked in {folder}. {likely if likely.startswith('Did') else 'Give the path of what is there.'}"


def see_working_folder() -> None:
    """Let modules of the working folder be found, as in the roles, which are started by `python -m jaxroll`."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)

"""Checks before a run: config checks that the roles make, before any role starts; installed dependencies (`doctor`).

`check_described` judges the config alone. `check` also opens what the config names on this machine:
files, the task's library, the tokenizer, the environment's module. Neither loads JAX. tests/control/test_preflight.py
lists the refusals of the roles' packages and the check here that comes first.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path

from jaxroll import config as configs
from jaxroll.config import Config, MeshConfig, TaskConfig
from jaxroll.config.derived import (
    COLOCATED,
    cache_tokens,
    device_processes,
    has_evaluator,
    limits_cache,
    longest_prompt,
    model_folder,
    page_size,
    sample_tokens,
)
from jaxroll.config.parsing import HELDOUT, about, evaluation_set, every_part, nearest, samples_of, task_parts
from jaxroll.config.rewards import RewardModelSettings, terms
from jaxroll.config.rules import GPU_SHARE, Inventory
from jaxroll.control import program, run_dir
from jaxroll.engine.sequence import MemoryShare, fitting_pages
from jaxroll.errors import ConfigError, InfraError, no_memory_limit
from jaxroll.kernels import choice
from jaxroll.learner import peft
from jaxroll.models import families, folders
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import Progress
from jaxroll.report import trackers
from jaxroll.rpc import protocol, tls
from jaxroll.run_paths import RunPaths
from jaxroll.text import tokenizers
from jaxroll.text.tokenizers import HFTokenizer

# --- `jaxroll doctor`: installed dependencies, the features that missing ones disable, and how to install them

CORE = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorstore", "ml-collections", "numpy",
        "grpcio", "ml-dtypes", "msgspec", "tokenizers", "rich", "tensorboardX", "jaxtyping",
        "starlette", "uvicorn")  # fmt: skip
PROBE_S = 90.0

# Runs in a child: asking JAX for devices takes them.
_PROBE = "import jax, json; print(json.dumps([jax.default_backend(), [str(d) for d in jax.devices()]]))"


@dataclass(frozen=True)
class Optional:
    """An optional dependency: the feature that is skipped without it, and how to install it."""

    name: str
    present: Callable[[], bool]
    skipped: str
    remedy: str


def _module(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


def _program(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name) is not None


def _environment(name: str) -> Callable[[], bool]:
    return Path(f".venv-{name}", "bin", "python").exists  # in the folder where doctor is asked


OPTIONAL = (
    Optional("reasoning-gym", _module("reasoning_gym"), "its tasks, and the demo", "pip install 'jaxroll[envs]'"),
    Optional("pyarrow", _module("pyarrow"), "Parquet files as a source of tasks", "pip install 'jaxroll[data]'"),
    Optional("jinja2", _module("jinja2"), "chat templates of Hugging Face folders", "pip install 'jaxroll[hf]'"),
    Optional("libtpu", _module("libtpu"), "TPUs, and compiling for them ahead of time (Linux x86-64)",
             "pip install 'jaxroll[tpu]'"),
    Optional("CUDA plugin", lambda: any(_module(f"jax_cuda{n}_plugin")() for n in (12, 13)), "NVIDIA GPUs",
             "pip install 'jaxroll[gpu]', or 'jaxroll[gpu-cuda12]' for older drivers"),
    Optional("pytest", _module("pytest"), "the tests", "pip install 'jaxroll[dev]', or `make test`"),
    Optional(".venv-torch", _environment("torch"), "comparisons with transformers in `make soak`", "make venv-torch"),
    Optional(".venv-tunix", _environment("tunix"), "benchmarks against google-tunix", "make venv-tunix"),
    Optional(".venv-trl", _environment("trl"), "comparisons of losses with TRL in `make soak`", "make venv-trl"),
    Optional(".venv-more", _environment("more"), "tests of adapters and trackers in `make soak`", "make venv-more"),
    Optional(".venv-jetstream", _environment("jetstream"), "tests with google-jetstream", "make venv-jetstream"),
    Optional("nvidia-smi", _program("nvidia-smi"), "finding NVIDIA GPUs", "comes with the NVIDIA driver"),
    Optional("gcloud", _program("gcloud"), "launch/tpu_vm.sh", "https://cloud.google.com/sdk"),
)  # fmt: skip


def main() -> int:
    """Print the report; 0 when a run on the CPU can work here."""
    versions = run_dir.versions(CORE)
    absent = [name for name in CORE if name not in versions]
    print(f"python    {platform.python_version()} ({sys.executable})")
    print(f"machine   {platform.platform()}, {os.cpu_count()} cores, {_free_gb(Path.cwd()):.1f} GB free here")
    print(f"packages  {', '.join(f'{name} {version}' for name, version in versions.items())}")
    for name in absent:
        print(f"MISSING   {name}: nothing works without it. Get it: pip install jaxroll (or `make`)")
    for line in device_lines():
        print(f"devices   {line}")
    print(f"scoring   {scoring_limits()}")
    for line in certificate_lines():
        print(f"tls       {line}")
    for line in optional_lines():
        print(line)
    return 1 if absent or sys.version_info < (3, 11) else 0


def optional_lines(things: tuple[Optional, ...] = OPTIONAL) -> list[str]:
    """Installed optional parts; for missing ones, what is skipped and how to get it."""
    here = [thing.name for thing in things if thing.present()]
    lines = [f"here      {', '.join(here)}"] if here else []
    lines += [
        f"skipped   {thing.skipped}: no {thing.name}. Get it: {thing.remedy}" for thing in things if not thing.present()
    ]
    return lines


def certificate_lines(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Problems, present or near, of the certificates that JAXROLL_TLS names."""
    if not (folder := environment.get(tls.TLS_VARIABLE, "").strip()):
        return []
    material = tls.Material(Path(folder))
    try:
        material.client_context()
        if (material.folder / tls.CERT).exists() or (material.folder / tls.KEY).exists():
            material.server_context(mutual=False)
    except (ConfigError, InfraError, OSError) as error:
        return [str(error)]
    return material.warnings(time.time()) or [f"{folder}: in order"]


def device_lines(python: str = sys.executable) -> list[str]:
    """The devices as JAX sees them (asked in a child), and as the machine has them."""
    lines = []
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, encoding="utf-8", errors="replace", timeout=PROBE_S, check=True
        )
        backend, names = json.loads(done.stdout.splitlines()[-1])
        lines.append(f"JAX uses {backend}: {', '.join(names)}")
    except subprocess.TimeoutExpired:
        lines.append(f"JAX did not answer within {PROBE_S:.0f} s: another process may hold the accelerator")
    except (subprocess.CalledProcessError, json.JSONDecodeError, IndexError, OSError) as error:
        words = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        lines.append(f"JAX does not start: {words[-1] if words else error}")
    gpus, chips = program.gpu_memories_mb(), program.tpu_chips()
    lines.append(f"the machine has {chips} TPU chips and {len(gpus)} NVIDIA GPUs{f' ({gpus[0]} MB)' if gpus else ''}")
    return lines


def scoring_limits(python: str = sys.executable) -> str:
    """The restrictions of scoring processes here; a child tries them out, because they are permanent."""
    try:
        done = subprocess.run(
            [python, "-m", "jaxroll.rewards.sandbox"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PROBE_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        return f"OPEN: everything (the probe failed: {error})"
    return done.stdout.strip()


def _free_gb(path: Path) -> float:
    return shutil.disk_usage(path).free / 1e9


# --- Checks before a run


def check_described(config: Config) -> None:
    """Run the checks that do not depend on the machine. Raises ConfigError."""
    from jaxroll.data import sources  # every role loads this module, and checks nothing
    from jaxroll.store.core.admission import Settings

    for part in every_part(config):
        with about(part):
            if part.task.source == "reasoning_gym":
                sources.allowed(part.task.name)
            sources.check_game(part.task)
    if not model_folder(config):
        model = families.spec(config.model.size, compute_dtype=config.model.dtype)
        _check_meshes(config, model)
        _check_attention(config, model)
        families.check_routing(model, config)
    Settings.of(config)


def check(config: Config, report: Progress | None = None, inventory: Inventory | None = None) -> None:
    """Run every check that a role on this machine would end with exit code 64 for. Raises ConfigError.

    `report` receives a line about the rows of a file. `inventory` are the devices of the run, if they are known.
    """
    from jaxroll.data import preparation
    from jaxroll.envs import registry
    from jaxroll.store.core.admission import Settings

    check_described(config)
    if inventory is not None:
        program.check_stores(config)
    _check_files(config)
    see_working_folder()
    _check_algorithm(config.learner.algorithm)
    for part in every_part(config):
        with about(part):
            registry.factory(part.task.env)
            registry.check(part.task)
    registry.check_agent(config.task)
    trackers.check(config)
    _check_reward_models(config)
    Settings.of(config).filter.check()
    tokenizer = preparation.check(config, report)
    model = folders.spec(config.model, tokenizer.vocab_size)
    _check_meshes(config, model)
    _check_attention(config, model)
    families.check_routing(model, config)
    _check_memory(config, model, inventory)
    if model_folder(config):
        folders.check_weights(config.model, model)
    folders.check_draft(config.sampler, model)
    tokenizers.check_draft(config.sampler.draft_model, tokenizer)
    if config.learner.lora_path:
        peft.check(config.learner, model)


def check_model(config: Config) -> None:
    """Raise ConfigError if the model, its weights or its tokenizer, each in a folder, cannot be read."""
    text = tokenizers.build(config.tokenizer, "")
    folders.check_weights(config.model, folders.spec(config.model, text.vocab_size))


def check_trained(path: Path, config: Config | None = None) -> None:
    """Refuse a run without weights here, rather than in a child that must load JAX first."""
    from jaxroll.learner import checkpoint_files

    paths = RunPaths(path)
    if config is not None and model_folder(config):
        return
    if not paths.warm_start.is_dir() and not checkpoint_files.entries(paths.checkpoints, verify=False):
        reason = "has neither checkpoints nor a warm start"
        raise ConfigError("RUN", str(path), reason, f"Train first: jaxroll train {os.path.relpath(path)} --resume")


def _check_meshes(config: Config, model: ModelSpec) -> None:
    for role, mesh in meshes(config).items():
        families.check_mesh(model, mesh, f"{role}.mesh")


def _check_memory(config: Config, model: ModelSpec, inventory: Inventory | None) -> None:
    """Refuse a share of memory that a sampler could not use at its start; a GPU's memory is known before JAX runs."""
    fraction, mesh = config.sampler.memory_fraction, config.sampler.mesh
    if fraction and (inventory.platform if inventory else config.placement.platform) == "cpu":
        raise no_memory_limit(fraction, "cpu")
    if fraction and inventory and inventory.gpu_memory_mb:
        shared = inventory.gpus < sum(device_processes(config).values())
        of_process = config.placement.sampler_memory_fraction if shared else GPU_SHARE
        count = families.parameter_count(model) // (mesh.tensor * mesh.expert)  # embeddings are not quantized: a bound
        size_bytes = count * (2 if model.compute_dtype == "bfloat16" else 4)
        limit_bytes = int(of_process * inventory.gpu_memory_mb * 2**20)
        in_use = count if config.sampler.weight_dtype else size_bytes
        if draft := folders.with_draft(config.sampler, model).draft:
            in_use += families.parameter_count(draft) // mesh.tensor * size_bytes // count
        share = MemoryShare(limit_bytes, fraction, size_bytes, in_use)
        fitting_pages(share, lambda pages: 0, 0, 0)


def _check_attention(config: Config, model: ModelSpec) -> None:
    """ConfigError for a kernel that the configured platform lacks; with `auto`, for one that every platform lacks."""
    platform = "" if config.placement.platform == "auto" else config.placement.platform
    learner, sampler = config.learner, config.sampler
    choice.check_quantised(sampler.weight_dtype, model.experts)
    site = choice.Site(model, platform, learner.mesh.tensor * learner.mesh.sequence, sample_tokens(learner))
    choice.check("packed", learner.attention, site)
    for role, mesh in meshes(config).items():
        if role != "learner":
            site = choice.Site(model, platform, mesh.tensor, sampler.prefill_buckets[-1])
            choice.check("prefill", sampler.prefill_attention, site)
            longest = cache_tokens(config)
            limited = limits_cache(config)
            pages = replace(site, tokens=page_size(sampler.page_tokens, longest), longest=longest, limited=limited)
            kv_dtype = sampler.kv_dtype if role == "sampler" else ""
            pages = replace(pages, model=replace(model, scan=sampler.scan_layers, kv_dtype=kv_dtype))
            choice.check("paged", sampler.paged_attention, pages)


def meshes(config: Config) -> dict[str, MeshConfig]:
    """The mesh of every role that has one, by the role's name."""
    found = {"learner": config.learner.mesh, "sampler": config.sampler.mesh}
    return found | ({"evaluator": config.evaluator.mesh} if has_evaluator(config) else {})


def _check_files(config: Config) -> None:
    data = [(f"{part.key}.path", part.task.path) for part in task_parts(config.task)]
    for name in config.evaluator.sets:
        part, _ = evaluation_set(config, name)
        if part.task.path != config.task.path:
            data.append((f"{part.key}.path", part.task.path))
    for key, path in (
        ("model.path", config.model.path),
        ("tokenizer.path", config.tokenizer.path),
        ("learner.lora_path", config.learner.lora_path),
        ("sampler.draft_model", config.sampler.draft_model),
        *data,
    ):
        if path and not Path(path).expanduser().exists():
            raise ConfigError(
                key, path, "no such file or folder on this machine", _similar_paths(Path(path)) + _how_to_get(key, path)
            )


def _how_to_get(key: str, path: str) -> str:
    """The way to get the missing folder of a released model; empty for another key."""
    if key not in ("model.path", "tokenizer.path", "sampler.draft_model", "task.reward_args.reward_model.path"):
        return ""
    return (
        " Put the folder of a Hugging Face checkpoint there (config.json, *.safetensors, tokenizer.json), as by"
        f" `hf download ORGANIZATION/{Path(path).name} --local-dir {os.path.relpath(path)}`,"
        f" or name another one with --config.{key}=FOLDER."
    )


def _check_reward_models(config: Config) -> None:
    """Refuse folders of reward models that the process which serves them would end with."""
    for part in every_part(config):
        with about(part):
            _check_reward_model(part.task)


def _check_reward_model(task: TaskConfig) -> None:
    for term in terms(task.reward, task.reward_args):
        if not isinstance(term.settings, RewardModelSettings) or not term.settings.path:
            continue
        key, path = f"task.reward_args.{term.label}.path", term.settings.path
        if not Path(path).is_dir():
            remedy = _similar_paths(Path(path)) + _how_to_get(key, path)
            raise ConfigError(key, path, "no such folder on this machine", remedy)
        try:
            folders.classifier(Path(path))
            template = HFTokenizer(path).has_template
        except ConfigError as error:
            here = "" if path in str(error.value) else f"{error.key} = {error.value!r}: "
            raise ConfigError(key, path, f"{here}{error.reason}", error.remedy) from error
        if not template:
            reason = "its tokenizer has no chat template, which shows prompt and answer"
            raise ConfigError(key, path, reason, "Add chat_template.jinja to the folder.")


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
        raise ConfigError(
            "learner.algorithm", name, f"no module {module!r} is here", "Run where it can be found, or install it."
        )
    names = _registered(spec)
    if names is not None and short not in names:
        raise ConfigError(
            "learner.algorithm",
            name,
            f"{spec.origin or module} registers no algorithm of that name",
            nearest(short, names) if names else f"Put @register({short!r}) before it.",
        )


_MOST_FILES = 200  # that are read in seconds


def _registered(spec: ModuleSpec) -> tuple[str, ...] | None:
    """The names that the source of a module, or any of a package, registers; None if only its execution can tell."""
    if spec.name.partition(".")[0] in sys.stdlib_module_names:
        return ()
    files = [path for folder in spec.submodule_search_locations or () for path in sorted(Path(folder).rglob("*.py"))]
    if len(files) > _MOST_FILES:
        return None
    if not files and spec.has_location and spec.origin:
        files = [Path(spec.origin)]
    calls = list[ast.Call]()
    for path in files:
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, ValueError, SyntaxError, RecursionError):
            return None  # the learner gives the reason
        calls += [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _callee(node.func) == "register"]
    names = [node.args[0].value for node in calls if node.args and isinstance(node.args[0], ast.Constant)]
    return tuple(map(str, names)) if len(names) == len(calls) else None


def _callee(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _similar_paths(path: Path) -> str:
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


def runnable_config(options: argparse.Namespace, report: Progress | None = None) -> Config:
    """The config that `--config` and overrides give; ConfigError if it cannot run on this machine."""
    config = named_config(options)
    check(config, report)
    return config


def named_config(options: argparse.Namespace) -> Config:
    """The config that `--config` and overrides give; ConfigError without `--config`."""
    if not options.config:
        raise ConfigError("--config", None, "no experiment named", "Add --config=FILE, as configs/demo.py.")
    return configs.load(options.config, options.overrides)


def run_with_other_sets(options: argparse.Namespace) -> tuple[Config, Path] | None:
    """For `eval RUN --config=FILE`: the config of the run with the evaluator of the file, and the run's folder.

    None for other commands, if RUN is not a run, and in the child, which is given this config. ConfigError if the run
    has no weights, if the file names no sets, if an override would change nothing, or if a set is malformed or lacks
    its file.
    """
    if options.command != "eval" or options.child or not (options.config and options.run):
        return None
    path = run_dir.checked(options.run)
    if not RunPaths(path).run_file.exists():
        return None
    for text in options.overrides:
        key = text.removeprefix("--").removeprefix("config.").partition("=")[0]
        if not key.startswith("evaluator."):
            raise ConfigError(key, path.name, "the run has its own", "With RUN only keys of evaluator may be given.")
    evaluator = named_config(options).evaluator
    if not evaluator.sets:
        remedy = f"Add evaluator.sets, or leave it out to evaluate {path.name} on the run's own sets."
        raise ConfigError("--config", options.config, "names no held-out sets", remedy)
    config = replace(run_dir.load_config(path), evaluator=evaluator)
    config = configs.parse(configs.to_dict(config))
    check_options(options, config)
    check_trained(path, config)
    _check_files(config)
    return config, path


def check_options(options: argparse.Namespace, config: Config) -> None:
    """Raise ConfigError if the run has no such role, or a held-out set, its samples or a context are impossible."""
    known, context = (HELDOUT, *config.evaluator.sets), getattr(options, "context", None)
    for name in (options.set or known[0 if config.task.heldout_items else 1 :]) if options.command == "eval" else ():
        if name not in known:
            raise ConfigError("--set", name, "there is no such held-out set", f"Use {', '.join(known)}.")
        samples = samples_of(config, name, samples=options.samples, temperature=options.temperature)
        if (k := max(options.k, default=0)) > samples:
            raise ConfigError("--k", k, f"{name} has {samples} answers per item", f"Add --samples={k} or more.")
    if context is not None and context <= longest_prompt(config):
        reason = f"the config's longest prompt has {longest_prompt(config)} tokens, and an answer needs one more"
        raise ConfigError("--context", context, reason, "Give a larger number, or leave it out.")
    if options.command == COLOCATED and not config.placement.colocated:
        reason = "this run has a process for each role"
        raise ConfigError("placement.colocated", False, reason, "Set it to True, for every process of the run.")
    if options.command == "store" and not options.child and options.store:
        path = run_dir.checked(options.run) if options.run else None
        protocol.listening("--store", options.store, insecure=options.insecure, has_tls=tls.load(path) is not None)
    if options.command != "actor":
        return
    if not config.placement.actors:
        remedy = "Start the run, and every role of it, with --config.placement.actors=N."
        raise ConfigError("placement.actors", 0, "the samplers of this run play the episodes themselves", remedy)

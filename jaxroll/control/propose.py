"""Commands that propose a config: `jaxroll init` for a model, a task and hardware; `jaxroll place` for a cluster.

`init` writes only what `jaxroll config` accepts on this machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxroll import config as configs
from jaxroll import disk
from jaxroll.config.rules import Inventory, check_inventory
from jaxroll.control import preflight
from jaxroll.data import sources
from jaxroll.errors import ConfigError, DataError
from jaxroll.models import folders
from jaxroll.policy.placement import Plan
from jaxroll.sim import costs, place, simulate
from jaxroll.sim.costs import Hardware, LearnerCosts, SamplerCosts, TransferCosts

TINY = "tiny"
GPU_MB = 80_000  # memory that a GPU is assumed to have
FORMATS = {
    "none": "",
    "boxed": "Reason step by step, and put the final answer within \\boxed{}.",
    "answer_tag": "Reason step by step, and put the final answer within <answer> and </answer>.",
    "last_number": "Reason step by step, and end with the final number.",
    "after_think": "Think within <think> and </think>, then write the final answer alone.",
}
KINDS = {".jsonl": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class InitAnswers:
    """The answers to the questions of `jaxroll init`, by name."""

    model: str = TINY
    task: str = "spell_backward"
    answers: str = ""  # a key of FORMATS; "": boxed for a checkpoint, none for `tiny`
    hardware: str = "cpu"  # cpu, gpu:N or tpu:N


def run_init(options: argparse.Namespace, ask: Callable[[str], str] | None = None) -> None:
    """`init`: write the config FILE. `ask` answers what no flag says (None: defaults). ConfigError if it is refused."""
    file = Path(options.file)
    if file.suffix != ".py" or file.exists():
        raise ConfigError(
            "FILE",
            str(file),
            "exists" if file.exists() else "not the name of a Python file",
            "Name a new file that ends in .py.",
        )
    choice = InitAnswers()
    for name, question in QUESTIONS.items():
        default = getattr(choice, name)
        given = getattr(options, name)
        if given is None and ask is not None:
            given = _answer(ask, f"{question} [{default}]: ", name)
        choice = replace(choice, **{name: given or default})
    write(choice, file)
    shown = os.path.relpath(file)
    print(
        f"{shown} is written; `jaxroll config --config={shlex.quote(shown)}` prints it with all defaults.\n"
        f"Start with: jaxroll train --config={shlex.quote(shown)}"
    )


def asker() -> Callable[[str], str] | None:
    """A function that asks on the terminal; None without a terminal."""
    return input if sys.stdin.isatty() and sys.stdout.isatty() else None


def _answer(ask: Callable[[str], str], question: str, flag: str) -> str:
    try:
        return ask(question).strip()
    except EOFError as error:
        raise ConfigError(f"--{flag}", None, "the input ended before an answer", "Answer, or give the flag.") from error


def write(choice: InitAnswers, file: Path) -> None:
    """Write the config of `choice` to `file`. ConfigError, and no file, if it could not run here."""
    source = text(choice, file)
    trial = file.with_name(f".{file.stem}.{os.getpid()}.py")
    try:
        disk.replace_text(trial, source)
    except OSError as error:
        raise ConfigError(
            "FILE",
            str(file),
            f"its folder cannot be written ({error.strerror})",
            "Make the folder, or name another one.",
        ) from error
    try:
        config = configs.load(trial, [])
        preflight.check(config)
    finally:
        trial.unlink(missing_ok=True)
    platform, devices = _hardware(choice.hardware)
    if platform != "cpu":
        check_inventory(
            config, Inventory(platform, devices, GPU_MB) if platform == "gpu" else Inventory(platform, chips=devices)
        )
    disk.replace_text(file, source)


def text(choice: InitAnswers, file: Path) -> str:
    """The source of the config of `choice` for `file`, whose folder relative paths start at.

    ConfigError for a choice that is unknown.
    """
    parts = [*_model(choice, file), "", *_task(choice, file), "", *_devices(choice)]
    body = "\n".join(f"    {line}" if line else "" for line in parts)
    words = " ".join(
        f"--{name}={shlex.quote(getattr(choice, name))}" for name in asdict(choice) if getattr(choice, name)
    )
    return (
        f'"""{_title(choice)}.\n\n'
        f"Command   jaxroll train --config={file.name}\n"
        f"Made by   jaxroll init {file.name} {words}\n"
        '"""\n\n'
        "from ml_collections import ConfigDict\n\nfrom jaxroll.config import defaults\n\n\n"
        "def get_config() -> ConfigDict:\n"
        '    """The values that differ from the defaults; docs/config_keys.md explains every key."""\n'
        "    config = defaults()\n"
        f"    config.run.name = {json.dumps(file.stem)}\n\n"
        f"{body}\n"
        "    return config\n"
    )


def _title(choice: InitAnswers) -> str:
    model = "A tiny model" if choice.model == TINY else Path(choice.model).name
    return f"{model} on {Path(choice.task).name}, {choice.hardware}".replace("\\", "/").replace('"', "'")


def _relative(path: str, file: Path) -> str:
    """`path`, as the config in `file` names it: paths in a config start at its folder."""
    return os.path.relpath(Path(path).expanduser().absolute(), file.absolute().parent)


def _model(choice: InitAnswers, file: Path) -> list[str]:
    if choice.model == TINY:
        return [
            "# Model: small enough for a CPU, with a token per character. The warm start teaches it to answer.",
            'config.model.size = "tiny"',
            "config.sft.steps = 300",
            "config.schedule.steps = 100",
        ]
    path = _relative(choice.model, file)
    dtype = "float32" if choice.hardware == "cpu" else "bfloat16"
    return [
        "# Model: the checkpoint and its tokenizer. The learning rate is that of full fine-tuning of a released model.",
        f"config.model.path = config.tokenizer.path = {json.dumps(path)}",
        f'config.model.dtype = config.transfer.dtype = "{dtype}"',
        'config.tokenizer.kind = "hf"',
        "config.sft.steps = 0",
        "config.learner.learning_rate = 1e-6",
        "config.schedule.steps = 200",
    ]


def _task(choice: InitAnswers, file: Path) -> list[str]:
    answers = choice.answers or ("none" if choice.model == TINY else "boxed")
    if answers not in FORMATS:
        raise ConfigError("--answers", answers, "no form of answers", f"Known: {', '.join(FORMATS)}.")
    if (kind := _kind(choice.task)) is None:
        sources.allowed(choice.task)
        lines = [
            "# Task: problems that are generated, each with its scorer.",
            f"config.task.name = {json.dumps(choice.task)}",
        ]
        lines += [] if choice.task == "spell_backward" else ["config.task.args = {}"]
    else:
        lines = [
            "# Task: the rows of a file. Its columns are recognized (docs/prompts.md); task.prompt_column and",
            "# task.answer_column name others.",
            f'config.task.source = "{kind}"',
            f"config.task.path = {json.dumps(_relative(choice.task, file))}",
            "config.task.args = {}",
            "config.task.heldout_items = 128  # questions that are never trained, for evaluations",
        ]
    if choice.model != TINY:
        lines += ['config.task.prompt_style = "full"', "config.task.max_prompt_tokens = 512"]
    elif answers != "none" or kind is not None:
        lines += [
            "config.task.max_prompt_tokens = 192  # tokens are characters",
            "config.sampler.prefill_buckets = (64, 192)",
            "config.sampling.max_tokens = 64",
            "config.learner.row_tokens = 256",
        ]
    if answers != "none":
        lines += [
            f"config.task.system_prompt = {json.dumps(FORMATS[answers])}",
            f'config.task.extract = "{answers}"  # the part of an answer that is scored',
        ]
    if kind is not None:
        lines.append('config.task.reward = "exact"  # "math" compares as mathematics (pip install \'jaxroll[math]\')')
    return lines


def _kind(task: str) -> str | None:
    """The kind of dataset that `task` names as a path; None for the name of a task."""
    if Path(task).is_dir():
        return "hf_dataset"
    kind = KINDS.get(Path(task).suffix)
    if kind is None and (os.sep in task or "." in task):
        raise ConfigError(
            "--task", task, "neither a task nor a dataset", f"Datasets end in {' or '.join(KINDS)}, or are folders."
        )
    return kind


def _devices(choice: InitAnswers) -> list[str]:
    """Meshes of learner and sampler, half of the devices each, and sizes of batches."""
    platform, devices = _hardware(choice.hardware)
    learner = sampler = max(1, devices // 2)
    fsdp, tensor = (1, 1) if choice.model == TINY else _axes(choice.model, learner, sampler)
    lines = [f"# Hardware: {choice.hardware}."]
    if platform == "cpu":
        lines.append('config.placement.platform = "cpu"')
    else:
        lines.append("config.evaluator.every = 0  # an evaluator would need its own devices")
    if devices == 1:
        lines.append("config.placement.colocated = True  # all roles take turns on the one device")
    if devices > 1:
        lines += [f"config.learner.mesh.fsdp = {fsdp}", f"config.sampler.mesh.tensor = {tensor}"]
        if (count := sampler // tensor) > 1:
            lines.append(f"config.sampler.count = {count}")
    if choice.model != TINY:
        lines += [
            f"config.learner.micro_batch_rows = {fsdp * math.ceil(4 / fsdp)}",
            "config.learner.row_tokens = 2048",
            "config.sampling.max_tokens = 1024",
            "config.sampler.slots = 64",
            "config.sampler.prefill_buckets = (128, 256, 512)",
            "config.sampler.decode_chunk = 8",
        ]
    return lines


def _hardware(hardware: str) -> tuple[str, int]:
    """Platform and number of devices; 0 for a CPU."""
    platform, _, count = hardware.partition(":")
    if hardware == "cpu":
        return "cpu", 0
    if platform not in ("gpu", "tpu") or not count.isdecimal() or not 1 <= int(count) <= 100_000:
        raise ConfigError("--hardware", hardware, "not cpu, gpu:N or tpu:N", "As in --hardware=gpu:8.")
    return platform, int(count)


def _axes(model: str, learner: int, sampler: int) -> tuple[int, int]:
    """The largest axes `fsdp` of the learner and `tensor` of a sampler that divide the model and the devices."""
    spec = folders.described(Path(model).expanduser())
    fsdp = math.gcd(learner, spec.width)
    return fsdp, math.gcd(sampler, math.gcd(spec.heads, spec.hidden))


# Questions of `jaxroll init`, by flag.
QUESTIONS = {
    "model": "Model: `tiny` (trained here from nothing), or the folder of a Hugging Face checkpoint",
    "task": "Task: a reasoning_gym task, or a .jsonl or .parquet file or `datasets` folder of prompts and answers",
    "answers": "Form of answers: none, boxed, answer_tag, last_number, after_think; empty: none for tiny, else boxed",
    "hardware": "Hardware: cpu, gpu:N or tpu:N with the number of devices",
}  # fmt: skip


def init_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("file", metavar="FILE", help="the config file to write, ending in .py")
    for name, question in QUESTIONS.items():
        one.add_argument(f"--{name}", metavar=name.upper(), help=question[0].lower() + question[1:])


# --- `jaxroll place`: the placement, schedule and age bound of a config on described hardware (`sim.costs.Hardware`)


def run_place(options: argparse.Namespace) -> None:
    """`place`: print the best placement on the cluster, as changes of the config. ConfigError for a wrong file."""
    if not options.cluster:
        raise ConfigError("--cluster", None, "no cluster is described", "Add --cluster=FILE (docs/placement.md).")
    found = hardware(Path(options.cluster))
    if found.roles:
        _print_workflow(found, options)
        return
    config = configs.load(options.config, options.overrides) if options.config else configs.parse({})
    if config.placement.learner_samplers:
        reason, key = "placements with partial overlap are not compared", "placement.learner_samplers"
        raise ConfigError(key, config.placement.learner_samplers, reason, f"Add --config.{key}=0.")
    planner = place.Planner(config, found)
    chosen: list[tuple[place.PlacementPlan, place.Prediction]] = []
    refused = ""
    for one, predicted in place.ranked(planner, options.objective):
        try:
            changed = configs.override(configs.to_dict(config), place.overrides(planner, one))
            preflight.check_described(configs.parse(changed))
        except ConfigError as error:
            refused = refused or str(error)
            continue
        chosen.append((one, predicted))
        if len(chosen) >= max(1, options.simulate):
            break
    if not chosen:
        raise ConfigError(
            "--config", options.config, f"it accepts no placement that fits: {refused}", "Change that key."
        )
    best = _described(planner, *chosen[0])
    if options.simulate:
        rows = [_described(planner, *each) for each in place.simulated_best(planner, chosen, options.objective)]
        best = rows[0] | {"compared": [{key: row[key] for key in COMPARED} for row in rows]}
    accelerator = best["accelerator"]
    start = ["launch", "--on=LAUNCHER", f"--accelerator={accelerator}"] if accelerator else ["train"]
    words = [f"--config={options.config or 'FILE'}", *(f"--config.{change}" for change in best["overrides"])]
    best["launch"] = shlex.join(["jaxroll", *start, *words])
    if options.json:
        print(json.dumps({"objective": options.objective, "source": found.source, "class": "S"} | best))
        return
    print("\n".join(_lines(best)), best["launch"], sep="\n")


def hardware(path: Path) -> Hardware:
    """The hardware that a TOML file describes. ConfigError names the key that is wrong, and the remedy."""
    found = costs.load(path, Hardware, "docs/placement.md lists the keys.")
    names = [each.name for each in found.devices]
    known = {*simulate.SCHEDULES, place.SHARED}

    def refuse(key: str, value: object, reason: str, remedy: str) -> None:
        raise ConfigError(f"{path}: {key}", value, reason, remedy)

    if not names:
        refuse("devices", None, "no device is described", "Add a table [[devices]] with name and count.")
    if twice := [name for name in names if names.count(name) > 1]:
        refuse("devices.name", twice[0], "two types have this name", "Add their counts, or rename one.")
    if unknown := [name for name in found.search.schedules if name not in known]:
        refuse("search.schedules", unknown[0], "no schedule has this name", f"Known: {', '.join(sorted(known))}.")
    if found.failures:
        refuse("failures", len(found.failures), "a placement has no roles yet", "Set lost_every_s in [[devices]].")
    for role in found.roles:
        for key, table in (("seconds", role.seconds), ("rates", role.rates)):
            if other := [name for name in table if name not in names]:
                refuse(
                    f"roles.{key}", other[0], f"no type of device of role {role.name}", f"Known: {', '.join(names)}."
                )
        if missing := [name for name in role.after if name not in [each.name for each in found.roles]]:
            refuse("roles.after", missing[0], f"{role.name} depends on a role that is not described", "Add its table.")
        if bool(role.seconds) == bool(role.rates and role.rollouts):
            refuse("roles.seconds", role.name, "a role has either seconds, or rates and rollouts", "Give one of them.")
    if found.plan:
        return _with_plan(found, path)
    measured = found.learner != LearnerCosts() and found.sampler != SamplerCosts()
    if not (found.roles or found.model or measured):
        refuse(
            "model",
            None,
            "nothing tells the time of a step",
            "Add [model] and the rates of [[devices]], a plan, "
            "[[roles]], or the tables that `jaxroll sim calibrate RUN` prints.",
        )
    if found.model and not found.roles:
        for each in found.devices:
            if math.isinf(each.flops) or math.isinf(each.bytes_per_s):
                refuse("devices.flops", each.name, "[model] needs the rates of each type", "Add flops and bytes_per_s.")
    return found


def _with_plan(found: Hardware, path: Path) -> Hardware:
    """The hardware with the costs of a plan of one of its types, for the numbers of devices of that plan."""
    file = path.parent / found.plan
    try:
        plan = disk.read_json(file)
        speed, roles, programs = plan["speed"], plan["roles"], plan["programs"]
        prefill_s = max(row["least_s"] for row in programs if row["name"].startswith("prefill"))
        sampler = SamplerCosts(speed["decode_step_s"], prefill_s, all_slots=True)
        learner = LearnerCosts(micro_batch_overhead_s=speed["learner_s"] / speed["micro_batches"])
        sends = TransferCosts(latency_s=speed["transfer_s"])
        devices = {"sampler": roles["sampler"]["chips"], "learner": roles["learner"]["chips"]}
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, DataError) as error:
        reason = f"is no plan that fits ({type(error).__name__}: {error})"
        raise ConfigError(f"{path}: plan", found.plan, reason, "Write it with `jaxroll plan --json`.") from error
    space = replace(found.search, sampler_devices=(devices["sampler"],), learner_devices=(devices["learner"],))
    return replace(found, sampler=sampler, learner=learner, transfer=sends, search=space, model=None)


def _print_workflow(found: Hardware, options: argparse.Namespace) -> None:
    """Print the plan of the roles of the file. Its roles need not be those of JaxRoll, so it has no config."""
    plan, spread = place.workflow(found, options.objective)
    names, unit = [each.name for each in found.devices], found.search.unit
    units = {
        "+".join(leaf.roles): {name: n * unit for name, n in zip(names, leaf.devices, strict=True) if n}
        for leaf in plan.leaves()
    }
    row = {
        "step_s": plan.seconds,
        "low_s": plan.seconds * (1 - spread),
        "high_s": plan.seconds * (1 + spread),
        "alpha": plan.lag,
        "kind": plan.kind,
        "roles": units,
        "order": _order(plan),
    }
    if options.json:
        print(json.dumps({"objective": options.objective, "source": found.source, "class": "S"} | row))
        return
    print(f"step         {plan.seconds:.4g} s, between {row['low_s']:.4g} and {row['high_s']:.4g} s; alpha {plan.lag}")
    print(f"order        {_order(plan)}")
    for unit_, used in units.items():
        print(f"{unit_:12} {', '.join(f'{n} {name}' for name, n in used.items())}")


def _order(plan: Plan) -> str:
    """The tree as text: "then" on the same devices, "|" in a pipeline, "~" a step later, "&" at the same time."""
    if plan.kind == "role":
        return "+".join(plan.roles)
    sign = {"shared": "then", "pipelined": "|", "overlapped": "~", "parallel": "&"}[plan.kind]
    return f"({f' {sign} '.join(map(_order, plan.parts))})"


COMPARED = ("schedule", "alpha", "learner", "samplers", "sampler_devices", "step_s", "low_s", "high_s", "simulated")


def _described(
    planner: place.Planner, one: place.PlacementPlan, found: place.Prediction, run: simulate.Figures | None = None
) -> dict[str, Any]:
    """A candidate, its prediction, and figures of its simulation if there is one, as a JSON object."""
    devices = planner.hardware.devices
    figures = ("step_s", "tokens_per_s", "cost_per_million_tokens", "age_mean")
    simulated = {} if run is None else {"simulated": {key: run[key] for key in figures}}
    return (
        asdict(found)
        | simulated
        | {
            "schedule": one.schedule,
            "alpha": one.alpha,
            "learner": {devices[one.learner_type].name: one.learner_devices},
            "samplers": {each.name: n for each, n in zip(devices, one.samplers, strict=True) if n},
            "sampler_devices": one.sampler_devices,
            "overrides": place.overrides(planner, one),
            "accelerator": devices[one.learner_type].accelerator,
        }
    )


def _compared(row: Mapping[str, Any]) -> str:
    """A simulated candidate in one line."""
    (learner,), samplers = row["learner"].items(), " + ".join(f"{n} {name}" for name, n in row["samplers"].items())
    return (
        f"  {row['simulated']['step_s']:10.4g} s simulated, {row['step_s']:.4g} s predicted "
        f"({row['low_s']:.4g} to {row['high_s']:.4g}): {row['schedule']}, alpha {row['alpha']:g}, "
        f"learner {learner[1]} {learner[0]}, samplers {samplers} of {row['sampler_devices']}"
    )


def _lines(row: Mapping[str, Any]) -> list[str]:
    """A candidate for a person, and those that it was compared with by simulation."""
    samplers = ", ".join(f"{n} on {name}" for name, n in row["samplers"].items())
    (learner,) = row["learner"].items()
    return [
        f"schedule     {row['schedule']}, alpha {row['alpha']:g}",
        f"learner      {learner[1]} {learner[0]}"
        + (", shared with the samplers" if row["schedule"] == place.SHARED else ""),
        f"samplers     {samplers}; devices of each: {row['sampler_devices']}; slots: {row['slots']}",
        f"step         {row['step_s']:.4g} s predicted, between {row['low_s']:.4g} and {row['high_s']:.4g} s "
        f"(training {row['training_s']:.4g} s, generation {row['generation_s']:.4g} s)",
        f"throughput   {row['tokens_per_s']:,.0f} trained tokens/s",
        *(
            [f"simulated    {row['simulated']['step_s']:.4g} s a step, mean age {row['simulated']['age_mean']:.2f}"]
            if "simulated" in row
            else []
        ),
        f"cost         {row['price_per_hour']:.4g} per hour, {row['cost_per_million_tokens']:.4g} per million tokens",
        *(["compared     a step of the best predictions, by short simulations"] if "compared" in row else []),
        *map(_compared, row.get("compared", ())),
    ]

"""`jaxroll place`: the placement, schedule and age bound of a config on described hardware (`sim.costs.Hardware`)."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxroll import config as configs
from jaxroll.control import preflight
from jaxroll.errors import ConfigError
from jaxroll.policy.placement import Plan
from jaxroll.sim import costs, place, simulate
from jaxroll.sim.costs import Hardware, LearnerCosts, SamplerCosts, TransferCosts


def run(options: argparse.Namespace) -> None:
    """`place`: print the best placement on the cluster, as changes of the config. ConfigError for a wrong file."""
    if not options.cluster:
        raise ConfigError("--cluster", None, "no cluster is described", "Add --cluster=FILE (docs/placement.md).")
    found = hardware(Path(options.cluster))
    if found.roles:
        _print_workflow(found, options)
        return
    config = configs.load(options.config, options.overrides) if options.config else configs.parse({})
    planner = place.Planner(config, found)
    best: list[dict[str, Any]] = []
    refused = ""
    for one, predicted in place.ranked(planner, options.objective):
        changes = place.overrides(planner, one)
        try:
            preflight.check_described(configs.parse(configs.override(configs.to_dict(config), changes)))
        except ConfigError as error:
            refused = refused or str(error)
            continue
        best.append(_described(planner, one, predicted, changes))
        if options.simulate:
            run = place.simulated(planner, one)
            best[-1]["simulated"] = {
                key: run[key] for key in ("step_s", "tokens_per_s", "cost_per_million_tokens", "age_mean")
            }
        if len(best) >= max(1, options.simulate):
            break
    if not best:
        raise ConfigError(
            "--config", options.config, f"it accepts no placement that fits: {refused}", "Change that key."
        )
    if options.simulate:
        cheap = options.objective == "cost"
        best.sort(key=lambda row: row["simulated"]["cost_per_million_tokens"] if cheap else row["simulated"]["step_s"])
    start = (
        ["jaxroll", "launch", "--on=ENGINE", f"--accelerator={best[0]['accelerator']}"]
        if best[0]["accelerator"]
        else ["jaxroll", "train"]
    )
    words = [*start, f"--config={options.config or 'FILE'}", *(f"--config.{change}" for change in best[0]["overrides"])]
    best[0]["launch"] = shlex.join(words)
    if options.json:
        print(json.dumps({"objective": options.objective, "source": found.source, "class": "S"} | best[0]))
        return
    print("\n".join(_lines(best[0])), best[0]["launch"], sep="\n")


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
        plan = json.loads(file.read_text(encoding="utf-8"))
        speed, roles, programs = plan["speed"], plan["roles"], plan["programs"]
        prefill_s = max(row["least_s"] for row in programs if row["name"].startswith("prefill"))
        sampler = SamplerCosts(speed["decode_step_s"], prefill_s, all_slots=True)
        learner = LearnerCosts(micro_batch_overhead_s=speed["learner_s"] / speed["micro_batches"])
        sends = TransferCosts(latency_s=speed["transfer_s"])
        devices = {"sampler": roles["sampler"]["chips"], "learner": roles["learner"]["chips"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
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


def _described(
    planner: place.Planner, one: place.Candidate, found: place.Prediction, changes: list[str]
) -> dict[str, Any]:
    """A candidate and its prediction as a JSON object."""
    devices = planner.hardware.devices
    return asdict(found) | {
        "schedule": one.schedule,
        "alpha": one.alpha,
        "learner": {devices[one.learner_type].name: one.learner_devices},
        "samplers": {each.name: n for each, n in zip(devices, one.samplers, strict=True) if n},
        "sampler_devices": one.sampler_devices,
        "overrides": changes,
        "accelerator": devices[one.learner_type].accelerator,
    }


def _lines(row: Mapping[str, Any]) -> list[str]:
    """A candidate for a person."""
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
    ]

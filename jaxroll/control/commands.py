"""The commands. Each imports the heavy modules that it needs."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from jaxroll import config as configs
from jaxroll import disk, lifeline
from jaxroll.config import Config, RoleArgs, rewards
from jaxroll.config.derived import COLOCATED, model_folder, with_a_sampler
from jaxroll.control import preflight, program, run_dir
from jaxroll.control.child import check_not_supervised, check_served, config_environment, given_config, run_foreground
from jaxroll.errors import ConfigError
from jaxroll.run_paths import RunPaths

RUNS = Path("runs")
_MOST_DAYS = 36500  # of a certificate: the CA lives ten times as long, and openssl ends with the year 9999
_OF_WEIGHTS = {"generate": "generate", "eval": "evaluate", "serve": "serve"}  # functions of `tools.generate`


def run_train(options: argparse.Namespace) -> int:
    """`train`: start a new run, or continue one."""
    from jaxroll.control import train

    if (options.fork is not None or options.new_log) and not options.resume:
        raise ConfigError("--resume", None, "a new run has nothing for --fork or --new-log", "Add RUN and --resume.")
    if options.insecure and options.host is None:
        raise ConfigError("--insecure", None, "all traffic stays on this machine", "Leave it out, or add --host=NAME.")
    given = {name: getattr(options, name) for name in ("fork", "new_log", "host", "insecure")}
    if options.resume:
        if not options.run:
            raise ConfigError("RUN", None, "--resume names no run", "Add RUN (`jaxroll list` shows the runs).")
        path = run_dir.checked(options.run)
        if options.config:
            remedy = "Leave --config out; --config.KEY=VALUE may change a few keys."
            raise ConfigError("--config", options.config, "a run is resumed with its own config", remedy)
        run_dir.load(path)  # first: the lock is a file, and nothing is written into a folder that is not a run
        with run_dir.locked(path):
            config = run_dir.resume(path, options.overrides, _checked_here)
            return train.train(config, path, program.find_inventory(config), **given)
    if options.run:  # before the config is checked: that may import a library for seconds
        run_dir.check_free(run_dir.checked(options.run))
    config = preflight.named_config(options)
    inventory = program.find_inventory(config)  # also before
    preflight.check(config, inventory=inventory)
    print("".join(f"{line}\n" for line in configs.advice(config)), end="", file=sys.stderr)
    with _new_run(options, config.run.name, config) as path:
        print(f"The run is in {os.path.relpath(path)}.", flush=True)
        return train.train(config, path, inventory, **given)


def _checked_here(config: Config) -> None:
    preflight.check(config, inventory=program.find_inventory(config))


def run_role(options: argparse.Namespace) -> int:
    """A role in this process: under a supervisor, or alone."""
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr)  # it prints where every thread is
    if getattr(options, "join", None):
        from jaxroll.control import train

        return train.join(options, RUNS)
    args = role_args(options)
    if not options.child:
        check_not_supervised(args.run_dir, options.command, args.index)
        program.place_alone(options.command, args)
    if not lifeline.give_way():
        print(f"{options.command}: too many start at once: this session keeps the learner's priority", flush=True)
    if options.command == COLOCATED and args.config.run.deterministic:
        from jaxroll.control import train

        return train.deterministic(args)
    feeds = options.command == "feeder"  # in a child process of the store
    module = importlib.import_module(f"jaxroll.roles.{program.module_of(options.command, args.config)}")
    alone = options.command == "store" and not options.child
    with run_dir.locked(args.run_dir) if alone else contextlib.nullcontext():  # against `train` on the same run
        return module.feed(args) if feeds else module.main(args)


def role_args(options: argparse.Namespace) -> RoleArgs:
    """The arguments of a role from the command line; a role with a config but no run folder gets a new one."""
    index = getattr(options, "index", 0)
    if index < 0:
        raise ConfigError("--index", index, f"{options.command}s are numbered from 0", "Use 0 for the first.")
    name = f"{options.command}{f'-{index}' if options.command in ('sampler', 'actor') else ''}"
    config, path = _config_and_run(options, name)
    same = ("host", "port", "insecure", "fork", "new_log", "coordinator", "process", "peer")
    words = dict(zip(same, same, strict=True)) | {"drain": "drain_s"}
    given = {key: getattr(options, word) for word, key in words.items() if hasattr(options, word)}
    given |= {"samplers": tuple(options.sampler)} if options.command == "actor" else {}
    return program.checked_host(RoleArgs(config, path, getattr(options, "store", None), index, **given), options)


def run_offline(options: argparse.Namespace) -> int:
    """`sft`, `eval`, `generate` and `serve`: JAX work outside a run, in a child with the devices' environment."""
    if options.command == "generate" and (options.run or options.config) and not options.prompts:
        name = run_dir.checked(options.run).name if options.run else "RUN"
        raise ConfigError("PROMPT", None, "no prompt given", f"Add one, as in `jaxroll generate {name} PROMPT`.")
    if options.command == "eval" and options.run and not options.child:
        _evaluate_model_folder(options)
    check = None if options.command == "sft" or options.child else preflight.check_trained
    named = _model_folder(options) or preflight.run_with_other_sets(options)
    config, path = named or _config_and_run(options, options.command, check)
    if options.child:
        args = RoleArgs(config, path)
        if options.command != "sft":
            module = importlib.import_module("jaxroll.tools.generate")
            return getattr(module, _OF_WEIGHTS[options.command])(args, options)
        args.paths.warm_start_done.unlink(missing_ok=True)  # a kill may leave no warm start, not even the one before
        code = importlib.import_module("jaxroll.tools.sft").main(args)
        if not code:
            args.paths.warm_start_done.touch()
        return code
    check_served(options)
    inventory, cache_dir = program.find_inventory(config), program.default_cache_dir(path, os.environ)
    env = program.offline_env(config, inventory, cache_dir, program.visible_gpus())
    argv = [sys.executable, "-m", "jaxroll", options.command, f"--run={path}", *options.passed_on]
    held = run_dir.locked(path) if options.command == "sft" else contextlib.nullcontext()  # it replaces the warm start
    with held, config_environment(path, config) as handed:
        return run_foreground(argv, env | handed)


def _evaluate_model_folder(options: argparse.Namespace) -> None:
    """If RUN is the folder of a Hugging Face model, take model and tokenizer from it and the task from `--config`."""
    folder = Path(options.run)
    if RunPaths(folder).run_file.exists() or not (folder / "config.json").is_file():
        return
    if not options.config:
        reason = "is the folder of a model, which has no task"
        raise ConfigError("RUN", options.run, reason, f"Name a task too: jaxroll eval {options.run} --config=FILE")
    named = [f"--config.model.path={folder}"]
    if (folder / "tokenizer.json").is_file():
        named += ["--config.tokenizer.kind=hf", f"--config.tokenizer.path={folder}"]
    options.overrides, options.run = [*named, *options.overrides], None


def _model_folder(options: argparse.Namespace) -> tuple[Config, Path] | None:
    """The config and path of a model's folder that `serve` or `tinker-serve` names; None if it names a run."""
    if options.command not in ("serve", "tinker-serve") or options.config or not options.run:
        return None
    path = _absolute(options.run)
    if RunPaths(path).run_file.exists() or not (path / "tokenizer.json").is_file():
        return None
    config = configs.of_model_folder(path)
    preflight.check_options(options, config)
    if not options.child:  # it would find out after it has loaded JAX
        preflight.check_model(config)
    return config, path


def run_tinker(options: argparse.Namespace) -> int:
    """`tinker-serve`: a trainer and a sampler under the supervisor; or, as their child, one of them."""
    from jaxroll.control import train

    model = _model_folder(options)
    return train.run_tinker(*(model or _config_and_run(options, "tinker")), options, of_model=model is not None)


def run_compile(options: argparse.Namespace) -> int:
    """`compile`: the programs of one role, here when we are the child, else in a child with that role's devices."""
    config, path = _config_and_run(options, options.command)
    name = "sampler-0" if options.role == "sampler" else options.role
    placed = with_a_sampler(config) if options.role == "sampler" else config
    if not options.child:
        specs = program.compilers(
            placed,
            path,
            program.find_inventory(placed),
            python=sys.executable,
            cache_dir=program.default_cache_dir(path, os.environ),
            names=(name,),
            visible_gpus=program.visible_gpus(),
        )
        if not specs:
            remedy = "Colocated roles and a learner of several hosts compile when they start."
            raise ConfigError("--role", options.role, "has no programs of its own in this run", remedy)
        return run_foreground(list(specs[0].argv), dict(specs[0].env))
    from jaxroll.metrics import JsonlTracker
    from jaxroll.roles.weights import RoleLog

    lifeline.give_way()
    tracker = JsonlTracker(RunPaths(path).metrics)
    module = importlib.import_module(f"jaxroll.roles.{options.role}")
    module.compile_programs(RoleArgs(config, path), RoleLog(name, tracker.log))
    tracker.close()
    return 0


def run_config(options: argparse.Namespace) -> None:
    """`config`: print the resolved config as JSON, and lines about the rows of a file and the reward on stderr."""
    lines: list[str] = []
    path = options.run and _absolute(options.run)
    config = run_dir.load_config(path) if path else preflight.runnable_config(options, lines.append)
    print(*lines, sep="\n", end="\n" * bool(lines), file=sys.stderr)
    print(json.dumps(configs.to_dict(config), indent=2))
    print(*rewards.lines(config), *configs.advice(config), sep="\n", file=sys.stderr)


def run_sim(options: argparse.Namespace) -> None:
    """`sim`: simulate a run, or every value of a sweep, or calibrate a cluster."""
    from jaxroll.report.formats import figures_of_run
    from jaxroll.sim import costs, simulate

    if options.targets[:1] == ["calibrate"]:
        if len(options.targets) != 2:
            raise ConfigError("RUN", None, "no run named", "As in `jaxroll sim calibrate runs/demo`.")
        return print(costs.text(costs.calibrated(_absolute(options.targets[1]))), end="")
    if len(options.targets) > 1:
        raise ConfigError("RUN", " ".join(options.targets), "more than one", "See `jaxroll sim calibrate RUN`.")
    if not options.cluster:
        raise ConfigError("--cluster", None, "no cluster", "`jaxroll sim calibrate RUN` measures one.")
    config, cluster = costs.checked(preflight.named_config(options)), costs.load(Path(options.cluster))
    if options.sweep:
        for values, one, on in simulate.swept(config, cluster, options.sweep):
            found = values | simulate.simulate(one, on, Path(), keep=False, report=_on_stderr) | {"class": "S"}
            named = ", ".join(f"{key}={value}" for key, value in values.items())
            print(json.dumps(found) if options.json else "\n".join([named, *figures_of_run(found), ""]), flush=True)
        return
    options.run = options.targets[0] if options.targets else None
    with _new_run(options, f"sim-{config.run.name}", config) as path:
        run_dir.write(path, run_dir.load(path) | {"simulated": cluster.source or "yes", "created": simulate.EPOCH_S})
        found = simulate.simulate(config, cluster, path, report=_on_stderr)
    print(json.dumps(found | {"class": "S"}) if options.json else "\n".join(figures_of_run(found)))
    print(f"Simulated (class S). The run is in {os.path.relpath(path)}.", file=sys.stderr)


def run_plan(options: argparse.Namespace) -> int:
    """`plan`: memory and speed of a config on described hardware; the child compiles, the parent refuses first."""
    from jaxroll.tools import chips

    topology = chips.topology(options.topology)
    config = chips.described(preflight.named_config(options), topology)
    preflight.check_described(config)
    if options.child:
        from jaxroll.tools import plan

        folder = program.default_cache_dir(RUNS / "plan", os.environ) / "plan"
        return plan.main(with_a_sampler(config), topology, folder, as_json=options.json)
    env = chips.tpu_environment() if topology.platform != "cpu" else program.cpu_env(topology.count)
    return run_foreground([sys.executable, "-m", "jaxroll", *options.words], env)


def _on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_report(options: argparse.Namespace) -> int:
    """`report`: summary and page of a run."""
    path = _absolute(options.folder)
    run_dir.load(path)
    from jaxroll.report import page as report

    return report.main(path, as_json=options.json)


def run_ui(options: argparse.Namespace) -> int:
    """`ui`: the dashboard of the runs in a folder."""
    path = _absolute(options.folder)
    if not path.is_dir():
        raise ConfigError("RUNS", options.folder, "no such folder", "Name a folder of runs, or a run (`jaxroll list`).")
    from jaxroll.ui import server

    return server.main(path, options)


def run_inspect(options: argparse.Namespace) -> int:
    """`inspect` and `profile`: a look into a live or finished run, and a trace of a role of a live one."""
    path = _absolute(options.folder)
    config = run_dir.load(path)["config"]
    if options.command == "profile":
        from jaxroll.tools import profile

        return profile.main(path, options)
    from jaxroll.report import inspect

    return inspect.main(path, config, group=options.group, as_json=options.json)


def run_replay(options: argparse.Namespace) -> int:
    """`replay`: every record of the log, checked. The log alone is enough."""
    from jaxroll.report import archive

    if not RunPaths(path := _absolute(options.folder)).database.exists():
        run_dir.load(path)  # ConfigError where there is no run
    return archive.replay_main(path, as_json=options.json)


def run_export(options: argparse.Namespace) -> int:
    """`export`: trajectories as a table, and the timeline."""
    path = _absolute(options.folder)
    config = run_dir.load(path)["config"]
    from jaxroll.report import archive

    archive.check_targets(path, perfetto=options.perfetto, parquet=options.parquet, jsonl=options.jsonl)
    if options.perfetto:
        archive.export_timeline(path, Path(options.perfetto))
        if not options.parquet and not options.jsonl:
            return 0
    return archive.export_main(path, config, parquet=options.parquet, jsonl=options.jsonl)


def run_checkpoints(options: argparse.Namespace) -> int:
    """`checkpoints`: what a run has to resume from. Files are read, no JAX, no device, no store."""
    path = _absolute(options.folder)
    config = run_dir.load(path)["config"]  # perhaps damaged: the checkpoints are shown without it
    learner = config.get("learner") if isinstance(config, dict) else None
    keep_best = str(learner.get("keep_best", "")) if isinstance(learner, dict) else ""
    from jaxroll.report import archive

    return archive.checkpoints_main(path, verify=options.verify, as_json=options.json, keep_best=keep_best)


def run_weights(options: argparse.Namespace) -> int:
    """`weights`: to and from Hugging Face, in a child that leaves every device alone."""
    source, out = _absolute(options.source), _absolute(options.out)
    if not options.child:
        disk.check_new_folder(out)
        if options.direction == "import" and not (source / "config.json").is_file():
            raise ConfigError("HF_FOLDER", str(source), "holds no config.json", "Give a Hugging Face checkpoint.")
        if options.direction == "export" and RunPaths(source).run_file.is_file():
            preflight.check_trained(source)
        env = program.common_env(str(program.default_cache_dir(RUNS, os.environ))) | program.cpu_env()
        return run_foreground([sys.executable, "-m", "jaxroll", *options.words], env)
    from jaxroll.tools import weights

    if options.direction == "import":
        print(weights.import_folder(source, out, options.dtype))
        return 0
    above = (source, source.parent, source.parent.parent)  # RUN, RUN/warm, RUN/checkpoints/LINEAGE.STEP
    run = next((weights.OfRun(at, run_dir.load_config(at)) for at in above if RunPaths(at).run_file.is_file()), None)
    if options.adapters:
        print(weights.export_adapters(source, run, out, options.dtype, options.checkpoint))
    else:
        with weights.opened(source, run, options.checkpoint) as held:
            print(weights.export(held, out, options.dtype, options.shard_mb * 10**6))
    return 0


def run_list(options: argparse.Namespace) -> None:
    """`list`: one line per run."""
    if not (folder := Path(options.folder)).is_dir() and options.folder != str(RUNS):
        raise ConfigError("folder", options.folder, "is not a folder", "Name the one that holds the runs.")
    runs = run_dir.find_runs(folder)
    if not runs:
        print(f"No runs in {options.folder}/.")
    for run in runs:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created_s))
        held = "" if run.accuracy is None else f"  held-out {100 * run.accuracy:.1f} %"
        print(f"{made}  {run.path}  {run.steps}/{run.of_steps} steps{held}")


def run_demo(options: argparse.Namespace) -> int:
    """`demo`."""
    from jaxroll.control import train

    return train.demo(options.config, options.seed, options.overrides, options.words)


def run_env(options: argparse.Namespace) -> int:
    """`env check`: 0 when the environment keeps its contract, 1 with the list of violations; `env serve`."""
    preflight.see_working_folder()
    if options.action == "serve":
        from jaxroll.testing import openenv_server

        return openenv_server.main(options)
    from jaxroll.testing import environments

    if options.episodes < 1:
        raise ConfigError("--episodes", options.episodes, "nothing would be played", "Give 1 or more.")
    found = environments.report(options.name, options.config, overrides=options.overrides, episodes=options.episodes)
    if options.json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        print(environments.text(found))
    return 1 if found.violations else 0


def run_doctor(options: argparse.Namespace) -> int:
    """`doctor`."""
    return preflight.main()


def run_tls(options: argparse.Namespace) -> None:
    """`tls`: a CA and certificates for a run, or the token of one role."""
    from jaxroll.rpc import protocol, tls

    if options.token_of:
        secret = protocol.load_secret(_absolute(options.folder))
        if secret is None:
            raise ConfigError("RUN", options.folder, "has no token", "Make it with `jaxroll tls RUN`.")
        print(protocol.bearer(secret, protocol.right_of(options.token_of)))
        return
    if not 1 <= options.days <= _MOST_DAYS:
        raise ConfigError("--days", options.days, f"must be between 1 and {_MOST_DAYS}", "365 days are one year.")
    print(tls.make_certificates(run_dir.checked(options.folder, "RUN"), options.host, options.days))


def run_launch(options: argparse.Namespace) -> int:
    """`launch`: start the roles with a launcher, or print what launch/*.sh runs."""
    from jaxroll.control import launchers, train

    launcher = launchers.launcher_of(options)
    if launcher == "local" and not options.dry_run:
        options.resume = options.fork = options.host = options.new_log = None
        return run_train(options)
    config = preflight.named_config(options)
    preflight.check_described(config)  # the files it names are on the hosts
    run_dir.checked(os.path.join("/", options.run or ""))
    if launcher in launchers.LAUNCHERS:
        return launchers.hand_over(config, launcher, options, _absolute(options.run or launchers.Target.run))
    if launcher == "ssh" and not options.dry_run:
        return train.over_ssh(config, launchers.target_of(options), options.words)
    print(launchers.shown(config, launcher, options))
    return 0


def run_proposal(options: argparse.Namespace) -> None:
    """`init` and `place`."""
    from jaxroll.control import propose

    if options.command == "place":
        propose.run_place(options)
    else:
        propose.run_init(options, propose.asker())


def _config_and_run(
    options: argparse.Namespace, name: str, check: Callable[[Path, Config], None] | None = None
) -> tuple[Config, Path]:
    """The config and the run folder that --config and --run name together; `check` may refuse an existing folder."""
    folder = options.run
    if options.config:
        config = preflight.runnable_config(options)
        preflight.check_options(options, config)
        if folder:
            if check is not None:
                check(run_dir.checked(folder), config)
            return config, run_dir.shared(folder, config, options.words)
        if check is not None and not model_folder(config):
            raise ConfigError("RUN", None, "no run named", "Name one that has trained, or a config with model.path.")
        return config, run_dir.create_unique(RUNS, name, config, options.words)
    if not folder:
        raise ConfigError("RUN", None, "no run named", "Name one (`jaxroll list` shows them), or give --config=FILE.")
    if options.overrides:
        reason = "the run has its config already"
        raise ConfigError(options.overrides[0], folder, reason, "Give --config=FILE with overrides, or none.")
    path = run_dir.checked(folder)
    config = given_config(path) if options.child else run_dir.load_config(path)
    preflight.check_options(options, config)
    if check is not None:
        check(path, config)
    return config, path


def _new_run(options: argparse.Namespace, name: str, config: Config) -> contextlib.AbstractContextManager[Path]:
    if options.run:
        return run_dir.new_run(options.run, config, options.words)
    return run_dir.new_unique_run(RUNS, name, config, options.words)


def _absolute(folder: str) -> Path:
    return Path(os.path.abspath(folder))


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "train": run_train,
    **dict.fromkeys(("store", "sampler", "actor", "learner", "evaluator", "colocated", "feeder"), run_role),
    **dict.fromkeys(("sft", "eval", "generate", "serve"), run_offline),
    "tinker-serve": run_tinker,
    "compile": run_compile,
    "sim": run_sim,
    "plan": run_plan,
    **dict.fromkeys(("init", "place"), run_proposal),
    "config": run_config,
    "ui": run_ui,
    "report": run_report,
    **dict.fromkeys(("inspect", "profile"), run_inspect),
    "replay": run_replay,
    "export": run_export,
    "checkpoints": run_checkpoints,
    "weights": run_weights,
    "list": run_list,
    "demo": run_demo,
    "doctor": run_doctor,
    "env": run_env,
    "launch": run_launch,
    "tls": run_tls,
}

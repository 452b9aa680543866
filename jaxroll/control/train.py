"""A run from this machine: warm start, then all roles under the supervisor. Also joining samplers, Tinker, the demo."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

import jaxroll
from jaxroll import config as configs
from jaxroll import disk, lifeline
from jaxroll.clock import simulated_unix
from jaxroll.config import Config, RoleArgs
from jaxroll.config.derived import LEADERS, has_warm_start, with_a_sampler
from jaxroll.config.rules import Inventory
from jaxroll.control import child, launchers, preflight, program, run_dir
from jaxroll.control.live import LiveView, open_view
from jaxroll.control.program import ProcessSpec
from jaxroll.control.supervisor import ProcessView, Supervisor
from jaxroll.envs import registry
from jaxroll.errors import EXIT_INTERRUPTED, ConfigError, DataError, InfraError
from jaxroll.metrics import JsonlTracker
from jaxroll.report import record, summary, trackers
from jaxroll.rpc import protocol
from jaxroll.run_paths import RunPaths
from jaxroll.store import client
from jaxroll.store.core.admission import Settings
from jaxroll.store.log import database
from jaxroll.store.messages import Joined


def train(
    config: Config,
    path: Path,
    inventory: Inventory,
    *,
    fork: str | None = None,
    new_log: bool = False,
    host: str | None = None,
    insecure: bool = False,
) -> int:
    """Run `config` in the run folder `path`, whose lock the caller holds; the exit code.

    `fork` names the checkpoint of an earlier process to fork at ("": the newest); None continues where it ended. With
    `new_log` a store without a log begins one at the newest checkpoint.
    `host` is the name by which samplers on other machines reach this one; None: there are none.
    """
    began = time.monotonic()
    steps = Settings.of(config).steps
    if fork is None and not new_log and is_complete(path, steps):
        print(
            f"All {steps} steps of this run are trained. To train more: --config.schedule.steps={2 * steps}", flush=True
        )
        return 0
    cache_dir = program.default_cache_dir(path, os.environ)
    gpus = program.visible_gpus()
    specs = program.build(config, path, inventory, python=sys.executable, cache_dir=cache_dir, visible_gpus=gpus)
    if fork is not None:
        # The name tells the store that a learner that was started again means the same fork.
        specs = program.forked(specs, path, f"--fork={fork}@{uuid.uuid4().hex}")
    if new_log:
        specs = program.forked(specs, path, "--new-log")
    if host is not None:
        specs = program.reachable(specs, config, host, insecure=insecure)
    child.note_roles(path, [spec.name for spec in specs])
    protocol.create(path)
    view = open_view(path, configs.to_dict(config))
    try:
        view.tensorboard, view.aliases = "tensorboard" in config.run.trackers, trackers.aliases(config)
        view.trackers = trackers.opened(config, path, view.say)
        code = 0
        if needs_warm_start(config, path):
            warm = warm_spec(path, program.offline_env(config, inventory, cache_dir, gpus))
            names = compiled_meanwhile(config, inventory, len(os.sched_getaffinity(0)))
            compilers = program.compilers(
                config, path, inventory, python=sys.executable, cache_dir=cache_dir, names=names, visible_gpus=gpus
            )
            view.say(
                f"Warm start: {config.sft.steps} steps on worked answers."
                f"{' The programs of the roles compile meanwhile.' if compilers else ''}"
            )
            code = _supervise([warm, *compilers], path, config, view, leader="sft")
        if code == 0:
            if not config.sampler.count:
                view.say(f"No sampler is started; each one joins: jaxroll sampler --join={path}")
            leader = next(spec.name for spec in specs if spec.name in LEADERS)
            code = _supervise(specs, path, config, view, leader=leader)
    finally:
        view.close()
    print(closing_words(code, path, time.monotonic() - began), flush=True)
    if code == 0:
        for sentence in summary.warnings(summary.summary(record.load(path))):
            print(f"Warning: {sentence}", flush=True)
    return code


def _supervise(specs: Sequence[ProcessSpec], path: Path, config: Config, view: LiveView, *, leader: str) -> int:
    restarts = config.supervisor if leader in LEADERS else replace(config.supervisor, max_restarts=1)
    with child.config_environment(path, config) as handed:
        return Supervisor(specs, path, restarts, view, leader=leader, environ={**os.environ, **handed}).run()


def over_ssh(config: Config, target: launchers.Target, words: Sequence[str]) -> int:
    """Run `config` with its roles on the hosts of `target`, supervised from here; the exit code.

    `words` are the command line, for the run's folder. Starts and restarts are in RUN/metrics.jsonl here, so the
    store's host is the best one to call this on.
    """
    path = run_dir.shared(target.run, config, words)
    specs = launchers.supervised(config, target)
    with run_dir.locked(path), contextlib.ExitStack() as closing:
        protocol.create(path)
        launchers.send_secrets(target, path)
        view = closing.enter_context(contextlib.closing(open_view(path, configs.to_dict(config))))
        return Supervisor(specs, path, config.supervisor, view, leader="learner").run()


def is_complete(path: Path, steps: int) -> bool:
    """True if the log says that the learner closed the run after `steps` steps: evaluator and sampler had its weights.

    No weights are published any more, so roles that are started again would wait for them.
    """
    with database.damage_named(path, "`jaxroll replay` says what is wrong with it"):
        if not database.is_there(path):
            return False
        with database.transaction(path) as db:
            closed = db.execute("SELECT 1 FROM meta WHERE key = 'closed' AND value = 'finished'").fetchone()
            last = db.execute("SELECT MAX(step) FROM claims WHERE trained_lineage IS NOT NULL").fetchone()[0]
    return closed is not None and last is not None and last + 1 >= steps


def needs_warm_start(config: Config, path: Path) -> bool:
    """True if the run is to begin with a warm start that has not been made."""
    return has_warm_start(config) and not RunPaths(path).warm_start_done.exists()


def compiled_meanwhile(config: Config, inventory: Inventory, cores: int) -> tuple[str, ...]:
    """The roles whose programs compile during the warm start.

    On accelerators the warm start has the learner's devices, so the learner waits. On a CPU all compile, but only if
    the warm start leaves a core idle: on two cores that it shares, a demo took 6 s longer.
    """
    if inventory.platform != "cpu":
        return ("sampler-0", "evaluator")
    used = config.learner.mesh.devices * config.placement.cpu_threads
    return ("sampler-0", "evaluator", "learner") if cores > used else ()


def warm_spec(path: Path, env: dict[str, str]) -> ProcessSpec:
    """The warm start as a process."""
    return ProcessSpec("sft", "sft", (sys.executable, "-m", "jaxroll", "sft", f"--run={path}"), env)


def closing_words(code: int, path: Path, seconds: float) -> str:
    """The command to type next."""
    shown, command = os.path.relpath(path), own_command()
    if code == 0:
        return f"The run is complete after {seconds:.0f} s. See it with: {command} report {shown}"
    if code == EXIT_INTERRUPTED:
        return f"Stopped after {seconds:.0f} s. Go on with: {command} train {shown} --resume"
    return f"The run ended after {seconds:.0f} s without finishing. Logs: {shown}/{RunPaths(path).logs.name}/"


def own_command() -> str:
    """The command for `jaxroll` here: the bare name where the shell finds it, else the path of the running one."""
    installed = Path(sys.executable).with_name("jaxroll")
    if shutil.which("jaxroll") or not installed.exists():
        return "jaxroll"
    near = os.path.relpath(installed)
    return str(installed) if near.startswith("..") else near


# --- A deterministic run (`run.deterministic`): all roles on one thread and a virtual clock


def deterministic(args: RoleArgs) -> int:
    """Train the whole run in this process on a virtual clock; the exit code. ConfigError for a folder with a run."""
    from jaxroll.sim import network, simulate, world  # no other run needs the simulation

    paths = args.paths
    if paths.database.exists() or any(paths.checkpoints.glob("*")):
        reason = "its log was in memory until its end, so the run in this folder cannot go on"
        raise ConfigError("run.deterministic", True, reason, "Start a new run: it has the same bits.")
    if registry.uses_processes(args.config):
        reason = "the environment runs in processes, which a virtual clock does not wait for"
        raise ConfigError("run.deterministic", True, reason, "Let it declare place = 'thread', or set it to False.")
    stop, pool = threading.Event(), registry.scoring_pool(args.config, args.run_dir, network.OrderedPool)
    pool.start()  # before JAX is loaded
    recorded = run_dir.load(args.run_dir)
    run_dir.write(args.run_dir, recorded | {"simulated": world.CLOCK.source, "created": simulate.EPOCH_S})
    lifeline.on_stop(stop.set)
    metrics = JsonlTracker(paths.metrics)

    async def job() -> int:
        loop = asyncio.get_running_loop()
        with simulated_unix(lambda: simulate.EPOCH_S + loop.time()):
            async with world.Deterministic(args, pool, metrics, stop) as run:
                try:
                    return await run.train()
                finally:
                    run.store.save(paths.database)

    try:
        return network.run(job(), world.LIMIT_S, network.InPlaceLoop)
    finally:
        metrics.close()
        pool.close()


# --- `jaxroll sampler --join`: one more sampler for a running run, started on any machine


def join(options: argparse.Namespace, runs: Path) -> int:
    """Replace this process by a sampler of the run that `--join` names. ConfigError if it cannot work here.

    `--join` is the address of the run's store, or the run's folder on this machine. Without that folder the sampler
    gets one of its own, RUN or a new one in `runs`. Token and certificates are in the environment or in the folder.
    The store sends the run's config and a number that no other sampler has.
    """
    for name, value in (("--config", options.config), ("--store", options.store), ("--index", options.index)):
        if value:
            raise ConfigError(name, value, "a sampler that joins gets it from the store", f"Leave {name} out.")
    shared = Path(os.path.abspath(options.join)) if os.path.isdir(options.join) else None
    if shared is None and not all(map(protocol.is_address, options.join.split(","))):
        reason = "neither HOST:PORT of a store nor the folder of a run"
        raise ConfigError("--join", options.join, reason, "Write it as in --join=127.0.0.1:7077 or --join=runs/demo.")
    if shared is not None and options.run:
        raise ConfigError("RUN", options.run, f"{options.join} is the folder of this sampler", "Leave RUN out.")
    address = options.join if shared is None else _store_address(shared)
    own = Path(os.path.abspath(options.run)) if options.run else None
    joined = asyncio.run(client.joined(address, shared or own, _say_what_it_waits_for))
    config = _config_of(joined)
    preflight.check(config)
    path = shared or _own_folder(own, config, joined, options.words, runs)
    words = ["sampler", f"--run={path}", f"--store={address}", f"--index={joined.index}", f"--drain={options.drain}"]
    words += [f"--process={options.process}"] * (options.process > 0)
    words += [f"--coordinator={options.coordinator}"] * (options.coordinator is not None)
    words += [f"--host={options.host}", f"--port={options.port}", *(["--insecure"] if options.insecure else [])]
    print(f"sampler-{joined.index} joins run {joined.run_id} at {address}; its folder is {path}", flush=True)
    # A sampler starts its scoring pool before anything else, so this process is replaced instead of going on.
    os.execv(sys.executable, [sys.executable, "-m", "jaxroll", *words])


def _say_what_it_waits_for(error: InfraError) -> None:
    print(f"{error} Trying again for {client.JOIN_S:.0f} s, as the run may be starting …", file=sys.stderr, flush=True)


def _store_address(shared: Path) -> str:
    path = RunPaths(shared).store_address
    try:
        address = disk.read_text(path).strip()
    except FileNotFoundError as error:
        remedy = "Start the run first, or give the address of its store."
        raise ConfigError("--join", str(shared), "no store has written its address here", remedy) from error
    except (OSError, DataError) as error:
        why = f"{path.name} cannot be read ({error})"
        raise ConfigError("--join", str(shared), why, "Give the address of the run's store.") from error
    if not all(map(protocol.is_address, address.split(","))):
        raise ConfigError(str(path), address, "is not HOST:PORT", "Give the address of the run's store.")
    return address


def _config_of(joined: Joined) -> Config:
    values = msgspec.json.decode(joined.config)
    try:
        return configs.parse(values)
    except ConfigError as error:
        remedy = "Install the same JaxRoll, and the files and modules that the config names."
        raise ConfigError("--join", joined.run_id, f"the run's config is refused here: {error}", remedy) from error


def _own_folder(own: Path | None, config: Config, joined: Joined, words: list[str], runs: Path) -> Path:
    if own is None:
        return run_dir.create_unique(runs, f"sampler-{joined.index}", config, words)
    return run_dir.shared(own, config, words)


# --- demo: a new run of configs/demo.py, its link `runs/demo`, its report

NAME = "demo"


def find_config(file: str | None, here: Path) -> Path:
    """The demo's config file: `file`, else configs/demo.py under `here`, else next to the package."""
    if file is not None:
        return Path(file)
    for root in (here, Path(jaxroll.__file__).parent.parent):
        if (root / "configs" / "demo.py").is_file():
            return root / "configs" / "demo.py"
    remedy = "Run the demo in a checkout of JaxRoll, or give --config=FILE."
    raise ConfigError("--config", "configs/demo.py", f"not found under {here}", remedy)


def demo(file: str | None, seed: int, overrides: list[str], argv: list[str]) -> int:
    """Run the demo from start to report; the exit code."""
    from jaxroll.report import page

    began = time.monotonic()
    config = configs.load(find_config(file, Path.cwd()), [f"run.seed={seed}", *overrides])
    preflight.check(config)
    inventory = program.find_inventory(config)
    with run_dir.new_unique_run(Path("runs"), NAME, config, argv, suffix=f"-seed{seed}") as path:
        run_dir.link(path, NAME)
        print(f"The demo runs in {path.parent.name}/{path.name} (seed {seed}).", flush=True)
        code = train(config, path, inventory)
    if code:
        return code
    failed = page.main(path, as_json=False)
    print(f"The whole demo took {time.monotonic() - began:.0f} s.", flush=True)
    return int(failed or 0)


# --- `jaxroll tinker-serve`: the processes of a Tinker server, each with its own devices, under the supervisor

LEAST_S = 20.0  # of --session-timeout
PARTS = {"trainer": "learner", "sampler": "sampler-0"}  # with the names under which their devices are placed


class _Shown:
    """Prints the supervisor's sentences, and the URL once there is one."""

    def __init__(self, url_file: Path) -> None:
        self._url_file, self._shown = url_file, ""

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Ignore metrics rows: there are none."""

    def tick(self, processes: Sequence[ProcessView]) -> None:
        """Print how to connect, when that is known or has changed."""
        try:
            line = self._url_file.read_text(encoding="utf-8").strip()
        except OSError:
            return
        if line and line != self._shown:
            self._shown = line
            url, name, token_file = line.split("\t")
            print(
                f"serves {name} to clients of the Tinker API. To connect:\n"
                f"  export TINKER_BASE_URL={url} TINKER_API_KEY=tml-$(cat {token_file})",
                flush=True,
            )

    def say(self, text: str) -> None:
        """Print `text`."""
        print(text, flush=True)


def tinker_options(one: argparse.ArgumentParser) -> None:
    """The options of the command, in addition to those of every HTTP server."""
    one.usage = "jaxroll tinker-serve RUN|FOLDER [OPTIONS]"
    one.add_argument("--name", help="the name of the base model (default: that of its folder)")
    one.add_argument("--token-file", metavar="FILE", help="file of the clients' token (default: RUN/http.token)")
    one.add_argument(
        "--session-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="a client that is silent for this time ends, with its models (default: 120)",
    )
    one.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)  # in a child process


def run_tinker(config: Config, path: Path, options: argparse.Namespace, *, of_model: bool) -> int:
    """The whole server over the run folder `path`, or over the model's folder `path`; in a child one part of it.

    Weights saved from a model's folder are in runs/tinker-NAME.
    """
    if not options.session_timeout >= LEAST_S:
        raise ConfigError(
            "--session-timeout", options.session_timeout, "clients report every 10 seconds", f"Use {LEAST_S:g} or more."
        )
    if options.child:
        return _tinker_part(config, path, options)
    child.check_served(options)
    if of_model:
        path = run_dir.shared(Path("runs") / f"tinker-{path.name}", config, options.words)
    return _serve_tinker(config, path, options)


def _serve_tinker(config: Config, path: Path, options: argparse.Namespace) -> int:
    """Serve from the run folder `path` until a stop signal; 0 then, otherwise the exit code of the failure."""
    served = with_a_sampler(config)
    devices = program.device_env(served, program.find_inventory(served), program.visible_gpus())
    common = program.common_env(str(program.default_cache_dir(path, os.environ)))
    command = (sys.executable, "-m", "jaxroll", "tinker-serve", f"--run={path}", *options.passed_on)
    specs = [
        ProcessSpec(part, name.partition("-")[0], (*command, f"--part={part}"), common | devices[name])
        for part, name in PARTS.items()
    ]
    with run_dir.locked(path), child.config_environment(path, config) as handed:
        protocol.create(path)
        (RunPaths(path).tinker_url).unlink(missing_ok=True)
        environ = {**os.environ, **handed}
        shown = _Shown(RunPaths(path).tinker_url)
        print(f"starts a trainer and a sampler; their logs are in {path}/logs", flush=True)
        code = Supervisor(specs, path, config.supervisor, shown, leader="trainer", environ=environ).run()
    return 0 if code == EXIT_INTERRUPTED else code


def _tinker_part(config: Config, path: Path, options: argparse.Namespace) -> int:
    """The trainer with its HTTP server, or the sampler, in this process."""
    if options.part == "sampler":
        from jaxroll.tinker import sampler

        return sampler.main(RoleArgs(config, path))
    from jaxroll.tinker import server

    return server.main(RoleArgs(config, path), options)

"""The command `jaxroll`: reads the command line, nothing else; the work is done by what it calls.

Options that begin with `--config.` change keys of the config; everything else is declared in `parser`.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxroll import disk, lifeline
from jaxroll.control import streams
from jaxroll.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, JaxRollError, exit_code

ROLES = ("store", "sampler", "actor", "learner", "evaluator", "colocated", "feeder")
OFFLINE = {
    "sft": "warm start on worked answers",
    "eval": "held-out accuracy of a run's newest weights",
    "generate": "try a run's weights: jaxroll generate RUN PROMPT… [--temperature=…]",
}
RUNNING = ("train", "demo")  # with the roles: the run goes on without a reader of their output
PASSED_ON = ("eval", "generate")  # their further words are read by what they call


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one command. Without `argv` this is the program itself, and stdout and stderr are made safe."""
    if argv is not None:
        return _command(list(argv), None)
    streams.ensure_utf8()
    output = streams.harden()
    code = _command(sys.argv[1:], output)
    sys.stdout.flush()
    if output.patience_s is None and output.lost is not None:
        print(f"error: stdout: {output.lost.strerror}; the output is not complete.", file=sys.stderr)
        return code or EXIT_FAILURE
    return code


def _command(words: list[str], output: streams.Outlet | None) -> int:
    options = argparse.Namespace()
    try:
        child = lifeline.bind_from_env()
        overrides, rest = split_overrides(words)
        top = parser()
        if rest and not rest[0].startswith("-") and rest[0] not in (known := _commands(top)):
            near = difflib.get_close_matches(rest[0], known, n=1)
            hint = f"Did you mean `jaxroll {near[0]}`?" if near else "`jaxroll --help` lists the commands."
            print(f"jaxroll: there is no command {rest[0]}. {hint}", file=sys.stderr)
            return EXIT_USAGE
        options, extra = top.parse_known_args(rest)
        if extra and options.command not in PASSED_ON:
            hint = _hint(options, extra[0])
            print(f"jaxroll {options.command}: unknown argument {extra[0]}. {hint}", file=sys.stderr)
            return EXIT_USAGE
        options.overrides, options.extra, options.words, options.child = overrides, extra, words, child
        if output is not None and options.command in (*RUNNING, *ROLES):
            output.patience_s = streams.NOT_SHOWN_S
        from jaxroll.control import commands

        return int(commands.COMMANDS[options.command](options) or 0)
    except JaxRollError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return exit_code(error)
    except OSError as error:
        advice = disk.remedy(error, Path(str(error.filename or getattr(options, "run", None) or ".")))
        if not advice:
            raise
        print(f"error: {error}. {advice}", file=sys.stderr, flush=True)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _commands(top: argparse.ArgumentParser) -> list[str]:
    (action,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    return list(action.choices)


def _hint(options: argparse.Namespace, word: str) -> str:
    """The likeliest meaning of an argument that the command does not take."""
    name = word.removeprefix("--").partition("=")[0]
    if word.endswith(".py") and not word.startswith("-") and hasattr(options, "config"):
        return f"A config file is given as --config={word}."
    if word.startswith("--") and "." in name and hasattr(options, "config"):
        return f"A key of the config is changed with --config.{word.removeprefix('--')}."
    return f"`jaxroll {options.command} --help` lists them."


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The `key=value` overrides among the words, and the other words. `--config.key value` is understood too."""
    overrides, rest = [], []
    pending = iter(words)
    for word in pending:
        if not word.startswith("--config."):
            rest.append(word)
        elif "=" in word:
            overrides.append(word.removeprefix("--config."))
        else:
            overrides.append(f"{word.removeprefix('--config.')}={next(pending, '')}")
    return overrides, rest


def parser() -> argparse.ArgumentParser:
    """The options of every command."""
    top = argparse.ArgumentParser(prog="jaxroll", description="Asynchronous RL for language models in JAX.",
                                  epilog="Any key of the config: --config.learner.learning_rate=1e-4")  # fmt: skip
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    train = add("train", "start all roles on this machine and watch over them")
    _run_options(train)
    train.add_argument("--resume", action="store_true", help="continue the run in --run")
    _fork_option(train)
    for role in ROLES:
        one = add(role, f"run the role {role} alone")
        _run_options(one)
        _role_options(role, one)
    for name, text in OFFLINE.items():
        _run_options(add(name, text))
    config = add("config", "print the resolved config")
    _run_options(config)
    report = add("report", "summary of a run, and its page report.html")
    report.add_argument("folder", metavar="RUN")
    report.add_argument("--json", action="store_true", help="print one JSON object")
    inspect = add("inspect", "what goes on in a run: leases, waits, failures; or one trajectory group in full")
    inspect.add_argument("--group", type=int, metavar="ID", help="this group: text, rewards, versions, events")
    replay = add("replay", "drive a run's log through the store's rules again and check every record")
    export = add("export", "the trajectories that a run keeps, one row per member")
    export.add_argument("--parquet", metavar="FILE", help="needs pyarrow (pip install 'jaxroll[data]')")
    export.add_argument("--jsonl", metavar="FILE", help="one JSON object a line")
    for one in (inspect, replay, export):
        one.add_argument("folder", metavar="RUN")
    for one in (inspect, replay):
        one.add_argument("--json", action="store_true", help="print one JSON object")
    checkpoints = add("checkpoints", "what a run has to resume from: step, lineage, size, time, log position, durable")
    checkpoints.add_argument("folder", metavar="RUN")
    checkpoints.add_argument("--verify", action="store_true", help="read every byte and compare it with its sum")
    checkpoints.add_argument("--json", action="store_true", help="print one JSON object")
    _weights_options(add("weights", "a model from and to Hugging Face"))
    _env_options(add("env", "check an environment of your own before a run depends on it"))
    demo = add("demo", "a small model learns by asynchronous RL on the CPU")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--config", metavar="FILE", help="default: configs/demo.py")
    listing = add("list", "the runs in a folder")
    listing.add_argument("folder", nargs="?", default="runs")
    tls = add("tls", "certificates for a run whose roles are on several machines, in RUN/tls, and its token")
    tls.add_argument("folder", metavar="RUN")
    tls.add_argument(
        "--host", action="append", default=[], metavar="NAME", help="of the store's and the learner's hosts, repeatedly"
    )
    tls.add_argument("--token-of", metavar="ROLE", help="only print what a machine shows that may speak as ROLE alone")
    tls.add_argument("--days", type=int, default=365, help="how long they are good for")
    add("doctor", "what is installed here, what will be skipped, how to get it")
    launch = add("launch", "the same roles on other machines (used by launch/*.sh)")
    _launch_options(launch)
    return top


def _role_options(role: str, one: argparse.ArgumentParser) -> None:
    """The options that `role` reads, and no other."""
    if role != "feeder":
        one.add_argument("--store", metavar="HOST:PORT", help="where the store is (for the store: where it listens)")
    if role in ("store", "learner", "sampler"):
        one.add_argument("--insecure", action="store_true", help="plain text to other machines, where there is no TLS")
    if role == "learner":
        one.add_argument("--host", default="127.0.0.1", help="the name under which samplers reach this process")
        one.add_argument("--index", type=int, default=0, help="which of the learner's hosts this is")
        one.add_argument(
            "--coordinator", metavar="HOST:PORT", help="where the learner's hosts meet, on the first; else JAX finds it"
        )
    if role in ("learner", "colocated"):
        _fork_option(one)
    if role in ("sampler", "actor"):
        one.add_argument("--index", type=int, default=0, help=f"which of several {role}s")
    if role == "sampler":
        one.add_argument("--host", default="127.0.0.1", help="the name under which actors reach this process")
        one.add_argument("--port", type=int, default=0, help="where it listens for actors; 0: any that is free")
    if role == "actor":
        one.add_argument(
            "--sampler",
            action="append",
            default=[],
            metavar="HOST:PORT",
            help="of each sampler; else RUN says it",
        )


def _weights_options(weights: argparse.ArgumentParser) -> None:
    directions = weights.add_subparsers(dest="direction", required=True, metavar="import|export")
    for name, source, text in (
        ("import", "HF_FOLDER", "a Qwen3 checkpoint as a folder for model.path and tokenizer.path"),
        ("export", "SOURCE", "a run's newest checkpoint, one checkpoint, or such a folder, for transformers"),
    ):
        one = directions.add_parser(name, help=text, description=text, allow_abbrev=False)
        one.add_argument("source", metavar=source)
        one.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
        one.add_argument("--dtype", choices=("as-stored", "float32", "bfloat16"), default="as-stored")
        if name == "export":
            one.add_argument("--shard-mb", type=int, default=5000, metavar="MB", help="of one file at most")


def _env_options(env: argparse.ArgumentParser) -> None:
    actions = env.add_subparsers(dest="action", required=True, metavar="check")
    text = "play an environment with a scripted model and list what breaks its contract"
    check = actions.add_parser("check", help=text, description=text, allow_abbrev=False)
    check.add_argument("name", metavar="MODULE:NAME", help="the environment, as in task.env")
    check.add_argument("--config", metavar="FILE", help="a config file whose tasks are played (see configs/)")
    check.add_argument("--episodes", type=int, default=32, metavar="N", help="scripts that are played, one by one")
    check.add_argument("--json", action="store_true", help="print one JSON object")


def _fork_option(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--fork", metavar="STEP", nargs="?", const="", help="give up what was trained after the checkpoint of STEP (or "
        "LINEAGE.STEP; the newest without one) and go on from there in a new lineage"
    )  # fmt: skip


def _run_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--config", metavar="FILE", help="a config file (see configs/)")
    one.add_argument("--run", metavar="DIR", help="the run's folder")


def _launch_options(one: argparse.ArgumentParser) -> None:
    _run_options(one)
    one.add_argument("--target", choices=("tpu_vm", "gpu"), required=True)
    one.add_argument(
        "--on", action="append", default=[], metavar="ROLE=HOST", help="as store=a, learner=b, sampler-0=c"
    )
    one.add_argument("--workdir", default=".", help="the checkout on the hosts")
    one.add_argument("--python", default="python3", help="the interpreter on the hosts")
    one.add_argument("--port", type=int, default=7077, help="of the store")
    one.add_argument(
        "--devices-per-host", type=int, default=0, help="TPU chips or GPUs of a host that has several roles"
    )
    one.add_argument("--gpu-memory-mb", type=int, default=0, help="of one GPU that roles share")
    one.add_argument("--zone", default="", help="of the TPU VMs")
    one.add_argument("--project", default="", help="of the TPU VMs")
    one.add_argument("--insecure", action="store_true", help="several hosts: plain text between them, on a trusted net")
    one.add_argument(
        "--tls", default="", metavar="DIR", help="several hosts: where their certificates are on each host"
    )
    one.add_argument("--dry-run", action="store_true", help="print host, command and environment per role")

"""The command `jaxroll`: reads the command line and calls the function of the command in `jaxroll.control.commands`.

`GROUPS` lists the commands and `parser` their options. Options that begin with `--config.` change keys of the config.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxroll import __version__, disk, lifeline
from jaxroll.control import GROUPS
from jaxroll.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, JaxRollError, exit_code

ROLES = tuple(command.name for command in GROUPS["roles"])
COMPILED = ("learner", "sampler", "evaluator")  # roles that have programs to compile
RUNNING = ("train", "demo", "serve", "tinker-serve", "ui")  # like roles, these go on when their output has no reader
HELP = (
    "RUN is the folder of a run; `train` and the roles also take it as --run=DIR. --config.KEY=VALUE changes a key of\n"
    "the config, as in --config.learner.learning_rate=1e-4. `jaxroll COMMAND --help` lists a command's arguments.\n"
)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one command. Without `argv` this is the program itself, and stdout and stderr are made safe."""
    if argv is not None:
        return _command(list(argv), None)
    lifeline.ensure_utf8()
    output = lifeline.harden()
    code = _command(sys.argv[1:], output)
    sys.stdout.flush()
    if output.patience_s is None and output.lost is not None:
        print(f"error: stdout: {output.lost.strerror}; the output is not complete.", file=sys.stderr)
        return code or EXIT_FAILURE
    return code


def _command(words: list[str], output: lifeline.Outlet | None) -> int:
    options = argparse.Namespace()
    try:
        if not (child := lifeline.bind_from_env()):  # a role that is started again goes on in a removed folder
            _check_folder()
        overrides, rest = split_overrides(words)
        top = parser(next((word for word in rest if not word.startswith("-")), ""))
        known = ("-h", "--help", "--version", *subparsers(top))
        if rest and rest[0] not in known and (rest[0][0:1] != "-" or all(word[0:1] == "-" for word in rest)):
            near = difflib.get_close_matches(rest[0], known, n=1)
            hint = f"Did you mean `jaxroll {near[0]}`?" if near else "`jaxroll --help` lists the commands."
            print(f"jaxroll: there is no command {rest[0]!r}. {hint}", file=sys.stderr)
            return EXIT_USAGE
        options, extra = top.parse_known_args(rest)
        if refused := _settle(options, extra, subparsers(top)[options.command]):
            print(f"jaxroll {options.command}: {refused}", file=sys.stderr)
            return EXIT_USAGE
        options.overrides, options.words, options.child, options.passed_on = overrides, words, child, []
        if options.command == "generate":
            passed = spelled(subparsers(top)["generate"], options, ("help", "run", "config"))
            options.passed_on = [*passed, "--", *options.prompts]
        if options.command in ("eval", "serve", "tinker-serve"):
            one = subparsers(top)[options.command]
            options.passed_on = spelled(one, options, ("help", "run", "config", "folder"))
        if output is not None and options.command in (*RUNNING, *ROLES):
            output.patience_s = lifeline.NOT_SHOWN_S
        from jaxroll.control import commands

        return int(commands.COMMANDS[options.command](options) or 0)
    except JaxRollError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return exit_code(error)
    except OSError as error:
        advice = disk.remedy(error, Path(str(error.filename or getattr(options, "run", None) or ".")))
        text = f"{error}. {advice}" if advice else disk.misfit(error)
        if not text:
            raise
        print(f"error: {text}", file=sys.stderr, flush=True)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (RuntimeError, MemoryError) as error:  # JAX has a RuntimeError for it
        full = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
        if not full or getattr(options, "command", "") not in ("generate", "eval", "serve", "tinker-serve"):
            raise
        what = str(error).partition("\n")[0][:200] or "out of memory"
        text = f"error: {what}. It does not fit into memory: ask for fewer slots or tokens."
        print(text, file=sys.stderr, flush=True)
        return EXIT_FAILURE


def _check_folder() -> None:
    """Raise ConfigError if the working folder was removed."""
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigError("working folder", None, f"is gone ({error.strerror})", "Change to another one.") from error


def subparsers(top: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, by its name."""
    (action,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def _settle(options: argparse.Namespace, extra: list[str], one: argparse.ArgumentParser) -> str:
    """Put RUN and the prompts where the command reads them; return the reason to refuse the arguments, or ''."""
    if options.command == "generate":  # prompts may follow options
        end = extra.index("--") if "--" in extra else len(extra)
        options.prompts += [word for word in extra[:end] if not word.startswith("-")] + extra[end + 1 :]
        extra = [word for word in extra[:end] if word.startswith("-")]
        if options.folder is not None and (options.run or options.config):
            options.prompts.insert(0, options.folder)
            options.folder = None
    if extra:
        return f"unknown argument {extra[0]}. {_hint(options, extra[0], one)}"
    _check_values(options, one)
    if (folder := getattr(options, "folder", None)) is None or not hasattr(options, "run"):
        return ""
    if folder.endswith(".py"):
        return f"RUN is a folder. A config file is given as --config={folder}."
    if options.run:
        return f"RUN is {folder}, and --run={options.run} names another one. Give one of them."
    options.run = folder
    return ""


# The least and the greatest value of an option. A number beyond them is a mistake, and some would take all memory.
_SHARE, _MANY = (0.0, 1.0), 10**6
BOUNDS: dict[str, tuple[float, float]] = {
    "port": (0, 65_535), "group": (0, 2**53), "simulate": (0, 1000), "process": (0, 9999),
    "temperature": (0.0, 100.0), "top_k": (0, _MANY), "top_p": (1e-6, 1.0), "min_p": _SHARE,
    "repetition_penalty": (0.01, 100.0), "samples": (1, _MANY), "max_tokens": (1, _MANY), "slots": (1, 4096),
    "queue": (0, _MANY), "context": (2, 16 * _MANY), "shard_mb": (1, _MANY), "episodes": (1, _MANY),
    "devices_per_host": (1, 1024), "gpu_memory_mb": (1, 10 * _MANY), "k": (1, _MANY),
}  # fmt: skip


_POSITIONAL = {
    "folder": "RUN",
    "name": "MODULE:NAME",
    "source": "SOURCE",
    "out": "OUT",
    "file": "FILE",
    "targets": "RUN",
}


def _check_values(options: argparse.Namespace, one: argparse.ArgumentParser) -> None:
    """Raise ConfigError for an option without a value, as `--config=$FILE` without the variable, or out of bounds."""
    for name, value in vars(options).items():
        key = _POSITIONAL.get(name, f"--{name.replace('_', '-')}")
        if "" in _listed(value) and name not in ("prompts", "fork") and one.get_default(name) != "":
            raise ConfigError(key, "", "is empty", "Name one, or leave it out.")
        for number in _listed(value) if name in BOUNDS else ():
            least, most = BOUNDS[name]
            if isinstance(number, int | float) and not least <= number <= most:
                raise ConfigError(key, number, "is out of range", f"Give a number from {least:,} to {most:,}.")


def _hint(options: argparse.Namespace, word: str, one: argparse.ArgumentParser) -> str:
    """The likeliest meaning of an argument that the command does not take."""
    name, equals, value = word.partition("=")
    if word.startswith("--") and "." in name and hasattr(options, "config"):
        first, _, key = word.removeprefix("--").partition(".")
        key = key if difflib.get_close_matches(first, ["config"], cutoff=0.7) else f"{first}.{key}"
        return f"A key of the config is changed with --config.{key}."
    known = [text for action in one._actions for text in action.option_strings if text.startswith("--")]
    if name in known:
        return f"Options follow the command: jaxroll {options.command} … {word}"
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        return f"Did you mean {near[0]}{equals}{value}?"
    return f"`jaxroll {options.command} --help` lists them."


def spelled(one: argparse.ArgumentParser, options: argparse.Namespace, skipped: Sequence[str]) -> list[str]:
    """The options of a command as words, defaults and those in `skipped` left out."""
    words = []
    for action in one._actions:
        value = getattr(options, action.dest, action.default)
        if action.dest in skipped or not action.option_strings or value == action.default:
            continue
        option = action.option_strings[-1]
        words += [option] if value is True else [f"{option}={item}" for item in _listed(value)]
    return words


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The `key=value` overrides among the words, and the other words. `--config.key value` is understood too."""
    overrides, rest = [], []
    pending = iter(words)
    for word in pending:
        if word == "--":
            return overrides, [*rest, word, *pending]
        if not word.startswith("--config."):
            rest.append(word)
        elif "=" in word:
            overrides.append(word.removeprefix("--config."))
        else:
            overrides.append(f"{word.removeprefix('--config.')}={next(pending, '')}")
    return overrides, rest


class _Parser(argparse.ArgumentParser):
    """The parser of a command, whose errors propose what may be meant, or show the example."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = difflib.get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), n=1) if found else ()
        message += ", a folder, without --run in front" if message.endswith("required: RUN") else ""
        super().error(message + (f". Did you mean {near[0]}?" if near else f". {self.epilog}" if self.epilog else ""))


class _Top(argparse.ArgumentParser):
    """The parser of `jaxroll` itself, whose help lists the commands by group, each with an example."""

    def format_help(self) -> str:
        lines = [self.format_usage(), f"{self.description}\n"]
        for title, commands in GROUPS.items():
            lines.append(f"{title}:")
            for one in commands:
                lines += [f"  {one.name:<14}{one.text}", f"{'':16}$ {one.example}"]
            lines.append("")
        return "\n".join([*lines, HELP])


def parser(named: str | None = None) -> argparse.ArgumentParser:
    """The commands with their options. Options whose module takes long to load are only those of the command `named`;
    None: of all."""
    top = _Top(
        prog="jaxroll",
        usage="jaxroll COMMAND [RUN] [OPTIONS]",
        description="Asynchronous RL for language models in JAX.",
    )
    top.add_argument("--version", action="version", version=f"jaxroll {__version__}")
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="jaxroll", parser_class=_Parser
    )
    known = {}
    for one in (command for group in GROUPS.values() for command in group):
        known[one.name] = _added(commands, one.name, one.text, one.example)
    for name in ("train", "sft", "compile", "config", "generate", "eval", "tinker-serve", "launch", *ROLES):
        _run_options(known[name])
    known["train"].add_argument("--resume", action="store_true", help="continue RUN with its own config")
    _fork_option(known["train"])
    known["train"].add_argument("--host", metavar="NAME", help="the name by which samplers on other machines join")
    known["train"].add_argument(
        "--insecure", action="store_true", help="allow plain text to other machines, without TLS"
    )
    known["compile"].add_argument(
        "--role", choices=COMPILED, required=True, help="the role whose programs are compiled, on its own mesh"
    )
    for role in ROLES:
        _role_options(role, known[role])
    for name in ("report", "inspect", "profile", "replay", "export", "checkpoints", "tls"):
        known[name].add_argument("folder", metavar="RUN", help="the folder of the run")
    for name in ("report", "inspect", "profile", "replay", "checkpoints", "sim", "place"):
        known[name].add_argument("--json", action="store_true", help="print one JSON object")
    known["inspect"].add_argument(
        "--group", type=int, metavar="ID", help="show this group: text, rewards, versions, events"
    )
    text = "write Parquet; needs pyarrow (pip install 'jaxroll[data]')"
    known["export"].add_argument("--parquet", metavar="FILE", help=text)
    known["export"].add_argument("--jsonl", metavar="FILE", help="write one JSON object per line")
    known["export"].add_argument("--perfetto", metavar="FILE", help="write the timeline, for https://ui.perfetto.dev")
    known["checkpoints"].add_argument("--verify", action="store_true", help="read every byte and compare its checksum")
    known["demo"].add_argument("--seed", type=int, default=0, help="run.seed (default: 0)")
    known["demo"].add_argument("--config", metavar="FILE", help="another config file (default: configs/demo.py)")
    known["list"].add_argument("folder", nargs="?", default="runs", help="the folder of the runs (default: runs)")
    if named in ("profile", None):
        from jaxroll.tools import profile

        profile.add_options(known["profile"])
    _ui_options(known["ui"])
    _generate_options(known["generate"])
    _eval_options(known["eval"])
    _serve_options(known["serve"])
    http_options(known["tinker-serve"], 8200)
    _weights_options(known["weights"])
    _env_options(known["env"])
    for name, page in (("sim", "simulation"), ("place", "placement")):
        known[name].add_argument("--config", metavar="FILE", help="a config file (see configs/)")
        known[name].add_argument("--cluster", metavar="FILE", help=f"a TOML file of a cluster (docs/{page}.md)")
    text = "rank by the time of a step, the cost of a token, or the time of the run (default: throughput)"
    known["place"].add_argument("--objective", choices=("throughput", "cost", "time"), default="throughput", help=text)
    text = "simulate the N best, take the best"
    known["place"].add_argument("--simulate", type=int, default=0, metavar="N", help=text)
    _sim_options(known["sim"])
    _plan_options(known["plan"])
    _tls_options(known["tls"])
    if named in ("init", None):
        from jaxroll.control import propose

        propose.init_options(known["init"])
    if named in ("launch", None):
        from jaxroll.control import launchers

        launchers.add_options(known["launch"])
    if named in ("tinker-serve", None):
        from jaxroll.control import train

        train.tinker_options(known["tinker-serve"])
    return top


def _added(commands: Any, name: str, text: str, example: str, **shown: str) -> argparse.ArgumentParser:
    text = f"{text[0].upper()}{text[1:]}."
    return commands.add_parser(name, description=text, epilog=f"Example: {example}", allow_abbrev=False, **shown)


def _run_options(one: argparse.ArgumentParser, text: str = "the folder of the run") -> None:
    one.add_argument("folder", nargs="?", metavar="RUN", help=text)
    one.add_argument("--run", metavar="DIR", help="the same as RUN")
    one.add_argument("--config", metavar="FILE", help="a config file (see configs/)")


def _role_options(role: str, one: argparse.ArgumentParser) -> None:
    """The options that `role` reads, and no other."""
    if role != "feeder":
        text = "the address of the store (default: the one in RUN/store.addr)"
        text = "the address to listen on (default: a free port of 127.0.0.1)" if role == "store" else text
        one.add_argument("--store", metavar="HOST:PORT", help=text)
    if role == "store":
        one.add_argument("--peer", metavar="HOST:PORT", help="the address of the other store (store.standby)")
    if role in ("store", "learner", "sampler"):
        one.add_argument("--insecure", action="store_true", help="allow plain text to other machines, without TLS")
    if role in ("store", "learner"):
        text = "0: this store begins the run; 1: it is the standby" if role == "store" else "the number of this host"
        one.add_argument("--index", type=int, default=0, help=text)
    if role == "learner":
        one.add_argument("--host", default="127.0.0.1", help="the host name by which samplers reach this process")
    if role in ("learner", "sampler"):
        text = f"the address on the first host at which the hosts of a {role} meet (default: JAX finds it)"
        one.add_argument("--coordinator", metavar="HOST:PORT", help=text)
    if role in ("learner", "colocated"):
        _fork_option(one)
    if role in ("sampler", "actor"):
        one.add_argument("--index", type=int, default=0, help=f"the number of this {role}, from 0")
        text = "on SIGTERM finish running members for so long (default: 0)"
        one.add_argument("--drain", type=_seconds, default=0.0, metavar="SECONDS", help=text)
    if role == "sampler":
        text = "join a running run: its store's address, or its folder"
        one.add_argument("--join", metavar="HOST:PORT|RUN", help=text)
        one.add_argument("--host", default="127.0.0.1", help="the host name by which actors reach this process")
        one.add_argument("--port", type=int, default=0, help="the port on which it listens for actors (0: any)")
        one.add_argument("--process", type=int, default=0, help="the number of this host among the sampler's hosts")
    if role == "actor":
        text = "the address of a sampler that the run starts with, once for each (default: those in RUN)"
        one.add_argument("--sampler", action="append", default=[], metavar="HOST:PORT", help=text)


def _seconds(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise ValueError(text)
    return value


def _generate_options(one: argparse.ArgumentParser) -> None:
    one.usage = "jaxroll generate RUN PROMPT… [OPTIONS]"
    one.add_argument("prompts", nargs="*", metavar="PROMPT", help="the text of a user's message")
    one.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (default: 0, greedy)")
    one.add_argument("--top-k", type=int, default=0, help="sample from the K most likely tokens (default: 0, all)")
    one.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the most likely tokens of this total probability"
    )
    one.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the largest probability")
    one.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="divide the logits of earlier tokens (default: 1)"
    )
    one.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer at this text, repeatable"
    )
    one.add_argument(
        "--ignore-eos", action="store_true", help="continue to --max-tokens after an end-of-sequence token"
    )
    one.add_argument("--seed", type=int, help="seed of the sampling (default: run.seed)")
    one.add_argument("--samples", type=int, default=1, help="answers per prompt (default: 1)")
    one.add_argument("--max-tokens", type=int, help="tokens of an answer (default: sampling.max_tokens)")
    one.add_argument("--slots", type=int, default=8, help="slots of the engine (default: 8)")


def _eval_options(one: argparse.ArgumentParser) -> None:
    text = "a held-out set: heldout or a name of evaluator.sets, repeatable (default: all)"
    one.add_argument("--set", action="append", default=[], metavar="NAME", help=text)
    text = "answers per item (default: evaluator.samples, or those of the set)"
    one.add_argument("--samples", type=int, metavar="N", help=text)
    text = "sampling temperature; 0 is greedy (default: evaluator.temperature)"
    one.add_argument("--temperature", type=float, help=text)
    text = "print pass@K, repeatable; needs at least K answers per item"
    one.add_argument("--k", action="append", type=int, default=[], metavar="K", help=text)
    one.add_argument("--json", action="store_true", help="print one JSON object")


def _serve_options(one: argparse.ArgumentParser) -> None:
    one.usage = "jaxroll serve RUN|FOLDER [OPTIONS]"
    _run_options(one, "the folder of the run, or a Hugging Face folder with a model")
    http_options(one, 8000)
    one.add_argument("--name", help="the name of the model (default: that of the folder)")
    text = "file of the clients' token (default: RUN/http.token, or jaxroll/http.token in your state folder)"
    one.add_argument("--token-file", metavar="FILE", help=text)
    one.add_argument("--slots", type=int, default=8, help="slots of the engine (default: 8)")
    one.add_argument("--queue", type=int, default=504, help="answers that may wait for a slot (default: 504)")
    text = "tokens of prompt and answer together (default: the config's, or 4096)"
    one.add_argument("--context", type=int, metavar="TOKENS", help=text)


def http_options(one: argparse.ArgumentParser, port: int) -> None:
    """The options of every HTTP server."""
    one.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    one.add_argument("--port", type=int, default=port, help=f"the port (default: {port}; 0: any free port)")
    one.add_argument("--insecure", action="store_true", help="allow plain text to other machines")


def _ui_options(one: argparse.ArgumentParser) -> None:
    text = "the folder that holds the runs, or the folder of one run (default: runs)"
    one.add_argument("folder", nargs="?", default="runs", metavar="RUNS", help=text)
    http_options(one, 8100)
    text = "file of the token (default: jaxroll/ui.token in your state folder)"
    one.add_argument("--token-file", metavar="FILE", help=text)


def _weights_options(weights: argparse.ArgumentParser) -> None:
    directions = weights.add_subparsers(dest="direction", required=True, metavar="import|export")
    for name, source, given, text in (
        ("import", "HF_FOLDER", "a checkpoint as Hugging Face publishes it", "convert a checkpoint for model.path"),
        ("export", "SOURCE", "a run, a checkpoint, or a folder", "convert a checkpoint for transformers"),
    ):
        one = _added(directions, name, text, f"jaxroll weights {name} models/mine out", help=text)
        one.add_argument("source", metavar=source, help=given)
        one.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
        text = "the dtype of the written weights (default: as-stored)"
        one.add_argument("--dtype", choices=("as-stored", "float32", "bfloat16"), default="as-stored", help=text)
        if name == "export":
            one.add_argument(
                "--shard-mb", type=int, default=5000, metavar="MB", help="largest size of one file (default: 5000)"
            )
            text = "the checkpoint of a run; best: the one that learner.keep_best keeps"
            one.add_argument("--checkpoint", choices=("newest", "best"), default="newest", help=text)
            one.add_argument("--adapters", action="store_true", help="write a run's LoRA adapters alone, for PEFT")


def _env_options(env: argparse.ArgumentParser) -> None:
    actions = env.add_subparsers(dest="action", required=True, metavar="check|serve")
    text = "play an environment with a scripted model and list the violations of its contract"
    check = _added(actions, "check", text, "jaxroll env check my_env:MyEnv", help=text)
    check.add_argument("name", metavar="MODULE:NAME", help="the environment, as in task.env")
    check.add_argument("--config", metavar="FILE", help="a config file with the tasks to play (see configs/)")
    check.add_argument("--episodes", type=int, default=32, metavar="N", help="episodes to play (default: 32)")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    text = "serve an environment by the protocol of OpenEnv, at its WebSocket /ws"
    serve = _added(actions, "serve", text, "jaxroll env serve my_env:MyEnv --port=8000", help=text)
    serve.add_argument("name", metavar="MODULE:NAME", help="the environment, as in task.env")
    serve.add_argument("--config", metavar="FILE", help="a config file with the tasks to serve (see configs/)")
    text = "file of the clients' token (default: openenv.token in jaxroll/ of your state folder)"
    serve.add_argument("--token-file", metavar="FILE", help=text)
    http_options(serve, 8000)


def _sim_options(one: argparse.ArgumentParser) -> None:
    one.usage = "jaxroll sim [RUN] --config=FILE --cluster=FILE [OPTIONS]\n       jaxroll sim calibrate RUN"
    text = "the folder of the simulated run; `calibrate RUN` prints the cluster on which RUN was recorded"
    one.add_argument("targets", nargs="*", metavar="RUN", help=text)
    one.add_argument("--sweep", action="append", default=[], metavar="KEY=V1,V2", help="simulate each value of a key")


def _plan_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--config", metavar="FILE", help="a config file (see configs/)")
    text = "v5e:8x8, v5p:4x4x4, v6e:8x8 or another slice of TPUs; gpu:8xH100, gpu:8xH200 or gpu:8xA100; cpu:2"
    one.add_argument("--topology", metavar="NAME", default="", help=text)
    one.add_argument("--json", action="store_true", help="print one JSON object")


def _tls_options(tls: argparse.ArgumentParser) -> None:
    text = "a host name of the store or the learner, repeatable"
    tls.add_argument("--host", action="append", default=[], metavar="NAME", help=text)
    tls.add_argument(
        "--token-of", metavar="ROLE", help="print the token of a machine that may act only as ROLE, and end"
    )
    tls.add_argument("--days", type=int, default=365, help="days for which the certificates are valid (default: 365)")


def _fork_option(one: argparse.ArgumentParser) -> None:
    text = "discard the training after the checkpoint of STEP (or LINEAGE.STEP; default: the newest checkpoint) and "
    text += "continue from it in a new lineage"
    one.add_argument("--fork", metavar="STEP", nargs="?", const="", help=text)
    text = "the store's log is lost: begin a new one at the newest checkpoint, and report what is lost"
    one.add_argument("--new-log", action="store_true", help=text)

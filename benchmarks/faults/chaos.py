"""A whole run under random faults for an hour.

    python -m benchmarks.faults.chaos --minutes=60 --seed=N [--every=20] [--only=NAME,…] [--without=NAME,…] [--quick]
                                      [--variant=PART,…]

A run with two samplers, a learner, a store with its feeder and an evaluator trains the smallest model. In every window
of `--every` seconds a fault of `chaos_faults.FAULTS` is injected at a random instant, in a quarter of the windows two
at once. The faults are in a shuffled order in which each occurs once before any occurs twice. After `--minutes` they
stop: the run is interrupted, resumed with a few more steps to train, and must complete. Then this must hold:

- every step is durable, and the run ended by itself only after a fault that may end it (a full disk, for instance);
- no group is unaccounted for; no group was claimed for two steps; a step that was trained again had the same claim and
  the same result, bit for bit; no token older than `schedule.alpha` was trained;
- each put that the store acknowledged was trained (the learner received its bytes in the claim of a durable step), is
  kept for a later step, or its group ended for the reason that the log states; `puts` counts them by outcome. Each
  checkpoint that it acknowledged as durable is an ancestor of the last weights. Hooks inside the roles journal
  acknowledgements in a folder next to the run's;
- no fault was skipped three times and never injected. `unseen` counts faults that were not seen to take place, or not
  at the instant that their name says; `faults` and `by_kind` do not contain them;
- `jaxroll replay` and `jaxroll checkpoints --verify` find nothing;
- prompts were issued in the order of an undisturbed run.

`tracebacks` are those in the logs of roles that no injected fault explains, with their number and the first errors by
log. They are reported and no violation: the list of explanations is not complete.

The last line is one JSON object. With exit code 1 the violations are named and the run's folder (`--folder`) is kept.
The seed chooses the variant of the run (`run.VARIANTS`: TLS, actors, links that can be cut, a warm start, small disks,
foreign names and locales, weights and compile cache on small disks), unless `--variant` names its parts. Faults that
have no target in it are left out.
`seed` determines kinds, targets, durations and instants. The run's state at an instant also depends on the machine, so
a seed makes a failure likely to occur again, not certain.

As root on Linux the benchmark uses its own mount and network namespace, with a small tmpfs for the run's folder: full
disks, read-only folders and cut networks are real and affect no other process. Without root these are skipped.
The wall clock jumps for the run's processes alone (`hooks/sitecustomize.py`).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults import machine
from benchmarks.faults.chaos_faults import AT_START, FAULTS, needed
from benchmarks.faults.chaos_machine import small_disks
from benchmarks.faults.run import FOLDER, FOREIGN_FOLDER, VARIANTS, Run, Skipped, Unseen, Wrong, tell, variant_of
from benchmarks.faults.verdict import facts, tracebacks, violations
from benchmarks.lib.report import commit, hardware, say
from jaxroll.errors import EXIT_INTERRUPTED
from jaxroll.run_paths import RunPaths

PAIRS = 0.25  # share of the windows with two faults
START_S, STALL_S, FINISH_S = 900.0, 300.0, 900.0  # a busy machine compiles for minutes before the first step
SILENCE_S = 8.0
LAST_STEPS = 10
FRUITLESS = 5  # processes in a row that ended by themselves before a step was trained
SKIPS = 3  # so often a fault may be skipped before it is injected once
TORN = "does not belong to"  # a role met certificates that were half replaced, which must not end it
FORGOTTEN_S = 180.0  # faults of at most this age may explain an end of the run


@dataclass
class Tally:
    """The events so far: faults by name, unseen and skipped ones apart, ends of the run, violations."""

    faults: Counter[str] = field(default_factory=Counter)
    unseen: Counter[str] = field(default_factory=Counter)  # neither injected for certain nor skipped
    skipped: dict[str, str] = field(default_factory=dict)
    skips: Counter[str] = field(default_factory=Counter)
    ends: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    recent: list[tuple[float, str]] = field(default_factory=list)
    fruitless: int = 0

    def note(self, name: str) -> None:
        """A fault begins."""
        self.faults[name] += 1
        self.recent.append((time.monotonic(), name))

    def skip(self, name: str, reason: str) -> None:
        """A fault did not begin, and explains no end of the run."""
        self.faults[name] -= 1
        self.recent.remove(next(one for one in reversed(self.recent) if one[1] == name))
        self.skips[name] += 1
        self.skipped[name] = reason

    def miss(self, name: str) -> None:
        """A fault was not seen to take place. It may take place later, and may explain an end of the run."""
        self.faults[name] -= 1
        self.unseen[name] += 1

    def absent(self, expected: str | None) -> list[str]:
        """Violations: faults that never began in `SKIPS` attempts, unless for the `expected` reason."""
        return [
            f"{name}: skipped {self.skips[name]} times and never injected: {reason}"
            for name, reason in self.skipped.items()
            if not self.faults[name] and self.skips[name] >= SKIPS and reason != expected
        ]

    def suspects(self) -> list[str]:
        """The names of recent faults."""
        return [name for at, name in self.recent if time.monotonic() - at < FORGOTTEN_S]


def plan(seed: int, every_s: float, names: Sequence[str]) -> Iterator[tuple[float, tuple[str, ...]]]:
    """(seconds since the beginning, faults) without end. Each name occurs once before any occurs twice."""
    chance, deck, window = random.Random(f"chaos {seed}"), [], 0
    while True:
        chosen: list[str] = []
        for _ in range(1 + (len(names) > 1 and chance.random() < PAIRS)):
            if not deck:
                deck = chance.sample(list(names), len(names))
            if chosen and (deck[-1] in chosen or (FAULTS[chosen[0]].alone and FAULTS[deck[-1]].alone)):
                break
            chosen.append(deck.pop())
        yield (window + chance.random()) * every_s, tuple(chosen)
        window += 1


class Attack:
    """One run under attack."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.seed, self.tally = run, seed, Tally()
        self._began_s = self._spoke_s = time.monotonic()
        self._count = 0
        self.step_at_end = 0

    def tell(self, *texts: str) -> None:
        """Print one line of progress."""
        self._spoke_s = time.monotonic()
        tell(self._began_s, [f"step {self.run.step:<5}", *texts])

    def play(self, minutes: float, every_s: float, names: Sequence[str]) -> int:
        """Attack for `minutes`, let the run complete, and return the steps that it had to train; note violations."""
        self.run.start()
        if AT_START in names:
            self.wait(lambda: self.run.find("sft") is not None, START_S)
            self.strike([AT_START])
            names = [name for name in names if name != AT_START]
        if not self.wait(lambda: self.run.step >= 1, START_S):
            self.tally.wrong.append(f"no step within {START_S:.0f} s of the start: {self.run.last_words()}")
            return 0
        begin = time.monotonic()
        for at, chosen in plan(self.seed, every_s, names):
            if at > 60.0 * minutes or not self.wait(lambda at=at: time.monotonic() - begin >= at, 1e9):
                break
            self.strike(chosen)
        self.wait(lambda: time.monotonic() - begin >= 60.0 * minutes, 1e9)
        return self.complete()

    def strike(self, chosen: Sequence[str]) -> None:
        """Inject the faults at once and wait for the end of each."""
        threads = []
        for name in chosen:
            self._count += 1
            words = name, random.Random(f"chaos {self.seed} {self._count}")
            threads.append(threading.Thread(target=self._inject, args=words, daemon=True))
            threads[-1].start()
        while any(thread.is_alive() for thread in threads):
            if not self.look():
                return
            time.sleep(0.1)

    def _inject(self, name: str, chance: random.Random) -> None:
        self.tally.note(name)
        try:
            effect = FAULTS[name](self.run, chance)
        except Skipped as reason:
            self.tally.skip(name, str(reason))
            effect = f"skipped: {reason}"
        except Unseen as known:
            self.tally.miss(name)
            effect = f"unseen: {known}"
        except Wrong as what:
            self.tally.wrong.append(f"{name}: {what}")
            effect = f"VIOLATION: {what}"
        except Exception as error:
            self.tally.wrong.append(f"{name}: the injector failed: {type(error).__name__}: {error}")
            raise
        self.tell(f"{name:15}", effect)

    def wait(self, seen, limit_s: float) -> bool:
        """Wait up to `limit_s` until `seen()` is true; return True if it is and the attack may continue."""
        deadline = time.monotonic() + limit_s
        while not seen():
            if time.monotonic() > deadline or not self.look():
                return False
            time.sleep(0.1)
        return True

    def look(self) -> bool:
        """Resume the run if it ended by itself; return False if it makes no progress or was complete."""
        self.run.look()
        if time.monotonic() - self._spoke_s > SILENCE_S:
            self.tell("…")
        if self.run.lock.acquire(blocking=False):
            try:
                if not self.run.alive:
                    self._ended()
            finally:
                self.run.lock.release()
        if self.tally.fruitless >= FRUITLESS:
            self.tally.wrong.append(f"{FRUITLESS} processes in a row ended without a step")
            return False
        limit_s = STALL_S if self.run.step else START_S
        if time.monotonic() - self.run.moved_s > limit_s:
            self.run.show_stacks()
            text = f"no step for {limit_s:.0f} s after step {self.run.step}; faults before it: {self.tally.suspects()}"
            self.tally.wrong.append(f"{text}; the stacks are in the logs")
            return False
        return True

    def _ended(self) -> None:
        """Note that the run ended by itself and resume it."""
        assert self.run.process is not None
        code, suspects = self.run.process.returncode, self.tally.suspects()
        words = self.run.last_words()
        text = f"the run ended with {code} after {', '.join(suspects) or 'no fault'}: {words}"
        self.tally.ends.append(text)
        traceback = "Traceback" in self.run.output("err").read_text(errors="replace")
        logs = RunPaths(self.run.run_dir).logs.glob("*.log")  # the supervisor's output may be closed
        torn = any(TORN in log.read_text(errors="replace") for log in logs)
        if traceback or torn or not any(FAULTS[name].ends for name in suspects):
            self.tally.wrong.append(text)
        self.tally.fruitless = self.tally.fruitless + 1 if self.run.step == self.step_at_end else 1
        self.step_at_end = self.run.step
        self.tell("the run ended by itself", f"code {code}", words.splitlines()[-1] if words else "", "resumed")
        self.run.start()

    def complete(self) -> int:
        """Let the run train a few more steps and end; return the total number of steps."""
        at = self.run.step
        if not self.wait(lambda: self.run.step > at, STALL_S):
            return 0
        self.tell("faults stop; the run is interrupted and resumed with a last step")
        if (code := self.run.signal(signal.SIGINT)) != EXIT_INTERRUPTED:
            self.tally.wrong.append(f"the last interrupt ended the run with {code}: {self.run.last_words()}")
        self.run.look()
        steps = self.run.step + LAST_STEPS
        self.run.start(f"--config.schedule.steps={steps}")
        deadline = time.monotonic() + FINISH_S
        while self.run.alive and time.monotonic() < deadline:
            self.run.look()
            if time.monotonic() - self._spoke_s > SILENCE_S:
                self.tell(f"… of {steps}")
            time.sleep(0.1)
        code = self.run.process.poll() if self.run.process is not None else None
        if code is None:
            self.run.show_stacks()
        if code != 0:
            self.tally.wrong.append(f"the last process ended with {code}: {self.run.last_words()}")
        self.run.look()
        self.tell(f"complete with code {code}")
        return steps


def chosen_names(only: str, without: str, variant: Sequence[str] = VARIANTS) -> list[str]:
    """The faults to inject into a run of this variant. Raises SystemExit for an unknown name."""
    names = only.split(",") if only else list(FAULTS)
    unknown = [name for name in (*names, *filter(None, without.split(","))) if name not in FAULTS]
    if unknown:
        raise SystemExit(f"no such fault: {', '.join(unknown)}. There are: {', '.join(FAULTS)}")
    return [name for name in names if name not in without.split(",") and needed(name) <= {*variant}]


def parts(variant: str) -> tuple[str, ...]:
    """The parts of a variant. Raises SystemExit for an unknown one."""
    found = tuple(filter(None, variant.split(",")))
    if unknown := [name for name in found if name not in VARIANTS]:
        raise SystemExit(f"no such part of a variant: {', '.join(unknown)}. There are: {', '.join(VARIANTS)}")
    if {"files", "links"} <= {*found}:
        raise SystemExit("files and links exclude each other: weights go through a folder or through connections")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Attack one run; return 0 if there was no violation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="15 s with a fault every 3 s, to show that it works")
    parser.add_argument("--minutes", type=float, default=60.0, help="time with faults")
    parser.add_argument("--every", type=float, default=20.0, help="seconds per window, each with one or two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="NAME,…", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--without", default="", metavar="NAME,…")
    parser.add_argument(
        "--variant", metavar="PART,…", help=f"of {', '.join(VARIANTS)}; empty: none (default: the seed's)"
    )
    parser.add_argument("--folder", type=Path, help="where the run and its journal are (default: a temporary folder)")
    parser.add_argument("--keep", action="store_true", help="keep the folder also without a violation")
    options = parser.parse_args(words)
    minutes, every_s = (0.25, 3.0) if options.quick else (options.minutes, options.every)
    variant = variant_of(options.seed) if options.variant is None else parts(options.variant)
    names = chosen_names(options.only, options.without, variant)
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="jaxroll-chaos-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    disk = folder / "disk"
    disk.mkdir()
    refused = machine.enter(disk)
    say(
        f"seed {options.seed}, variant {','.join(variant) or 'plain'}, {minutes:g} minutes, a window of {every_s:g} s, "
        f"{len(names)} kinds of faults in {folder}"
    )
    if refused:
        say(f"no separate namespaces ({refused}): full disk, read-only folder and cut network are skipped")
    began = time.monotonic()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            signum, lambda number, _: sys.exit(128 + number)
        )  # runs the `finally` blocks, so that nothing is left
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background job the signal would be ignored
    run = Run(folder, disk / (FOREIGN_FOLDER if "foreign" in variant else FOLDER), options.seed, refused, variant)
    if "disks" in variant and not refused:
        for path in small_disks(run.run_dir):
            machine.small_disk(path, machine.SIZE_MB // 2)
    for path in (run.weights, run.cache) if "files" in variant and not refused else ():
        machine.small_disk(path, machine.SIZE_MB // 2)
    attack = Attack(run, options.seed)
    try:
        steps = attack.play(minutes, every_s, names)
    finally:
        run.close()
    tally, found = attack.tally, {}
    if (run.run_dir / "store.db").exists():
        found = facts(run, steps)
        tally.wrong += violations(found)
    tally.wrong += tally.absent(refused)
    raised = tracebacks(RunPaths(run.run_dir).logs, {*+tally.faults, *tally.unseen})
    result = {
        "benchmark": "chaos",
        "faults": tally.faults.total(),
        "steps": found.get("steps", 0),
        "lost": len(found.get("lost", ())),
        "trained_twice": len(found.get("trained_twice", ())),
        "age_max": found.get("age_max"),
        "alpha": found.get("alpha"),
        "conservation": found.get("conservation"),
        "replay_clean": found.get("replay_clean", False),
        "prompts_in_order": bool(found) and found["prompts_out_of_order"] is None,
        "seed": options.seed,
        "variant": variant,
        "minutes": minutes,
        "violations": tally.wrong,
        "by_kind": dict(+tally.faults),
        "unseen": dict(tally.unseen),
        "skipped": tally.skipped,
        "ends": tally.ends,
        "tracebacks": raised,
        "lives": run.lives,
        **{
            key: found.get(key)
            for key in (
                "steps_wanted",
                "steps_trained_again",
                "rewinds",
                "dead",
                "prompts_issued",
                "acknowledged_puts",
                "puts",
            )
        },
        "wall_s": round(time.monotonic() - began, 1),
        "hardware": hardware(),
        "commit": commit(),
    }
    keep_or_remove(folder, disk, keep=options.keep or bool(tally.wrong), mounted=not refused)
    if tally.unseen:
        say(f"unseen: {', '.join(f'{name} {times} times' for name, times in sorted(tally.unseen.items()))}")
    for log, row in raised.items():
        say(f"{row['number']} tracebacks in {log} that no fault explains: {'; '.join(row['first'])}")
    for text in tally.wrong:
        say(f"VIOLATED: {text}")
    print(json.dumps(result), flush=True)
    return 1 if tally.wrong else 0


def keep_or_remove(folder: Path, disk: Path, *, keep: bool, mounted: bool) -> None:
    """Remove the folder, or keep all of it: copy the small file system, which ends with this process."""
    if not keep:
        if mounted:
            machine.leave(disk)
        shutil.rmtree(folder, ignore_errors=True)
        return
    if mounted:
        shutil.copytree(disk, folder / "kept", symlinks=True, dirs_exist_ok=True)
    say(f"kept: {folder / ('kept' if mounted else 'disk')}")


if __name__ == "__main__":
    sys.exit(main())

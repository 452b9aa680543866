"""A journal of every token that a sampler's engine has sampled, which survives its `kill -9`.

A test puts this folder on the PYTHONPATH of `jaxroll sampler` and names a folder in `TOKEN_JOURNAL`. Each process then
appends rows to a file TIME-PID.jsonl of its own there (t: seconds of the monotonic clock, which all processes share):

    {"t", "start": [group, member], "tokens"}      a request got its slot; `tokens` were sampled elsewhere
    {"t", "tokens": [[group, member, tokens]]}     after a dispatch: the tokens of every running request
    {"t", "end": [group, member]}                  a request has ended
    {"t", "sent": [group, member], "tokens"}       so many of them are on their way to the store
    {"t", "known": [group, member], "tokens"}      the store has so many of them

Only the standard library is imported here; modules of JaxRoll are changed when the process itself imports them.
"""

import importlib.util
import os
import sys
import time
from pathlib import Path

_HOOKS = Path(__file__).resolve().parents[3] / "benchmarks/faults/hooks/sitecustomize.py"


def journal_tokens(module, journal):
    """Wrap the methods of the engine's `Ledger` that start, account for and remove requests."""
    ledger = module.Ledger
    start, account, take = ledger.start, ledger.account, ledger.take

    def key_of(add):
        return [add.request.key.group, add.request.key.member]

    def started(self, slot, add, start_s, version, before=None):
        journal.write(t=time.monotonic(), start=key_of(add), tokens=0 if before is None else len(before.tokens))
        start(self, slot, add, start_s, version, before)

    def accounted(self, report):
        progress = account(self, report)
        running = [[*key_of(one.add), int(one.count)] for one in self._running if one is not None]
        journal.write(t=time.monotonic(), tokens=running)
        return progress

    def taken(self, slot, ended, end_s):
        add, result = take(self, slot, ended, end_s)
        journal.write(t=time.monotonic(), end=key_of(add))
        return add, result

    ledger.start, ledger.account, ledger.take = started, accounted, taken


def journal_flushes(module, journal):
    """Wrap `Stream.add` and `Stream.answered`: a flush begins, and the store has answered it."""
    add, answered = module.Stream.add, module.Stream.answered

    def sent(self, piece):
        add(self, piece)
        journal.write(t=time.monotonic(), sent=list(self.key[:2]), tokens=int(self._end))

    def noted(self, piece, known):
        journal.write(t=time.monotonic(), known=list(self.key[:2]), tokens=int(known))
        return answered(self, piece, known)

    module.Stream.add, module.Stream.answered = sent, noted


if "TOKEN_JOURNAL" in os.environ and sys.orig_argv[1:4] == ["-m", "jaxroll", "sampler"]:
    _spec = importlib.util.spec_from_file_location("faults_hooks", _HOOKS)
    assert _spec is not None and _spec.loader is not None
    _hooks = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_hooks)
    _journal = _hooks.Journal(os.environ["TOKEN_JOURNAL"])
    _changes = {
        "jaxroll.engine.ledger": [lambda module: journal_tokens(module, _journal)],
        "jaxroll.store.flushes": [lambda module: journal_flushes(module, _journal)],
    }
    sys.meta_path.insert(0, _hooks.Changes(_changes))

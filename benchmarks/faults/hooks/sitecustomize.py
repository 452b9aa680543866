"""Hooks in every Python process of a run under attack (chaos.py puts this folder on its PYTHONPATH).

- `CHAOS_CLOCK` names a file that holds one double: the seconds by which `time.time` is wrong, read at every call.
- `CHAOS_JOURNAL` names a folder, outside the run's, to which the store's acknowledgements are written.
- The store compacts its log after 300 records instead of 20,000, so that a short run compacts it many times.

Only the standard library is imported here; modules of JaxRoll are changed when the process itself imports them.
"""

import importlib.abc
import importlib.machinery
import json
import mmap
import os
import struct
import sys
import time
import uuid

COMPACT_EVERY = 300


def shift_clock(path):
    """Shift `time.time` and `time.time_ns` by the seconds in the file.

    gRPC and its callers get the true time: gRPC adds a timeout to `time.time()` and compares the sum with the kernel's
    clock, which a real jump would also move.
    """
    with open(path, "rb") as file:
        offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    real, real_ns, caller = time.time, time.time_ns, sys._getframe

    def shifted():
        if caller(1).f_globals.get("__name__", "").startswith(("grpc", "jaxroll.rpc.")):
            return real()
        return real() + struct.unpack("d", offset)[0]

    time.time = shifted
    time.time_ns = lambda: real_ns() + int(struct.unpack("d", offset)[0] * 1e9)


class Journal:
    """A file of JSON rows of this process, each written with one call."""

    def __init__(self, folder):
        self._path = os.path.join(folder, f"{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl")
        self._fd = -1

    def write(self, **row):
        """Append one row."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.write(self._fd, json.dumps(row).encode() + b"\n")


def journal_acknowledgements(module):
    """Wrap the calls of StoreClient whose answers acknowledge something: put, claim, ack, durable."""
    from jaxroll import wire
    from jaxroll.records import Finished

    client, journal = module.StoreClient, Journal(os.environ["CHAOS_JOURNAL"])
    put, claim, ack, durable = client.put, client.claim, client.ack, client.durable

    async def journaled_put(self, member):
        answer = await put(self, member)
        key, finished = [member.group, member.member, member.attempt], isinstance(member.outcome, Finished)
        journal.write(kind="put", key=key, finished=finished, answer=answer, digest=wire.digest(wire.encode(member)))
        return answer

    async def journaled_claim(self, lineage, step, *words, **options):
        found = await claim(self, lineage, step, *words, **options)
        groups = [
            [group.group, [[m.member, m.attempt, wire.digest(wire.encode(m))] for m in group.members]]
            for group in found.groups
        ]
        journal.write(kind="claim", step=found.step, lineage=found.lineage, groups=groups)
        return found

    async def journaled_ack(self, version):
        await ack(self, version)
        journal.write(kind="ack", version=[version.lineage, version.step])

    async def journaled_durable(self, version):
        await durable(self, version)
        journal.write(kind="durable", version=[version.lineage, version.step])

    client.put, client.claim = journaled_put, journaled_claim
    client.ack, client.durable = journaled_ack, journaled_durable


def compact_often(module):
    """Lower the store's threshold for compaction."""
    module.COMPACT_EVERY = COMPACT_EVERY


class Changes(importlib.abc.MetaPathFinder):
    """An import hook that calls a function with a module right after the module's import."""

    def __init__(self, by_name):
        self._by_name = by_name

    def find_spec(self, name, path, target=None):
        """The module's usual spec, with the change appended to its execution."""
        change = self._by_name.pop(name, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


if "CHAOS_CLOCK" in os.environ:
    shift_clock(os.environ["CHAOS_CLOCK"])
if "CHAOS_JOURNAL" in os.environ:
    changes = {"jaxroll.store.client": journal_acknowledgements, "jaxroll.store.server.keeper": compact_often}
    sys.meta_path.insert(0, Changes(changes))

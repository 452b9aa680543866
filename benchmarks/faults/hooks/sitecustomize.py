"""Hooks in every Python process of a run under attack (chaos.py puts this folder on its PYTHONPATH).

- `CHAOS_CLOCK` names a file that holds one double: the seconds by which `time.time` is wrong, read at every call.
- `CHAOS_JOURNAL` names a folder, outside the run's, to which the store's acknowledgements are written.
- `CHAOS_MEMORY` names a folder: a role that finds a file with its name there uses up its memory.
- `CHAOS_LINKS` names a folder: the file ROLE.PEER.addr in it holds the address at which this role reaches that peer.
- The store compacts its log after 300 records instead of 20,000, so that a short run compacts it many times.

Only the standard library is imported here; modules of JaxRoll are changed when the process itself imports them.
"""

import importlib.abc
import importlib.machinery
import json
import mmap
import os
import resource
import struct
import sys
import threading
import time
import uuid

COMPACT_EVERY = 300
MEMORY_POLL_S = 0.2
MEMORY_GONE_S = 20.0  # for which a role that copes has no free memory
SMALLEST_BYTES = 600  # smaller ones come from Python's own pools


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
    from msgspec.structs import replace

    from jaxroll import wire
    from jaxroll.records import UNMARKED, Finished

    client, journal = module.StoreClient, Journal(os.environ["CHAOS_JOURNAL"])
    put, claim, ack, durable = client.put, client.claim, client.ack, client.durable

    def received(member):
        """A member of a claim: number, attempt, digest, and the digest that it had before stale tokens were masked."""
        digest = before = wire.digest(wire.encode(member))
        segments = member.outcome.segments
        if any(one.sampled.size for one in segments):
            whole = tuple(
                replace(one, loss_mask=one.sampled, sampled=UNMARKED) if one.sampled.size else one for one in segments
            )
            before = wire.digest(wire.encode(replace(member, outcome=replace(member.outcome, segments=whole))))
        return [member.member, member.attempt, digest, before]

    async def journaled_put(self, member):
        answer = await put(self, member)
        key, finished = [member.group, member.member, member.attempt], isinstance(member.outcome, Finished)
        journal.write(kind="put", key=key, finished=finished, answer=answer, digest=wire.digest(wire.encode(member)))
        return answer

    async def journaled_claim(self, lineage, step, *words, **options):
        found = await claim(self, lineage, step, *words, **options)
        groups = [[group.group, [received(m) for m in group.members]] for group in found.groups]
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


def name_of_role():
    """The name of this process among the run's roles, as `sampler-0`; '' outside the roles."""
    if sys.orig_argv[1:3] != ["-m", "jaxroll"] or len(sys.orig_argv) < 4:
        return ""
    index = [word.partition("=")[2] for word in sys.orig_argv if word.startswith("--index=")]
    return "-".join([sys.orig_argv[3], *index])


def link(peer):
    """The file with this role's address of `peer`; None if there is none."""
    path = os.path.join(os.environ.get("CHAOS_LINKS", ""), f"{name_of_role()}.{peer}.addr")
    return path if os.path.exists(path) else None


def link_calls(module):
    """Let calls to a server whose address is in a file use this role's link."""
    from pathlib import Path

    connect = module.GrpcTransport.__init__

    def linked(self, address, max_message_bytes, tls):
        found = link(address.stem) if isinstance(address, Path) else None
        connect(self, address if found is None else Path(found), max_message_bytes, tls)

    module.GrpcTransport.__init__ = linked


def link_weights(module):
    """Let this role fetch weights over its link to the learner, whose address it notes for the proxy."""
    from msgspec.structs import replace

    announced = module.StoreClient.announced

    async def linked(self, *words, **options):
        reply, file = await announced(self, *words, **options), link("learner")
        if file is None or reply.ref is None or reply.ref.channel != "tcp":
            return reply
        target = file.removesuffix(".addr") + ".target"
        with open(f"{target}.new", "w", encoding="ascii") as draft:
            draft.write(reply.ref.address)
        os.replace(f"{target}.new", target)
        with open(file, encoding="ascii") as address:
            return replace(reply, ref=replace(reply.ref, address=address.read().strip()))

    module.StoreClient.announced = linked


def compact_often(module):
    """Lower the store's threshold for compaction."""
    module.COMPACT_EVERY = COMPACT_EVERY


def use_up_memory(folder, role):
    """Wait in a thread for the file of this role, and then allocate until nothing is free, for `MEMORY_GONE_S`.

    The limits are what is mapped and used by then, so that every other allocation of the process fails as well.
    """
    order, noted = os.path.join(folder, role), os.path.join(folder, f"{role}.{os.getpid()}")
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)

    def wait():
        while True:
            time.sleep(MEMORY_POLL_S)
            try:
                os.rename(order, noted)
            except OSError:
                continue
            hold()

    def hold():
        with open("/proc/self/status", encoding="ascii") as status:
            used = {line.split(":")[0]: line.split()[1] for line in status if line.startswith("Vm")}
        before = [resource.getrlimit(limit) for limit in limits]
        kept, note = [], os.open(noted, os.O_WRONLY)
        for limit, name, (_, hard) in zip(limits, ("VmSize", "VmData"), before, strict=True):
            resource.setrlimit(limit, (int(used[name]) * 1024, hard))
        until = time.monotonic() + MEMORY_GONE_S
        while time.monotonic() < until:
            size = 1 << 24
            while size >= SMALLEST_BYTES:
                try:
                    kept.append(bytes(size))
                except MemoryError:
                    size //= 2
            if note >= 0:
                os.write(note, b"used up")
                note = os.close(note) or -1
            time.sleep(0.01)  # what others free meanwhile is taken as well
        kept.clear()
        for limit, value in zip(limits, before, strict=True):
            resource.setrlimit(limit, value)

    threading.Thread(target=wait, name="memory", daemon=True).start()


class Changes(importlib.abc.MetaPathFinder):
    """An import hook that calls functions with a module right after the module's import."""

    def __init__(self, by_name):
        self._by_name = by_name

    def find_spec(self, name, path, target=None):
        """The module's usual spec, with the changes appended to its execution."""
        changes = self._by_name.pop(name, None)
        if changes is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for change in changes:
                change(module)

        spec.loader.exec_module = exec_module
        return spec


if "CHAOS_CLOCK" in os.environ:
    shift_clock(os.environ["CHAOS_CLOCK"])
if "CHAOS_MEMORY" in os.environ and name_of_role():
    use_up_memory(os.environ["CHAOS_MEMORY"], name_of_role().partition("-")[0])
if "CHAOS_JOURNAL" in os.environ:
    changes = {"jaxroll.store.client": [journal_acknowledgements], "jaxroll.store.server.keeper": [compact_often]}
    if os.environ.get("CHAOS_LINKS"):
        changes["jaxroll.store.client"].append(link_weights)
        changes["jaxroll.rpc.client"] = [link_calls]
    sys.meta_path.insert(0, Changes(changes))

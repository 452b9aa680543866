"""Faults of chaos.py between the roles: no network, single links that are cut, and other certificates."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass

from benchmarks.faults import machine
from benchmarks.faults.run import LEASE_S, Run, Skipped, Unseen, gone_is_fine, needs_namespace, there
from jaxroll.run_paths import RunPaths

QUIET_S = 40.0  # for which a link may be idle: on a busy machine steps, and with them weights, come rarely


@dataclass(frozen=True)
class CutNetwork:
    """No packet passes between the roles."""

    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        needs_namespace(run)
        seconds = chance.uniform(2.0, 2.0 * LEASE_S)
        with machine.network_cut():
            time.sleep(seconds)
        return f"no network for {seconds:.1f} s"


@dataclass(frozen=True)
class CutLink:
    """No byte passes between a role and its peer for longer than a lease, one way or both ways.

    The peer is the store, the learner (of its weights only) or a sampler. Without a `role` all links of the peer are
    cut, in the same direction. The cut goes on until something was held back, for `QUIET_S` more at most.
    """

    role: str
    peer: str
    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        found = [link for link in run.links if link[0].startswith(self.role) and link[1].startswith(self.peer)]
        links = [chance.choice(found)] if self.role else found
        proxies, direction = [run.links[link] for link in links], chance.choice(("both", "up", "down"))
        seconds, before = chance.uniform(1.3, 2.5) * LEASE_S, sum(proxy.held for proxy in proxies)
        began_s = time.monotonic()
        try:
            for proxy in proxies:
                proxy.partition(direction)
            time.sleep(seconds)
            while sum(proxy.held for proxy in proxies) == before and time.monotonic() < began_s + seconds + QUIET_S:
                time.sleep(0.1)
        finally:
            for proxy in proxies:
                proxy.heal()
        held, seconds = sum(proxy.held for proxy in proxies) - before, time.monotonic() - began_s
        names = ", ".join(f"{role} from {peer}" for role, peer in links)
        if not held:
            raise Skipped(f"nothing was sent between {names}")
        return f"{names} cut ({direction}) for {seconds:.1f} s, which held {held} transmissions back"


@dataclass(frozen=True)
class Certificates:
    """Other certificates in RUN/tls for all connections from now on, and a process that must connect.

    `new` ones of the same CA or of a new CA are valid. Expired ones, and wrong ones of a CA that is not trusted, are
    replaced by valid ones after some seconds, in which the run may end.
    """

    new: str
    ends: bool = False
    alone: bool = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        target, seconds, state, refused = chance.choice(run.roles), chance.uniform(5.0, 20.0), "", ""
        process, before = there(run, target), _complaints(run)
        with run.lock:  # no resume with the wrong ones
            self._replace(run)
            try:
                with gone_is_fine(target):
                    process.kill()
                if self.ends:
                    run.wait_for(target)  # it connects with them only after its start
                    time.sleep(seconds)
                    state = "went on" if run.alive else "ended"
                    refused = ", ".join(sorted((_complaints(run) - before).keys()))
            finally:
                if self.ends:
                    Certificates("ca")._replace(run)
        if not self.ends:
            return f"certificates: {self.new}; {target} killed"
        effect = (
            f"certificates: {self.new}; {target} killed; valid again {seconds:.1f} s after its start; "
            f"refused in the log of {refused or 'no role'}; the run {state}"
        )
        if not refused:
            raise Unseen(effect)
        return effect

    def _replace(self, run: Run) -> None:
        from jaxroll.rpc import tls

        if self.new == "same":  # file by file, as the documented command does it
            tls.make_certificates(run.run_dir, [], 1)
            return
        scratch, folder = run.run_dir.parent / "certificates", RunPaths(run.run_dir).tls
        made = RunPaths(scratch).tls
        scratch.mkdir()
        try:
            tls.make_certificates(scratch, [], -1 if self.new == "expired" else 1)
            if self.new == "wrong":
                shutil.copy(folder / tls.CA, made / tls.CA)
            folder.rename(scratch / "old")
            made.rename(folder)
        finally:
            shutil.rmtree(scratch)


def _complaints(run: Run) -> Counter[str]:
    """The number of lines about certificates in the log of each role."""
    found: Counter[str] = Counter()
    for log in RunPaths(run.run_dir).logs.glob("*.log"):
        found[log.stem] = sum("certificate" in line for line in log.read_text(errors="replace").splitlines())
    return found

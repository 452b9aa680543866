"""Broken and slow holders by the contract: rests, their lengths, and the next holder of a failed member."""

from __future__ import annotations

from typing import Any

from jaxroll.store.core import events as ev
from tests.harness.store_model.books import FREE, LEASED, broken
from tests.harness.store_model.learner import LearnerSide

THERE_S, AVOID_S, HUNGRY_S, IDLE_S, SEEN_S = 10.0, 60.0, 10.0, 120.0, 1.0
IN_A_ROW, TRIAL, LONGEST_S, ALONE_S = 4, 2, 600.0, 30.0


class Holders(LearnerSide):
    """Holders as the reference model knows them."""

    def is_left_to_another(self, member: dict, name: str, now: float) -> bool:
        """True if `name` failed it, and a holder is present that did not."""
        lately = name in member["failed_by"] and now < member["avoid"]
        return lately and any(other not in member["failed_by"] for other in self.helpers(name, now))

    def helpers(self, name: str, now: float) -> list[str]:
        """Holders other than `name` that are present and reliable."""
        there = [other for other in self.seen if other != name and self.is_there(other, now)]
        return [o for o in there if not self.yields(o, now) and not self.is_ill(o, now)]

    def is_there(self, name: str, now: float) -> bool:
        """True if it called recently, and asks for leases."""
        called = name in self.seen and now - self.seen[name] <= max(THERE_S, self.rules.lease_s)
        return called and name not in self.away

    def fails(self, name: str) -> bool:
        """True if more than a tenth of its last members failed."""
        return self.failing.get(name, 0.0) > 0.1

    def holds_up(self, name: str) -> bool:
        """Slow, or failing."""
        return name in self.slow or self.fails(name)

    def yields(self, name: str, now: float) -> bool:
        """True if it gets nothing, because one that does better was idle lately."""
        if name in self.slow and any(
            o != name and not self.holds_up(o) and now - at <= HUNGRY_S for o, (at, *_) in self.rooms.items()
        ):
            return True
        rested = self.health[name]["at"] if self.on_trial(name) else None
        if not self.fails(name) and (rested is None or now - rested >= LONGEST_S):
            return False
        idle = [o for o, since in self.idle.items() if o != name and now - since <= IDLE_S and self.is_there(o, now)]
        return any(not self.fails(o) and not self.on_trial(o) for o in idle)

    def busy(self, name: str) -> None:
        """It is at rest, so it has no room."""
        for known in (self.rooms, self.behind, self.idle):
            known.pop(name, None)

    def note_end(self, name: str, failed: bool) -> None:
        """One more member of a holder, the last twenty of which count."""
        before = self.failing.get(name, 0.0)
        if failed or before:
            self.failing[name] = (1 - 0.05) * before + 0.05 * failed

    def is_broken_alone(self, name: str, now: float) -> bool:
        """True if a third of its members fail, or all, and another holder's do not or have not yet."""
        left = {known for known, session in self.sessions.items() if not session}
        if len({*self.failing, *left, name}) < self.rules.holders and name not in self.proved:
            return True
        return self.failing.get(name, 0.0) >= 0.3 and any(not self.fails(o) for o in self.helpers(name, now))

    def is_ill(self, name: str, now: float) -> bool:
        """At rest or on trial."""
        health = self.health.get(name)
        return health is not None and (
            health["rests"] >= TRIAL or (health["at"] is not None and health["at"] + health["rest"] > now)
        )

    def rests(self, name: str, now: float) -> bool:
        """True if `name` gets nothing now."""
        health = self.health.get(name)
        if health is None or health["at"] is None:
            return False
        rest = health["rest"] if self.helpers(name, now) else min(health["rest"], ALONE_S)
        return health["at"] + rest > now

    def on_trial(self, name: str) -> bool:
        """True if `name` gets one member at a time."""
        return self.health.get(name, {"rests": 0})["rests"] >= TRIAL

    def is_at_rest(self, r: ev.Lease, reply: Any, now: float) -> bool:
        """True if the caller gets nothing because its members failed: only then the refusal must give that reason."""
        busy = any(m["status"] == LEASED and m["name"] == r.name for g in self.open.values() for m in g["members"])
        due = self.rests(r.name, now) or (self.on_trial(r.name) and busy)
        refused = str(reply).startswith(("no credit: resting", "no credit: on trial"))
        if due != refused:
            broken("failures: rest", f"{r.name} gets {reply}, and should{'' if due else ' not'} rest: {self.health}")
        return due

    def note_failure(self, member: dict, now: float) -> None:
        """An INFRA failure of the member's holder, and the rest that it brings."""
        said = next((fact[2] for fact in self.take("rest")), None)
        if self.count_failure(member, said, now):
            self.health[member["name"]]["slow"] = False

    def count_failure(self, member: dict, said: float | None, now: float) -> bool:
        """Count a failure against the member's holder, which brings the rest that the store `said`; False: not."""
        name = member["name"]
        health = self.health.get(name, {"failures": 0, "rests": 0, "rest": 0.0, "at": None})
        leased = member["leased"]
        due: float | None = 0.0
        if health["at"] is not None and leased is not None and leased <= health["at"]:
            due = None  # of the wave before its rest
        elif health["failures"] + 1 >= (1 if health["rests"] >= TRIAL else IN_A_ROW):
            took = now - leased if health["rests"] and leased is not None else 0.0
            due = min(LONGEST_S, max(1.0, took) * 2 ** health["rests"])
        if said != due:
            broken("failures: rest", f"{name} rests {said}, {due} is due: {health}, leased at {leased}")
        if due is None:
            return False
        self.health[name] = health
        health["failures"] += 1
        if due:
            health |= {"failures": 0, "rests": health["rests"] + 1, "rest": due, "at": now}
            self.busy(name)
        return True

    def end_slow_lease(self, gid: int, number: int, rest: float | None, now: float) -> None:
        """A lease that the learner waits for and that takes longer than others' members: as if it had failed now."""
        member = self.open[gid]["members"][number]
        name, leased = member["name"], member["leased"]
        has_rested = self.health.get(name, {"rests": 0})["rests"] > 0
        if member["status"] != LEASED or not has_rested or leased is None or now - leased <= 1.0:
            broken("failures: rest", f"the lease of {gid}.{number} by {name} is ended as too slow: {member}")
        if not self.awaited or gid not in list(self.open)[: self.rules.batch] or not self.helpers(name, now):
            broken("failures: rest", f"{gid}.{number} of {name} is ended, and none waits for it or can take it")
        member["status"] = FREE
        self.ended_as_slow += 1
        self.count_failure(member, rest, now)

    def note_success(self, name: str, now: float) -> None:
        """Count a put, which halves the counts, unless the store finds it slow compared with others."""
        slow = [fact[2] for fact in self.take("too slow")]
        health = self.health.get(name, {"failures": 0, "rests": 0, "rest": 0.0, "at": None})
        on_trial = health.get("slow", False) and health["rests"] >= TRIAL
        if slow:
            if not 0 <= slow[0] <= LONGEST_S or not (self.helpers(name, now) or (slow[0] == 0 and on_trial)):
                broken("failures: rest", f"{name} is slow for {slow}, compared with {self.helpers(name, now)}")
            self.health[name] = health
            health["tried"] = health.get("tried", 0) + 1
            if slow[0]:
                health |= {"slow": True, "tried": 0}
                health |= {"failures": 0, "rests": max(TRIAL, health["rests"] + 1), "rest": slow[0], "at": now}
                self.busy(name)
            return
        if on_trial and health["tried"] + 1 < IN_A_ROW:
            broken("failures: rest", f"{name} passes a trial for slowness after {health['tried'] + 1} members")
        health |= {"failures": 0, "rests": health["rests"] // 2, "at": None}
        if not health["rests"]:
            self.health.pop(name, None)

"""Reference model of the store, by its contract: the allowed answers to every request, and the invariants after it.

It shares only the request types with the store. It receives every request, its answer, and the starts and ends in the
log (`Fact`s). Where the contract leaves a choice, it checks that the answer is allowed and follows it; otherwise
the answer must be the only allowed one. A refusal must have one of the reasons that apply.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from jaxroll.store.core import events as ev
from tests.harness.store_model.books import DONE, DROPPED, FREE, LEASED, Fact, broken
from tests.harness.store_model.holders import AVOID_S, SEEN_S
from tests.harness.store_model.shares import Deal, Sharing

FIRST_GUESS_BYTES = 4096  # what may be reserved for a member before any was seen
RESERVED_S = 5.0  # after a release for another sampler that one alone may lease the member
BACKOFF_S = (0.5, 30.0)  # the first rest after an INFRA failure, doubled each time, and the longest


class Reference(Sharing):
    """State of a store that keeps its promises, after the requests that it `observe`d."""

    def observe(self, request: Any, reply: Any, facts: list[Fact], now: float) -> None:
        """Raise Broken unless the contract allows `reply` and `facts`; then follows them."""
        self.facts = list(facts)
        getattr(self, "on_" + type(request).__name__)(request, reply, now)
        if self.facts:
            broken("9 nothing without a cause", f"the log says {self.facts}")

    # --- leases

    def on_Arrive(self, r: ev.Arrive, reply: Any, now: float) -> None:
        if self.sessions.get(r.name) != r.session:
            self.asked.pop(self.sessions.get(r.name, ""), None)
            self.sessions[r.name] = r.session
            self.free(lambda m: m["name"] == r.name and m["session"] != r.session)
            self.failing.pop(r.name, None)
            self.away.discard(r.name)
            if health := self.health.get(r.name):
                health |= {"failures": 0, "at": None}

    def on_Leave(self, r: ev.Leave, reply: Any, now: float) -> None:
        if self.sessions.get(r.name) != r.session:
            return
        self.asked.pop(r.session, None)
        self.sessions[r.name] = ""
        self.free(lambda m: m["name"] == r.name)
        self.failing.pop(r.name, None)
        if health := self.health.get(r.name):
            health |= {"failures": 0, "at": None}
        for known in (self.idle, self.rooms, self.behind, self.seen):
            known.pop(r.name, None)
        self.away.discard(r.name)

    def on_Renew(self, r: ev.Renew, reply: Any, now: float) -> None:
        for key in r.members:
            if held := self.holds(r.session, key):
                member = self.open[key[0]]["members"][key[1]]
                member["deadline"], self.seen[member["name"]] = now + self.rules.lease_s, now
            if held == (key in reply) and self.finished.get(key[:2], (0,))[0] != key[2]:  # a put on its way is no loss
                broken("11 leases are renewed", f"{key} is {'lost' if held else 'kept'} by {reply}")

    def on_Release(self, r: ev.Release, reply: Any, now: float) -> None:
        keys = {key[:2]: key[2] for key in r.members}
        for gid, number in keys.keys() & {(g, m) for g in self.open for m in range(self.rules.members)}:
            member = self.open[gid]["members"][number]
            if member["status"] == LEASED and member["attempt"] == keys[gid, number]:
                member["status"] = FREE
                if self.sessions.get(r.to):
                    member |= {"rest": now + RESERVED_S, "for": r.to}
        if r.away:
            self.away.add(r.away)
            for known in (self.rooms, self.behind):
                known.pop(r.away, None)

    def on_Tick(self, r: ev.Tick, reply: Any, now: float) -> None:
        if not r.stalled_s:
            self.free(lambda m: m["deadline"] <= now)
            for _, gid, number, rest in self.take("lease too slow"):
                self.end_slow_lease(gid, number, rest, now)
            return None
        for group in self.open.values():  # a suspended store extends leases instead of expiring them all
            if group["leased_at"] is not None:
                group["leased_at"] += r.stalled_s
            for member in group["members"]:
                member["deadline"] += r.stalled_s
                member["leased"] = None if member["leased"] is None else member["leased"] + r.stalled_s
        for health in self.health.values():
            health["at"] = None if health["at"] is None else health["at"] + r.stalled_s
        return None

    def on_Lease(self, r: ev.Lease, reply: Any, now: float) -> None:
        if no := self.lease_refusals(r):
            return self.one_of(reply, no, "11 typed ends")
        if isinstance(reply, Exception):
            self.one_of(reply, {"NoCredit"}, "9 backpressure")
        repeated = self.asked.get(r.session, ("",))[0] == r.request
        if not repeated and self.is_at_rest(r, reply, now):
            return None
        if self.on_trial(r.name) and not repeated:
            r = replace(r, max_members=1)
        if not repeated and self.is_for_another(r, str(reply), now):
            return None
        given = getattr(reply, "grants", ())
        grants = {(g.group, number): attempt for g in given for number, attempt in g.members}
        if len(grants) < sum(len(g.members) for g in given) or any(g.ttl_s != self.rules.lease_s for g in given):
            broken("2 attempts per member", f"{given} grants something twice, or for another time")
        if self.asked.get(r.session, ("",))[0] == r.request:
            still = {key[:2]: key[2] for key in self.asked[r.session][1] if self.holds(r.session, key)}
            return None if grants == still else broken("2 asked again", f"{grants} where {r.session} holds {still}")
        if grants:
            self.asked[r.session] = (r.request, tuple((*key, attempt) for key, attempt in grants.items()))
        if r.reserved:
            return self.grant_reserved(r, grants, now)
        deal = self.deal(r, now)
        was_seen = self.seen.get(r.name)
        left = self.grant_retries(r, dict(grants), deal, now)
        self.grant_prompts(r, *left, getattr(reply, "prompts_used", 0), deal, now)
        self.note_room(r, grants, str(reply), now)
        self.note_seen(r, grants, reply, was_seen, now)
        self.dealt += deal.is_known and deal.fraction < 1 and bool(grants)
        if any(self.open[g.group]["members"][m]["salt"] != g.key_salt for g in given for m, _ in g.members):
            broken("failures", f"{given}: a DATA failure would repeat itself with the same key")
        return None

    def grant_reserved(self, r: ev.Lease, grants: dict, now: float) -> None:
        """Follow the grants of members that are reserved for the caller, and of no others."""
        self.moved += len(grants)
        self.note_room(r, grants, "Leases", now)
        self.note_seen(r, grants, None, None, now)
        whole = Deal(r.max_members, r.max_members, Fraction(1), False, False, self.rules.batch, True)
        left, _, _ = self.grant_retries(r, dict(grants), whole, now)
        if left:
            broken("2 reserved members", f"{left} are not reserved for {r.name}")

    def note_seen(self, r: ev.Lease, grants: dict, reply: Any, before: float | None, now: float) -> None:
        """Note the presence of a sampler that gets work, or could do some and gets none."""
        idle = isinstance(reply, Exception) and self.published is not None and r.version.step >= self.published[1]
        if grants or (idle and (before is None or now - before >= SEEN_S)):
            self.seen[r.name] = now
            self.away.discard(r.name)

    def is_for_another(self, r: ev.Lease, reply: str, now: float) -> bool:
        """True if a slow or failing sampler gets no members but reserved ones, as a better one was just idle."""
        refused = reply.startswith(("no credit: slow", "no credit: unreliable"))
        if (due := not r.reserved and self.yields(r.name, now)) != refused:
            broken("7 slow samplers", f"{reply}, and {r.name} should{'' if due else ' not'} yield: idle {self.idle}")
        return refused

    def lease_refusals(self, r: ev.Lease) -> set[str]:
        no, version = set(), (r.version.lineage, r.version.step)
        over = self.data_ended and not self.open and self.acked >= self.next_claim
        if self.closed or over or self.acked >= self.rules.steps:
            no.add("Closed")
        if self.sessions.get(r.name, r.session) != r.session:
            no.add("StaleClient")
        if self.published is None or version[0] < self.published[0]:
            no.add("NoCredit")
        elif version > self.published[:2]:
            no.add("StaleClient")
        return no

    def grant(self, r: ev.Lease, gid: int, number: int, attempt: int, now: float) -> None:
        group = self.open[gid]
        member = group["members"][number]
        if attempt <= max(member["attempt"], member["fenced"]):
            broken("2 attempts per member", f"attempt {attempt} of {gid}.{number} was granted or fenced before")
        member |= {"status": LEASED, "attempt": attempt, "session": r.session, "name": r.name, "rest": 0.0}
        member["leased"] = now
        member["deadline"] = now + self.rules.lease_s
        group["leased_at"] = now if group["leased_at"] is None else group["leased_at"]

    def grant_retries(self, r: ev.Lease, grants: dict, deal: Deal, now: float) -> tuple[dict, int, bool]:
        """Follow the grants of members that open groups miss: in order, within the window, none passed over.

        Returns the grants that are left, what is left of the asker's share, and whether new prompts may follow.
        """
        least, most = self.window(self.base() - r.version.step)
        room, goes_on, unpublished = deal.most, True, self.unpublished()
        for place, (gid, group) in enumerate(self.open.items()):
            free = self.free_now(group, r.name, now, r.reserved)
            if not free:
                continue
            ahead = unpublished + (place if self.rules.order == "lease_order" else len(self.open) - 1)
            got, part = [number for number in free if (gid, number) in grants], deal.part(len(free), place)
            if not got:
                if goes_on and room > 0 and ahead < least and deal.is_known:
                    broken("2 re-leased", f"{free} of {gid} are free and within the window, and passed over")
                goes_on = False
            elif not goes_on or room <= 0 or ahead >= most:
                broken("7a admission", f"{got} of {gid} are granted with {ahead} groups ahead of it, room {room}")
            elif deal.is_known and got != free[: min(room, part)]:
                broken("9 shares", f"{got} of {free} of group {gid} go to {r.name}, {part} may, {room} left of {deal}")
            for number in got:
                self.grant(r, gid, number, grants.pop((gid, number)), now)
            room -= len(got)
        return grants, room, goes_on or room <= 0

    def grant_prompts(
        self, r: ev.Lease, grants: dict, room: int, may_follow: bool, used: int, deal: Deal, now: float
    ) -> None:
        """Follow the groups made of new prompts."""
        least, most = self.window(self.base() - r.version.step)
        issued = self.take("issued")
        if issued and not may_follow:
            broken("8 retries first", f"{issued} are issued before what is free is leased")
        if [f[2] for f in issued] != [t.index for t, _ in r.prompts[:used] if t.index not in self.passed]:
            broken(
                "10 prompts in order", f"{issued} are issued of the {used} prompts that are used, {r.prompts[:used]}"
            )
        for _, gid, prompt, reissue_of in issued:
            self.next_prompt = self.skip_passed(self.next_prompt)
            if prompt != self.next_prompt or reissue_of is not None:
                broken("10 prompts in order", f"prompt {prompt} is issued where {self.next_prompt} is next")
            if self.outstanding() >= most or room <= 0:
                broken("7a admission", f"group {gid} with {self.outstanding()} outstanding of {most}, room {room}")
            if self.must_not_issue():
                broken("6 retention", f"group {gid} is issued: {self.must_not_issue()}")
            place, whole = len(self.open), room + deal.room - deal.most
            self.add(gid, prompt, 0)
            self.prompts, self.next_prompt = self.prompts + 1, prompt + 1
            mine = [number for number in range(self.rules.members) if (gid, number) in grants]
            due = min(deal.part(self.rules.members, place), room if deal.splits(place) else whole)
            if len(mine) != due and (deal.is_known or not 0 < len(mine) <= whole):
                broken("9 shares", f"members {mine} of the new group {gid} go to {r.name}, {due} should, of {deal}")
            for number in mine:
                self.grant(r, gid, number, grants.pop((gid, number)), now)
            room -= len(mine)
        if grants:
            broken("2 attempts per member", f"{grants} were not free")
        more = [t.index for t, _ in r.prompts[used:] if t.index not in self.passed]
        if may_follow and room > 0 and more and len(self.open) + self.unpublished() < least and deal.is_known:
            if not self.may_refuse_to_issue():
                broken("9 backpressure", f"no group for prompt {more[0]}, with room {room} and {least} in the window")

    def must_not_issue(self) -> str:
        """The reason why one more prompt would break a promise; '' if it would not."""
        per_claim = self.rules.batch + self.rules.redundant
        if len(self.open) >= (self.rules.steps - self.next_claim) * per_claim:
            return "no step is left that would train it"
        full = (
            self.bytes() + self.largest * self.unfinished(LEASED) >= self.rules.retention_bytes or self.buffer_is_full()
        )
        return f"{self.bytes()} bytes are kept" if full and len(self.open) >= per_claim else ""

    def buffer_is_full(self) -> bool:
        """True if no more groups may be alive."""
        return 0 < self.rules.buffer <= len(self.open) + len(self.held)

    def may_refuse_to_issue(self) -> bool:
        """True if a store that reserves generously may say that its budget, or the run, is at its end."""
        per_claim = self.rules.batch + self.rules.redundant
        reserve = max(self.largest, FIRST_GUESS_BYTES) * (self.unfinished(LEASED, FREE) + self.rules.members)
        full = self.buffer_is_full() or self.bytes() + reserve >= self.rules.retention_bytes
        return (full and len(self.open) >= per_claim) or len(self.open) >= (
            self.rules.steps - self.next_claim
        ) * per_claim

    # --- puts

    def on_PutMember(self, r: ev.PutMember, reply: Any, now: float) -> None:
        self.one_of(reply, self.put_answers(r), "2 idempotent put")
        member = self.member(r.group, r.member)
        if member is None or reply != "OK" or member["status"] in (DONE, DROPPED):
            return
        if r.attempt != member["attempt"] or r.attempt in member["failed"]:
            return
        if r.failure is not None:
            return self.fail(r, member, r.failure[0], now)
        runs = tuple((run.version.lineage, run.version.step, run.count) for run in r.runs)
        member |= {"status": DONE, "digest": r.digest, "bytes": r.size_bytes, "runs": runs, "rest": 0.0}
        member |= {"reward": r.reward, "failed_by": set()}
        self.note_success(member["name"], now)
        if member["leased"] is not None and now > member["leased"]:
            self.proved.add(member["name"])
        self.note_end(member["name"], failed=False)
        self.seen[member["name"]] = now
        self.finished[r.group, r.member] = (r.attempt, r.digest)
        self.largest = max(self.largest, r.size_bytes)
        self.tokens_put += sum(run[2] for run in runs)
        group = self.open[r.group]
        if self.rules.spare and sum(m["status"] == DONE for m in group["members"]) == self.rules.size:
            self.let_go(r.group, self.missing(group))
        self.note_completion(group)
        if self.open[r.group]["place"] is not None:
            self.judge(r.group)

    def put_answers(self, r: ev.PutMember) -> set[str]:
        """The answers that promise 2 allows."""
        if not 0 <= r.group < self.next_group or not 0 <= r.member < self.rules.members:
            return (
                {"StaleClient"} if r.group >= self.next_group or (r.group in self.open) else {"StaleClient", "SURPLUS"}
            )
        member, done = self.member(r.group, r.member), self.finished.get((r.group, r.member))
        if done is not None and r.attempt == done[0]:
            return {"OK" if r.digest == done[1] else "Conflict"}
        if member is None:
            return {"SURPLUS", "Fenced"} if done is not None and r.attempt < done[0] else {"SURPLUS"}
        repeats = member["failed"].get(r.attempt)
        also = {"OK"} if repeats == r.digest else set()
        if member["status"] == DROPPED:
            return {"SURPLUS"} | also
        if r.attempt != member["attempt"] or r.attempt <= member["fenced"]:
            return {"Fenced"} | also
        if repeats is not None:
            return also or {"Conflict"}
        return {"OK"} if r.failure is not None else self.run_answers(r)

    def run_answers(self, r: ev.PutMember) -> set[str]:
        """Versions must have been published, lie on the line, and only grow."""
        runs = [(run.version.lineage, run.version.step, run.count) for run in r.runs]
        wrong = (
            not runs or any(run[2] < 1 for run in runs) or sorted(run[:2] for run in runs) != [run[:2] for run in runs]
        )
        for lineage, step, _ in runs:
            if (
                not 0 <= lineage < len(self.lines)
                or not 0 <= step <= self.newest[lineage]
                or not self.on_line(lineage, step)
            ):
                wrong = True
        return {"StaleClient"} if wrong else {"OK"}

    def fail(self, r: ev.PutMember, member: dict, kind: str, now: float) -> None:
        """INFRA is tried again after a rest, DATA at once with another key, neither forever."""
        member["failed"][r.attempt] = r.digest
        spared = self.is_broken_alone(member["name"], now)
        member[kind] += not spared
        member["salt"] += kind == "DATA"
        elsewhere = any(o not in member["failed_by"] for o in self.helpers(member["name"], now))
        if kind == "INFRA" or spared:
            self.note_failure(member, now)
        self.note_end(member["name"], failed=True)
        member |= {"failed_by": member["failed_by"] | {member["name"]}, "avoid": now + AVOID_S}
        rest = min(BACKOFF_S[1], BACKOFF_S[0] * 2 ** (member["INFRA"] - 1)) if kind == "INFRA" and not spared else 0.0
        if member["INFRA"] == 1 and elsewhere:
            rest = 0.0  # another holder has it at once
        member |= {"status": FREE, "rest": now + rest if rest else 0.0, "for": ""}
        over = member[kind] > (self.rules.infra_retries if kind == "INFRA" else self.rules.data_retries)
        if over and len(self.missing(group := self.open[r.group])) > self.rules.size - sum(
            m["status"] == DONE for m in group["members"]
        ):
            return self.let_go(r.group, (r.member,))
        if over != (self.take("dead") == [("dead", r.group)]):
            broken("failures", f"{r.group}.{r.member}: {member[kind]} {kind} failures, dead should be {over}")
        if over:
            self.end(r.group, "dead")
        return None

    # --- the end

    def on_EndData(self, r: ev.EndData, reply: Any, now: float) -> None:
        self.data_ended = True

    def on_Close(self, r: ev.Close, reply: Any, now: float) -> None:
        said = [f[2] for f in self.take("closed")]
        if said != ([] if self.closed else [r.reason]):
            broken("11 typed ends", f"closed by {r.reason}, the log says {said}")
        self.closed = self.closed or r.reason

    def on_Open(self, r: ev.Open, reply: Any, now: float) -> None:
        if self.closed and self.acked < self.rules.steps:
            self.closed, self.rejected = "", 0

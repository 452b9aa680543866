"""The learner's side of the reference model: begin, claim, publish, ack, durable, and what expires by them."""

from __future__ import annotations

import random
from typing import Any

from jaxroll.store.core import events as ev
from tests.harness.store_model.books import DONE, DROPPED, FREE, LEASED, Books, Fact, Rules, broken, whole_groups


class LearnerSide(Books):
    """Allowed answers to a learner, and the effects of its calls."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.facts: list[Fact] = []

    def take(self, kind: str, reason: str = "") -> list[Fact]:
        """The facts of one kind, which are accounted for from now on."""
        taken = [f for f in self.facts if f[0] == kind and (not reason or f[2] == reason)]
        self.facts = [f for f in self.facts if f not in taken]
        return taken

    def one_of(self, reply: Any, allowed: set, promise: str) -> None:
        """The answer, or the name of the refusal, must be one of these."""
        name = reply if reply is None or isinstance(reply, str) else type(reply).__name__
        if name not in allowed:
            broken(promise, f"{reply!r} where {sorted(allowed)} is due")

    def missing(self, group: dict) -> tuple[int, ...]:
        """Its members that may still be put."""
        return tuple(number for number, m in enumerate(group["members"]) if m["status"] in (FREE, LEASED))

    def let_go(self, gid: int, members: tuple[int, ...]) -> None:
        """The log must say that these redundant members are not needed any more."""
        if not members:
            return
        if ("aborted", gid, members) not in self.facts:
            broken("redundant members", f"{members} of group {gid} are not needed; the log says {self.facts}")
        self.facts.remove(("aborted", gid, members))
        for number in members:
            self.open[gid]["members"][number]["status"] = DROPPED

    def judge(self, gid: int) -> None:
        """A complete group that the filter rejects must have ended, the run with it if there were too many."""
        rules, group = self.rules, self.open[gid]
        limit = rules.filter_windows * (whole_groups(rules.alpha, rules.batch, 0) + rules.redundant)
        stays = not self.rejects(group) or (self.rejected >= limit and rules.at_limit == "deliver")
        ended = ("expired", gid, "filtered") in self.facts
        if stays == ended:
            broken("filter", f"group {gid} {'ends as filtered' if ended else 'stays'}: {group['members']}, {limit}")
        if stays:
            return
        self.facts.remove(("expired", gid, "filtered"))
        self.end(gid, "filtered")
        self.rejected += 1
        if self.rejected < limit or self.closed or rules.at_limit == "deliver":
            return
        why = self.take("closed")
        if len(why) != 1 or not why[0][2].startswith("schedule.filter"):
            broken("filter", f"{self.rejected} groups are filtered, {limit} may be, and the run goes on: {why}")
        self.closed, self.stopped = why[0][2], self.stopped + 1

    # --- what the learner says

    def stale_learner(self, session: str, lineage: int | None = None) -> set[str]:
        other = not self.learner or session != self.learner or lineage not in (None, len(self.lines) - 1)
        return {"StaleClient"} if other else set()

    def on_Begin(self, r: ev.Begin, reply: Any, now: float) -> None:
        lineage, step = (0, 0) if r.durable is None else (r.durable.lineage, r.durable.step)
        if r.fork and r.fork not in self.forks:
            return self.fork(r, lineage, step, reply)
        no = {"Closed"} if self.closed else set()
        if not self.on_line(lineage, step) or not self.durable <= step <= self.next_claim:
            no.add("StaleClient")
        if no:
            return self.one_of(reply, no, "6 never below the trim mark")
        rewinds = step < max(self.acked, self.base())
        begun = (len(self.lines) - 1 + rewinds, step)
        if isinstance(reply, Exception) or (reply.lineage, reply.step) != begun:
            broken("lineage", f"begin at {lineage}.{step} answers {reply} where {begun} is due")
        self.learner, self.acked, self.awaited = r.session, step, False
        self.trim(step)
        if rewinds:
            self.rewind(step)
        return None

    def rewind(self, step: int) -> None:
        """A new lineage: open leases are fenced, and what was sampled above the fork never happened."""
        self.start_line(len(self.lines) - 1, step)
        self.branch_of.append(self.branch_of[-1])
        self.expire(
            [g for g, x in self.open.items() if any(not self.on_line(*run[:2]) for run in self.runs(x))], "lineage"
        )
        for group in self.open.values():
            for member in group["members"]:
                if member["status"] in (FREE, LEASED):
                    member |= {"status": FREE, "fenced": member["attempt"]}

    def start_line(self, parent: int, step: int) -> None:
        """A new lineage, which has published nothing."""
        self.lines.append((parent, step))
        self.newest.append(-1)
        self.published = None
        self.asked.clear()

    def fork(self, r: ev.Begin, lineage: int, step: int, reply: Any) -> None:
        """A new lineage whose claims from `step` on are made again, of all prompts that had not ended by then."""
        known = lineage < len(self.lines) and (step == 0 or self.branch(lineage, step) in self.cuts)
        durable = known and (step == 0 or self.made(lineage, step) in self.durable_made)
        if isinstance(reply, Exception) or not known:
            here = known and self.on_line(lineage, step) and self.durable <= step <= self.next_claim
            return self.one_of(reply, {"StaleClient"} - ({"StaleClient"} if durable or here else set()), "6 fork")
        if (reply.lineage, reply.step) != (len(self.lines), step):
            broken("6 fork", f"a fork at {lineage}.{step} answers {reply} where lineage {len(self.lines)} is due")
        shared = self.shared(lineage, step)
        self.trim(shared)
        ended = {*self.open, *self.held}
        if ended != {f[1] for f in self.take("expired", "lineage")}:
            broken("6 fork", f"groups {sorted(ended)} are given up; the log says otherwise")
        for gid in ended:
            self.end(gid, "lineage")
        self.passed = self.cuts[self.branch(lineage, step)] if step else frozenset()
        self.branches.append(self.branch(lineage, step))
        self.branch_of.append(len(self.branches) - 1)
        self.start_line(lineage, step)
        self.batches, self.next_prompt, self.begun_at = {}, 0, step
        self.next_claim = self.durable = self.acked = step
        self.learner, self.closed, self.data_ended, self.rejected = r.session, "", False, 0
        self.awaited = False
        self.forks.add(r.fork)
        return None

    def shared(self, lineage: int, step: int) -> int:
        """The number of claims of the current line behind that version."""
        mine, its = self.line(len(self.lines) - 1, self.next_claim), self.line(lineage, step)
        return next((n for n, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), min(len(mine), len(its)))

    def expire(self, groups: list[int], why: str) -> None:
        """These groups must have expired just now, and their prompts come back at the end of the order."""
        if sorted(groups) != sorted(f[1] for f in self.take("expired", why)):
            broken("expired", f"groups {sorted(groups)} are {why}; the log says otherwise")
        again = {f[3]: f for f in self.facts if f[0] == "issued"}
        self.take("issued")
        for gid in groups:
            group = self.end(gid, why)
            new = again.pop(gid, None)
            if (new is not None) != (group["reissues"] < self.rules.reissues) or (new and new[2] != group["prompt"]):
                broken(
                    "expired groups are re-issued", f"group {gid} ({group['reissues']} re-issues) came back as {new}"
                )
            if new is not None:
                self.add(new[1], group["prompt"], group["reissues"] + 1)
        if again:
            broken("expired groups are re-issued", f"{again} without an expired group")

    def on_Publish(self, r: ev.Publish, reply: Any, now: float) -> None:
        version = r.ref.version
        no = self.stale_learner(r.session, version.lineage)
        if not self.base() <= version.step <= self.next_claim:
            no.add("StaleClient")
        self.one_of(reply, no or {None}, "versions grow within a lineage")
        if not no:
            newest = (version.lineage, version.step, r.ref.address)
            if self.published is None or newest[:2] != self.published[:2]:  # all that have room lack it
                others = {name: (*known[:2], False) for name, known in self.behind.items()}
                self.behind = {name: (*known[:2], True) for name, known in self.rooms.items()} | others
                self.published_at = now
            self.published = newest
            self.newest[-1] = version.step

    def on_Ack(self, r: ev.Ack, reply: Any, now: float) -> None:
        no = self.stale_learner(r.session, r.version.lineage)
        if r.version.step > self.acked or r.version.step >= self.next_claim:
            no.add("StaleClient")
        self.one_of(reply, no or {None}, "4 acked in order")
        if not no:
            self.acked = max(self.acked, r.version.step + 1)

    def on_Durable(self, r: ev.Durable, reply: Any, now: float) -> None:
        no = self.stale_learner(r.session)
        if not self.on_line(r.version.lineage, r.version.step) or r.version.step > self.acked:
            no.add("StaleClient")
        self.one_of(reply, no or {None}, "6 retention")
        if not no:
            self.trim(r.version.step)

    def trim(self, step: int) -> None:
        """A checkpoint holds the claims below `step`."""
        for covered in range(self.durable, step):
            for gid in self.batches[covered][0]:
                del self.held[gid]
                self.ended["trimmed"] += 1
        if step > self.durable:
            self.durable_made.add(self.made(len(self.lines) - 1, step))
            self.durable = step

    # --- claims

    def on_ClaimStep(self, r: ev.ClaimStep, reply: Any, now: float) -> None:
        no = self.stale_learner(r.session, r.lineage)
        if r.step < self.durable or r.step > self.next_claim:
            no.add("StaleClient")
        if r.step >= self.next_claim and (self.closed or r.step >= self.rules.steps):
            no.add("Closed")
        if no:
            return self.one_of(reply, no, "11 typed ends")
        if r.step == self.next_claim:
            return self.new_claim(r.step, reply, now, ahead=r.ahead)
        if isinstance(reply, Exception) or (reply.groups, reply.shuffle_seed) != self.batches[r.step]:
            broken("5 replayable batches", f"claim {r.step} answers {reply}, it was {self.batches[r.step]}")
        return None

    def new_claim(self, step: int, reply: Any, now: float, *, ahead: bool) -> None:
        """Expire stale groups, shrink the head if allowed, then claim the policy's batch if it is ready."""
        rules, usable = self.rules, [gid for gid, group in self.open.items() if not self.is_stale(group, step)]
        self.expire([gid for gid in self.open if gid not in usable], "stale")
        last = self.data_ended and len(self.open) == len(usable)
        if last and rules.last_batch == "drop" and len(usable) < rules.batch:
            usable = self.drop(usable)
        for gid in [] if ahead else self.shrink(usable[: rules.batch], now):
            if not self.closed:
                self.judge(gid)
        if self.closed:
            return self.one_of(reply, {"Closed"}, "filter")
        usable = [gid for gid in usable if gid in self.open]
        head = usable[: rules.batch + rules.redundant] if rules.order == "lease_order" else usable
        complete = [gid for gid in head if self.open[gid]["place"] is not None]
        wanted = min(rules.batch, len(usable)) if last else rules.batch
        if not wanted:
            self.one_of(reply, {"Closed"}, "11 typed ends")
        elif len(complete) < wanted:
            self.awaited = self.awaited or not ahead
            self.one_of(reply, {"NotReady"}, "3 atomic groups" if len(usable) >= wanted else "11 typed ends")
        elif isinstance(reply, Exception):
            broken("11 typed ends", f"{reply!r} where {complete} are complete")
        else:
            self.check_order(reply, complete, wanted)
            self.follow_claim(step, reply, [gid for gid in head if gid not in reply.groups])

    def drop(self, short: list[int]) -> list[int]:
        """The last batch is too short, and not wanted."""
        if sorted(short) != sorted(f[1] for f in self.take("expired", "last_batch")):
            broken("11 the last short batch", f"{short} are dropped by policy; the log says otherwise")
        for gid in short:
            self.end(gid, "last_batch")
        return []

    def is_stale(self, group: dict, step: int) -> bool:
        """True if it holds a token too old for `step`; when such tokens are masked, whether it holds no other."""
        old = [self.too_old(run[1], step) for run in self.runs(group)]
        return any(old) if self.rules.on_stale == "expire" else bool(old) and all(old)

    def shrink(self, head: list[int], now: float) -> list[int]:
        """The straggler policy: late groups at the head are closed with two finished members or more, those of two
        members with one. Which ones."""
        closed, least = [], 1 if self.rules.size == 2 else 2
        for gid in head if self.rules.straggler == "shrink" else ():
            group = self.open[gid]
            late = group["leased_at"] is not None and now - group["leased_at"] >= self.rules.straggler_s
            done = [number for number, member in enumerate(group["members"]) if member["status"] == DONE]
            if late and group["place"] is None and len(done) >= least:
                missing = self.missing(group)
                if ("shrunk", gid, missing) not in self.facts:
                    broken("8 stragglers", f"group {gid} is late; the log does not say that {missing} are dropped")
                self.facts.remove(("shrunk", gid, missing))
                for number in missing:
                    group["members"][number]["status"] = DROPPED
                self.note_completion(group)
                closed.append(gid)
        return closed

    def check_order(self, reply: Any, complete: list[int], wanted: int) -> None:
        """The batch is what the order policy says, shuffled by the logged seed."""
        chosen = sorted(reply.groups)
        if len(set(chosen)) != wanted or not set(chosen) <= set(complete):
            broken("3 atomic groups", f"{reply} where {wanted} of {complete} are due")
        if self.rules.order == "freshest_first":
            oldest = {gid: min(run[1] for run in self.runs(self.open[gid])) for gid in complete}
            left = [oldest[gid] for gid in complete if gid not in chosen]
            right = not left or min(oldest[gid] for gid in chosen) >= max(left)
        else:
            right = chosen == sorted(sorted(complete, key=lambda gid: self.open[gid]["place"])[:wanted])
        random.Random(reply.shuffle_seed).shuffle(chosen)
        if not right or tuple(chosen) != reply.groups:
            broken("8 order", f"{reply} is not what {self.rules.order} takes of {complete}, shuffled")

    def follow_claim(self, step: int, reply: Any, losers: list[int]) -> None:
        """No token is too old, the surplus ends, and the batch is logged."""
        runs = [run for gid in reply.groups for run in self.runs(self.open[gid])]
        masked = sum(run[2] for run in runs if self.too_old(run[1], step))
        if masked and self.rules.on_stale == "expire":
            broken("7b age bound", f"claim {step} holds tokens of {min(runs, key=lambda run: run[1])}")
        self.tokens_masked += masked
        surplus = [f[1] for f in self.take("expired", "surplus")]
        if len(surplus) != min(self.rules.redundant, len(losers)) or not set(surplus) <= set(losers):
            broken("7 surplus", f"{surplus} expired as surplus of {losers}")
        for gid in surplus:
            self.end(gid, "surplus")
        for gid in reply.groups:
            group = self.held[gid] = self.open.pop(gid)
            group["step"] = step
            if any(m["status"] not in (DONE, DROPPED) for m in group["members"]):
                broken("3 atomic groups", f"group {gid} is claimed in parts")
        self.batches[step] = (reply.groups, reply.shuffle_seed)
        self.next_claim, self.rejected, self.awaited = step + 1, 0, False
        self.failing = {name: 0.99 * share for name, share in self.failing.items() if 0.99 * share > 0.001}
        here = (self.branch_of[-1], self.next_claim)
        self.claims[here[0], step] = reply.groups
        begun = self.skip_passed(self.next_prompt)
        ended = {*range(begun), *self.passed} - {group["prompt"] for group in self.open.values()}
        self.cuts[here] = frozenset(ended)

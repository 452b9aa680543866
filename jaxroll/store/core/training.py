"""Training decisions: claims, acknowledgements, versions, lineages, the end of the run. Pure functions of the state.

The learner's convention: version `(lineage, k)` is the parameters after k claims. The claim of step s is trained at
version s and yields version s + 1. `ack(s)` confirms that it was trained, `durable(k)` that a checkpoint holds the
effect of all claims below k. `begin(k)` starts from that checkpoint, and the next claim is k.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxroll.errors import Closed, NotReady, StaleClient, StoreRefusal
from jaxroll.records import Cut, LogStart, Version
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import END_OF_DATA, Settings, adapted_pace
from jaxroll.store.core.leases import Decision, refuse
from jaxroll.store.core.puts import judged
from jaxroll.store.core.state import Batch, Group, Lineage, State, base_step, on_line

SHRINK_LEAST = 2  # finished members, which can be compared; one of a group of two, which would wait forever


def claim(settings: Settings, state: State, r: ev.ClaimStep, now_s: float) -> Decision:
    """Return the batch of `r.step`: the logged one, or the next one by the order policy once it is complete."""
    refusal = _not_the_learner(state, r.session) or _wrong_line(state, r.lineage)
    if refusal is not None:
        return refuse(refusal)
    if r.step < state.durable:
        return refuse(StaleClient(f"claim {r.step} is trimmed: step {state.durable} is durable"))
    if r.step in state.batches:
        return Decision(reply=state.batches[r.step])
    if r.step > state.next_claim:
        return refuse(StaleClient(f"claim {r.step} before claim {state.next_claim}"))
    if r.step >= settings.steps:
        return refuse(Closed("finished"))
    if state.closed:
        return refuse(Closed(state.closed))
    return _new_claim(settings, state, r, now_s)


def _new_claim(settings: Settings, state: State, r: ev.ClaimStep, now_s: float) -> Decision:
    events: list[ev.Event] = []
    old_enough = r.step > settings.limiter.max_age  # before that no token can be too old
    stale = _stale(settings, state, r.step) if old_enough else set()
    for gid in sorted(stale):
        events += expire_and_reissue(settings, state, state.open[gid], "stale", sum(map(_is_issue, events)))
    limiter = settings.limiter
    straggles = _may_straggle(settings, state, now_s)
    ready = len(state.open) - len(state.index.lacking)
    if ready < limiter.batch_groups and not (stale or state.data_ended or straggles):
        head = limiter.batch_groups + limiter.redundant_groups if settings.order == "lease_order" else len(state.open)
        return _not_ready(settings, state, r, [], *state.index.unready(head), len(state.open))
    usable = [g for g in state.open.values() if g.id not in stale] if stale else [*state.open.values()]
    last = state.data_ended and not any(map(_is_issue, events))
    if last and settings.last_batch == "drop" and len(usable) < settings.limiter.batch_groups:
        events += [ev.Expired(group.id, "last_batch") for group in usable]
        usable = []
    # A prefetching learner is not waiting yet.
    shrinking = _shrunk(settings, usable, now_s) if straggles and not r.ahead else []
    rejected = _rejected(settings, state, shrinking)
    events += [*shrinking, *rejected]
    if over := [e.reason for e in rejected if isinstance(e, ev.RunClosed)]:
        return Decision(events, Closed(over[0]))
    closed = {e.group: place for place, e in enumerate(shrinking)}
    gone = {e.group for e in rejected if isinstance(e, ev.Expired)}
    candidates: Sequence[Claimable] = usable  # a group is one itself
    if closed or settings.order == "freshest_first":
        candidates = [_candidate(settings, g, closed, state.ready_places) for g in usable if g.id not in gone]
    if last and not candidates:
        return Decision(events, Closed(END_OF_DATA))
    picked = pick(settings.order, candidates, limiter.batch_groups, limiter.redundant_groups, last)
    if not picked.chosen:
        first = state.open[picked.missing[0]] if picked.missing else None
        return _not_ready(settings, state, r, events, len(picked.missing), first, len(candidates))
    events += [ev.Expired(gid, "surplus") for gid in picked.surplus]
    claimed = _claimed(settings, state, r, picked, now_s)
    return Decision([*events, claimed], Batch(r.step, claimed.groups, claimed.shuffle_seed))


def _claimed(settings: Settings, state: State, r: ev.ClaimStep, picked: Pick, now_s: float) -> ev.Claimed:
    seed = settings.shuffle_seed(r.step)
    groups = shuffled(picked.chosen, seed)
    masked = sum(_stale_tokens(settings, state.open[gid], r.step) for gid in groups)
    waited_s, worked_s = _learner_s(state, now_s, r.computed_s)
    pace = adapted_pace(settings, state, waited_s, worked_s)
    return ev.Claimed(r.step, state.lineage, groups, seed, masked, waited_s, worked_s, pace)


def _learner_s(state: State, now_s: float, computed_s: float) -> tuple[float, float]:
    """Seconds that the learner waited for this claim, and worked since the previous one; 0 if unknown."""
    asked_at_s = now_s if state.awaited_at_s is None else state.awaited_at_s
    asked_at_s = min(now_s, asked_at_s + computed_s)
    worked_s = 0.0 if state.claimed_at_s is None else asked_at_s - state.claimed_at_s
    return now_s - asked_at_s, max(0.0, worked_s)


def _stale(settings: Settings, state: State, step: int) -> set[int]:
    """The open groups that `on_stale` ends because of tokens too old for `step`.

    With "expire" one such token suffices; with "mask" all tokens must be too old.
    """
    place = 0 if settings.on_stale == "expire" else 1
    index = state.index
    old = {edge for edge in index.by_edge if settings.limiter.too_old(edge[place], step)}
    return {gid for gid, edge in index.edges.items() if edge in old} if old else set()


def _stale_tokens(settings: Settings, group: Group, step: int) -> int:
    runs = [run for _, slot in group.done() for run in slot.runs]
    return sum(run.count for run in runs if settings.limiter.too_old(run.version.step, step))


def expire_and_reissue(
    settings: Settings, state: State, group: Group, reason: str, issued_before: int
) -> list[ev.Event]:
    """Expire `group` and, up to `settings.reissues` times, issue its prompt again as the newest group."""
    events: list[ev.Event] = [ev.Expired(group.id, reason)]
    if group.reissues < settings.reissues:
        new = state.next_group + issued_before
        events.append(_reissued(settings, group, new))
    return events


def _length_class(tokens: int) -> int:
    """The smallest power of two that is at least `tokens`; 0 for none."""
    return 1 << (tokens - 1).bit_length() if tokens > 0 else 0


def _reissued(settings: Settings, group: Group, new: int) -> ev.Issued:
    length = _length_class(max((slot.tokens for _, slot in group.done()), default=0))
    size, wanted = settings.members_leased, settings.members_wanted
    again = (group.id, group.reissues + 1, None, group.ordinal)
    return ev.Issued(new, group.task, size, *again, length=length, wanted=wanted)


def _is_issue(event: ev.Event) -> bool:
    return isinstance(event, ev.Issued)


def _shrunk(settings: Settings, usable: list[Group], now_s: float) -> list[ev.Shrunk]:
    """Close groups at the head that are past the straggler deadline with enough finished members."""
    if settings.straggler != "shrink":
        return []
    least = min(SHRINK_LEAST, max(settings.group_size - 1, 1))
    after_s, head = settings.straggler_deadline_s, usable[: settings.limiter.batch_groups]
    late = [g for g in head if g.ready_place is None and g.leased_at_s is not None and now_s - g.leased_at_s >= after_s]
    return [
        ev.Shrunk(group.id, tuple(m for m, _ in group.missing()), "straggler")
        for group in late
        if sum(1 for _ in group.done()) >= least
    ]


def _rejected(settings: Settings, state: State, shrinking: list[ev.Shrunk]) -> list[ev.Event]:
    """The filter's events for the groups that this decision closes as stragglers."""
    events: list[ev.Event] = []
    for shrunk in shrinking:
        if any(isinstance(e, ev.RunClosed) for e in events):
            break
        rewards = [slot.reward for _, slot in state.open[shrunk.group].done()]
        events += judged(settings, state, shrunk.group, rewards, len(events))
    return events


def _candidate(settings: Settings, group: Group, closed: dict[int, int], ready_places: int) -> Candidate:
    """The group as a candidate for a claim. `closed` maps the groups that this decision closes to their order."""
    place = ready_places + closed[group.id] if group.id in closed else group.ready_place
    return Candidate(group.id, place, group.oldest_step if settings.order == "freshest_first" else 0)


def _may_straggle(settings: Settings, state: State, now_s: float) -> bool:
    """True if an unfinished group has been leased for as long as the straggler deadline."""
    first = next(iter(state.index.begun.values()), None)
    if first is None or first.leased_at_s is None:
        return False
    return now_s - first.leased_at_s >= settings.straggler_deadline_s


def _not_ready(
    settings: Settings,
    state: State,
    r: ev.ClaimStep,
    events: list[ev.Event],
    missing: int,
    first: Group | None,
    there: int,
) -> Decision:
    """The answer while `missing` groups of a claim are not finished, of which `first` is the oldest."""
    if state.awaited_at_s is None and not r.ahead:
        events.append(ev.Awaited(r.step))
    if first is None:
        why = f"{there} of {settings.limiter.batch_groups} groups are there; the others are not leased yet"
    else:
        lacking = ", ".join(str(m) for m, _ in first.missing())
        why = f"{missing} groups are not finished; group {first.id} misses members {lacking} ({first.state})"
    return Decision(events, NotReady(why))


# --- claim order (docs/store_contract.md, promise 8)
#
# `lease_order` takes groups in the order of their prompts, so short answers are not favored and a run is reproducible.
# `ready_first` takes the groups that finished first, `freshest_first` those sampled last; with these two, the other
# groups grow stale.


class Claimable(Protocol):
    """The part of a group that `pick` reads; the fields are those of `Candidate`."""

    @property
    def group(self) -> int: ...
    @property
    def ready_place(self) -> int | None: ...
    @property
    def oldest_step(self) -> int: ...


@dataclass(frozen=True)
class Candidate:
    """Unclaimed group. `ready_place` is its position in the order of completion; None if it is unfinished."""

    group: int
    ready_place: int | None
    oldest_step: int = 0  # the version of its oldest token


@dataclass(frozen=True)
class Pick:
    """Groups `chosen` for a claim and `surplus` ones to abort; or the unfinished groups that are `missing` for it."""

    chosen: tuple[int, ...] = ()
    surplus: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


def pick(policy: str, candidates: Sequence[Claimable], batch: int, redundant: int, last: bool) -> Pick:
    """Pick the groups of the next claim from `candidates` (in the order of issue).

    `last`: no further group will come, so the batch may be short. With `redundant` groups the first `batch` to finish
    among `batch + redundant` are chosen and the others are surplus.
    """
    head = candidates[: batch + redundant] if policy == "lease_order" else candidates
    ready = [c for c in head if c.ready_place is not None]
    wanted = min(batch, len(candidates)) if last else batch
    if len(ready) < wanted or wanted == 0:
        return Pick(missing=tuple(c.group for c in head if c.ready_place is None))
    if policy == "ready_first":
        ready.sort(key=lambda c: (c.ready_place, c.group))
    elif policy == "freshest_first":
        ready.sort(key=lambda c: (-c.oldest_step, c.group))
    elif redundant:
        ready.sort(key=lambda c: (c.ready_place, c.group))
    chosen = sorted(c.group for c in ready[:wanted])
    return Pick(chosen=tuple(chosen), surplus=_surplus(head, chosen, redundant))


def _surplus(head: Sequence[Claimable], chosen: list[int], redundant: int) -> tuple[int, ...]:
    """At most `redundant` groups of the head that were not chosen; unfinished ones first, because they cost least."""
    rest = [c for c in head if c.group not in set(chosen)]
    rest.sort(key=lambda c: (c.ready_place is not None, c.group))
    return tuple(sorted(c.group for c in rest[:redundant]))


def shuffled(groups: Sequence[int], seed: int) -> tuple[int, ...]:
    """`groups` in a random order determined by `seed`."""
    order = list(groups)
    random.Random(seed).shuffle(order)
    return tuple(order)


# --- calls of the learner


def begin(settings: Settings, state: State, r: ev.Begin, now_s: float) -> Decision:
    """Return the version to train from. A checkpoint below the published or trained step opens a new lineage."""
    if r.fork and all(line.fork != r.fork for line in state.lineages):
        return fork(state, r)
    start = r.durable or Version(0, 0)
    refusal = _impossible_start(state, start)
    if refusal is not None:
        return refuse(refusal)
    if state.closed:
        return refuse(Closed(state.closed))
    known = max(state.acked, base_step(state))
    rewinds = start.step < known
    version = Version(state.lineage + rewinds, start.step)
    events: list[ev.Event] = [ev.Acked(Version(state.lineage, s)) for s in range(state.acked, start.step)]
    if start.step > state.durable:
        events.append(ev.MadeDurable(Version(state.lineage, start.step)))
    events.append(ev.Began(version, r.session, parent=state.lineage if rewinds else None))
    if rewinds:
        events += _expired_by_rewind(settings, state, version.step)
    return Decision(events, version)


def _impossible_start(state: State, start: Version) -> StoreRefusal | None:
    if not 0 <= start.lineage < len(state.lineages) or not on_line(state.lineages, start):
        return StaleClient(f"checkpoint {start} is not of this run's line (now lineage {state.lineage})")
    if start.step < state.durable:
        return StaleClient(
            f"checkpoint {start} is below step {state.durable}, whose trajectories are trimmed: "
            "restore a newer one, or fork the run there (--fork)"
        )
    if start.step > state.next_claim:
        return StaleClient(f"checkpoint {start} is ahead of the log, which holds {state.next_claim} claims")
    return None


def _expired_by_rewind(settings: Settings, state: State, fork_step: int) -> list[ev.Event]:
    """Expire open groups with tokens of versions above the fork, which the new lineage does not contain."""
    lines = [*state.lineages, Lineage(state.lineage, fork_step)]
    events: list[ev.Event] = []
    for group in state.open.values():
        if any(not on_line(lines, run.version) for _, slot in group.done() for run in slot.runs):
            events += expire_and_reissue(settings, state, group, "lineage", sum(map(_is_issue, events)))
    return events


def publish(settings: Settings, state: State, r: ev.Publish, now_s: float) -> Decision:
    """Record new weights. Steps only grow within a lineage; the same version again replaces its address."""
    version = r.ref.version
    refusal = _not_the_learner(state, r.session) or _wrong_line(state, version.lineage)
    if refusal is not None:
        return refuse(refusal)
    if version.step > state.next_claim:
        return refuse(StaleClient(f"version {version} needs {version.step} claims; {state.next_claim} were made"))
    if version.step < base_step(state):
        return refuse(StaleClient(f"version {version} is older than {version.lineage}.{base_step(state)}"))
    if state.published == r.ref:
        return Decision()
    return Decision([ev.Published(r.ref)])


def ack(settings: Settings, state: State, r: ev.Ack, now_s: float) -> Decision:
    """Record that the claim of version.step was trained. Acks come in order; a repeated one has no effect."""
    refusal = _not_the_learner(state, r.session) or _wrong_line(state, r.version.lineage)
    if refusal is not None:
        return refuse(refusal)
    step = r.version.step
    if step > state.acked or step >= state.next_claim:
        return refuse(StaleClient(f"ack of step {step}, but the next to be trained is {state.acked}"))
    return Decision([ev.Acked(r.version)] if step == state.acked else [])


def durable(settings: Settings, state: State, r: ev.Durable, now_s: float) -> Decision:
    """Trim the groups of all claims below version.step."""
    refusal = _not_the_learner(state, r.session)
    if refusal is None and not on_line(state.lineages, r.version):
        refusal = StaleClient(f"version {r.version} is not of this line (now lineage {state.lineage})")
    if refusal is None and r.version.step > state.acked:
        refusal = StaleClient(f"durable {r.version}, but only {state.acked} claims are trained")
    if refusal is not None:
        return refuse(refusal)
    return Decision([ev.MadeDurable(r.version)] if r.version.step > state.durable else [])


def _not_the_learner(state: State, session: str) -> StoreRefusal | None:
    if not state.learner:
        return StaleClient("begin first")
    return None if session == state.learner else StaleClient("another learner began after this one")


def _wrong_line(state: State, lineage: int) -> StoreRefusal | None:
    return None if lineage == state.lineage else StaleClient(f"lineage {lineage} ended, {state.lineage} is current")


# --- the end


def end_data(settings: Settings, state: State, r: ev.EndData, now_s: float) -> Decision:
    """Record that there are no further prompts."""
    return Decision([] if state.data_ended else [ev.DataEnded()])


def close(settings: Settings, state: State, r: ev.Close, now_s: float) -> Decision:
    """End the run; later calls keep the first reason."""
    return Decision([] if state.closed else [ev.RunClosed(r.reason)])


def open_run(settings: Settings, state: State, r: ev.Open, now_s: float) -> Decision:
    """Reopen, at the start of the store, a run that was closed before all steps were trained."""
    return Decision([ev.RunOpened()] if state.closed and state.acked < settings.steps else [])


# --- forks: a new lineage from a checkpoint, without the claims after it (their trajectories may be trimmed)
#
# A rewind replays the claims after its checkpoint; a fork makes new claims instead, so it also restores the position of
# the prompt stream at that step (`cut_at`). The new lineage skips the prompts that claims before the fork used and
# issues all others again, in their order.


def fork(state: State, r: ev.Begin) -> Decision:
    """Open a new lineage at the checkpoint: all groups after it end, and its later claims are made again."""
    start = r.durable or Version(0, 0)
    if r.log is not None:
        return _new_log(state, start, r, r.log)
    known = 0 <= start.lineage < len(state.lineages) and start.step >= 0
    cut = cut_at(state, start) if known else None
    if cut is None:
        return refuse(_no_cut(state, start))
    shared = shared_steps(state.lineages, start)
    events: list[ev.Event] = [ev.Acked(Version(state.lineage, step)) for step in range(state.acked, shared)]
    if shared > state.durable:
        events.append(ev.MadeDurable(Version(state.lineage, shared)))
    ended = [g.id for g in state.held.values() if g.step is not None and g.step >= shared] + list(state.open)
    events += [ev.Expired(group, "lineage") for group in sorted(ended)]
    version = Version(len(state.lineages), start.step)
    events.append(ev.Began(version, r.session, start.lineage, r.fork, cut))
    return Decision(events, version)


def _new_log(state: State, start: Version, r: ev.Begin, log: LogStart) -> Decision:
    """Begin this log, which is new, at a checkpoint whose own log is lost."""
    if state.issued or len(state.lineages) > 1 or not log.is_sound or start.lineage >= len(log.lines):
        return refuse(StaleClient(f"checkpoint {start} begins no new log here: this one has {state.issued} groups"))
    version = Version(len(log.lines), start.step)
    return Decision([ev.Began(version, r.session, start.lineage, r.fork, log.cut, log)], version)


def _no_cut(state: State, start: Version) -> StoreRefusal:
    newest = ", ".join(list(state.cuts)[-3:]) or "none"
    return StaleClient(
        f"checkpoint {start} cannot be forked from: the store knows the prompts of 0.0, of durable steps (the newest: "
        f"{newest}) and of the claims since"
    )


# --- position of the prompt stream after each claim, from which a fork continues
#
# The store keeps a cut for every claim that is not trimmed, and for every durable step.

CUTS_KEPT = 1000  # the newest durable steps; only these can be forked from


def cut_of(state: State) -> Cut | None:
    """The current position of the prompt stream: prompts before the oldest open group have ended, and some after it.

    None while a group is open whose prompt was read before the log kept the pipeline's states (schema 1).
    """
    unended = {group.ordinal for group in state.open.values()}
    low = min(unended, default=state.next_ordinal)
    if low and low - 1 not in state.stream:
        return None
    passed = [ordinal for ordinal in range(low, state.next_ordinal) if ordinal not in unended]
    passed += sorted(ordinal for ordinal in state.passed if ordinal >= state.next_ordinal)
    return Cut(low, tuple(passed), state.stream.get(low - 1), state.next_group)


def origin(lineages: list[Lineage], version: Version) -> Version:
    """The same parameters, named by the lineage that trained them.

    Version 2.5 is 0.5 if lineage 2 left lineage 0 at step 5 or later.
    """
    lineage = version.lineage
    while (parent := lineages[lineage].parent) is not None and version.step <= lineages[lineage].fork_step:
        lineage = parent
    return Version(lineage, version.step)


def cut_at(state: State, version: Version) -> Cut | None:
    """The cut of `version`; None if the store never had it or has dropped it."""
    made = origin(state.lineages, version)
    if version.step == 0:
        return Cut()
    if (known := state.cuts.get(str(made))) is not None:
        return known
    here = origin(state.lineages, Version(state.lineage, version.step))
    return state.claim_cuts.get(version.step - 1) if made == here else None


def keep_cut(state: State, version: Version) -> None:
    """Keep the cut of a version that becomes durable; drop the oldest beyond `CUTS_KEPT`."""
    cut = state.claim_cuts.get(version.step - 1)  # None: an older JaxRoll logged the claim, without a cut
    if cut is not None:
        state.cuts[str(origin(state.lineages, version))] = cut
    for step in [step for step in state.claim_cuts if step < version.step]:
        del state.claim_cuts[step]
    while len(state.cuts) > CUTS_KEPT:
        del state.cuts[next(iter(state.cuts))]


def shared_steps(lineages: list[Lineage], version: Version) -> int:
    """The number of claims that the newest lineage and `version` have in common."""
    here = _line(lineages, Version(len(lineages) - 1, version.step))
    there = _line(lineages, version)
    return max((min(step, there[lineage]) for lineage, step in here.items() if lineage in there), default=0)


def _line(lineages: list[Lineage], version: Version) -> dict[int, int]:
    """For each lineage on the line that ends at `version`: its last step on that line."""
    lineage: int | None = version.lineage
    last, found = version.step, {}
    while lineage is not None:
        found[lineage] = last
        last, lineage = min(last, lineages[lineage].fork_step), lineages[lineage].parent
    return found

"""The dashboard of a large run: 1,000,000 metric rows and 10,000 groups of 8 rollouts. It prints the time of each view.

Times are of this machine; nothing here depends on them.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from jaxroll import wire
from jaxroll.records import Version, VersionRef, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.log import commit_log
from tests.harness import browser, dashboard
from tests.harness.run_folder import STARTED, LogMaker, task, write_run_file
from tests.ui.conftest import finished, serving

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(1500)]
ROWS, GROUPS = 1_000_000, 10_000
MEMBERS, PER_STEP, SAMPLERS, ROUNDS = 8, 24, 4, 7


def rows() -> Iterator[dict]:
    """Rows of a run in the proportions of the demo: about ten per step, most of them spans."""
    rng = random.Random(0)
    for number in range(ROWS):
        step, place = divmod(number, 10)
        t, role = STARTED + step + place / 10, f"sampler-{step % SAMPLERS}"
        if number == 0:
            yield {"t": t, "role": "learner", "kind": "event", "text": "the run begins"}
        elif place < 6:
            what = ("decode", "decode", "decode", "fetch", "weight_swap", "decode")[place]
            yield {"t": t, "role": role, "kind": "span", "what": what, "t0": t - 0.09, "t1": t, "tokens": 100}
        elif place < 8:
            yield {
                "t": t,
                "role": "store",
                "kind": "store",
                "waits": {"learner": f"is training claim {step}"},
                "in_flight_window": 48,
                "groups_in_flight": rng.randrange(48),
                "learner_wait_share": rng.random(),
                "counts": {"LEASED": 9, "READY": 3},
                "wasted_tokens": rng.random(),
                "published": f"0.{step}",
            }
        elif place == 8:
            yield {
                "t": t,
                "role": role,
                "kind": "stats",
                "version": f"0.{step}",
                "tokens_per_s": rng.gauss(9000, 500),
                "slot_occupancy": rng.random(),
                "queue_depth": rng.randrange(64),
                "ttft_p50_s": rng.random(),
                "itl_p50_s": rng.random(),
                "episodes": number,
                "reward_parts": {"score": rng.random()},
            }
        else:
            yield {
                "t": t,
                "role": "learner",
                "kind": "step",
                "step": step + 1,
                "lineage": 0,
                "t0": t - 0.6,
                "t1": t - 0.1,
                "train_s": 0.5,
                "wait_s": 0.1,
                "publish_s": 0.05,
                "age_hist": {"0": 100, "1": 500},
                "reward_mean": rng.random(),
                "loss": rng.gauss(0, 1),
                "entropy": rng.random(),
                "ess": rng.random(),
                "grad_norm": rng.random(),
                "age_mean": 0.8,
                "age_max": 1,
                "kl_behaviour": rng.random(),
                "clip_share": rng.random(),
                "padding_waste": rng.random(),
                "by_age": {"0": {"ess": rng.random()}, "1": {"ess": rng.random()}},
            }


def make_log(path: Path) -> None:
    """A log of `GROUPS` groups, of which the last thousand have tokens."""
    log = LogMaker()
    log.add(ev.Began(Version(0, 0), "L"), ev.Published(VersionRef(Version(0, 0), "tcp", "h:1", "m")))
    waiting: list[int] = []
    for group in range(GROUPS):
        step = group // PER_STEP
        log.add(ev.Issued(group, task(group), MEMBERS, cursor=b"c"), t=STARTED + step)
        log.add(ev.Leased(group, tuple((m, 1) for m in range(MEMBERS)), "sampler-0", "s", "r", 30.0), t=STARTED + step)
        for member in range(MEMBERS):
            runs = (VersionRun(Version(0, max(0, step - 1)), 9),)
            log.add(ev.Put(group, member, 1, f"d{group}.{member}", 100, runs, reward=(group + member) % 3 / 2))
            if group >= GROUPS - 1000:
                body = wire.encode(finished(group, member, 0.0))
                log.statements.append(commit_log.payload(group, member, body))
        if group % 50 == 7:
            log.add(ev.Expired(group, "filtered:equal rewards"))
        else:
            waiting.append(group)
        if len(waiting) == PER_STEP:
            claimed = log.state.next_claim
            log.add(ev.Claimed(claimed, 0, tuple(waiting), 7), t=STARTED + step)
            log.add(ev.Published(VersionRef(Version(0, claimed + 1), "tcp", "h:1", "m")), ev.Acked(Version(0, claimed)))
            waiting.clear()
            if claimed % 20 == 19:
                log.add(ev.MadeDurable(Version(0, claimed + 1)))
    log.write(path)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run `large`."""
    folder = tmp_path_factory.mktemp("large")
    path = folder / "large"
    write_run_file(path, tokenizer__kind="char", schedule__steps=ROWS // 10)
    (path / "alphabet.json").write_text('"abcdefghijklmnopqrstuvwxyz"')
    with (path / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows())
    make_log(path)
    return folder


QUERIES = {
    "runs": {}, "run": {}, "curves": {"name": ["step/reward_mean", "step/loss", "stats/tokens_per_s",
                                               "store/learner_wait_share", "step/entropy", "step/ess"]},
    "curves by time": {"name": ["step/reward_mean", "stats/tokens_per_s"], "x": "time", "from": 1000, "to": 50_000},
    "timeline": {"points": 1000}, "ages": {}, "versions": {}, "faults": {}, "roles": {}, "configs": {},
    "rollouts": {}, "rollouts by reward": {"order": "reward"}, "rollouts by text": {"text": "word 77"},
    "rollouts, last page": {"offset": GROUPS - 50}, "rollout": {"group": GROUPS - 5},
    "member": {"group": GROUPS - 5, "member": 3},
}  # fmt: skip


def test_every_view_of_a_large_run_is_there(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(large) as (made, url):
        client = httpx.Client(base_url=url, headers={"Authorization": "Bearer " + "t" * 64}, timeout=60)
        began, slowest = time.perf_counter(), 0.0
        while True:  # while the rows are read, views show what is there
            asked = time.perf_counter()
            found = client.get("/api/run", params={"run": "large"}).json()
            slowest = max(slowest, time.perf_counter() - asked)
            if found["ready"]:
                break
        read_s, worst_ms = time.perf_counter() - began, 1000 * slowest
        lines = [f"{found['rows']:,} rows read in {read_s:.1f} s; slowest answer {worst_ms:.0f} ms"]
        assert found["rows"] == ROWS
        for name, query in QUERIES.items():
            taken = []
            for _ in range(ROUNDS):
                asked = time.perf_counter()
                answer = client.get(f"/api/{name.split(' ')[0].strip(',')}", params={"run": "large", **query})
                taken.append(1000 * (time.perf_counter() - asked))
                assert answer.status_code == 200, answer.text
            lines.append(
                f"api {name}: {statistics.median(taken):.0f} ms ({min(taken):.0f} to {max(taken):.0f}), "
                f"{len(answer.content) // 1000} kB"
            )
        assert client.get("/api/rollouts", params={"run": "large"}).json()["total"] == GROUPS
        curves = client.get("/api/curves", params={"run": "large", "name": "step/loss"}).json()["curves"]["step/loss"]
        assert len(curves[0]["x"]) == 500 and curves[0]["x"][-1] == ROWS // 10
        if browser.program():
            with browser.opened() as page:
                page.size(1280, 900)
                page.go(f"{url}/#code={made.code}")
                page.until("!!document.querySelector('#view table')")
                for view in dashboard.FILLED:
                    taken = []
                    for _ in range(ROUNDS):
                        page.run("location.hash = '#/'")
                        page.until("!!document.querySelector('#view table')")
                        taken.append(page.run(SHOWN % ("large", view, dashboard.FILLED[view])))
                    lines.append(
                        f"view {view}: {statistics.median(taken):.0f} ms ({min(taken):.0f} to {max(taken):.0f})"
                    )
    with capsys.disabled():
        print("\n" + "\n".join(lines))


# From the change of the address to the frame in which the view shows data.
SHOWN = """new Promise(done => {
  const began = performance.now();
  location.hash = '#/%s/%s';
  const look = () => document.querySelector("#tabs:not([hidden])") && document.querySelector("%s")
    ? requestAnimationFrame(() => done(performance.now() - began)) : setTimeout(look, 2);
  setTimeout(look, 2);
})"""

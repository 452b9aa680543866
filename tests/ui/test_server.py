"""The dashboard's server: clients without the token see nothing, and its JSON has what the run's files have."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from jaxroll.ui import server
from jaxroll.ui.runs import Runs
from tests.harness.run_folder import GROUPS, MEMBERS, TOKENS
from tests.ui.conftest import ALPHABET, HOSTILE, HOSTILE_NAME, SAMPLED

TOKEN = "0123456789abcdef" * 4
OWN = {"X-JaxRoll": "1"}
VIEWS = (
    "runs",
    "run",
    "curves",
    "timeline",
    "ages",
    "versions",
    "faults",
    "roles",
    "rollouts",
    "rollout",
    "member",
    "configs",
)


@pytest.fixture(scope="module")
def dashboard(runs_dir: Path) -> Iterator[server.Dashboard]:
    made = server.Dashboard(Runs(runs_dir), TOKEN)
    made.runs.start()
    yield made
    made.runs.close()


@pytest.fixture
def anyone(dashboard: server.Dashboard) -> TestClient:
    return TestClient(dashboard.app, base_url="http://127.0.0.1:8100")


@pytest.fixture
def user(dashboard: server.Dashboard) -> TestClient:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return TestClient(dashboard.app, base_url="http://localhost:8100", headers=headers)


def get(user: TestClient, view: str, **query: object) -> dict:
    answer = user.get(f"/api/{view}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


# --- access


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shown", ["", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}0"])
def test_without_the_token_nothing_can_be_read(anyone: TestClient, view: str, shown: str) -> None:
    answer = anyone.get(f"/api/{view}", params={"run": "a", "group": 0}, headers={"Authorization": shown})
    assert answer.status_code == 401 and "a" not in answer.json().keys() - {"error"}


def test_without_the_token_there_is_only_the_login(anyone: TestClient) -> None:
    page = anyone.get("/")
    assert page.status_code == 401 and 'id="token"' in page.text and "app.js" not in page.text
    files = [path.relative_to(server.STATIC) for path in server.STATIC.rglob("*") if path.is_file()]
    open_files = {str(file) for file in files if anyone.get(f"/static/{file}").status_code == 200}
    assert open_files == set(server.OPEN_FILES)
    for path in ("/nothing", "/api/nothing", "/docs", "/static/../server.py", "/static/%2e%2e/server.py"):
        assert anyone.get(path).status_code == 401, path


def test_every_view_is_listed_here(dashboard: server.Dashboard, user: TestClient) -> None:
    paths = {name for name in VIEWS if user.get(f"/api/{name}").status_code in (200, 404)}
    assert paths == set(VIEWS) and user.get("/api/other").status_code == 404


def test_a_browser_gets_a_session_for_the_token_or_once_for_the_link(dashboard: server.Dashboard) -> None:
    code = dashboard.code
    for body in ({"code": code}, {"token": f" {TOKEN}\n"}):
        browser = TestClient(dashboard.app, base_url="http://localhost:8100")
        assert browser.get("/api/runs").status_code == 401
        answer = browser.post("/login", json=body, headers=OWN)
        cookie = answer.headers["set-cookie"].lower()
        assert answer.status_code == 200 and TOKEN not in cookie
        assert "httponly" in cookie and "samesite=strict" in cookie and "path=/" in cookie
        assert browser.get("/api/runs").status_code == 200 and "app.js" in browser.get("/").text
        assert browser.post("/logout", headers=OWN).status_code == 200
        browser.cookies.set(*cookie.split(";")[0].split("=", 1))  # a kept cookie of an ended session
        assert browser.get("/api/runs").status_code == 401
    for wrong in ({"code": code}, {"code": ""}, {"token": ""}, {"token": None}, {}, {"token": "0" * 64}):
        assert browser.post("/login", json=wrong, headers=OWN).status_code == 401, wrong
    assert browser.post("/login", content=b"[1]", headers=OWN).status_code == 400
    assert browser.post("/login", content=b"x" * 100_000, headers=OWN).status_code == 413


@pytest.mark.parametrize("name", ["evil.example", "evil.example:8100", "127.0.0.1.evil.example", "", "localhost.evil"])
def test_other_names_of_this_machine_are_refused(dashboard: server.Dashboard, name: str) -> None:
    client = TestClient(dashboard.app, base_url="http://localhost:8100", headers={"Authorization": f"Bearer {TOKEN}"})
    for path in ("/", "/api/runs", "/static/style.css"):
        assert client.get(path, headers={"Host": name}).status_code == 421
    for own in ("127.0.0.1:9", "localhost", "[::1]:8100", "192.168.0.7:8100"):  # as behind a tunnel
        assert client.get("/api/runs", headers={"Host": own}).status_code == 200


def test_a_name_given_by_the_user_is_accepted(runs_dir: Path) -> None:
    named = server.Dashboard(Runs(runs_dir), TOKEN, "box.example")
    client = TestClient(named.app, base_url="http://box.example:1", headers={"Authorization": f"Bearer {TOKEN}"})
    assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        OWN | {"Origin": "http://evil.example"},
        OWN | {"Origin": "http://localhost:9999"},
        OWN | {"Origin": "null"},
        OWN | {"Sec-Fetch-Site": "cross-site"},
        OWN | {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_requests_of_other_pages_change_nothing(user: TestClient, headers: dict[str, str]) -> None:
    for path in ("/login", "/logout"):
        assert user.post(path, json={"token": TOKEN}, headers=headers).status_code == 403


def test_every_response_has_the_headers(anyone: TestClient, user: TestClient) -> None:
    answers = [anyone.get("/"), anyone.get("/api/runs"), user.get("/"), user.get("/api/runs"), user.get("/x"),
               user.get("/static/app.js"), user.get("/api/run", params={"run": "x"}),
               user.get("/", headers={"Host": "x.example"})]  # fmt: skip
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store" and answer.headers["referrer-policy"] == "no-referrer"


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_pages_load_only_files_of_this_server_and_scripts_write_no_html() -> None:
    for page in server.STATIC.glob("*.html"):
        for tag, attributes in _Tags(page.read_text()).found:
            assert not [name for name in attributes if name.startswith("on") or name == "style"], (page.name, tag)
            assert tag != "style" and (tag != "script" or attributes.get("src")), page.name
            for name in ("src", "href"):
                assert str(attributes.get(name, "/")).startswith(("/static/", "#", "/")), (page.name, attributes)
    for script in server.STATIC.glob("*.js"):
        text = script.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|https?://", text
        )


# --- what is read


def test_runs_are_listed_and_damaged_ones_say_so(user: TestClient) -> None:
    found = {run["name"]: run for run in get(user, "runs")["runs"]}
    assert found.keys() == {"a", HOSTILE_NAME, "damaged"}
    assert found["a"]["trained"] == 30 and found["a"]["steps"] == 40 and found["a"]["accuracy"] > 0.3
    assert "run.json" in found["damaged"]["error"]


@pytest.mark.parametrize("name", ["", "..", "../runs/a", "no run", "link", "/etc", "a/../a", "x" * 5000])
def test_only_runs_of_the_folder_can_be_named(user: TestClient, name: str) -> None:
    for view in set(VIEWS) - {"runs", "curves", "configs"}:
        answer = user.get(f"/api/{view}", params={"run": name, "group": 0, "member": 0})
        assert answer.status_code == 404 and "no such run" in answer.json()["error"], view
    assert user.get("/api/curves", params={"run": name, "name": "step/loss"}).status_code == 404
    assert user.get("/api/configs", params={"run": name}).status_code == 404


def test_a_damaged_run_is_an_error_with_a_reason(user: TestClient) -> None:
    answer = user.get("/api/run", params={"run": "damaged"})
    assert answer.status_code == 404 and "unreadable" in answer.json()["error"]


def test_curves_are_the_rows(user: TestClient, rows: list[dict]) -> None:
    query = {"run": ["a", "a"], "name": ["step/reward_mean", "eval/accuracy", "stats/tokens_per_s", "step/none"]}
    found = get(user, "curves", **query)["curves"]
    steps = [row for row in rows if row["kind"] == "step"]
    (reward, again) = found["step/reward_mean"]
    assert reward == again and reward["role"] == "learner" and reward["x"] == [row["step"] for row in steps]
    assert reward["y"] == pytest.approx([row["reward_mean"] for row in steps], rel=1e-6)
    assert found["step/none"] == [] and len(found["eval/accuracy"][0]["y"]) == 2
    by_time = get(user, "curves", run="a", name="stats/tokens_per_s", x="time")["curves"]["stats/tokens_per_s"][0]
    stats = [row for row in rows if row["kind"] == "stats"]
    assert by_time["x"] == pytest.approx([row["t"] - rows[0]["t"] for row in stats], rel=1e-6)
    part = get(user, "curves", run="a", name="step/loss", points=10, **{"from": 5, "to": 24})["curves"]["step/loss"][0]
    assert len(part["x"]) == 10 and part["x"][-1] == 24
    losses = [row["loss"] for row in steps if 5 <= row["step"] <= 24]
    assert min(part["low"]) == pytest.approx(min(losses), rel=1e-5) and max(part["high"]) == pytest.approx(
        max(losses), rel=1e-5
    )


def test_ages_versions_faults_and_roles_of_a_run(user: TestClient, rows: list[dict]) -> None:
    ages = get(user, "ages", run="a")
    assert sum(ages["ages"].values()) == 30 * GROUPS * MEMBERS * TOKENS and ages["bound"] == 1
    assert sum(get(user, "ages", run="a", last=3)["ages"].values()) == 3 * GROUPS * MEMBERS * TOKENS
    versions = get(user, "versions", run="a")
    assert [one["step"] for one in versions["versions"]] == list(range(31))
    assert versions["samplers"] == {"sampler-0": "0.29"}
    faults = get(user, "faults", run="a")
    assert faults["restarts"] == {"sampler-0": 1} and faults["failures_total"] == 1
    assert faults["causes"][0]["cause"].startswith("scorer raised") and faults["causes"][0]["groups"] == 1
    assert faults["events"][0]["kind"] == "event" and [e for e in faults["events"] if e["kind"] == "restart"]
    roles = get(user, "roles", run="a")
    assert {"learner", "sampler-0", "evaluator"} <= roles["roles"].keys() and "config" not in roles["about"]
    assert get(user, "configs", run="a")["configs"]["a"]["schedule"]["steps"] == 40


def test_prometheus_reads_the_newest_numbers_of_live_runs(
    tmp_path: Path, runs_dir: Path, rows: list[dict], anyone: TestClient
) -> None:
    """Judged by prometheus_client's parser, with hostile names of runs and processes."""
    assert anyone.get("/metrics").status_code == 401
    for name, age_s in (("a", 0.0), (HOSTILE_NAME, 0.0), ("ended", 3600.0)):
        shutil.copytree(runs_dir / ("a" if name == "ended" else name), tmp_path / name)
        os.utime(tmp_path / name / "metrics.jsonl", times=(time.time() - age_s,) * 2)
    made = server.Dashboard(Runs(tmp_path), TOKEN)
    made.runs.start()
    client = TestClient(made.app, base_url="http://localhost:8100", headers={"Authorization": f"Bearer {TOKEN}"})
    answer = client.get("/metrics")
    made.runs.close()
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.text))
    assert len({family.name for family in families}) == len(families) and {one.type for one in families} == {"gauge"}
    found = {
        (one.name, one.labels["run"], one.labels.get("role", "")): one.value for f in families for one in f.samples
    }
    assert len(found) == sum(len(family.samples) for family in families) and {run for _, run, _ in found} == {
        "a",
        HOSTILE_NAME,
    }
    newest = [row for row in rows if row["kind"] == "step"][-1]
    of_step = {name: found["jaxroll_step_" + name, "a", "learner"] for name in ("loss", "reward_mean", "step_number")}
    assert of_step == {"loss": newest["loss"], "reward_mean": newest["reward_mean"], "step_number": 30}
    assert found["jaxroll_step_by_age_1_ess", "a", "learner"] == newest["by_age"]["1"]["ess"]
    assert found["jaxroll_stats_weights_step", "a", "sampler-0"] == 29 and found["jaxroll_trained_steps", "a", ""] == 30
    assert found["jaxroll_restarts", HOSTILE_NAME, HOSTILE] == 1 and found["jaxroll_restarts", "a", "sampler-0"] == 1


def test_a_run_has_its_progress_and_the_names_of_its_metrics(user: TestClient) -> None:
    found = get(user, "run", run="a")
    assert found["trained"] == 30 and found["ready"] and "step/reward_mean" in found["names"]
    assert found["latest"]["learner/step"]["step"] == 30 and "config" not in found["about"]
    assert "step/by_age/1/ess" in found["names"] and not [name for name in found["names"] if "age_hist" in name]


def test_the_timeline_covers_the_run(user: TestClient) -> None:
    found = get(user, "timeline", run="a", points=50)
    assert {"learner", "sampler-0", "evaluator"} <= found["roles"].keys()
    assert set(found["roles"]["learner"]) >= {"train", "wait", "publish", "compile"}
    assert all(
        len(shares) == 50 and 0 <= min(shares) <= max(shares) <= 1
        for lane in found["roles"].values()
        for shares in lane.values()
    )
    part = get(user, "timeline", run="a", points=20, **{"from": 1e9, "to": -5})
    assert part["from"] <= part["to"] <= found["all"] + 0.01
    waits = get(user, "timeline", run=HOSTILE_NAME, points=10)
    assert max(waits["waits"]["samplers"]) == 1 and {"samplers": HOSTILE} in waits["reasons"]


# --- rollouts


def test_rollouts_are_found_by_text_state_step_sampler_and_reward(user: TestClient) -> None:
    def ids(run: str = HOSTILE_NAME, **query: object) -> list[int]:
        return [group["id"] for group in get(user, "rollouts", run=run, **query)["groups"]]

    assert ids() == [1, 0] and ids(order="oldest") == [0, 1]
    assert ids(text="question 1") == [1] and ids(text=HOSTILE) == [1, 0] and ids(text="scorer raised") == [0]
    assert ids(text="100%") == [] and ids(text="question_1") == [] and ids(text="1") == [1] and ids(text="h0") == [0]
    answer = "".join(ALPHABET[token - 4] for token in SAMPLED[1:])
    assert ids(answer=answer) == [1, 0] and ids(answer=answer, text="1") == [1] and ids(answer="question") == []
    searched = get(user, "rollouts", run=HOSTILE_NAME, answer=answer)
    assert (searched["searched"], searched["kept"]) == (6, 6)
    assert ids(state="EXPIRED") == [1] and ids(text="filtered") == [1] and ids(holder="sampler-1") == []
    assert ids(reward_from=0.3, reward_to=0.4) == [1, 0] and ids(reward_from=0.5) == []
    assert ids("a", step=2, order="oldest") == [8, 9, 10, 11] and ids("a", state="DURABLE", limit=2) == [79, 78]
    page = get(user, "rollouts", run="a", offset=5, limit=3)
    assert page["total"] == 30 * GROUPS + 1 and [group["id"] for group in page["groups"]] == [115, 114, 113]
    assert page["states"] == {"ACKED": 40, "DURABLE": 80, "PENDING": 1}
    assert ids("a", limit=10**9) == list(range(120, -1, -1))


@pytest.mark.parametrize("order", ["newest", "oldest", "reward", "low reward", "longest", "most failures", "x; DROP"])
def test_every_order_has_every_group(user: TestClient, order: str) -> None:
    found = get(user, "rollouts", run="a", order=order, limit=200)["groups"]
    assert {group["id"] for group in found} == set(range(30 * GROUPS + 1))


def test_a_group_says_why_it_ended_and_a_member_shows_each_token(user: TestClient) -> None:
    group = get(user, "rollout", run=HOSTILE_NAME, group=1)
    assert group["group"]["state"] == "EXPIRED" and group["group"]["reason"] == f"filtered:{HOSTILE}"
    assert [round(one["advantage"], 3) for one in group["members"][:3]] == [0.667, -0.333, -0.333]
    assert group["members"][3]["advantage"] is None and not group["members"][3]["kept"]
    assert group["neighbours"] == [0, None] and [e["kind"] for e in group["events"]][-1] == "expired"
    member = get(user, "member", run=HOSTILE_NAME, group=1, member=0)
    shown, sampled = member["segments"]
    assert shown["source"] == "shown" and shown["logprobs"] == [None, None] and shown["versions"] == [None, None]
    assert sampled["tokens"] == SAMPLED and sampled["logprobs"] == [-0.5, -1.0, -2.0, -4.0]
    assert sampled["versions"] == ["0.3", "0.3", "0.3", "0.4"] and sampled["trained"] == [1, 1, 1, 0]
    assert "".join(sampled["pieces"]) == "".join(ALPHABET[token - 4] for token in SAMPLED)
    assert member["reward_parts"] == {HOSTILE: 1.0} and member["extracted"] == HOSTILE


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"group": 99}, "no such group"),
        ({}, "no such group"),
        ({"group": "x"}, "not a number"),
        ({"group": 1, "member": 3}, "not kept"),
        ({"group": 1, "member": -1}, "not kept"),
    ],
)
def test_a_missing_group_or_member_is_an_error_with_a_reason(user: TestClient, query: dict, words: str) -> None:
    answer = user.get("/api/member" if "member" in query else "/api/rollout", params={"run": HOSTILE_NAME, **query})
    assert answer.status_code == 404 and words in answer.json()["error"]


def test_a_run_without_a_log_is_empty(user: TestClient, runs_dir: Path) -> None:
    path = runs_dir / "begun"
    path.mkdir()
    try:
        (path / "run.json").write_text((runs_dir / "a" / "run.json").read_text())
        assert get(user, "rollouts", run="begun")["groups"] == []
        for view in ("run", "timeline", "ages", "versions", "faults", "roles"):
            assert json.dumps(get(user, view, run="begun"))
        assert user.get("/api/rollout", params={"run": "begun", "group": 0}).status_code == 503
    finally:
        (path / "run.json").unlink()
        path.rmdir()


# --- control


def test_control_needs_the_token_and_the_dashboard(anyone: TestClient, user: TestClient) -> None:
    body = {"run": "a", "action": "stop"}
    assert anyone.post("/api/control", json=body, headers=OWN).status_code == 401
    assert user.post("/api/control", json=body).status_code == 403
    assert user.get("/api/control").status_code == 405


@pytest.mark.parametrize(
    ("run", "action", "status", "words"),
    [
        ("a", "explode", 404, "pause, resume"),
        ("../a", "pause", 404, "no such run"),
        ("a", "stop", 503, "supervisor"),
        ("a", "pause", 503, "no store"),
    ],
)
def test_a_control_that_cannot_act_says_why(user: TestClient, run: str, action: str, status: int, words: str) -> None:
    answer = user.post("/api/control", json={"run": run, "action": action}, headers=OWN)
    assert answer.status_code == status and words in answer.json()["error"], answer.text

"""`jaxroll sampler --join` and the options of other new commands: each reaches what reads it, or is refused."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxroll import config as configs
from jaxroll.config import Config, PlacementConfig
from jaxroll.control import cli, program, run_dir, train
from jaxroll.control.program import ProcessSpec
from jaxroll.roles.session import RoleArgs
from jaxroll.rpc import http
from jaxroll.store.messages import Joined
from jaxroll.testing import openenv_server
from tests.control.test_cli import given_role

ROOT = Path(__file__).parents[2]
CONFIG = Config()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of the store, and then the words of the process that replaces this one."""
    found: list[Any] = []

    async def joined(address: str, folder: Path | None, wait: object) -> Joined:
        found.append((address, folder))
        return Joined("run-1", json.dumps(configs.to_dict(CONFIG)).encode(), 4)

    monkeypatch.setattr(train.client, "joined", joined)
    monkeypatch.setattr(os, "execv", lambda program, words: found.append(words))
    return found


def test_a_sampler_joins_by_the_address_in_a_folder_of_its_own(here: Path, asked: list[Any]) -> None:
    joining_words = ["--join=h:7077", "--run=mine", "--drain=2.5", "--host=me", "--port=9", "--insecure"]
    cli.main(["sampler", *joining_words])
    (call, words) = asked
    assert call == ("h:7077", here / "mine") and run_dir.load_config(here / "mine") == CONFIG
    assert words[words.index("jaxroll") :] == [
        "jaxroll",
        "sampler",
        f"--run={here / 'mine'}",
        "--store=h:7077",
        "--index=4",
        "--drain=2.5",
        "--host=me",
        "--port=9",
        "--insecure",
    ]


def test_a_sampler_joins_by_the_folder_of_the_run(here: Path, asked: list[Any]) -> None:
    (here / "run").mkdir()
    (here / "run" / "store.addr").write_text("127.0.0.1:5\n")
    cli.main(["sampler", "--join=run"])
    (call, words) = asked
    assert call == ("127.0.0.1:5", here / "run")
    assert f"--run={here / 'run'}" in words and "--store=127.0.0.1:5" in words and "--insecure" not in words


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([f"--config={ROOT / 'configs/smoke.py'}", "--join=h:1"], "--config"),
        (["--join=.", "--run=mine"], "RUN"),
        (["--join=h:1", "--store=h:2"], "--store"),
        (["--join=h:1", "--index=3"], "--index"),
        (["--join=."], "--join"),
    ],
)
def test_what_the_store_gives_is_refused(
    here: Path, asked: list[Any], capsys: pytest.CaptureFixture[str], words: list[str], key: str
) -> None:
    assert cli.main(["sampler", *words]) == 64
    assert capsys.readouterr().err.startswith(f"error: {key}") and asked == []


@pytest.mark.parametrize("role", ["sampler", "actor"])
def test_the_time_to_drain_reaches_the_role(here: Path, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    path = run_dir.create(here / "r", replace(CONFIG, placement=PlacementConfig(actors=1)), [])
    seen: list[RoleArgs] = given_role(monkeypatch, f"jaxroll.roles.{role}")
    assert cli.main([role, f"--run={path}", "--drain=7"]) == 0
    assert seen[0].drain_s == 7.0
    with pytest.raises(SystemExit):
        cli.main([role, f"--run={path}", "--drain=-1"])


def test_roles_that_others_reach_listen_on_the_name_of_the_host() -> None:
    roles = ("store", "learner", "sampler", "evaluator")
    specs = [ProcessSpec(role, role, ("python", role)) for role in roles]
    found = {spec.name: spec.argv[2:] for spec in program.reachable(specs, CONFIG, "h.example", insecure=True)}
    assert found == {
        "store": ("--store=h.example:0", "--insecure"),
        "learner": ("--host=h.example", "--insecure"),
        "sampler": ("--host=h.example", "--insecure"),
        "evaluator": (),
    }
    assert not any("--insecure" in spec.argv for spec in program.reachable(specs, CONFIG, "h", insecure=False))


@pytest.mark.parametrize("given", [["--host=h.example"], []])
def test_train_makes_its_roles_reachable_by_the_name(
    here: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    seen: dict[str, tuple[str, ...]] = {}

    def supervise(specs: Sequence[ProcessSpec], *_: Any, **__: Any) -> int:
        seen.update({spec.role: spec.argv for spec in specs})
        return 1

    monkeypatch.setattr(train, "_supervise", supervise)
    words = ["train", f"--config={ROOT / 'configs/smoke.py'}", "--run=r", "--config.sft.steps=0", *given]
    assert cli.main(words) == 1
    assert ("--store=h.example:0" in seen["store"]) == ("--host=h.example" in seen["learner"]) == bool(given)


# --- servers: `ui` and `env serve`


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The addresses at which something was served; nothing waits for a signal."""
    found: list[tuple] = []

    async def serve(app: Any, listening: socket.socket, **_: Any) -> None:
        found.append(listening.getsockname()[:2])
        listening.close()

    monkeypatch.setattr(http, "serve", serve)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def test_ui_serves_the_folder_at_the_port_with_the_token_of_the_file(
    here: Path, served: list[tuple], capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine").mkdir()
    port = free_port()
    assert cli.main(["ui", "mine", f"--port={port}", "--token-file=t"]) == 0
    shown = capsys.readouterr().out
    assert served == [("127.0.0.1", port)] and f"the runs in {here / 'mine'}\n" in shown and f":{port}/#code=" in shown
    assert len((here / "t").read_text().strip()) >= 32 and (here / "t").stat().st_mode & 0o777 == 0o600


def test_env_serve_serves_at_the_port_with_the_config(
    here: Path, served: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple] = []
    original = openenv_server.Server.__init__

    def noting(self: Any, name: str, config: Config, pool: Any, token: str) -> None:
        made.append((name, config.run.seed, token))
        original(self, name, config, pool, token)

    monkeypatch.setattr(openenv_server.Server, "__init__", noting)
    port, config = free_port(), ROOT / "configs/agentic_frozen_lake.py"
    words = ["env", "serve", "frozen_lake", f"--config={config}", "--config.run.seed=12", f"--port={port}"]
    assert cli.main([*words, "--token-file=t"]) == 0
    token = (here / "t").read_text().strip()
    assert served == [("127.0.0.1", port)] and made == [("frozen_lake", 12, token)] and len(token) >= 32


@pytest.mark.parametrize("words", [["ui", "."], ["env", "serve", "frozen_lake"]], ids=["ui", "env serve"])
def test_plain_text_to_other_machines_needs_a_word(
    here: Path, served: list[tuple], capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    open_words = [*words, "--host=0.0.0.0", "--port=0", "--token-file=t"]
    assert cli.main(open_words) == 64 and served == []
    assert "--insecure" in capsys.readouterr().err
    assert cli.main([*open_words, "--insecure"]) == 0 and served[0][0] == "0.0.0.0"

"""A whole run over TLS: certificates that are replaced during the run or expire, and callers that are refused."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll.errors import EXIT_CONFIG, EXIT_INTERRUPTED, Unauthorized
from jaxroll.rpc import protocol, tls
from jaxroll.run_paths import RunPaths
from jaxroll.store.client import StoreClient
from tests.harness.train_process import SMALL, START_S, Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]
WORDS = (
    *SMALL,
    "--config.store.mutual_tls=true",
    "--config.learner.checkpoint_every=3",
    "--config.supervisor.backoff_s=0.1",
    "--config.schedule.steps=100000",
)


def refusal(train: Train, monkeypatch: pytest.MonkeyPatch, folder: Path | None, token: str, role: str) -> str:
    """The store's answer to a caller with the certificates in `folder` (None: those of the run) and this token."""

    async def calls() -> str:
        try:
            client = await StoreClient.connect(
                train.run_dir / "store.addr", role=role, name="stranger", token=token, patience_s=60.0
            )
        except Unauthorized as error:
            return str(error)
        await client.aclose()
        return ""

    with monkeypatch.context() as patch:
        patch.setenv(tls.TLS_VARIABLE, str(folder or RunPaths(train.run_dir).tls))
        return asyncio.run(asyncio.wait_for(calls(), 40.0))


def test_a_run_over_tls_outlives_its_certificates(
    tmp_path: Path, certified: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    tls.make_certificates(run, [], 1)
    with Train(run, *WORDS) as train:
        train.until_step(4)
        soon = [row["text"] for row in train.rows if row["kind"] == "event" and "expires at" in row["text"]]
        assert len(soon) >= 2 and all("jaxroll tls RUN" in text for text in soon), "a day is less than a week"

        secret = protocol.load_secret(run) or ""
        assert refusal(train, monkeypatch, None, secret, "observer") == ""
        assert "another CA; copy ca.pem" in refusal(train, monkeypatch, certified.client.folder, secret, "observer")
        wrong = refusal(train, monkeypatch, None, protocol.bearer(secret, "sampler"), "learner")
        assert "no valid token for the role 'learner'" in wrong and protocol.TOKEN_VARIABLE in wrong

        shutil.rmtree(RunPaths(run).tls)  # a new CA: old certificates are no longer trusted
        tls.make_certificates(run, [], 1)
        for name in ("store", "learner", "sampler"):
            at = last_step(train.rows)
            train.role(name).send_signal(signal.SIGKILL)
            train.until(lambda rows, at=at: last_step(rows) >= at + 4, f"steps after the {name} began again")

        tls.make_certificates(run, [], -1)
        train.role("store").send_signal(signal.SIGKILL)
        assert train.finish() == EXIT_CONFIG, train.logs()
        said = train.output.read_text()
        assert "refused its configuration" in said and "expired" in said and "jaxroll tls RUN" in said, said
        stopped_at = last_step(train.rows)
    tls.make_certificates(run, [], 1)
    steps = stopped_at + 3
    with Train(run, f"--config.schedule.steps={steps}", resume=True) as second:
        assert second.finish() == 0, second.logs()
        second.rows = train.rows + second.rows
        assert_sound(second, steps=steps, alpha=1)


DAY_S = 25 * 3600.0
CLOCK = """
import os, sys, time
_time, _time_ns, _by_s = time.time, time.time_ns, float(os.environ["WRONG_BY_S"])


def _offset_s():  # gRPC turns deadlines into monotonic ones at once, in C, with the true clock
    return 0.0 if sys._getframe(2).f_globals.get("__name__", "").startswith("grpc") else _by_s


if sys.orig_argv[1:4] == ["-m", "jaxroll", os.environ["WRONG_ROLE"]]:
    time.time = lambda: _time() + _offset_s()
    time.time_ns = lambda: _time_ns() + int(_offset_s() * 1e9)
"""


@pytest.mark.parametrize(
    ("role", "by_s", "warning"), [("learner", DAY_S, "expired at"), ("sampler", -DAY_S, "is not valid before")]
)
def test_a_role_whose_clock_is_off_by_a_day_warns_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, by_s: float, warning: str
) -> None:
    """The role's Python has another time, which JaxRoll's messages about certificates, rows and durations use.

    OpenSSL and gRPC read the machine's clock; the test above shows with real certificates how they refuse expired ones.
    """
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(CLOCK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("WRONG_ROLE", role)
    monkeypatch.setenv("WRONG_BY_S", str(by_s))
    tls.make_certificates(tmp_path / "run", [], 1)
    with Train(tmp_path / "run", *WORDS) as train:
        train.until_step(8)
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=1)
        report = train.report()
        assert report["restarts"] == 0
        warned = [path.stem for path in (train.run_dir / "logs").glob("*.log") if warning in path.read_text()]
        said = {row["role"] for row in train.rows if row["kind"] == "event" and warning in row["text"]}
        assert {name.partition("-")[0] for name in (*warned, *said)} == {role}, (warned, said)
        steps = [row for row in train.rows if row["kind"] == "step"]
        assert all(0 <= row[key] <= START_S for row in steps for key in ("train_s", "wait_s", "publish_s"))

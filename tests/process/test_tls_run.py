"""A whole run over TLS: certificates that are replaced during the run or expire, and callers that are refused."""

from __future__ import annotations

import asyncio
import mmap
import shutil
import signal
import struct
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


HOUR_S = 3600


@pytest.mark.parametrize(
    ("role", "hours", "cause"),
    [("learner", 25, "has expired"), ("sampler", -25, "is not yet valid"), ("store", 12, "")],
)
def test_a_role_whose_clock_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wall_clock: mmap.mmap, role: str, hours: int, cause: str
) -> None:
    """Off by more than the certificates are valid: the run ends, names the clocks, and continues when they are set.

    Off by less: the run works, and no duration is wrong. The clock is that of all code in the role's processes, OpenSSL
    among it.
    """
    monkeypatch.setenv("JUMP_ROLE", role)
    wall_clock[:16] = struct.pack("qq", hours * HOUR_S, 0)
    tls.make_certificates(tmp_path / "run", [], 1)
    with Train(tmp_path / "run", *WORDS) as train:
        if not cause:
            train.until_step(8)
            train.interrupt()
        code = train.finish()
        output = train.output.read_text()
        assert struct.unpack("qq", wall_clock[:16])[1] > 30, "few readings were shifted, so the test shows nothing"
    if cause:
        assert code == EXIT_CONFIG, train.logs()
        assert "Traceback" not in output and cause in output and "check the clocks" in output, output
        assert f"The run ends: {role}" in output and "refused its configuration" in output, output
        assert last_step(train.rows) == 0
    else:
        assert code == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=1)
        assert train.report()["restarts"] == 0
        steps = [row for row in train.rows if row["kind"] == "step"]
        assert all(0 <= row[key] <= START_S for row in steps for key in ("train_s", "wait_s", "publish_s"))
    wall_clock[:16] = bytes(16)
    steps = last_step(train.rows) + 3
    with Train(tmp_path / "run", f"--config.schedule.steps={steps}", resume=True) as second:
        assert second.finish() == 0, second.logs()
        second.rows = train.rows + second.rows
        assert_sound(second, steps=steps, alpha=1)

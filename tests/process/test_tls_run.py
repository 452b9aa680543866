"""A whole run over TLS: certificates that are replaced while it runs, that expire, and callers that do not fit."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll.control import certificates
from jaxroll.errors import EXIT_CONFIG, Unauthorized
from jaxroll.rpc import auth, tls
from jaxroll.store.client import StoreClient
from tests.process.trains import SMALL, Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]
WORDS = (*SMALL, "--config.store.mutual_tls=true", "--config.learner.checkpoint_every=3",
         "--config.supervisor.backoff_s=0.1", "--config.schedule.steps=100000")  # fmt: skip


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
        patch.setenv(tls.TLS_VARIABLE, str(folder or train.run_dir / tls.TLS_FOLDER))
        return asyncio.run(asyncio.wait_for(calls(), 40.0))


def test_a_run_over_tls_outlives_its_certificates(
    tmp_path: Path, certified: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    certificates.make(run, [], 1)
    with Train(run, *WORDS) as train:
        train.until_step(4)
        soon = [row["text"] for row in train.rows if row["kind"] == "event" and "expires at" in row["text"]]
        assert len(soon) >= 2 and all("jaxroll tls RUN" in text for text in soon), "a day is less than a week"

        secret = auth.load_secret(run) or ""
        assert refusal(train, monkeypatch, None, secret, "observer") == ""
        assert "another CA; copy ca.pem" in refusal(train, monkeypatch, certified.client.folder, secret, "observer")
        wrong = refusal(train, monkeypatch, None, auth.bearer(secret, "sampler"), "learner")
        assert "no valid token for the role 'learner'" in wrong and auth.TOKEN_VARIABLE in wrong

        shutil.rmtree(run / tls.TLS_FOLDER)  # a new CA: nobody trusts an old certificate any more
        certificates.make(run, [], 1)
        for name in ("store", "learner", "sampler"):
            at = last_step(train.rows)
            train.role(name).send_signal(signal.SIGKILL)
            train.until(lambda rows, at=at: last_step(rows) >= at + 4, f"steps after the {name} began again")

        certificates.make(run, [], -1)
        train.role("store").send_signal(signal.SIGKILL)
        assert train.finish() == EXIT_CONFIG, train.logs()
        said = train.output.read_text()
        assert "refused its configuration" in said and "expired" in said and "jaxroll tls RUN" in said, said
        stopped_at = last_step(train.rows)
    certificates.make(run, [], 1)
    steps = stopped_at + 3
    with Train(run, f"--config.schedule.steps={steps}", resume=True) as second:
        assert second.finish() == 0, second.logs()
        second.rows = train.rows + second.rows
        assert_sound(second, steps=steps, alpha=1)

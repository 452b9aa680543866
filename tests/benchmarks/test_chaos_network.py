"""Links and certificates in `benchmarks/faults/chaos.py`: what is cut, replaced and reached."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.faults import chaos_network
from benchmarks.faults.run import Run, Skipped
from jaxroll.records import Version, VersionRef
from jaxroll.rpc import tls
from jaxroll.store.messages import PublishedReply

HOOKS = Path(__file__).resolve().parents[2] / "benchmarks" / "faults" / "hooks"


class Echo(socketserver.BaseRequestHandler):
    """Answers each byte with itself."""

    def handle(self) -> None:
        while data := self.request.recv(100):
            self.request.sendall(data)


@pytest.mark.process
@pytest.mark.parametrize("direction", ["up", "down", pytest.param("both", marks=pytest.mark.soak)])
def test_a_link_that_is_cut_holds_bytes_back_and_an_idle_one_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    monkeypatch.setattr(chaos_network, "LEASE_S", 0.1)
    run = Run(tmp_path, tmp_path / "run", 0, variant=("links", "actors"))
    assert ("actor-1", "sampler-0") in run.links and ("evaluator", "learner") in run.links
    assert not [link for link in run.links if link[0] == "store"]
    chance = SimpleNamespace(choice=lambda found: direction if "up" in found else found[0], uniform=lambda a, b: b)
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "store.addr").write_text(f"127.0.0.1:{server.server_address[1]}")
        host, _, port = (tmp_path / "links" / "learner.store.addr").read_text().strip().rpartition(":")
        with socket.create_connection((host, int(port)), 5) as role:
            role.sendall(b"a")
            assert role.recv(1) == b"a"
            proxy, begun, seen = run.links["learner", "store"], threading.Event(), list[str]()
            partition = proxy.partition
            monkeypatch.setattr(proxy, "partition", lambda direction: (partition(direction), begun.set()))
            cut = threading.Thread(target=lambda: seen.append(chaos_network.CutLink("learner", "store")(run, chance)))
            cut.start()
            assert begun.wait(30)
            role.sendall(b"b")
            assert role.recv(1) == b"b" and proxy.held, "it passed through the cut"
            cut.join(10)
        assert re.fullmatch(
            rf"learner from store cut \({direction}\) for .* s, which held \d transmissions back", seen[0]
        )
        monkeypatch.setattr(chaos_network, "QUIET_S", 0.1)
        with pytest.raises(Skipped, match="nothing was sent between evaluator from learner"):
            chaos_network.CutLink("evaluator", "learner")(run, chance)
    finally:
        server.shutdown()
        server.server_close()
        run.close()


def test_a_role_reaches_its_peers_over_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("chaos_hooks", HOOKS / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(hooks := importlib.util.module_from_spec(spec))
    monkeypatch.setenv("CHAOS_LINKS", str(tmp_path))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "jaxroll", "sampler", "--run=r", "--index=1"])
    (tmp_path / "sampler-1.store.addr").write_text("proxy:1")
    (tmp_path / "sampler-1.learner.addr").write_text("proxy:2\n")

    class Transport:
        def __init__(self, address, max_message_bytes, tls) -> None:
            self.address = address

    class Client:
        async def announced(self, known) -> PublishedReply:
            return PublishedReply(VersionRef(known, "tcp" if known.step else "shm", "learner:3", ""))

    hooks.link_calls(SimpleNamespace(GrpcTransport=Transport))
    hooks.link_weights(SimpleNamespace(StoreClient=Client))
    assert Transport(tmp_path / "run" / "store.addr", 1, None).address == tmp_path / "sampler-1.store.addr"
    assert Transport(tmp_path / "run" / "sampler-0.addr", 1, None).address == tmp_path / "run" / "sampler-0.addr"
    for step, address in ((0, "learner:3"), (1, "proxy:2")):
        reply = asyncio.run(Client().announced(Version(0, step)))
        assert reply.ref is not None and reply.ref.address == address
    assert (tmp_path / "sampler-1.learner.target").read_text() == "learner:3"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
@pytest.mark.parametrize(
    ("new", "problem"),
    [
        ("same", ""),
        ("wrong", "issuer"),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in (("ca", ""), ("expired",) * 2)),
    ],
)
def test_certificates_are_replaced_by_those_that_the_fault_names(tmp_path: Path, new: str, problem: str) -> None:
    run_dir = tmp_path / "run"
    tls.make_certificates(run_dir, [], 1)
    before = {name: (run_dir / "tls" / name).read_bytes() for name in (tls.CA, tls.CERT)}
    chaos_network.Certificates(new)._replace(SimpleNamespace(run_dir=run_dir))
    after = {name: (run_dir / "tls" / name).read_bytes() for name in (tls.CA, tls.CERT)}
    assert after[tls.CERT] != before[tls.CERT]
    assert (after[tls.CA] == before[tls.CA]) == (new in ("same", "wrong"))
    words = ["openssl", "verify", "-CAfile", str(run_dir / "tls" / tls.CA), str(run_dir / "tls" / tls.CERT)]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (found.returncode != 0) == bool(problem) and problem in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_wrong_certificates_do_not_stay_when_the_target_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process of the run could connect any more, and the benchmark took it for a defect of the run."""
    run_dir = tmp_path / "run"
    tls.make_certificates(run_dir, [], 1)

    def kill() -> None:
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(chaos_network, "there", lambda run, target: SimpleNamespace(kill=kill))
    run = SimpleNamespace(run_dir=run_dir, roles=["learner"], lock=threading.RLock())
    with pytest.raises(Skipped, match="learner ended by itself"):
        chaos_network.Certificates("wrong", ends=True)(run, random.Random(0))  # type: ignore[arg-type]
    words = ["openssl", "verify", "-CAfile", str(run_dir / "tls" / tls.CA), str(run_dir / "tls" / tls.CERT)]
    assert subprocess.run(words, capture_output=True, text=True, check=False).returncode == 0

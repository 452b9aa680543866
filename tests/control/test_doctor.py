"""`jaxroll doctor`: findings about Python, packages, devices and the scoring process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from jaxroll.control import preflight, program
from jaxroll.errors import ConfigError
from jaxroll.rpc import tls
from tests.control.test_bad_files import cut
from tests.control.test_inputs_of_commands import BINARY, CLASSES, NOT_LOCKED, OTHERS, damaged, forbidden, gone
from tests.harness.damages import Damage, folder, too_large, writes


def of_a_client(home: Path) -> None:
    """The files of a host that does not serve, without the one that it verifies the store with."""
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (home / "tls" / name).unlink()


KEYS: list[tuple[str, Damage]] = [
    ("a client without ca.pem", of_a_client),
    ("key.pem is gone", gone("tls/key.pem")),
    ("key.pem is another one", writes("tls/key.pem", BINARY)),
    ("a folder that may not be entered", forbidden("tls")),
]
CERTIFICATES: dict[str, Damage | str] = {
    "missing": gone("tls/ca.pem"),
    "unreadable": forbidden("tls/ca.pem"),
    "wrong type": folder("tls/ca.pem"),
    "corrupt": writes("tls/ca.pem", BINARY),
    "foreign": writes("tls/ca.pem", OTHERS),
    "too large": too_large("tls/ca.pem"),
    "in use": NOT_LOCKED,
    "interrupted": cut("tls/ca.pem"),
}


@pytest.mark.process
def test_doctor_names_python_packages_devices_and_missing_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main() == 0
    out = capsys.readouterr().out
    assert "python    3." in out and "jax 0." in out and "JAX uses cpu: " in out
    assert "NVIDIA GPUs" in out
    assert "\nscoring   no network by seccomp" in out or "OPEN: " in out


@pytest.mark.process
def test_a_failed_probe_of_the_scoring_process_counts_as_unrestricted(tmp_path: Path) -> None:
    assert preflight.scoring_limits(str(tmp_path / "nothing")).startswith("OPEN: everything")


def test_missing_packages_are_named_with_their_effect_and_remedy() -> None:
    things = (
        preflight.Optional("a", lambda: True, "x", "get a"),
        preflight.Optional("b", lambda: False, "the b tests", "pip install b"),
    )
    assert preflight.optional_lines(things) == ["here      a", "skipped   the b tests: no b. Get it: pip install b"]


@pytest.mark.parametrize("kind", CLASSES)
def test_certificates_with_damage_are_named_with_the_remedy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No role can use them. The report goes on, as other parts of it may be what the user looks for."""
    if isinstance(damage := CERTIFICATES[kind], str):
        return
    monkeypatch.setattr(tls, "_PROBE_PAUSE_S", 0.0)
    with tempfile.TemporaryDirectory() as made:
        home = Path(made) / "home"
        home.parent.chmod(0o777)
        tls.make_certificates(home, [], 30)
        environment = {tls.TLS_VARIABLE: str(home / "tls")}
        assert preflight.certificate_lines(environment) == [f"{home / 'tls'}: in order"]
        with damaged(home, kind, damage):
            (line,) = preflight.certificate_lines(environment)
    assert line.startswith(str(home / "tls")) and "jaxroll tls RUN" in line and "in order" not in line


@pytest.mark.parametrize(("what", "damage"), KEYS, ids=[what for what, _ in KEYS])
def test_the_files_of_servers_and_of_clients_count(what: str, damage: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_PROBE_PAUSE_S", 0.0)
    with tempfile.TemporaryDirectory() as made:
        home = Path(made) / "home"
        home.parent.chmod(0o777)
        tls.make_certificates(home, [], 30)
        with damaged(home, "unreadable" if "may not" in what else "corrupt", damage):
            (line,) = preflight.certificate_lines({tls.TLS_VARIABLE: str(home / "tls")})
    assert str(home / "tls") in line and "in order" not in line


@pytest.mark.process
def test_a_jax_that_does_not_start_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no libtpu here' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert preflight.device_lines(str(broken))[0] == "JAX does not start: no libtpu here"
    assert "JAX does not start" in preflight.device_lines(str(tmp_path / "nothing"))[0]


def test_tpu_chips_are_counted_on_the_pci_bus(tmp_path: Path) -> None:
    for name, vendor, device in (
        ("0", "0x1ae0", "0x0063"),
        ("1", "0x1ae0", "0x0063"),
        ("2", "0x1ae0", "0x0042"),
        ("3", "0x8086", "0x0063"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "device").write_text(device + "\n")
    (tmp_path / "4").mkdir()
    assert program.tpu_chips(tmp_path) == 2
    assert program.tpu_chips(tmp_path / "nowhere") == 0


def test_auto_takes_the_best_that_is_here_and_obeys_jax_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "tpu_chips", lambda: 4)
    monkeypatch.setattr(program, "gpu_memories_mb", lambda: [100, 80, 90])
    installed = {"libtpu", "jax_cuda12_plugin"}
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: name if name in installed else None)
    assert program.find("auto", {}) == program.Inventory("tpu", chips=4)
    assert program.find("auto", {"JAX_PLATFORMS": "cuda,cpu"}) == program.Inventory("gpu", 3, 80)
    assert program.find("auto", {"JAX_PLATFORMS": "cpu"}) == program.Inventory("cpu")
    installed.remove("libtpu")
    assert program.find("auto", {}).platform == "gpu"
    assert program.find("auto", {"CUDA_VISIBLE_DEVICES": "0,2"}) == program.Inventory("gpu", 2, 90)
    assert program.find("auto", {"CUDA_VISIBLE_DEVICES": ""}) == program.Inventory("cpu")
    installed.clear()
    assert program.find("auto", {}) == program.Inventory("cpu")
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        program.find("gpu", {"CUDA_VISIBLE_DEVICES": ""})

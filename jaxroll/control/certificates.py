"""A private certificate authority for one run, made with the program `openssl`.

RUN/tls gets a CA, a certificate for the processes that listen (store, learner), with the names of their hosts, and one
for those that only call. Made again, the CA stays and the certificates are new: clients that trust the CA need no new
copy of it. The CA is valid ten times as long; one that would end before the new certificates is made new, too.
"""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jaxroll.errors import ConfigError
from jaxroll.rpc import auth, tls
from jaxroll.rpc.tls import validity
from jaxroll.run_paths import RunPaths

CA_KEY = "ca-key.pem"
ALWAYS = ("localhost", "127.0.0.1", "::1")
_STEP_S = 30.0
_CA_LIVES = 10  # of a certificate


def make(run_dir: Path, hosts: Sequence[str], days: int) -> str:
    """The next steps for a person, after making RUN/tls and, where there is none, RUN/token."""
    if shutil.which("openssl") is None:
        raise ConfigError("openssl", "not found", "certificates are made with it",
                          "Install it (apt install openssl), or put ca.pem, cert.pem and key.pem of your own into "
                          f"{RunPaths(run_dir).tls} (docs/machines.md, Between machines).")  # fmt: skip
    names = tuple(dict.fromkeys((*hosts, *ALWAYS)))
    subject_names = ",".join(map(_subject_name, names))
    folder = RunPaths(run_dir).tls
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError("RUN", str(run_dir), f"{folder} cannot be made ({error.strerror})",
                          "Name a folder that can be written.") from error  # fmt: skip
    kept = (folder / CA_KEY).is_file() and (folder / tls.CA).is_file() and _outlives(folder / tls.CA, days)
    if not kept:
        _authority(folder, max(_CA_LIVES * days, 1))
    serving = f"serverAuth,clientAuth\nsubjectAltName={subject_names}"
    _certificate(folder, tls.CERT, tls.KEY, "jaxroll server", serving, days)
    _certificate(folder, tls.CLIENT_CERT, tls.CLIENT_KEY, "jaxroll client", "clientAuth", days)
    auth.create(run_dir)
    return _next_steps(folder, names, kept)


def _subject_name(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        pass
    if not all(part and part.isascii() and part.replace("-", "").isalnum() for part in host.split(".")):
        raise ConfigError("--host", host, "neither a host name nor an address", "Write it as other machines do.")
    return f"DNS:{host}"


def _outlives(ca: Path, days: int) -> bool:
    """True if the CA is still valid when a certificate of so many days, made now, ends."""
    try:
        return validity(ca.read_text(encoding="utf-8"))[1] >= time.time() + days * 86400
    except ValueError:
        return False


def _authority(folder: Path, days: int) -> None:
    _key(folder / CA_KEY)
    _openssl("req", "-x509", "-new", "-key", folder / CA_KEY, "-sha256", "-days", days, "-subj", "/CN=jaxroll run CA",
             "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
             "-out", folder / tls.CA)  # fmt: skip


def _certificate(folder: Path, cert: str, key: str, name: str, extensions: str, days: int) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        request, extra, made_key, made = (Path(scratch) / part for part in ("request", "extensions", "key", "cert"))
        _key(made_key)
        _openssl("req", "-new", "-key", made_key, "-subj", f"/CN={name}", "-out", request)
        extra.write_text(f"basicConstraints=CA:FALSE\nextendedKeyUsage={extensions}\n", encoding="utf-8")
        _openssl("x509", "-req", "-in", request, "-CA", folder / tls.CA, "-CAkey", folder / CA_KEY, "-CAcreateserial",
                 "-CAserial", Path(scratch) / "serial", "-sha256", "-days", days, "-extfile", extra,
                 "-out", made)  # fmt: skip
        made_key.replace(folder / key)
        made.replace(folder / cert)


def _key(path: Path) -> None:
    _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", path)
    path.chmod(0o600)


def _openssl(*words: object) -> None:
    command = ["openssl", *map(str, words)]
    try:
        subprocess.run(
            command, check=True, capture_output=True, encoding="utf-8", errors="replace", timeout=_STEP_S, umask=0o077
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise ConfigError("openssl", command[1], f"failed ({said[-1] if said else 'without a message'})",
                          "Check that the run's folder can be written.") from error  # fmt: skip


def _next_steps(folder: Path, names: Sequence[str], kept: bool) -> str:
    listening = f"{tls.CA} {tls.CERT} {tls.KEY} {tls.CLIENT_CERT} {tls.CLIENT_KEY}"
    calling = f"{tls.CA} {tls.CLIENT_CERT} {tls.CLIENT_KEY}"
    return (
        f"{folder}: certificates for {', '.join(names)} ({'the CA stayed' if kept else 'a new CA'}).\n"
        f"On the hosts of store and learner put:  {listening}\n"
        f"On the hosts of samplers and evaluator: {calling}\n"
        f"into RUN/tls there, or into a folder named in {tls.TLS_VARIABLE}. {CA_KEY} stays here.\n"
        f"The token in {RunPaths(folder.parent).token} goes into {auth.TOKEN_VARIABLE} on every host."
    )

"""TLS between machines: certificates from a folder, verification of both ends, errors with a remedy.

The folder is JAXROLL_TLS, or RUN/tls. With `ca.pem` in it a process uses TLS and trusts only that CA. A server shows
`cert.pem` with `key.pem`; with mutual TLS a client shows `client-cert.pem` with `client-key.pem`, or the server's if
they are missing. `jaxroll tls RUN` makes all of them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import grpc

from jaxroll import disk
from jaxroll.errors import ConfigError, DataError, InfraError
from jaxroll.rpc import protocol
from jaxroll.run_paths import RunPaths

TLS_VARIABLE = "JAXROLL_TLS"
CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"
CLIENT_CERT, CLIENT_KEY = "client-cert.pem", "client-key.pem"
PROBE_S = 3.0
SOON_S, SOON_SHARE = 7 * 86400.0, 0.1  # less time, or a smaller part of its validity, left: warn of a certificate
_MOST_BYTES = 1 << 20  # of one file
_PROBES, _PROBE_PAUSE_S = 3, 0.2
_REMAKE = "make new certificates with `jaxroll tls RUN --host=NAME`, and copy RUN/tls to the hosts again"
_T = TypeVar("_T")
_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@dataclass(frozen=True)
class Material:
    """A folder with certificates."""

    folder: Path

    def server_credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """Credentials of a gRPC server; with `mutual` it requires a client certificate of the same CA.

        New files in the folder are used from the next connection on.
        """
        current = self._newest(self._server_configuration)
        return grpc.dynamic_ssl_server_credentials(current(), current, require_client_authentication=mutual)

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        self.server_context(mutual=False)  # gRPC accepts any bytes, and its errors for wrong ones are not helpful
        cert, key = self._server_files()
        return grpc.ssl_server_certificate_configuration([(_read(key), _read(cert))], _read(self.folder / CA))

    def written(self) -> tuple[tuple[int, int], ...]:
        """Identity (inode, modification time) of each file, to notice replaced ones."""
        found = []
        for name in (CA, CERT, KEY, CLIENT_CERT, CLIENT_KEY):
            with contextlib.suppress(OSError):
                status = (self.folder / name).stat()
                found.append((status.st_ino, status.st_mtime_ns))
        return tuple(found)

    def warnings(self, now_s: float) -> list[str]:
        """A warning for each certificate that has expired, is not valid yet, or expires soon."""
        found = []
        for path in sorted({self.folder / CA, self.folder / CERT, self.folder / CLIENT_CERT}):
            try:
                first_s, last_s = validity(disk.read_text(path, _MOST_BYTES))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, DataError) as error:
                found.append(f"{path}: {error}; {_REMAKE}")
                continue
            left_s, at = last_s - now_s, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(last_s))
            if now_s < first_s:
                begins = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first_s))
                found.append(f"{path} is not valid before {begins}: check the clocks, or {_REMAKE}")
            elif left_s <= 0:
                found.append(f"{path} expired at {at}: {_REMAKE}")
            elif left_s < max(SOON_S, SOON_SHARE * (last_s - first_s)):
                found.append(f"{path} expires at {at}, in {_duration(left_s)}: {_REMAKE}")
        return found

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a gRPC client."""
        return self._settled(self._channel_credentials)

    def _channel_credentials(self) -> grpc.ChannelCredentials:
        self._client_context()  # as in _server_configuration
        files = self.client_certificate()
        shown = (_read(files[1]), _read(files[0])) if files else (None, None)
        return grpc.ssl_channel_credentials(_read(self.folder / CA), *shown)

    def server_contexts(self, *, mutual: bool) -> Callable[[], ssl.SSLContext]:
        """A function that returns the context for the next connection of a listening socket, from the newest files."""
        return self._newest(lambda: self.server_context(mutual=mutual))

    def server_context(self, *, mutual: bool) -> ssl.SSLContext:
        """The SSL context of a listening socket."""
        cert, key = self._server_files()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(context, (cert, key))
        if mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """The SSL context of a connecting socket; it verifies the server's name."""
        return self._settled(self._client_context)

    def _client_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(context, self.client_certificate())
        return context

    def _newest(self, make: Callable[[], _T]) -> Callable[[], _T]:
        """A function that returns the result of `make` from the newest files."""
        known, made = self.written(), self._settled(make)

        def current() -> _T:
            nonlocal known, made
            found = self.written()
            if found != known:
                # Files may be half copied; the next connection checks again.
                with contextlib.suppress(OSError, ConfigError, InfraError):
                    made, known = make(), found
            return made

        return current

    def _settled(self, make: Callable[[], _T]) -> _T:
        """The result of `make`, called up to _PROBES times: until it succeeds and no file was replaced meanwhile."""
        left = _PROBES
        while True:
            before, left = self.written(), left - 1
            try:
                made = make()
            except ConfigError:
                if not left:
                    raise
                time.sleep(_PROBE_PAUSE_S)  # new files may be half copied, and a key then belongs to no certificate
            else:
                if not left or before == self.written():
                    return made

    def _load(self, context: ssl.SSLContext, shown: tuple[Path, Path] | None) -> None:
        remake = f"{_REMAKE[0].upper()}{_REMAKE[1:]}."
        for path in (self.folder / CA, *(shown or ())):
            _read(path)  # OpenSSL would block on a pipe, and read a file of any size
        try:
            context.load_verify_locations(self.folder / CA)
            if shown:
                context.load_cert_chain(*shown, password=functools.partial(_no_password, shown[1]))
        except (OSError, ssl.SSLError) as error:
            _raise_if_at_limit(error, self.folder)
            reason = "these certificates cannot be used"
            if shown and isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
                reason = f"{shown[1].name} does not belong to {shown[0].name}"
            raise ConfigError(str(self.folder), str(error), reason, remake) from error

    def _server_files(self) -> tuple[Path, Path]:
        cert, key = self.folder / CERT, self.folder / KEY
        for path in (cert, key):
            if not path.is_file():
                raise ConfigError(
                    str(self.folder),
                    path.name,
                    "is missing, and a server needs a certificate",
                    f"Copy {CERT} and {KEY} to this host, which listens.",
                )
        protocol.keep_private(key)
        return cert, key

    def client_certificate(self) -> tuple[Path, Path] | None:
        """Certificate and key of a client; None if there are none."""
        for cert, key in ((CLIENT_CERT, CLIENT_KEY), (CERT, KEY)):
            if (self.folder / cert).is_file() and (self.folder / key).is_file():
                protocol.keep_private(self.folder / key)
                return self.folder / cert, self.folder / key
        return None


def _read(path: Path) -> bytes:
    """The content of a regular file of bounded size; ConfigError for anything else, InfraError at a limit."""
    try:
        return disk.read_bytes(path, _MOST_BYTES)
    except (OSError, DataError) as error:
        _raise_if_at_limit(error, path)
        raise ConfigError(str(path.parent), path.name, str(error), f"{_REMAKE[0].upper()}{_REMAKE[1:]}.") from error


def _raise_if_at_limit(error: Exception, path: Path) -> None:
    """Raise InfraError if the process has no descriptor or memory left: the files may be in order."""
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno in _LIMITS:
        raise InfraError(f"{path}: {error.strerror}") from error


def _no_password(key: Path) -> str:
    """Refuse an encrypted key; OpenSSL would ask for its password on the terminal, which blocks the role."""
    raise ConfigError(
        str(key.parent),
        key.name,
        "the key is encrypted, and no role asks for its password",
        f"Store it in plain form: openssl pkey -in {key.name} -out plain.pem; mv plain.pem {key.name}; "
        f"chmod 600 {key.name}.",
    )


def load(run_dir: Path | None, environment: Mapping[str, str] = os.environ) -> Material | None:
    """The certificates of this process; None if there are none, and its connections are plain text."""
    named = environment.get(TLS_VARIABLE, "").strip()
    folder = Path(named) if named else RunPaths(run_dir).tls if run_dir is not None else None
    if folder is None or not (named or os.path.lexists(folder)):
        return None
    if not (folder / CA).is_file():
        raise ConfigError(
            str(folder),
            CA,
            "is missing, and without it no peer can be verified",
            "Copy the folder that `jaxroll tls RUN` made.",
        )
    _warn(folder)
    return Material(folder)


@functools.cache
def _warn(folder: Path) -> None:
    """Print the warnings about the certificates of `folder`, once."""
    for line in Material(folder).warnings(time.time()):
        print(f"warning: {line}", file=sys.stderr, flush=True)


def diagnosis(address: str, material: Material | None) -> str | None:
    """The reason why no connection to host:port can be made, with the remedy; None if TLS is not the cause.

    Tries the handshake as gRPC would, within PROBE_S.
    """
    for _ in range(_PROBES):
        before = None if material is None else material.written()
        with contextlib.suppress(_HungUp):
            why = _probe(address, material)
            if material is None or material.written() == before:  # else the files were replaced during the handshake
                return why
        time.sleep(_PROBE_PAUSE_S)  # a server that dies in a handshake looks the same, but not three times
    return None if material is None else _client_refused(material)


class _HungUp(Exception):
    """The other end closed the connection after the handshake."""


def _probe(address: str, material: Material | None) -> str | None:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal():
        return None
    try:
        with socket.create_connection((host, int(port)), timeout=PROBE_S) as sock:
            sock.settimeout(PROBE_S)
            return _plain_diagnosis(sock, host) if material is None else _tls_diagnosis(sock, host, material)
    except OSError:
        return None  # no server: nothing is known about its TLS


def _plain_diagnosis(sock: socket.socket, host: str) -> str | None:
    """The diagnosis for a client without certificates: an advice if the server uses TLS, otherwise None."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(sock, server_hostname=host).close()
    except ssl.SSLError as error:
        if "ALERT" not in str(error.reason):
            return None
    return (
        f"it uses TLS and this process has no certificates: copy {CA} of RUN/tls (with mutual TLS also "
        f"{CLIENT_CERT} and {CLIENT_KEY}) to a folder here and name it in {TLS_VARIABLE}"
    )


def _tls_diagnosis(sock: socket.socket, host: str, material: Material) -> str | None:
    context = material.client_context()
    context.set_alpn_protocols(["h2"])
    try:
        secured = context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLError as error:
        return explanation(error, material)
    with secured:
        try:
            # In TLS 1.3 a server checks our certificate after our handshake is complete. A gRPC server that refuses it
            # closes the connection without a message; one that accepts it sends its settings first.
            if secured.recv(1):
                return None
        except (ssl.SSLEOFError, ConnectionError):
            pass
        except ssl.SSLError as error:
            return explanation(error, material)
        raise _HungUp


def _client_refused(material: Material) -> str:
    if material.client_certificate() is None:
        return (
            f"it asks for a certificate (mutual TLS) and {material.folder} has none: copy {CLIENT_CERT} and "
            f"{CLIENT_KEY} of RUN/tls there"
        )
    return f"it does not accept the certificate in {material.folder}: {_REMAKE}"


def explanation(error: ssl.SSLError, material: Material | None) -> str | None:
    """The cause and remedy of a handshake error; None if it is not about certificates."""
    folder = material.folder if material is not None else "RUN/tls"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted ({error.verify_message}) by {folder}/{CA}: {_advice(error)}"
    reason = str(error.reason)
    if material is not None and ("CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason):
        return _client_refused(material)
    if "ALERT" in reason and any(word in reason for word in ("CERT", "UNKNOWN_CA", "ACCESS_DENIED")):
        return f"it does not accept the certificate in {folder} ({reason}): {_REMAKE}"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE"):
        return f"it uses plain text, and this process has certificates ({folder}): give it some too, or remove these"
    return None


def _advice(error: ssl.SSLCertVerificationError) -> str:
    words = error.verify_message.lower()
    if "mismatch" in words:
        return f"it was made for other names; {_REMAKE}"
    if "expired" in words or "not yet valid" in words:
        return f"check the clocks, or {_REMAKE}"
    return f"it is of another CA; copy {CA} of that run's RUN/tls"


def _duration(seconds: float) -> str:
    return f"{seconds / 86400:.0f} days" if seconds >= 2 * 86400 else f"{seconds / 3600:.1f} hours"


# --- Validity of a certificate, read from its PEM text (Python's `ssl` returns only that of a peer)

_VERSION, _UTC_TIME = 0xA0, 0x17  # tags of DER, X.690


def validity(pem: str) -> tuple[float, float]:
    """The unix seconds of the first certificate's notBefore and notAfter; ValueError when there is none."""
    try:
        end = pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        der = ssl.PEM_cert_to_DER_cert(pem[pem.index(ssl.PEM_HEADER) : end])
        _, certificate = next(_parts(der))
        _, signed = next(_parts(certificate))
        fields = [part for tag, part in _parts(signed) if tag != _VERSION]
        first, last = _parts(fields[3])  # after serial number, algorithm and issuer (RFC 5280, 4.1)
    except (IndexError, StopIteration, ValueError) as error:
        raise ValueError(f"not a certificate in PEM ({error or type(error).__name__})") from error
    return _seconds(*first), _seconds(*last)


def _parts(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element of a DER sequence."""
    at = 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1], at + 2
        if size & 0x80:
            digits = size & 0x7F
            size, at = int.from_bytes(data[at : at + digits], "big"), at + digits
        if at + size > len(data):
            raise ValueError("cut off")
        yield tag, data[at : at + size]
        at += size


def _seconds(tag: int, text: bytes) -> float:
    digits = text.decode("ascii").removesuffix("Z")
    if tag == _UTC_TIME:  # two digits of the year
        digits = ("19" if digits[0] >= "5" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()


# --- a private certificate authority for one run, made with the program `openssl`
#
# The CA stays when certificates are made again, so that clients need no new copy of it. It is valid ten times as long;
# one that would end before the new certificates is made new.

CA_KEY = "ca-key.pem"
ALWAYS = ("localhost", "127.0.0.1", "::1")
_MADE, _LOCK, _STEP_S = ".new-", ".making", 30.0
_CA_LIVES = 10  # of a certificate


def make_certificates(run_dir: Path, hosts: Sequence[str], days: int) -> str:
    """The next steps for a person, after making RUN/tls and, where there is none, RUN/token."""
    if shutil.which("openssl") is None:
        remedy = "Install it (apt install openssl), or put ca.pem, cert.pem and key.pem of your own into "
        remedy += f"{RunPaths(run_dir).tls} (docs/machines.md, Between machines)."
        raise ConfigError("openssl", "not found", "certificates are made with it", remedy)
    names = tuple(dict.fromkeys((*hosts, *ALWAYS)))
    serving = "serverAuth,clientAuth\nsubjectAltName=" + ",".join(map(_subject_name, names))
    folder = RunPaths(run_dir).tls
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with disk.locked(folder / _LOCK), tempfile.TemporaryDirectory(dir=folder, prefix=_MADE) as scratch:
            made = Path(scratch)  # roles may load files of `folder` now
            for left in set(folder.glob(f"{_MADE}*")) - {made}:  # of a command that was killed
                shutil.rmtree(left, ignore_errors=True)
            kept = (folder / CA_KEY).is_file() and (folder / CA).is_file() and _signs(folder, days)
            if kept:
                shutil.copy2(folder / CA, made)
                shutil.copy2(folder / CA_KEY, made)
            else:
                _authority(made, max(_CA_LIVES * days, 1))
            _certificate(made, CERT, KEY, "jaxroll server", serving, days)
            _certificate(made, CLIENT_CERT, CLIENT_KEY, "jaxroll client", "clientAuth", days)
            for cert, key in ((CA, CA_KEY), (CERT, KEY), (CLIENT_CERT, CLIENT_KEY)):  # openssl may end with 0
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(made / cert, made / key)  # on a full disk
            for name in (CA_KEY, CA, KEY, CERT, CLIENT_KEY, CLIENT_CERT):
                (made / name).replace(folder / name)
    except BlockingIOError:
        reason = f"another `jaxroll tls` makes certificates in {folder} now"
        raise ConfigError("RUN", str(run_dir), reason, "Start it again when that one has ended.") from None
    except OSError as error:
        reason = f"{folder} cannot be written ({error.strerror})"
        remedy = "Name a folder that can be written, on a disk with room."
        raise ConfigError("RUN", str(run_dir), reason, remedy) from error
    protocol.create(run_dir)
    return _next_steps(folder, names, kept)


def _subject_name(host: str) -> str:
    with contextlib.suppress(ValueError):
        return f"IP:{ipaddress.ip_address(host)}"
    if not all(part and part.isascii() and part.replace("-", "").isalnum() for part in host.split(".")):
        raise ConfigError("--host", host, "neither a host name nor an address", "Write it as other machines do.")
    return f"DNS:{host}"


def _signs(folder: Path, days: int) -> bool:
    """True if the CA belongs to its key, and is still valid when a certificate of so many days, made now, ends."""
    with contextlib.suppress(ValueError, ssl.SSLError):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / CA, folder / CA_KEY)
        return validity((folder / CA).read_text(encoding="utf-8"))[1] >= time.time() + days * 86400
    return False


def _authority(folder: Path, days: int) -> None:
    _key(folder / CA_KEY)
    _openssl("req", "-x509", "-new", "-key", folder / CA_KEY, "-sha256", "-days", days, "-subj", "/CN=jaxroll run CA",
             "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
             "-out", folder / CA)  # fmt: skip


def _certificate(folder: Path, cert: str, key: str, name: str, extensions: str, days: int) -> None:
    request, extra = folder / "request", folder / "extensions"
    _key(folder / key)
    _openssl("req", "-new", "-key", folder / key, "-subj", f"/CN={name}", "-out", request)
    extra.write_text(f"basicConstraints=CA:FALSE\nextendedKeyUsage={extensions}\n", encoding="utf-8")
    _openssl("x509", "-req", "-in", request, "-CA", folder / CA, "-CAkey", folder / CA_KEY, "-CAcreateserial",
             "-CAserial", folder / "serial", "-sha256", "-days", days, "-extfile", extra,
             "-out", folder / cert)  # fmt: skip


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
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        reason = f"failed ({lines[-1] if lines else 'without a message'})"
        raise ConfigError("openssl", command[1], reason, "Check the run's folder and the room on its disk.") from error


def _next_steps(folder: Path, names: Sequence[str], kept: bool) -> str:
    listening = f"{CA} {CERT} {KEY} {CLIENT_CERT} {CLIENT_KEY}"
    calling = f"{CA} {CLIENT_CERT} {CLIENT_KEY}"
    return (
        f"{folder}: certificates for {', '.join(names)} ({'the CA stayed' if kept else 'a new CA'}).\n"
        f"On the hosts of store and learner put:  {listening}\n"
        f"On the hosts of samplers and evaluator: {calling}\n"
        f"into RUN/tls there, or into a folder named in {TLS_VARIABLE}. {CA_KEY} stays here.\n"
        f"The token in {RunPaths(folder.parent).token} goes into {protocol.TOKEN_VARIABLE} on every host."
    )

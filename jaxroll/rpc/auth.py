"""Bearer tokens, one per run and role, compared in constant time.

A run has one secret (RUN/token, or JAXROLL_TOKEN). What travels is not the secret but the role's token,
`role.HMAC(secret, role)`: a machine that was given the sampler's token cannot speak as the learner.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from jaxroll.errors import ConfigError

TOKEN_FILE = "token"
TOKEN_VARIABLE = "JAXROLL_TOKEN"
ROLES = frozenset({"sampler", "learner", "admin", "observer"})
_ALIASES = {"actor": "sampler", "evaluator": "observer", "report": "observer", "supervisor": "admin", "store": "admin"}
_ROLE_TOKEN = re.compile(rf"({'|'.join(sorted(ROLES))})\.[0-9a-f]{{64}}")
_MAX_CHARS = 1024


def right_of(role: str) -> str:
    """The right (one of ROLES) that a process of `role` has."""
    right = _ALIASES.get(role, role)
    if right not in ROLES:
        raise ConfigError("role", role, "unknown role", f"Use one of {', '.join(sorted({*ROLES, *_ALIASES}))}.")
    return right


def load(run_dir: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The secret or role token in the environment, else in the run's folder; None when the run has none.

    ConfigError for a token file that is empty or cannot be kept from others.
    """
    text = environment.get(TOKEN_VARIABLE, "").strip()
    if text or run_dir is None:
        return text or None
    return _read(run_dir / TOKEN_FILE)


def load_secret(run_dir: Path, environment: Mapping[str, str] = os.environ) -> str | None:
    """The run's secret for the process that checks tokens; ConfigError when there is only a role's token."""
    secret = load(run_dir, environment)
    if secret is not None and _ROLE_TOKEN.fullmatch(secret):
        raise ConfigError(TOKEN_VARIABLE, "(a role's token)", "the store checks the tokens of all roles",
                          "Give the store the run's secret.")  # fmt: skip
    return secret


def _read(path: Path) -> str | None:
    if not path.is_file():
        return None
    keep_private(path)
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if not text.isascii():
        raise ConfigError(str(path), "(not text)", "holds no secret that JaxRoll makes",
                          "Restore it from a copy, or remove it: `jaxroll train` makes a new one.")  # fmt: skip
    if not text:
        raise ConfigError(str(path), "", "is empty, which would let everybody in",
                          "Write a secret into it, or remove the file: then only this machine is served.")  # fmt: skip
    return text


def keep_private(path: Path) -> None:
    """Take from others the right to read `path`, and say so; ConfigError when it is not ours to change."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o077:
        return
    try:
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(str(path), f"{mode:o}", "others can read it", "Its owner must chmod 600 it.") from error
    print(f"{path} could be read by others (mode {mode:o}) and is closed now; make a new one if they matter",
          file=sys.stderr, flush=True)  # fmt: skip


def create(run_dir: Path) -> str:
    """The run's secret, made (readable by its owner only) if there is none yet."""
    path = run_dir / TOKEN_FILE
    kept = _read(path)
    if kept is not None:
        return kept
    secret = secrets.token_hex(32)
    draft = path.with_name(f".{TOKEN_FILE}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())  # an empty one, as a power failure may leave it, would end the run
    try:
        os.link(draft, path)  # whole or not at all, and never over another's
    except FileExistsError:
        return create(run_dir)
    finally:
        draft.unlink()
    return secret


def bearer(token: str, right: str) -> str:
    """What a process with `right` shows, made from the run's secret (or the role token itself, unchanged)."""
    return token if _ROLE_TOKEN.fullmatch(token) else _made(token, right)


def _made(secret: str, right: str) -> str:
    return f"{right}.{hmac.new(secret.encode(), right.encode(), hashlib.sha256).hexdigest()}"


def admits(secret: str | None, right: str, shown: str) -> bool:
    """True if `shown` is the token of `right`; a run without a secret admits every local process."""
    return secret is None or matches(tokens(secret), right, shown)


def tokens(secret: str) -> dict[str, bytes]:
    """The token of every right: what a server computes once."""
    return {right: _made(secret, right).encode() for right in ROLES}


def matches(expected: Mapping[str, bytes], right: str, shown: str) -> bool:
    """True if `shown` is the expected token of `right`, compared in constant time."""
    known = expected.get(right)
    sent = shown.encode("utf-8", "surrogatepass")[:_MAX_CHARS]
    return known is not None and hmac.compare_digest(known, sent)

"""Bearer tokens, one per run and role, compared in constant time.

A run has one secret (RUN/token, or JAXROLL_TOKEN). Processes send the token of their role, `role.HMAC(secret, role)`,
instead of the secret: a machine with the sampler's token cannot call as the learner.
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
from jaxroll.run_paths import RunPaths

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

    ConfigError for a token file that is empty or cannot be made private.
    """
    text = environment.get(TOKEN_VARIABLE, "").strip()
    if text or run_dir is None:
        return text or None
    return _read(RunPaths(run_dir).token)


def load_secret(run_dir: Path, environment: Mapping[str, str] = os.environ) -> str | None:
    """The run's secret, for a process that checks tokens; ConfigError if there is only a role's token."""
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
        raise ConfigError(str(path), "", "is empty, which would admit every process",
                          "Write a secret into it, or remove the file: then only this machine is served.")  # fmt: skip
    return text


def keep_private(path: Path) -> None:
    """Make `path` readable by its owner only, with a warning if it was not; ConfigError if that fails."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o077:
        return
    try:
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(str(path), f"{mode:o}", "others can read it", "Its owner must chmod 600 it.") from error
    print(f"warning: other users could read {path} (mode {mode:o}); it is private now, make a new one if in doubt",
          file=sys.stderr, flush=True)  # fmt: skip


def create(run_dir: Path) -> str:
    """The run's secret, made (readable by its owner only) if there is none yet."""
    path = RunPaths(run_dir).token
    kept = _read(path)
    if kept is not None:
        return kept
    secret = secrets.token_hex(32)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())  # after a power failure an unsynced file may be empty, which would end the run
    try:
        os.link(draft, path)  # atomic, and never replaces the file of another process
    except FileExistsError:
        return create(run_dir)
    finally:
        draft.unlink()
    return secret


def bearer(token: str, right: str) -> str:
    """The token of `right`, derived from the run's secret; a role token is returned unchanged."""
    return token if _ROLE_TOKEN.fullmatch(token) else _role_token(token, right)


def _role_token(secret: str, right: str) -> str:
    return f"{right}.{derived(secret, right)}"


def derived(secret: str, purpose: str) -> str:
    """A token for one purpose, from which `secret` and the tokens of other purposes do not follow."""
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def admits(secret: str | None, right: str, shown: str) -> bool:
    """True if `shown` is the token of `right`; a run without a secret admits every local process."""
    return secret is None or matches(tokens(secret), right, shown)


def tokens(secret: str) -> dict[str, bytes]:
    """The token of every right; a server computes them once."""
    return {right: _role_token(secret, right).encode() for right in ROLES}


def matches(expected: Mapping[str, bytes], right: str, shown: str) -> bool:
    """True if `shown` is the expected token of `right`, compared in constant time."""
    known = expected.get(right)
    sent = shown.encode("utf-8", "surrogatepass")[:_MAX_CHARS]
    return known is not None and hmac.compare_digest(known, sent)

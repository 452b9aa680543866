"""Bearer tokens, one per run and role, compared in constant time.

A run has one secret (RUN/token, or JAXROLL_TOKEN). What travels is not the secret but the role's token,
`role.HMAC(secret, role)`: a machine that was given the sampler's token cannot speak as the learner.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from jaxroll.errors import ConfigError

TOKEN_FILE = "token"
TOKEN_VARIABLE = "JAXROLL_TOKEN"
ROLES = frozenset({"sampler", "learner", "admin", "observer"})
_ALIASES = {"actor": "sampler", "evaluator": "observer", "report": "observer", "supervisor": "admin", "store": "admin"}


def right_of(role: str) -> str:
    """The right (one of ROLES) that a process of `role` has."""
    right = _ALIASES.get(role, role)
    if right not in ROLES:
        raise ConfigError("role", role, "unknown role", f"Use one of {', '.join(sorted({*ROLES, *_ALIASES}))}.")
    return right


def load(run_dir: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The secret or role token in the environment, else in the run's folder; None when the run has none."""
    text = environment.get(TOKEN_VARIABLE, "")
    if not text and run_dir is not None and (run_dir / TOKEN_FILE).is_file():
        text = (run_dir / TOKEN_FILE).read_text()
    return text.strip() or None


def create(run_dir: Path) -> str:
    """The run's secret, made (readable by its owner only) if there is none yet."""
    path = run_dir / TOKEN_FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    secret = secrets.token_hex(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
    return secret


def bearer(token: str, right: str) -> str:
    """What a process with `right` shows, made from the run's secret (or the role token itself, unchanged)."""
    if token.startswith(f"{right}."):
        return token
    return f"{right}.{hmac.new(token.encode(), right.encode(), hashlib.sha256).hexdigest()}"


def admits(secret: str | None, right: str, shown: str) -> bool:
    """Whether `shown` is the token of `right`; a run without a secret admits every local process."""
    if secret is None:
        return True
    return hmac.compare_digest(bearer(secret, right).encode(), shown.encode())

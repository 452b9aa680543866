"""Whether a process on this machine has a run open, without touching its locks."""

from __future__ import annotations

from pathlib import Path

LOCK = "store.lock"
_SUPERVISOR_LOCK = ".lock"  # control.run_dir.LOCK_FILE, which this package may not import
_LOCKS = Path("/proc/locks")


def store_pid(run_dir: Path) -> int | None:
    """The process that serves the run on this machine; None when none does, or nothing is known of it."""
    path = run_dir / LOCK
    try:
        return int(path.read_text(encoding="utf-8")) if _is_held(path) else None
    except (OSError, ValueError):
        return None


def is_open(run_dir: Path) -> bool:
    """Whether a store or a supervisor on this machine holds the run."""
    return any(_is_held(run_dir / name) for name in (LOCK, _SUPERVISOR_LOCK))


def _is_held(path: Path) -> bool:
    try:
        inode = path.stat().st_ino
        return any(line.split()[1] == "FLOCK" and line.split()[5].endswith(f":{inode}") for line in _lines())
    except (OSError, ValueError, IndexError):
        return False


def _lines() -> list[str]:
    # Taking the lock, even for a moment, could turn away a store that starts just then; the kernel's table says it too.
    return [line for line in _LOCKS.read_text(encoding="utf-8").splitlines() if "->" not in line]

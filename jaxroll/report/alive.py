"""Whether a store has a run open, without touching its lock."""

from __future__ import annotations

from pathlib import Path

LOCK = "store.lock"
_LOCKS = Path("/proc/locks")


def store_pid(run_dir: Path) -> int | None:
    """The process that serves the run on this machine; None when none does, or nothing is known of it."""
    path = run_dir / LOCK
    try:
        inode = path.stat().st_ino
        held = any(line.split()[1] == "FLOCK" and line.split()[5].endswith(f":{inode}") for line in _lines())
        return int(path.read_text(encoding="utf-8")) if held else None
    except (OSError, ValueError, IndexError):
        return None


def _lines() -> list[str]:
    # Taking the lock, even for a moment, could turn away a store that starts just then; the kernel's table says it too.
    return [line for line in _LOCKS.read_text(encoding="utf-8").splitlines() if "->" not in line]

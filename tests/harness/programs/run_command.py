"""Run `jaxroll WORDS…` with stand-ins for the roles: run_command.py PYTHON WORDS… (PYTHON replaces the interpreter).

A store that is started alone is a stand-in too, which runs while the run's folder holds a file `hold`.
"""

import sys
import time
import types

from jaxroll.config import RoleArgs
from jaxroll.control import cli


def _store(args: RoleArgs) -> None:
    (args.run_dir / "store.addr").write_text("127.0.0.1:1")
    until_s = time.monotonic() + 60
    while (args.run_dir / "hold").exists() and time.monotonic() < until_s:
        time.sleep(0.02)


if __name__ == "__main__":
    sys.executable = sys.argv[1]
    store = types.ModuleType("jaxroll.roles.store")
    store.main = _store  # type: ignore[attr-defined]
    sys.modules["jaxroll.roles.store"] = store
    sys.exit(cli.main(sys.argv[2:]))

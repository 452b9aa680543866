"""A stand-in for a role: it notes its start and end in a file, and behaves as its arguments say.

    dummy_role.py EVENTS NAME [--ready=FILE] [--hold=FILE] [--until=FILE] [--crash=N] [--code=C]
                  [--stubborn] [--linger=SECONDS] [--child[=loose]]

It ends with code C once the FILE of --until exists, or with code 0 on SIGTERM. The first N processes crash at once.
With
--linger it takes SECONDS to end and notes that. With --child it has a child, which a loose one outlives. With --hold it
is ready only once that FILE exists.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jaxroll import lifeline


def main() -> int:
    lifeline.bind_from_env()
    events, name, *words = sys.argv[1:]
    options: dict[str, str] = {}
    for word in words:
        key, _, value = word.lstrip("-").partition("=")
        options[key] = value

    def note(what: str) -> None:
        fd = os.open(events, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{what} {name} {os.getpid()}\n".encode())
        os.close(fd)

    def stop(*_: object) -> None:
        note("term")
        if "linger" in options:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(float(options["linger"]))
            note("end")
        if "stubborn" not in options:
            os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    if "child" in options:
        bound = "" if options["child"] == "loose" else f"from jaxroll import lifeline; lifeline.bind({os.getpid()}); "
        code = f"{bound}import time; time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code])
        Path(events).with_name(f"child-of-{name}").write_text(str(child.pid))
    lived = Path(events).read_text().splitlines() if Path(events).exists() else []
    note("again" if any(line.split()[:2] == ["start", name] for line in lived) else "start")
    print(f"{name} speaks", flush=True)
    lives = sum(
        line.split()[:2] in (["start", name], ["again", name]) for line in Path(events).read_text().splitlines()
    )
    if lives <= int(options.get("crash", 0)):
        print("it hurts", flush=True)
        return 3
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up:
        if "ready" in options and ("hold" not in options or Path(options["hold"]).exists()):
            Path(options.pop("ready")).write_text("127.0.0.1:1")
        if "until" in options and Path(options["until"]).exists():
            note("end")
            return int(options.get("code", 0))
        time.sleep(0.02)
    return 99


if __name__ == "__main__":
    sys.exit(main())

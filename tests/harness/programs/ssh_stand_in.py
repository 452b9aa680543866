"""ssh for tests: `[-tt] HOST COMMAND` in a clean environment, as at the other end of a connection with a terminal.

The server is a process of its own session. When the client ends, even by SIGKILL, the server closes the terminal, as
sshd does; without -tt the command reads the client's standard input. HOST is written to $SSH_NOTES with the command.
$SSH_HOSTS may hold, as JSON, the words that enter a host. The lines of $SSH_NOTES.lost are hosts that are not reached.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys

KEPT = ("HOME", "PATH", "JAXROLL_CACHE", "XLA_FLAGS", "JAXROLL_TEST_ID")


def entered(host: str, command: str) -> list[str]:
    """The words that run `command` on `host`."""
    return [*json.loads(os.environ.get("SSH_HOSTS", "{}")).get(host, ()), "bash", "-c", command]


def serve(connection: int, words: list[str]) -> int:
    """Run the words on a terminal until it ends or the client is gone; its exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(words[0], words, {name: os.environ[name] for name in KEPT if name in os.environ})
    while True:
        ready, _, _ = select.select([connection, terminal], [], [])
        try:
            data = os.read(terminal, 4096) if terminal in ready else b""
        except OSError:  # the command closed it
            data = b""
        if terminal in ready and data:
            os.write(1, data)
        if connection in ready or (terminal in ready and not data):
            os.close(terminal)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> int:
    """The exit code of the command."""
    words = sys.argv[1:]
    with open(os.environ["SSH_NOTES"], "a", encoding="utf-8") as notes:
        notes.write(" ".join(words) + "\n")
    with contextlib.suppress(FileNotFoundError), open(os.environ["SSH_NOTES"] + ".lost", encoding="utf-8") as lost:
        if words[1] in lost.read().split():
            print(f"ssh: connect to host {words[1]} port 22: No route to host", file=sys.stderr)
            return 255
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    if words[0] != "-tt":
        return subprocess.run(entered(*words), env=env, check=False).returncode
    held, ours = os.pipe()
    os.set_inheritable(held, True)
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(held), *entered(*words[1:])], pass_fds=[held], start_new_session=True
    )
    os.close(held)
    code = server.wait()
    os.close(ours)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[2]), sys.argv[3:]) if sys.argv[1] == "--serve" else main())

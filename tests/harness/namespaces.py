"""Hosts on this machine: Linux namespaces with an address, a host name and a name table of their own, on one bridge.

Programs in them reach one another through the kernel's network stack, and two hosts can be cut from each other. Needs
root, `ip`, `unshare` and `nsenter`.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

NETWORK = "10.77.0"
_HOLD = (
    "mount --bind {names} /etc/hosts && hostname {name} && ip link set lo up && {disk} && echo ready && "
    "exec sleep infinity"
)


def missing() -> str:
    """The reason why this machine cannot make namespaces, or an empty text."""
    if absent := [program for program in ("ip", "unshare", "nsenter", "hostname") if shutil.which(program) is None]:
        return f"this machine has no {', '.join(absent)}"
    tried = subprocess.run(["unshare", "-n", "-u", "-m", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


class Hosts:
    """A context manager for `count` hosts with the addresses 10.77.0.1 and up, which end with it.

    The folder `own`, if it is given, is one of each host's: the others do not see what is in it.
    """

    def __init__(self, count: int, folder: Path, own: Path | None = None) -> None:
        self._own = own
        self.addresses = tuple(f"{NETWORK}.{number}" for number in range(1, count + 1))
        self._folder, self._holders, self._cut = folder, list[subprocess.Popen[str]](), list[tuple[str, str]]()

    def __enter__(self) -> Hosts:
        names = self._folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {_name(ip)}\n" for ip in self.addresses))
        try:
            self._hold(_HOLD.format(names=names, name="bridge", disk="true"))
            for ip in self.addresses:
                disk = "true"
                if self._own is not None:
                    self.disk(ip).mkdir()
                    disk = f"mount --bind {self.disk(ip)} {self._own}"
                self._hold(_HOLD.format(names=names, name=_name(ip), disk=disk))
            bridge = self._holders[0].pid
            self._in(bridge, "ip link add bridge type bridge")
            self._in(bridge, "ip link set bridge up")
            for number, (ip, holder) in enumerate(zip(self.addresses, self._holders[1:], strict=True)):
                self._in(bridge, f"ip link add port{number} type veth peer name net0 netns {holder.pid}")
                self._in(bridge, f"ip link set port{number} master bridge up")
                self._in(holder.pid, f"ip address add {ip}/24 dev net0")
                self._in(holder.pid, "ip link set net0 up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for holder in self._holders:
            with contextlib.suppress(psutil.NoSuchProcess):
                holder.kill()
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()

    def enter(self, ip: str) -> list[str]:
        """The words before a command that runs it on the host of this address."""
        return ["nsenter", "-t", str(self._pid(ip)), "-n", "-u", "-m", "--wd=."]

    def disk(self, ip: str) -> Path:
        """The folder that the host of this address sees as `own`."""
        return self._folder / f"disk-{_name(ip)}"

    def lose(self, ip: str) -> None:
        """Kill all that runs on the host of this address, and empty its disk."""
        network = Path("/proc", str(self._pid(ip)), "ns", "net").readlink()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != self._pid(ip) and Path("/proc", str(process.pid), "ns", "net").readlink() == network:
                    process.kill()
        shutil.rmtree(self.disk(ip))
        self.disk(ip).mkdir()

    def cut(self, one: str, other: str) -> None:
        """Drop all packets between two hosts, in both directions."""
        for here, there in ((one, other), (other, one)):
            self._in(self._pid(here), f"ip route add blackhole {there}/32")
            self._cut.append((here, there))

    def heal(self) -> None:
        """Let the packets of all hosts through again."""
        for here, there in self._cut:
            self._in(self._pid(here), f"ip route del blackhole {there}/32")
        self._cut.clear()

    def _pid(self, ip: str) -> int:
        return self._holders[1 + self.addresses.index(ip)].pid

    def _hold(self, line: str) -> None:
        words: Sequence[str] = ("unshare", "-n", "-u", "-m", "bash", "-c", line)
        holder = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n", "a namespace could not be made"

    @staticmethod
    def _in(pid: int, command: str) -> None:
        subprocess.run(["nsenter", "-t", str(pid), "-n", *command.split()], check=True, capture_output=True, text=True)


def _name(ip: str) -> str:
    return f"host-{ip.rpartition('.')[2]}"

"""Sandbox of a scoring worker: restrictions that it imposes on itself before it reads an answer.

Two mechanisms of the Linux kernel, which need no privileges and also bind root:

- *seccomp*: a filter of system calls. No sockets, no new processes or programs, no signals to other processes, no
  change of names or permissions of files, nothing that outlives the process (System V memory, queues). Threads are
  allowed.
- *landlock* (Linux ≥ 5.13): no file can be written, created or removed, except for writing to /dev/null, and none can
  be read in /proc, which shows the environment variables of other processes. Without landlock, the seccomp filter
  refuses to open files for writing.

`Restrictions` (and `jaxroll doctor`) lists what could not be restricted; resource limits (see `worker`) hold in any
case. System call numbers are those of x86-64 and 64-bit ARM; the ARM numbers come from its headers and were not run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

import msgspec

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # classic BPF: ld, jeq, jset, jge, ret
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16  # in struct seccomp_data
_CLONE_THREAD = 0x10000
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_OTHER_ABI = 0x40000000  # x32 on x86-64; native calls have lower numbers on every architecture

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # landlock, the same on every architecture
_WRITE_FILE, _READ_FILE, _TRUNCATE = 1 << 1, 1 << 2, 1 << 14
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # all rights to remove and create

# Denied for all arguments.
_DENIED_X86_64 = {
    "network": (41, 53, 425),  # socket socketpair io_uring_setup
    "processes": (57, 58, 59, 322, 101, 310, 311, 272, 308, 165, 321, 323, 298, 248, 249, 250),
    # fork vfork execve execveat ptrace process_vm_readv process_vm_writev unshare setns mount bpf userfaultfd
    # perf_event_open add_key request_key keyctl
    "signals": (129, 297, 424, 434, 438),  # rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal pidfd_open pidfd_getfd
    "files": (85, 87, 263, 82, 264, 316, 83, 258, 84, 86, 265, 88, 266, 133, 259, 90, 91, 268, 452, 92, 93, 94, 260, 76,
              132, 235, 280, 261, 188, 189, 190, 29, 64, 68, 240),
    # creat unlink unlinkat rename renameat renameat2 mkdir mkdirat rmdir link linkat symlink symlinkat mknod mknodat
    # chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat truncate utime utimes utimensat futimesat setxattr
    # lsetxattr fsetxattr shmget semget msgget mq_open
}  # fmt: skip
_DENIED_ARM64 = {
    "network": (198, 199, 425),
    "processes": (221, 281, 117, 270, 271, 97, 268, 40, 280, 282, 241, 217, 218, 219),
    "signals": (138, 240, 424, 434, 438),
    "files": (35, 38, 276, 34, 37, 36, 33, 52, 53, 452, 54, 55, 45, 88, 5, 6, 7, 194, 190, 186, 180),
}


class _Machine(msgspec.Struct, frozen=True):
    """System call numbers of an architecture. `opens` maps the numbers of open and openat to their flags' argument."""

    audit_arch: int
    denied: dict[str, tuple[int, ...]]
    clone: int
    kills: tuple[int, ...]  # kill tkill tgkill: allowed only if the first argument is this process
    opens: dict[int, int]


_MACHINES = {
    "x86_64": _Machine(0xC000003E, _DENIED_X86_64, 56, (62, 200, 234), {2: 1, 257: 2}),
    "aarch64": _Machine(0xC00000B7, _DENIED_ARM64, 220, (129, 130, 131), {56: 2}),
}
_CLONE3, _OPENAT2 = 435, 437  # a filter cannot read their arguments, which are in memory; libc falls back to others


class Restrictions(msgspec.Struct, frozen=True):
    """The mechanism that restricts each capability of a worker; an empty string if nothing does."""

    network: str = ""
    processes: str = ""
    signals: str = ""
    files: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """The capabilities that only resource limits restrict."""
        return tuple(name for name in self.__struct_fields__ if not getattr(self, name))

    def __str__(self) -> str:
        closed = [f"{name} by {getattr(self, name)}" for name in self.__struct_fields__ if getattr(self, name)]
        if not self.missing:
            return f"no {', no '.join(closed)}"
        shut = f"no {', no '.join(closed)}; " if closed else ""
        return f"{shut}OPEN: {', '.join(self.missing)} (resource limits only)"


def restrict() -> Restrictions:
    """Restrict this process and its threads permanently, as far as the kernel can. Call this after all imports."""
    if not sys.platform.startswith("linux"):
        return Restrictions()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return Restrictions()
    landlocked = _landlock(libc)
    filtered = _filter(libc, refuse_writing=not landlocked)
    calls = "seccomp" if filtered else ""
    return Restrictions(calls, calls, calls, "landlock" if landlocked else calls)


def _landlock(libc: ctypes.CDLL) -> bool:
    """Forbid changing files and reading /proc. Return False on a kernel without landlock."""
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    writing = _WRITE_FILE | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("<Q", _CHANGES | writing | _READ_FILE)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        # Landlock denies all paths without a rule, so every folder except /proc gets a rule for reading.
        readable = (os.path.join("/", name) for name in os.listdir("/") if name != "proc")
        allowed = [
            _allow(libc, ruleset, os.devnull, writing),
            *(_allow(libc, ruleset, p, _READ_FILE) for p in readable),
        ]
        return all(allowed) and libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, access: int) -> bool:
    """Add a rule that allows `access` beneath `path`; return True on success or if `path` cannot be opened anyway."""
    try:
        descriptor = os.open(path, os.O_PATH)
    except OSError:
        return True
    try:
        return libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("<Qi", access, descriptor), 0) == 0
    finally:
        os.close(descriptor)


class _Program(ctypes.Structure):
    """The kernel's struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _filter(libc: ctypes.CDLL, *, refuse_writing: bool) -> bool:
    """Install the filter of system calls; return True on success."""
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return False
    code = b"".join(_rules(machine, os.getpid(), refuse_writing))
    program = _Program(len(code) // 8, code)
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0


def _rules(machine: _Machine, own_pid: int, refuse_writing: bool) -> list[bytes]:
    """The instructions of the filter. Every rule ends in a return, so that no jump depends on the other rules."""
    deny, absent = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    rules = [_step(_LOAD, _ARCH_AT), _step(_EQUAL, machine.audit_arch, 1, 0), _step(_RETURN, _KILL)]
    rules += [_step(_LOAD, _NUMBER_AT), _step(_AT_LEAST, _OTHER_ABI, 0, 1), _step(_RETURN, deny)]
    for number in (n for numbers in machine.denied.values() for n in numbers):
        rules += [_step(_EQUAL, number, 0, 1), _step(_RETURN, deny)]
    for number in (_CLONE3, _OPENAT2):
        rules += [_step(_EQUAL, number, 0, 1), _step(_RETURN, absent)]
    rules += _by_argument(machine.clone, 0, _ANY_BIT, _CLONE_THREAD, _ALLOW, deny)
    for number in machine.kills:
        rules += _by_argument(number, 0, _EQUAL, own_pid, _ALLOW, deny)
    for number, place in machine.opens.items() if refuse_writing else ():
        rules += _by_argument(number, place, _ANY_BIT, _FOR_WRITING, deny, _ALLOW)
    return [*rules, _step(_RETURN, _ALLOW)]


def _by_argument(number: int, place: int, test: int, value: int, then: int, otherwise: int) -> list[bytes]:
    """`then` for system call `number` if `test` holds of the low half of its argument `place`, else `otherwise`."""
    return [
        _step(_EQUAL, number, 0, 4),
        _step(_LOAD, _ARGS_AT + 8 * place),
        _step(test, value, 0, 1),
        _step(_RETURN, then),
        _step(_RETURN, otherwise),
    ]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """The bytes of one instruction (struct sock_filter)."""
    return struct.pack("<HBBI", code, if_true, if_false, value)


if __name__ == "__main__":
    print(restrict())

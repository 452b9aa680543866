"""Sandbox: restrictions of a scoring worker, and stricter ones of the programs that it runs.

A worker restricts itself (`restrict`) before it reads an answer. Two mechanisms of the Linux kernel, which need no
privileges and also bind root:

- *seccomp*: a filter of system calls. No sockets, no new processes or programs, no signals to other processes, no
  change of names or permissions of files, nothing that outlives the process (System V memory, queues). Threads are
  allowed.
- *landlock* (Linux ≥ 5.13): no file can be written, created or removed, except for writing to /dev/null, and none can
  be read in /proc, which shows the environment variables of other processes. Without landlock, the seccomp filter
  refuses to open files for writing.

A program that a model wrote (see `fork_server`) can in addition read nothing but Python's libraries, and cannot send
any signal, open a file descriptor of another process or outlive its time limit (`for_programs`).

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
import sysconfig
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 1, 22, 38, 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # classic BPF: ld, jeq, jset, jge, ret
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16  # in struct seccomp_data
_CLONE_THREAD = 0x10000
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_OTHER_ABI = 0x40000000  # x32 on x86-64; native calls have lower numbers on every architecture

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # landlock, the same on every architecture
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # all rights to remove and create

# Denied for all arguments.
_DENIED_X86_64 = {
    "network": (41, 53, 425),  # socket socketpair io_uring_setup
    "processes": (57, 58, 59, 322, 101, 310, 311, 272, 308, 165, 321, 323, 298, 248, 249, 250),
    # fork vfork execve execveat ptrace process_vm_readv process_vm_writev unshare setns mount bpf userfaultfd
    # perf_event_open add_key request_key keyctl
    "signals": (129, 297, 424, 434, 438, 141, 142, 144, 203, 314, 251, 256, 279, 440, 448),
    # rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal pidfd_open pidfd_getfd setpriority sched_setparam
    # sched_setscheduler sched_setaffinity sched_setattr ioprio_set migrate_pages move_pages process_madvise
    # process_mrelease
    "files": (85, 87, 263, 82, 264, 316, 83, 258, 84, 86, 265, 88, 266, 133, 259, 90, 91, 268, 452, 92, 93, 94, 260, 76,
              132, 235, 280, 261, 188, 189, 190, 29, 64, 68, 240, 319, 447),
    # creat unlink unlinkat rename renameat renameat2 mkdir mkdirat rmdir link linkat symlink symlinkat mknod mknodat
    # chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat truncate utime utimes utimensat futimesat setxattr
    # lsetxattr fsetxattr shmget semget msgget mq_open memfd_create memfd_secret
}  # fmt: skip
_DENIED_ARM64 = {
    "network": (198, 199, 425),
    "processes": (221, 281, 117, 270, 271, 97, 268, 40, 280, 282, 241, 217, 218, 219),
    "signals": (138, 240, 424, 434, 438, 140, 118, 119, 122, 274, 30, 238, 239, 440, 448),
    "files": (35, 38, 276, 34, 37, 36, 33, 52, 53, 452, 54, 55, 45, 88, 5, 6, 7, 194, 190, 186, 180, 279, 447),
}

# Denied to programs of a model in addition: calls that change the user (which clears the signal at the server's death)
# or the session, watch or lock files (a channel between programs), look into other processes, or change file systems.
_NEW_CALLS = (428, 429, 430, 431, 432, 433, 442, 463, 466, 467, 469)
# open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr setxattrat removexattrat open_tree_attr file_setattr
_PROGRAMS_X86_64 = (
    105,
    106,
    113,
    114,
    116,
    117,
    119,
    122,
    123,
    126,
    109,
    112,
    253,
    294,
    300,
    73,
    312,
    274,
    303,
    304,
    161,
    166,
    197,
    198,
    199,
    135,
    154,
)
# setuid setgid setreuid setregid setgroups setresuid setresgid setfsuid setfsgid capset setpgid setsid inotify_init
# inotify_init1 fanotify_init flock kcmp get_robust_list name_to_handle_at open_by_handle_at chroot umount2 removexattr
# lremovexattr fremovexattr personality modify_ldt
_PROGRAMS_ARM64 = (
    146,
    144,
    145,
    143,
    159,
    147,
    149,
    151,
    152,
    91,
    154,
    157,
    26,
    262,
    32,
    272,
    100,
    264,
    265,
    51,
    39,
    14,
    15,
    16,
    92,
)


class _Machine(msgspec.Struct, frozen=True):
    """System call numbers of an architecture. `opens` maps the numbers of open and openat to their flags' argument.

    `prlimit` may only be called for the process itself (its first argument is 0); `fcntl` not with the commands that
    send a signal to another process.
    """

    audit_arch: int
    denied: dict[str, tuple[int, ...]]
    clone: int
    kills: tuple[int, ...]  # kill tkill tgkill: allowed only if the first argument is this process
    opens: dict[int, int]
    prlimit: int
    fcntl: int
    ioctl: int
    prctl: int
    programs: tuple[int, ...]  # denied to programs of a model only


_MACHINES = {
    "x86_64": _Machine(
        0xC000003E, _DENIED_X86_64, 56, (62, 200, 234), {2: 1, 257: 2}, 302, 72, 16, 157, _PROGRAMS_X86_64
    ),
    "aarch64": _Machine(0xC00000B7, _DENIED_ARM64, 220, (129, 130, 131), {56: 2}, 261, 25, 29, 167, _PROGRAMS_ARM64),
}
_PIDFD_OPEN = 434
# fcntl's F_SETOWN, F_SETSIG and F_SETOWN_EX and ioctl's FIOSETOWN and SIOCSPGRP: they make the kernel send a signal.
_SIGNALLING_FCNTLS, _SIGNALLING_IOCTLS = (8, 10, 15), (0x8901, 0x8902)
# F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE and F_NOTIFY, with the queries F_GETLK and F_OFD_GETLK.
_LOCKING_FCNTLS = (5, 6, 7, 36, 37, 38, 1024, 1026)
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


def has_seccomp(libc: ctypes.CDLL) -> bool:
    """True if the kernel has filters of system calls: it then reads the filter, which is missing here (EFAULT)."""
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0) == -1 and ctypes.get_errno() == errno.EFAULT


class ProgramRestrictions(NamedTuple):
    """Restrictions for a fork server and its programs, as data: the server cannot import this module.

    `server_filter` and `program_filter` are seccomp programs; the second is added in each program, the first binds
    both. `ruleset` is the descriptor of a landlock ruleset, -1 without landlock.
    """

    server_filter: bytes
    program_filter: bytes
    ruleset: int


def for_programs() -> ProgramRestrictions | None:
    """The restrictions for programs that a model wrote; None where this system cannot confine them: not Linux, or a
    kernel or container without seccomp.

    Programs read Python's standard library and installed packages, and write nothing. Without landlock they cannot
    open any file, so that only the preloaded part of the standard library can be imported.
    """
    machine = _MACHINES.get(platform.machine())
    if not sys.platform.startswith("linux") or machine is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    if not has_seccomp(libc):
        return None
    ruleset = _ruleset(libc, _library_paths(), reads=_READ_FILE | _READ_DIR)
    shared = [number for numbers in machine.denied.values() for number in numbers if number != _PIDFD_OPEN]
    opens = () if ruleset >= 0 else machine.opens
    deny = _ERRNO | errno.EPERM
    own = [rule for number in (_PIDFD_OPEN, *machine.kills, *opens) for rule in _deny(number)]
    own += _by_argument(machine.clone, 0, _ANY_BIT, _CLONE_THREAD, _ALLOW, deny)
    own += _by_argument(machine.prctl, 0, _EQUAL, _PR_SET_PDEATHSIG, deny, _ALLOW)
    shared += [*machine.programs, *_NEW_CALLS]
    server = _enclosed(machine, [rule for number in shared for rule in _deny(number)], _LOCKING_FCNTLS)
    # Short, because every program compiles it. The server's filter, which binds programs too, refuses other ABIs.
    program = b"".join([_step(_LOAD, _NUMBER_AT), *own, _step(_RETURN, _ALLOW)])
    return ProgramRestrictions(server, program, ruleset)


def _library_paths() -> list[str]:
    """The folders and files that programs may read: Python's libraries and those of the system."""
    packages = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    system = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo"]
    files = ["/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom"]
    return [os.path.realpath(p) for p in (*packages, os.path.join(sys.base_prefix, "lib"), *system, *files)]


def _landlock(libc: ctypes.CDLL) -> bool:
    """Forbid changing files and reading /proc. Return False on a kernel without landlock."""
    # Landlock denies all paths without a rule, so every folder except /proc gets a rule for reading.
    ruleset = _ruleset(libc, (os.path.join("/", name) for name in os.listdir("/") if name != "proc"), reads=_READ_FILE)
    if ruleset < 0:
        return False
    try:
        return libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _ruleset(libc: ctypes.CDLL, readable: Iterable[str], *, reads: int) -> int:
    """The descriptor of a ruleset: `reads` only beneath `readable`, no changes but to /dev/null; -1 on failure."""
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return -1
    writing = _WRITE_FILE | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("<Q", _CHANGES | writing | reads)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return -1
    rules = [_allow(libc, ruleset, os.devnull, writing), *(_allow(libc, ruleset, path, reads) for path in readable)]
    if not all(rules):
        os.close(ruleset)
        return -1
    return ruleset


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, access: int) -> bool:
    """Add a rule that allows `access` beneath `path`; return True on success or if `path` cannot be opened anyway."""
    try:
        descriptor = os.open(path, os.O_PATH)
    except OSError:
        return True
    if not os.path.isdir(path):
        access &= ~_READ_DIR  # the kernel refuses rights of folders for files
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
    code = _rules(machine, os.getpid(), refuse_writing)
    program = _Program(len(code) // 8, code)
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0


def _rules(machine: _Machine, own_pid: int, refuse_writing: bool) -> bytes:
    """The filter of a scoring worker."""
    deny = _ERRNO | errno.EPERM
    rules = [rule for numbers in machine.denied.values() for number in numbers for rule in _deny(number)]
    rules += _by_argument(machine.clone, 0, _ANY_BIT, _CLONE_THREAD, _ALLOW, deny)
    for number in machine.kills:
        rules += _by_argument(number, 0, _EQUAL, own_pid, _ALLOW, deny)
    for number, place in machine.opens.items() if refuse_writing else ():
        rules += _by_argument(number, place, _ANY_BIT, _FOR_WRITING, deny, _ALLOW)
    return _enclosed(machine, rules)


def _enclosed(machine: _Machine, rules: list[bytes], fcntls: tuple[int, ...] = ()) -> bytes:
    """The filter with `rules`, which refuses other ABIs and these commands of fcntl, and allows the remaining calls.

    Every rule ends in a return, so that no jump depends on the other rules.
    """
    deny, absent = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    first = [_step(_LOAD, _ARCH_AT), _step(_EQUAL, machine.audit_arch, 1, 0), _step(_RETURN, _KILL)]
    first += [_step(_LOAD, _NUMBER_AT), _step(_AT_LEAST, _OTHER_ABI, 0, 1), _step(_RETURN, deny)]
    for number in (_CLONE3, _OPENAT2):
        first += [_step(_EQUAL, number, 0, 1), _step(_RETURN, absent)]
    first += _by_argument(machine.prlimit, 0, _EQUAL, 0, _ALLOW, deny)
    for number, values in ((machine.fcntl, (*_SIGNALLING_FCNTLS, *fcntls)), (machine.ioctl, _SIGNALLING_IOCTLS)):
        first += _by_values(number, 1, values)
    return b"".join([*first, *rules, _step(_RETURN, _ALLOW)])


def _deny(number: int) -> list[bytes]:
    return [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ERRNO | errno.EPERM)]


def _by_values(number: int, place: int, values: tuple[int, ...]) -> list[bytes]:
    """Deny system call `number` if its argument `place` is one of `values`, allow it otherwise."""
    tests = [_step(_EQUAL, value, len(values) - nth, 0) for nth, value in enumerate(values)]
    body = [_step(_LOAD, _ARGS_AT + 8 * place), *tests, _step(_RETURN, _ALLOW), _step(_RETURN, _ERRNO | errno.EPERM)]
    return [_step(_EQUAL, number, 0, len(body)), *body]


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


def _words_for_programs() -> str:
    """The confinement of the reward `code` on this system."""
    found = for_programs()
    if found is None:
        return "the reward `code` is refused (no seccomp)"
    files = "read only Python's libraries" if found.ruleset >= 0 else "open no file (no landlock)"
    return f"programs of the reward `code` {files}"


if __name__ == "__main__":
    words = _words_for_programs()  # before the restrictions, which forbid to ask
    print(f"{restrict()}; {words}")

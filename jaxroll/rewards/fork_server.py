"""Fork server for programs that a model wrote: one restricted process per run of a program.

A program of its own, without imports from JaxRoll: the smaller this process, the faster its forks. It gets each run
from a scoring worker over a socket: a record (`RECORD`) and two descriptors, the program's input and output. The server
never reads either, and a program closes every other descriptor, so neither the server nor another program sees the
program, its input or its output. Expected outputs stay in the scoring worker, which compares.

Input of a run: one byte for the mode, four for the length of the program, the program, then its stdin (mode "S") or
calls of its functions (mode "C", one Python literal per line: object id or -1, name, arguments, keyword arguments).
Output: what the program prints, or one JSON line per call (see `_encoded`).

Processes: the server has one child per kind of preloaded modules; each of them loads its modules before its first run.
Waits: for runs, for the end of programs and for their deadlines, in one poll.
"""

import _socket
import ctypes
import gc
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` would make every fork slower
    from typing import Any

MAX_BATCH = 64  # runs in one message
_RECORD_BYTES = 8  # id, time limit in ms; without descriptors: id, 0 to kill that run
_CONCURRENT = 3  # programs of one server at a time: one may wait while another computes
_FILES = 512  # descriptors: two per waiting run
_FILES_OF_PROGRAM = 32
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE, _SECCOMP_MODE_FILTER = 1, 22, 38, 4, 2
_LANDLOCK_RESTRICT_SELF = 446
_NEW_NETWORK, _NEW_IPC = 0x40000000, 0x08000000
_SIGKILL = 9
_CAPABILITIES_V3 = 0x20080522
_NOBODY = 65534
TIMED_OUT = -1  # a status; the others are exit statuses and 256 + the signal

_WARM_UP = "def f(x):\n  return [int(a) for a in x.split() if len(a) > 0]\nsum(f('1 2 3'))\n"

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def main(settings: "dict[str, Any]") -> None:
    """Serve runs until the scoring worker closes the socket."""
    _die_with(settings["parent"])
    kind, *others = settings["sockets"]
    for other in others:
        parent = os.getpid()
        if os.fork() == 0:
            _die_with(parent)
            kind = other
            break
    for other, descriptor in settings["sockets"].items():
        if other != kind:
            os.close(descriptor)
    control = _socket.socket(fileno=settings["sockets"][kind])
    select.select([control], [], [])  # a kind that is never used costs nothing
    for folder in settings["path"]:
        sys.path.append(folder)
    for module in settings["preload"][kind]:
        __import__(module)
    _restrict(settings)
    own = settings["program_filter"]
    program_filter = _Filter(len(own) // 8, own)
    # Python prepares its parser at the first use, which takes a millisecond.
    exec(compile(_WARM_UP, "<warm-up>", "exec"), {})
    gc.collect()
    gc.freeze()  # so that a collection in a program does not copy the server's pages
    gc.disable()
    _serve(control, program_filter)


def _die_with(parent):
    _LIBC.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _restrict(settings):
    """Restrict this process and its future programs; exit with status 3 if the kernel refuses."""
    os.chdir("/")
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _FILES),
        (resource.RLIMIT_AS, settings["memory_bytes"]),
    ):
        _lower(limit, value)
    _LIBC.unshare(_NEW_NETWORK | _NEW_IPC)  # only root may; without it, the filters below still refuse sockets
    parent = os.getppid()
    if os.getuid() == 0 and settings["readable_by_all"]:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    _LIBC.capset(header, none)
    _die_with(parent)  # the change of the user cleared it
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    steps = [_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)]
    if settings["ruleset"] >= 0:
        steps.append(_LIBC.syscall(_LANDLOCK_RESTRICT_SELF, settings["ruleset"], 0))
        os.close(settings["ruleset"])
    code = settings["server_filter"]
    steps.append(_install(_Filter(len(code) // 8, code)))
    if any(steps):
        os._exit(3)


def _install(program):
    return _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)


def _lower(limit, value):
    _, hard = resource.getrlimit(limit)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (bound, bound))


# --- the server


def _serve(control, program_filter):
    poll = select.poll()
    poll.register(control, select.POLLIN)
    waiting, running = [], {}  # records with their descriptors; of each pidfd: id, process, deadline, killed
    number = control.fileno()
    space = _socket.CMSG_SPACE(2 * MAX_BATCH * ctypes.sizeof(ctypes.c_int))
    while True:
        while waiting and len(running) < _CONCURRENT:
            ident, limit_ms, input_, output = waiting.pop(0)
            process = os.fork()
            if process == 0:
                _become_program(input_, output, limit_ms, program_filter)
            os.close(input_)
            os.close(output)
            pidfd = os.pidfd_open(process)
            running[pidfd] = [ident, process, time.monotonic() + limit_ms / 1000, False]
            poll.register(pidfd, select.POLLIN)
        wait_ms = None
        if running:
            wait_ms = max(0, (min(run[2] for run in running.values()) - time.monotonic()) * 1000) + 1
        ended = b""
        for descriptor, _ in poll.poll(wait_ms):
            if descriptor != number:
                ident, process, _, late = running.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                status = TIMED_OUT if late else status if status >= 0 else 256 - status
                ended += ident.to_bytes(4, "little") + status.to_bytes(4, "little", signed=True)
                continue
            data, ancillary, _, _ = control.recvmsg(_RECORD_BYTES * MAX_BATCH, space)
            if not data:
                return
            passed = memoryview(b"".join(body for _, _, body in ancillary)).cast("i").tolist()
            for nth in range(len(data) // _RECORD_BYTES):
                record = data[_RECORD_BYTES * nth : _RECORD_BYTES * (nth + 1)]
                ident, limit_ms = int.from_bytes(record[:4], "little"), int.from_bytes(record[4:], "little")
                if limit_ms:
                    waiting.append((ident, limit_ms, passed[2 * nth], passed[2 * nth + 1]))
                else:
                    for run in running.values():
                        if run[0] == ident:
                            run[2] = 0.0
        if ended:
            control.send(ended)
        now = time.monotonic()
        for run in running.values():
            if now >= run[2]:
                os.kill(run[1], _SIGKILL)  # its process id is not reused before waitpid
                run[2], run[3] = now + 1.0, True


# --- a program


def _become_program(input_, output, limit_ms, program_filter):
    """Turn this fork into the program; does not return."""
    status = 1
    try:
        server = os.getppid()
        # Descriptors of the server may be 0 or 1 only if they are these, which the server keeps open.
        os.dup2(input_, 0)
        os.dup2(output, 1)
        os.closerange(3, _FILES)
        seconds = limit_ms // 1000 + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES_OF_PROGRAM, _FILES_OF_PROGRAM))
        _LIBC.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != server or _install(program_filter) != 0:
            os._exit(1)
        head = _read(5)
        source = _read(int.from_bytes(head[1:], "little")).decode("utf-8", "surrogatepass")
        gc.enable()
        run = _serve_calls if head[:1] == b"C" else _run
        status = run(source)
    except BaseException:  # noqa: BLE001 - the program may raise anything
        status = 1
    finally:
        os._exit(status)


def _read(size):
    data = os.read(0, size)
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            os._exit(1)
        data += more
    return data


def _main_module():
    module = sys.modules["__main__"] = type(sys)("__main__")
    module.__dict__["__builtins__"] = __builtins__
    return module.__dict__


def _run(source):
    """Run the program as Python runs a script: with its threads and exit handlers. Return the exit status."""
    status = 0
    try:
        exec(compile(source, "<program>", "exec"), _main_module())
    except SystemExit as end:
        code = end.code
        status = 0 if code is None else code & 255 if isinstance(code, int) else 1
    except BaseException:  # noqa: BLE001 - the program may raise anything
        status = 1
    threading, exits = sys.modules.get("threading"), sys.modules.get("atexit")
    if threading is not None and threading.active_count() > 1:
        threading._shutdown()
    if exits is not None and exits._ncallbacks():
        exits._run_exitfuncs()
    for stream in (sys.stdout, sys.__stdout__):
        try:
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess]
        except (OSError, ValueError, AttributeError):
            status = status or 1
    return status


# --- calls of a program's functions


def _serve_calls(source):
    requests, replies = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    names = _main_module()
    failure = ""
    try:
        exec(compile(source, "<program>", "exec"), names)
    except BaseException as error:  # noqa: BLE001 - the program may raise anything
        failure = _named(error)
    objects = []
    words = {"inf": float("inf"), "nan": float("nan"), "R": objects.__getitem__, "set": set, "frozenset": frozenset}
    for line in requests:
        try:
            target, name, args, kwargs = eval(line, dict(words, __builtins__={}))
            if failure:
                raise RuntimeError(failure)
            if target < 0:
                found = names[name]
            else:
                found = objects[target] if name == "__call__" else getattr(objects[target], name)
            reply = _encoded(found if args is None else found(*args, **kwargs), objects)
        except BaseException as error:  # noqa: BLE001 - the program may raise anything
            reply = '{"e":' + _text(_named(error)) + "}"
        data = reply.encode("utf-8", "surrogatepass") + b"\n"
        while data:
            data = data[os.write(replies, data) :]
    return 0


_ESCAPED = {code: f"\\u{code:04x}" for code in (*range(32), ord('"'), ord("\\"))}
_PLAIN: "tuple[Any, ...]" = (type(None), bool, int, float, str, bytes, list, tuple, dict, set, frozenset)


def _named(error):
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:  # noqa: BLE001 - the program may raise anything
        return "Exception: "


def _text(text):
    return '"' + text.translate(_ESCAPED) + '"'


def _encoded(value: "Any", objects: "list[Any]", depth: int = 0) -> str:
    """`value` as JSON: null, booleans, small integers, floats, text and lists as they are, other plain data as an
    object with one key for its kind, and anything else as a reference to an object that stays here."""
    kind: Any = type(value)
    if depth > 100:
        raise ValueError("the value is nested too deeply")
    if kind not in _PLAIN:
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            return _encoded(value.tolist(), objects, depth + 1)
        # Subclasses, such as named tuples and counters, travel as their built-in type.
        as_built_in = next((plain for plain in _PLAIN if isinstance(value, plain)), None)
        if as_built_in is not None:
            return _encoded(as_built_in(value), objects, depth + 1)
    if value is None:
        return "null"
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return repr(value) if -(2**53) < value < 2**53 else '{"i":"' + repr(value) + '"}'
    if kind is float:
        return repr(value) if value - value == 0 else '{"x":"' + repr(value) + '"}'
    if kind is str:
        return _text(value)
    if kind is bytes:
        return '{"b":"' + value.hex() + '"}'
    if kind is list:
        return "[" + ",".join([_encoded(each, objects, depth + 1) for each in value]) + "]"
    if kind is dict:
        value = [(key, each) for key, each in value.items()]
    tag = {tuple: "t", set: "s", frozenset: "f", dict: "d"}.get(kind)
    if tag:
        return '{"' + tag + '":[' + ",".join([_encoded(each, objects, depth + 1) for each in value]) + "]}"
    objects.append(value)
    return '{"r":' + str(len(objects) - 1) + "}"


if __name__ == "__main__":
    import marshal

    main(marshal.loads(bytes.fromhex(sys.argv[1])))

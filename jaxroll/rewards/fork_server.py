"""Fork server for programs that a model wrote: one restricted process per run of a program, or of a batch of them.

A program of its own, without imports from JaxRoll: the smaller this process, the faster its forks. It gets each run
from a scoring worker over a socket: a record (`RECORD`) and two descriptors, the program's input and output. The server
never reads either, and a program closes every other descriptor, so neither the server nor another program sees the
program, its input or its output. Expected outputs stay in the scoring worker, which compares.

Input of a run: one byte for the mode, four for the length of the program, the program, then its stdin (mode "S") or
calls of its functions (mode "C", one Python literal per line: object id or -1, name, arguments, keyword arguments).
Output: what the program prints, or one JSON line per call (see `_encoded`). In mode "B", the program is a batch of
programs for `plain.outcomes`, and so is the output.

Processes: the server has one child per kind of preloaded modules; each of them loads its modules before its first run.
The kind "shared" runs batches only.
Waits: for runs, for the end of programs and for their deadlines, in one poll.

The time of a fork grows with the server's memory, by 0.2 µs per page, and every page that a program is the first to
write costs it a page fault of 2 µs. Therefore the server imports neither `os` nor `ctypes` but the C modules beneath
them, runs a few programs itself before its first fork (`_warm_up`), and pins the pages that a program writes
(`_pin_pages`).
"""

import _socket
import gc
import posix
import resource
import select
import sys
import time
from _ctypes import FUNCFLAG_CDECL, CFuncPtr, Structure, _SimpleCData, byref, dlopen, dlsym

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` would make every fork slower
    from typing import Any

MAX_HELD = 8  # runs that have not ended: every program has to close their descriptors
_RECORD_BYTES = 8  # id, time limit in ms; without descriptors: id, 0 to kill that run
_CONCURRENT = 3  # programs of one server at a time: one may wait while another computes
_FILES = 32  # descriptors of the server and of each program: two per waiting run
_DESCRIPTOR_BYTES = 4
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE, _SECCOMP_MODE_FILTER = 1, 22, 38, 4, 2
_PR_SET_KEEPCAPS, _CAP_SETUID = 8, 7
_LANDLOCK_RESTRICT_SELF = 446
_IO_URING_SETUP, _IO_URING_REGISTER, _REGISTER_BUFFERS = 425, 427, 0
_PAGE_BITS, _IS_PRESENT, _IS_EXCLUSIVE = 12, 1 << 63, 1 << 56  # of an entry of /proc/self/pagemap
_NEW_NETWORK, _NEW_IPC = 0x40000000, 0x08000000
_SIGKILL = 9
_CAPABILITIES_V3 = 0x20080522
_NOBODY = 65534
TIMED_OUT = -1  # a status; the others are exit statuses and 256 + the signal

# Programs that the server runs itself, so that its forks find Python's caches filled and its bytecode specialized.
# Preparing the parser alone takes a millisecond.
_PRINTS = b"def f(x):\n  return [int(a) for a in x.split() if len(a) > 0]\nprint(sum(f('1 2')), int(input()) + 1)\n"
_WARM_UPS = (
    (b"S", _PRINTS, b"1\n"),
    (b"C", b"f = lambda x, y=1: [x + y]\n", b"(-1,'f',(1,),{})\n(-1,'f',(2,),{'y':3})\n"),
)
_BATCH = b"".join(len(each).to_bytes(4, "little") for each in (_PRINTS, b"1\n")) + _PRINTS + b"1\n"
_WARM_UP_ROUNDS = 16  # Python specializes bytecode after eight calls


_plain: "dict[str, Any]" = {}  # the names of the module `plain`, in the kind "shared"


class _Long(_SimpleCData):
    _type_ = "l"


class _Short(_SimpleCData):
    _type_ = "H"


class _Bytes(_SimpleCData):
    _type_ = "z"


class _Filter(Structure):
    _fields_ = (("length", _Short), ("instructions", _Bytes))


class _Function(CFuncPtr):
    _flags_ = FUNCFLAG_CDECL
    _restype_ = _Long


_NAMES = ("prctl", "syscall", "unshare", "capset", "setfsuid")
if sys.platform == "linux":
    _C_LIBRARY = dlopen(None, 0)  # pyright: ignore[reportArgumentType]
    _prctl, _syscall, _unshare, _capset, _setfsuid = (_Function(dlsym(_C_LIBRARY, name)) for name in _NAMES)


def main(settings: "dict[str, Any]") -> None:
    """Serve runs until the scoring worker closes the socket."""
    _die_with(settings["parent"])
    kind, *others = settings["sockets"]
    for other in others:
        parent = posix.getpid()
        if posix.fork() == 0:
            _die_with(parent)
            kind = other
            break
    # The lowest free number, because programs close only those below the limit of descriptors.
    control = _socket.socket(fileno=posix.dup(settings["sockets"][kind]))
    for descriptor in settings["sockets"].values():
        posix.close(descriptor)
    select.select([control], [], [])  # a kind that is never used costs nothing
    for folder in settings["path"]:
        sys.path.append(folder)
    for module in settings["preload"][kind]:
        __import__(module)
    warm_ups = _WARM_UPS
    if kind == "shared":
        exec(settings["plain"], _plain)
        warm_ups = ((b"B", _BATCH * 2, b""),)
    _warm_up(warm_ups * _WARM_UP_ROUNDS)
    gc.collect()
    gc.freeze()  # so that a collection in a program does not copy the server's pages
    gc.disable()
    _pin_pages(_pages_written(warm_ups[:1]))
    _restrict(settings)
    own = settings["program_filter"]
    _serve(control, _Filter(len(own) // 8, own))


def _die_with(parent):
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if posix.getppid() != parent:
        posix._exit(1)


def _restrict(settings):
    """Restrict this process and its future programs; exit with status 3 if the kernel refuses."""
    posix.chdir("/")
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _FILES),
        (resource.RLIMIT_AS, settings["memory_bytes"]),
    ):
        _lower(limit, value)
    _unshare(_NEW_NETWORK | _NEW_IPC)  # only root may; without it, the filters below still refuse sockets
    parent = posix.getppid()
    if posix.getuid() == 0:
        _become_nobody(settings["readable_by_all"] or settings["ruleset"] < 0)
    _set_capabilities(0)
    _die_with(parent)  # the change of the user cleared it
    _prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    steps = [_prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)]
    if settings["ruleset"] >= 0:
        steps.append(_syscall(_LANDLOCK_RESTRICT_SELF, settings["ruleset"], 0))
        posix.close(settings["ruleset"])
    code = settings["server_filter"]
    steps.append(_install(_Filter(len(code) // 8, code)))
    if any(steps):
        posix._exit(3)


def _become_nobody(also_for_files):
    """Give up root's user and groups. Where Python's libraries are in a folder of root, files are still opened as root,
    which landlock limits to these libraries. Without landlock, programs open no files."""
    try:
        posix.setgroups([])
        posix.setresgid(_NOBODY, _NOBODY, _NOBODY)
        _prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
        posix.setresuid(_NOBODY, _NOBODY, _NOBODY)
    except OSError:  # a user namespace without this user: its root is an ordinary user
        return
    if not also_for_files:
        _set_capabilities(1 << _CAP_SETUID)
        _setfsuid(0)


def _set_capabilities(effective):
    """Keep only these capabilities."""
    header = _CAPABILITIES_V3.to_bytes(4, "little") + bytes(4)
    _capset(header, (effective.to_bytes(4, "little") * 2 + bytes(4)) + bytes(12))


def _install(program):
    return _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, byref(program), 0, 0)


def _lower(limit, value):
    _, hard = resource.getrlimit(limit)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (bound, bound))


# --- faster forks


def _warm_up(programs):
    """Run `programs` in this process, with pipes in place of its input and output."""
    main, kept = sys.modules["__main__"], (posix.dup(0), posix.dup(1))
    for mode, source, given in programs:
        (input_, write), (read, output) = posix.pipe(), posix.pipe()
        posix.write(write, mode + len(source).to_bytes(4, "little") + source + given)
        posix.close(write)
        _connect(input_, output)
        posix.close(input_)
        posix.close(output)
        _execute()
        posix.close(read)
    for number, descriptor in enumerate(kept):
        posix.dup2(descriptor, number)
        posix.close(descriptor)
    sys.modules["__main__"] = main


def _pages_written(programs):
    """The numbers of the pages that a fork writes when it runs `programs`; none if the kernel does not tell."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        writable = [each[0].split("-") for line in file if (each := line.split())[1][1] == "w"]
    ranges = [(int(first, 16) >> _PAGE_BITS, int(end, 16) >> _PAGE_BITS) for first, end in writable]
    read, write = posix.pipe()
    if posix.fork() == 0:
        try:
            _warm_up(programs)
            entries = []
            with open("/proc/self/pagemap", "rb", 0) as file:
                for first, end in ranges:
                    file.seek(8 * first)
                    entries.append(file.read(8 * (end - first)))
            wanted = _IS_PRESENT | _IS_EXCLUSIVE
            found = [
                first + nth
                for (first, _), data in zip(ranges, entries)  # noqa: B905 - of the same length
                for nth, each in enumerate(memoryview(data).cast("Q"))
                if each & wanted == wanted
            ]
            with open(write, "w", encoding="ascii") as file:
                file.write(" ".join(map(str, found)))
        finally:
            posix._exit(0)
    posix.close(write)
    with open(read, encoding="ascii") as file:
        found = [int(each) for each in file.read().split()]
    posix.wait()
    return found


def _pin_pages(pages):
    """Pin `pages` as buffers of an io_uring without operations, so that a fork copies them at once.

    Otherwise both processes have a page fault for each of them. Without io_uring, everything works, only slower.
    """
    if not pages:
        return
    ring = _syscall(_IO_URING_SETUP, 1, byref((_Long * 15)()))
    if ring < 0:
        return
    ranges = []
    for page in pages:
        if ranges and ranges[-1][1] == page:
            ranges[-1][1] += 1
        else:
            ranges.append([page, page + 1])
    sizes = [size << _PAGE_BITS for first, end in ranges for size in (first, end - first)]
    _syscall(_IO_URING_REGISTER, ring, _REGISTER_BUFFERS, byref((_Long * len(sizes))(*sizes)), len(ranges))


# --- the server


def _serve(control, program_filter):
    poll = select.poll()
    poll.register(control, select.POLLIN)
    waiting, running = [], {}  # records with their descriptors; of each pidfd: id, process, deadline, killed
    number = control.fileno()
    space = _socket.CMSG_SPACE(2 * MAX_HELD * _DESCRIPTOR_BYTES)
    while True:
        while waiting and len(running) < _CONCURRENT:
            ident, limit_ms, input_, output = waiting.pop(0)
            process = posix.fork()
            if process == 0:
                _become_program(input_, output, limit_ms, program_filter)
            posix.close(input_)
            posix.close(output)
            pidfd = posix.pidfd_open(process)
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
                posix.close(descriptor)
                status = posix.waitstatus_to_exitcode(posix.waitpid(process, 0)[1])
                status = TIMED_OUT if late else status if status >= 0 else 256 - status
                ended += ident.to_bytes(4, "little") + status.to_bytes(4, "little", signed=True)
                continue
            data, ancillary, _, _ = control.recvmsg(_RECORD_BYTES * MAX_HELD, space)
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
                posix.kill(run[1], _SIGKILL)  # its process id is not reused before waitpid
                run[2], run[3] = now + 1.0, True


# --- a program


def _become_program(input_, output, limit_ms, program_filter):
    """Turn this fork into the program; does not return."""
    status = 1
    try:
        server = posix.getppid()
        _connect(input_, output)
        posix.closerange(3, _FILES)
        seconds = limit_ms // 1000 + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if posix.getppid() != server or _install(program_filter) != 0:
            posix._exit(1)
        gc.enable()
        status = _execute()
    except BaseException:  # noqa: BLE001 - the program may raise anything
        status = 1
    finally:
        posix._exit(status)


def _connect(input_, output):
    # Descriptors of the server may be 0 or 1 only if they are these, which the server keeps open.
    posix.dup2(input_, 0)
    posix.dup2(output, 1)


def _execute():
    """Run the program that stdin holds; return its exit status."""
    head = _read(5)
    source = _read(int.from_bytes(head[1:], "little"))
    if head[:1] == b"B":
        _write(1, _plain["outcomes"](source))
        return 0
    source = source.decode("utf-8", "surrogatepass")
    return _serve_calls(source) if head[:1] == b"C" else _run(source)


def _read(size):
    data = posix.read(0, size)
    while len(data) < size:
        more = posix.read(0, size - len(data))
        if not more:
            posix._exit(1)
        data += more
    return data


def _write(descriptor, data):
    while data:
        data = data[posix.write(descriptor, data) :]


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
    requests, replies = open(posix.dup(0), encoding="utf-8"), posix.dup(1)  # noqa: SIM115 - closed below
    null = posix.open("/dev/null", posix.O_RDWR)
    posix.dup2(null, 0)
    posix.dup2(null, 1)
    posix.close(null)
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
        _write(replies, reply.encode("utf-8", "surrogatepass") + b"\n")
    requests.close()
    posix.close(replies)
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
    main(settings)  # noqa: F821  # pyright: ignore[reportUndefinedVariable] - a name of `programs._START`

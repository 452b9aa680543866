"""Set JAX up for the tests before anything imports it, and fail a `process` test that leaves something behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import jaxtyping
import psutil
import pytest

from tests.harness.xla import FAST_COMPILATION

if "jax" in sys.modules:
    raise pytest.UsageError("jax was imported before tests/conftest.py could set its environment")

_ROOT = Path(__file__).resolve().parent.parent
# Eight devices share few cores: a device that waits longer than XLA's default 40 s for the others is slow, not stuck,
# and XLA would abort the whole run. The deadlines stay below pytest's own (300 s), so that XLA names the collective.
# An unknown flag aborts the process; jaxlib 0.10.2 and 0.12.0.1 know these.
_XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60",
    "--xla_cpu_collective_call_terminate_timeout_seconds=240",
    "--xla_cpu_collective_timeout_seconds=240",
    FAST_COMPILATION,
)
# Tracing makes many objects and few cycles: with Python's limits, 8 % of the tests' time is garbage collection.
gc.set_threshold(20_000, 20, 50)
# `nohup` and some CI runners start the tests with SIGHUP ignored, and a script's `&` with SIGINT ignored. Every process
# that they start would inherit that, and some tests interrupt a command.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "1"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_XLA_FLAGS]).strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Functions of these packages whose annotations name shapes are checked against them at every call; under `jit` that is
# once for each compilation. Roles that run as processes are not slowed down.
_SHAPED = ("algorithms", "engine", "kernels", "learner", "models", "serving", "tinker")
_CHECKED = tuple(f"jaxroll.{name}" for name in _SHAPED)
if importlib.util.find_spec("beartype") is not None or "CI" in os.environ:
    importlib.import_module("tests.harness.shapes")  # the hook does not import it
    jaxtyping.install_import_hook(_CHECKED, "tests.harness.shapes.checked")

# The first example of a property often compiles, so a deadline per example would measure the compiler.
_SLOW_IS_FINE = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=_SLOW_IS_FINE)
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=30, derandomize=True, print_blob=True, suppress_health_check=_SLOW_IS_FINE
)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=1000, suppress_health_check=_SLOW_IS_FINE)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


# In these tests an array of lower rank is never broadcast to a higher one, which may hide a wrong shape.
_SAME_RANK = {*_SHAPED, "roles", "rollout", "sharding", "tools", "transfer"}


@pytest.fixture(autouse=True, scope="module")
def no_rank_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """An operand of lower rank raises an error in the tests of `_SAME_RANK`."""
    if request.path.relative_to(_ROOT / "tests").parts[0] not in _SAME_RANK:
        yield
        return
    import jax

    # For all threads: an engine's own would otherwise compile its programs again.
    before = jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_rank_promotion", "raise")
    yield
    jax.config.update("jax_numpy_rank_promotion", before)


@pytest.fixture
def free_run_dir(tmp_path: Path) -> Path:
    """A path for a run's directory that does not exist yet."""
    return tmp_path / "run"


# --- mounts of small disks


def pytest_configure() -> None:
    """Take an own mount namespace before JAX and TensorStore start threads, which would not see later mounts."""
    from tests.harness.cluster import disks

    disks.own_mounts()


# --- warnings


# After a failed write, orbax closes its event loop while writes of TensorStore are running. Each of them reports this
# when it ends, from a thread of the library (so the object is None), and pytest blames the test that runs then.
_LATE_WRITE = r"ignore:(?s)Exception ignored in. None.*Event loop is closed:pytest.PytestUnraisableExceptionWarning"

# JAX writes an entry of the compilation cache in place. A worker that reads it meanwhile warns and compiles by itself.
_HALF_WRITTEN = r"ignore:Error reading persistent compilation cache entry:UserWarning"

# jax 0.12 (Python 3.12) deprecates its attention kernels for GPUs and their backend: docs/results/real_size.md, row 2.
_GPU_KERNELS = r"ignore:.*(pallas\.ops\.gpu|Pallas Triton).* is deprecated:DeprecationWarning"

# Types that jaxlib 0.12 makes on first use, as `jaxroll profile` reads a trace. An error there aborts the process.
_TYPES_OF_JAXLIB = r"ignore:builtin type .* has no __module__ attribute:DeprecationWarning"

_ALLOWED = (_LATE_WRITE, _HALF_WRITTEN, _GPU_KERNELS, _TYPES_OF_JAXLIB)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Turn warnings into errors, except in tests that start processes or are long; long files first on two workers."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("process", "soak")):
            item.add_marker(pytest.mark.filterwarnings("error", *_ALLOWED), append=False)
    if bare := sorted({str(item.path) for item in items if item.get_closest_marker("process")} - _found(items)):
        raise pytest.UsageError(f"make test would skip them: write pytest.mark.process in {', '.join(bare)}")
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.relative_to(_ROOT / "tests").parts[0] not in _LONG_FIRST)


# --- collection

# Workers of pytest-xdist take files in the order of collection: were the last ones long, one worker would wait for the
# other. Most time goes to these folders, which compile; the last are `transfer` and `ui`.
_LONG_FIRST = ("engine", "learner", "models", "roles", "tools")


def _found(items: list[pytest.Item]) -> set[str]:
    """Files whose text has the mark of tests with processes, by which `pytest_ignore_collect` finds them."""
    return {str(path) for path in {item.path for item in items} if b"mark.process" in path.read_bytes()}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True for a file without tests that start processes where `make test` runs only those: imports take time."""
    only = config.option.markexpr == "process and not soak" and collection_path.match("test_*.py")
    return True if only and b"mark.process" not in collection_path.read_bytes() else None


def pytest_collection_finish() -> None:
    """Leave modules and tests out of later garbage collections: they stay, and a look at all of them takes 0.4 s."""
    gc.collect()
    gc.freeze()


# --- compiled programs

_MAPS, _MANY = Path("/proc/self/maps"), 15_000  # Linux grants a process 65,530 mappings of memory


@pytest.fixture(scope="session")
def program_holders() -> list[Callable[[], None]]:
    """Callbacks that release the programs which tests keep across modules, called before JAX's caches are cleared."""
    return []


@pytest.fixture(scope="session")
def forget_programs(program_holders: list[Callable[[], None]]) -> Callable[[], None]:
    """Clear every compiled program. All holders release theirs first: an engine that a module keeps would find its
    programs missing from JAX's caches and compile them again."""

    def forget() -> None:
        for drop_programs in program_holders:
            drop_programs()
        gc.collect()
        sys.modules["jax"].clear_caches()

    return forget


@pytest.fixture(scope="module", autouse=True)
def programs_are_forgotten(forget_programs: Callable[[], None]) -> Iterator[None]:
    """Clear the programs between two modules where there are many: each takes dozens of memory mappings."""
    yield
    if "jax" in sys.modules and _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MANY:
        forget_programs()


# --- leftovers of a test

TEST_ID_VARIABLE = "JAXROLL_TEST_ID"
_SHM = Path("/dev/shm")
_GRACE_S = 5.0  # a process that was stopped may take this long to exit


@dataclass(frozen=True)
class Leftovers:
    """Processes, listening sockets and shared memory that outlived a test."""

    processes: tuple[psutil.Process, ...] = ()
    listeners: tuple[tuple[int, str], ...] = ()  # (file descriptor in this process, address)
    shm_blocks: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.listeners or self.shm_blocks)

    def lines(self) -> list[str]:
        """One line for each of them."""
        return [
            *(f"process {process.pid}: {_command_line(process)}" for process in self.processes),
            *(f"listening socket {address} (descriptor {fd})" for fd, address in self.listeners),
            *(f"shared memory {path}" for path in self.shm_blocks),
        ]

    def end(self) -> None:
        """Kill the processes, stop the sockets from listening, remove the blocks."""
        for process in self.processes:
            _kill(process)
        psutil.wait_procs(self.processes, timeout=10)
        for fd, _ in self.listeners:
            _stop_listening(fd)
        for path in self.shm_blocks:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Before:
    """The state when a test began, so that only the test's own leftovers count."""

    test_id: str
    children: frozenset[psutil.Process] = field(default_factory=lambda: frozenset(_children()))
    listeners: frozenset[tuple[int, str]] = field(default_factory=lambda: frozenset(_listeners()))
    shm_blocks: frozenset[Path] = field(default_factory=lambda: frozenset(_shm_blocks()))

    def leftovers(self) -> Leftovers:
        """The processes, sockets and blocks of this test that exist now and did not exist before it."""
        processes = (set(_children()) - self.children) | set(_marked(self.test_id))
        blocks = _shm_blocks() - self.shm_blocks
        return Leftovers(
            processes=tuple(sorted((p for p in processes if _counts(p)), key=lambda process: process.pid)),
            listeners=tuple(sorted(_listeners() - self.listeners)),
            shm_blocks=tuple(sorted(blocks - _mapped_by_others(blocks, processes))) if blocks else (),
        )


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test marked `process` that leaves a process, a listening socket or a shared-memory block, and end them.

    Processes are found as descendants, and detached ones by JAXROLL_TEST_ID in their environment. Being automatic, this
    fixture is set up before the test's own and torn down after them: processes that they stop do not count.
    """
    if request.node.get_closest_marker("process") is None:
        yield
        return
    test_id = uuid.uuid4().hex
    monkeypatch.setenv(TEST_ID_VARIABLE, test_id)
    before = Before(test_id)
    yield
    deadline = time.monotonic() + _GRACE_S
    while (left := before.leftovers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        lines = left.lines()
        left.end()
        pytest.fail(f"left behind {_GRACE_S:g} s after the test (now ended):\n  " + "\n  ".join(lines), pytrace=False)


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _marked(test_id: str) -> set[psutil.Process]:
    """Processes that were started with the test's id in their environment, with any parent."""
    marked = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(TEST_ID_VARIABLE) == test_id:
                marked.add(process)
        except (psutil.Error, OSError):  # the process has ended or belongs to another user
            continue
    return marked - {psutil.Process()}


def _counts(process: psutil.Process) -> bool:
    """True if a live process belongs to the test: no zombie, and no multiprocessing helper of pytest."""
    try:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        helper = any(word in _command_line(process) for word in ("multiprocessing.resource_tracker", ".forkserver "))
        return not (helper and process.ppid() == os.getpid())
    except psutil.NoSuchProcess:
        return False


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:300] or process.name()
    except psutil.Error:
        return "(gone)"


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)


def _listeners() -> set[tuple[int, str]]:
    """Sockets on which this process listens; those of other processes end with the processes."""
    listening = (c for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN)
    return {(c.fd, f"{c.laddr.ip}:{c.laddr.port}") for c in listening}


def _stop_listening(fd: int) -> None:
    """Stop listening without closing a descriptor that some object still owns."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
    except OSError:  # closed meanwhile
        pass


def _shm_blocks() -> set[Path]:
    return set(_SHM.iterdir()) if _SHM.is_dir() else set()


def _mapped_by_others(blocks: set[Path], ours: set[psutil.Process]) -> set[Path]:
    """The blocks that other processes have mapped, such as another run of the tests on this machine."""
    mapped: set[Path] = set()
    own = {os.getpid(), *(process.pid for process in ours)}
    for process in psutil.process_iter():
        if process.pid in own:
            continue
        try:
            mapped |= blocks & {Path(region.path) for region in process.memory_maps()}
        except (psutil.Error, OSError):
            continue
    return mapped


# --- certificates, made once per session by `jaxroll tls`


@pytest.fixture(scope="session")
def certified(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Certificate folders: of servers (one for another host, one expired), of clients, of clients with another CA."""
    from jaxroll.rpc import tls
    from jaxroll.rpc.tls import Material

    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificates, is not installed (see `jaxroll doctor`)")
    root = tmp_path_factory.mktemp("certificates")
    tls.make_certificates(root / "run", [], 1)
    tls.make_certificates(root / "other", [], 1)
    shutil.copytree(root / "run", root / "past")
    tls.make_certificates(root / "past", [], -1)
    shutil.copytree(root / "run", root / "elsewhere")
    _rename_hosts(root / "elsewhere")

    def picked(name: str, run: str, *files: str) -> Material:
        folder = root / name
        folder.mkdir()
        for file in files:
            shutil.copy(root / run / "tls" / file, folder / file)
        return Material(folder)

    server, client = ("ca.pem", "cert.pem", "key.pem"), ("ca.pem", "client-cert.pem", "client-key.pem")
    return SimpleNamespace(
        root=root,
        server=picked("server", "run", *server),
        elsewhere=picked("elsewhere-server", "elsewhere", *server),
        past=picked("past-server", "past", *server),
        client=picked("client", "run", *client),
        anonymous=picked("anonymous", "run", "ca.pem"),
        other_ca=picked("other-ca", "other", *client),
        trusting_other_ca=_trusting(root, client),
    )


def _rename_hosts(run_dir: Path) -> None:
    """Replace the server certificate by one of the same CA for another host only."""
    from jaxroll.rpc import tls

    always, tls.ALWAYS = tls.ALWAYS, ()
    try:
        tls.make_certificates(run_dir, ["elsewhere.example"], 1)
    finally:
        tls.ALWAYS = always


def _trusting(root: Path, files: tuple[str, ...]):
    """A folder that trusts the run's CA and shows a certificate of another."""
    from jaxroll.rpc.tls import Material

    folder = root / "trusting"
    folder.mkdir()
    for file in files:
        shutil.copy(root / ("run" if file == "ca.pem" else "other") / "tls" / file, folder / file)
    return Material(folder)

"""Store role: the trajectory server, and the prompt feeder, which is its child process.

Threads: the main thread runs the asyncio loop that serves all calls; a writer thread commits the log (`jaxroll.store`).
Tasks: serve calls; read prompts ahead from the feeder; expire leases and report metrics by the clock.
Waits for: prompts from the feeder; every other role connects to it.
Stops: on SIGTERM, SIGINT or SIGHUP, some time after the run is closed, or if its address is silent for half a minute.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec

from jaxroll import lifeline, wire
from jaxroll.config import Config, RoleArgs
from jaxroll.config.derived import model_folder, tokenizer_folder
from jaxroll.errors import EXIT_FAILURE, ConfigError, InfraError, JaxRollError, one_line
from jaxroll.models import folders
from jaxroll.records import Task
from jaxroll.text import tokenizers

if TYPE_CHECKING:
    from jaxroll.store.server.standby import LogFollower

# Of the store's own address. Half a minute of silence ends the store; the roles wait a minute (STORE_PATIENCE_S), which
# also has to last until it serves again.
CHECK_EVERY_S, CHECK_S, SILENT_CHECKS = 5.0, 5.0, 3
T = TypeVar("T")
SilenceCheck = Callable[[str, float], Awaitable[bool]]


def main(args: RoleArgs) -> None:
    """Serve the run in `args.run_dir` until a stop signal arrives or the run is closed."""
    with asyncio.Runner() as runner:  # it makes the loop, which needs descriptors, before the coroutine
        runner.run(_serve(args))


async def _serve(args: RoleArgs) -> None:
    from jaxroll.rpc import protocol, tls
    from jaxroll.rpc.server import is_silent
    from jaxroll.store.server.server import serve  # the feeder starts without it

    peer = None
    if args.peer:
        peer = _peer(args)
        standing_by = asyncio.ensure_future(peer.stand_by(is_first=args.index == 0))
        for signum in lifeline.stop_signals():
            asyncio.get_running_loop().add_signal_handler(signum, standing_by.cancel)
        try:
            if not await standing_by:
                print("store: the other store has ended", flush=True)
                return
        except asyncio.CancelledError:
            print("store: stopped", flush=True)
            return
    feeder = FeederProcess(args.run_dir)
    has_tls, named = tls.load(args.run_dir) is not None, args.store_address or "127.0.0.1:0"
    host, port = protocol.listening("--store", named, insecure=args.insecure, has_tls=has_tls)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(
        serve(
            args.config,
            args.run_dir,
            feeder,
            host=host,
            port=port,
            ready=address.set_result,
            insecure=args.insecure,
            vocab_size=Vocabulary(args.config, args.run_dir),
            epoch_of_peer=None if peer is None else peer.epoch_of_peer,
        )
    )
    watching = asyncio.ensure_future(_watch(address, is_silent))
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:  # a second cancellation would interrupt the orderly shutdown
            stopping = True
            serving.cancel()

    loop = asyncio.get_running_loop()
    for signum in lifeline.stop_signals():
        loop.add_signal_handler(signum, stop)
    try:
        await serving
    except asyncio.CancelledError:
        print("store: stopped", flush=True)
    finally:
        watching.cancel()
        await feeder.close()


def _peer(args: RoleArgs) -> LogFollower:
    """The copy of the other store's log in this store's folder."""
    from jaxroll.rpc import protocol, tls
    from jaxroll.rpc.client import RawClient
    from jaxroll.store import messages
    from jaxroll.store.client import MAX_MESSAGE_BYTES
    from jaxroll.store.server.standby import LogFollower

    client = RawClient(
        messages.SERVICE,
        str(args.peer),
        role="store",
        name="standby",
        token=protocol.load(args.run_dir),
        patience_s=0.0,
        max_message_bytes=MAX_MESSAGE_BYTES,
        tls=tls.load(args.run_dir),
    )
    return LogFollower(args.run_dir, client, args.config.store.takeover_s, partial(print, "store:", flush=True))


class Vocabulary:
    """Vocabulary size of the model, as far as it is known without JAX and the task's data."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config, self._run_dir, self._size = config, run_dir, 0

    def __call__(self) -> int:
        """The number of token ids; 0 if it is not known (yet).

        A `char` tokenizer is known before the first result is stored: the feeder writes its alphabet before the first
        prompt. For a model given by its size with an `hf` tokenizer it stays unknown: the store loads no tokenizer.
        """
        if not self._size:
            try:
                self._size = self._found()
            except ConfigError:  # the folder may be on other hosts; roles that need it report what is wrong
                return 0
        return self._size

    def _found(self) -> int:
        if folder := model_folder(self._config):
            return folders.described(folder).vocab_size
        text = None if tokenizer_folder(self._config) else tokenizers.of_run(self._run_dir, self._config.tokenizer)
        return folders.spec(self._config.model, text.vocab_size).vocab_size if text else 0


async def _watch(serving_on: asyncio.Future[str], is_silent: SilenceCheck) -> None:
    """Announce the address, and end this process with the cause when it is silent: gRPC could not stop in order.

    Everything that the store has acknowledged is in its log.
    """
    print(f"store: serving on {(address := await serving_on)}", flush=True)
    try:
        await until_silent(address, is_silent)
    except InfraError as error:
        try:
            print(f"error: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(EXIT_FAILURE)


async def until_silent(address: str, is_silent: SilenceCheck) -> None:
    """Raise InfraError after `SILENT_CHECKS` silent connections in a row to the server at `address`.

    gRPC reports nothing if the machine refuses it threads: connections are made and get no byte. `is_silent` checks one
    for the seconds given. Checks are counted, not time, so that a process that was suspended does not end.
    """
    silent = 0
    while silent < SILENT_CHECKS:
        await asyncio.sleep(CHECK_EVERY_S)
        silent = silent + 1 if await is_silent(address, CHECK_S) else 0
    raise InfraError(
        f"{address} accepts connections and has answered none for {silent * (CHECK_EVERY_S + CHECK_S):.0f} s: the "
        "machine may have refused gRPC a thread. Raise its limits on processes and threads"
    )


# --- Feeder: reads prompts from the dataset for the store, in a child process of the store
#
# grain imports jax, which the store must not load, so the prompt pipeline runs in a child (`jaxroll feeder`). The child
# keeps no history: the store saves the pipeline's state with every prompt that it issues and sends it after a restart.
#
# Threads: one, blocking. Messages are length-prefixed MessagePack frames on standard input and output.
# Waits for: requests of the store.
# Stops: when its standard input ends.

_HEADER = struct.Struct("<I")
PROGRESS_EVERY_S = 1.0
RETRY_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # after a failure of what the source needs, such as a server


class FeedRequest(msgspec.Struct, frozen=True):
    """Ask for `count` tasks; with `restore`, first go (back) to `state` (None is the beginning)."""

    count: int
    restore: bool = False
    state: bytes | None = None


class FeedReply(msgspec.Struct, frozen=True):
    """Tasks in order, each with the pipeline's state after it; or an error; or a progress message.

    `skipped` are the items that the stream has skipped or truncated since the beginning of the run, by kind.
    """

    tasks: tuple[tuple[Task, bytes], ...] = ()
    error: str = ""
    may_pass: bool = False  # the error: what the source needs could not be reached
    progress: str = ""  # a phase that began; the reply to the request follows
    skipped: dict[str, int] = {}


class PromptsHere:
    """The run's prompts as the store takes them, read in this process instead of a child."""

    def __init__(self, args: RoleArgs) -> None:
        from jaxroll.data.tasks import PromptPipeline

        self._pipeline = PromptPipeline(args.config)
        tokenizers.note(args.run_dir, self._pipeline.tokenizer)

    @property
    def skipped(self) -> dict[str, int]:
        """See FeederProcess."""
        return dict(self._pipeline.skipped)

    async def restore(self, state: bytes | None) -> None:
        """Continue after the prompt that `state` belongs to; None is the beginning."""
        if state is not None:
            self._pipeline.restore(state)

    async def next(self, count: int) -> list[tuple[Task, bytes]]:
        """The next `count` tasks with the state after each; fewer only at the end of the data."""
        return [(task, self._pipeline.state()) for task in itertools.islice(self._pipeline, count)]


def feed(args: RoleArgs) -> None:
    """Answer feed requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that datasets print must not mix with the frames

    def send(reply: FeedReply) -> None:
        data = wire.encode(reply)
        answers.write(_HEADER.pack(len(data)) + data)
        answers.flush()

    send(FeedReply(progress="it imports jax and grain"))
    from jaxroll.data.tasks import PromptPipeline

    pipeline: PromptPipeline | None = None
    while True:
        frame = _read_frame(sys.stdin.buffer)
        if frame is None:
            return
        try:
            if pipeline is None:
                send(FeedReply(progress="it opens the task's data"))
                pipeline = _with_retries(lambda: PromptPipeline(args.config), send)
                tokenizers.note(args.run_dir, pipeline.tokenizer)
            reply = _answer(pipeline, wire.decode(frame, FeedRequest), send)
        except JaxRollError as error:
            reply = FeedReply(error=str(error), may_pass=isinstance(error, InfraError))
        send(reply)


def _answer(pipeline, request: FeedRequest, send: Callable[[FeedReply], None]) -> FeedReply:
    sent_s = time.monotonic()
    if request.restore and request.state is not None:
        pipeline.restore(request.state)
    tasks = []
    for _ in range(request.count):
        try:
            before = tasks[-1][1] if tasks else pipeline.state()
            task = _with_retries(partial(next, pipeline), send, partial(pipeline.restore, before))
        except StopIteration:
            break
        tasks.append((task, pipeline.state()))
        if time.monotonic() - sent_s >= PROGRESS_EVERY_S:
            sent_s = time.monotonic()
            send(FeedReply(progress=f"it makes prompt {len(tasks) + 1} of {request.count}"))
    return FeedReply(tuple(tasks), skipped=dict(pipeline.skipped))


def _with_retries(
    call: Callable[[], T], send: Callable[[FeedReply], None], undo: Callable[[], None] | None = None
) -> T:
    """The result of `call`; after each InfraError `undo` and a longer pause. Raises the last one."""
    for pause_s in RETRY_PAUSES_S:
        try:
            return call()
        except InfraError as error:
            send(FeedReply(progress=f"its source failed, and is tried again in {pause_s:g} s: {one_line(str(error))}"))
            if undo is not None:
                undo()
            time.sleep(pause_s)
    return call()


def _read_frame(stream: BinaryIO) -> bytes | None:
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    return stream.read(size)


class FeederProcess:
    """The store's end of the pipe: a feeder child, restarted at the same prompt if it dies or makes no progress.

    `deadline_s` is the longest time without a progress message; the second child in a row has twice, the third four
    times that, because the machine may be busy. Use it from one event loop. `next` raises ConfigError if the task
    gives no prompts, InfraError if three children in a row did not answer, or its source failed for a minute.
    """

    def __init__(self, run_dir: Path, *, deadline_s: float = 120.0, command: Sequence[str] = ()) -> None:
        self._run_dir, self._deadline_s = run_dir, deadline_s
        self._command = [*command] or [sys.executable, "-m", "jaxroll", "feeder", f"--run={run_dir}"]
        self._doing = ""
        self.skipped: dict[str, int] = {}  # as the stream has reported last
        self._process: asyncio.subprocess.Process | None = None
        self._state: bytes | None = None
        self._lock = asyncio.Lock()

    async def restore(self, state: bytes | None) -> None:
        """Continue after the prompt that `state` belongs to; None is the beginning."""
        self._state = state
        await self._stop()

    async def next(self, count: int) -> list[tuple[Task, bytes]]:
        """The next `count` tasks, each with the pipeline state after it; fewer only at the end of the data."""
        async with self._lock:
            failures: list[str] = []
            for patience_s in (self._deadline_s, 2 * self._deadline_s, 4 * self._deadline_s):
                try:
                    reply = await self._ask(count, patience_s)
                except TimeoutError:
                    failures.append(f"no progress for {patience_s:g} s; last phase: {self._doing}")
                    await self._stop()
                    continue
                except (OSError, asyncio.IncompleteReadError) as error:
                    failures.append(f"it ended ({type(error).__name__}); last phase: {self._doing}")
                    await self._stop()
                    continue
                if reply.error and reply.may_pass:
                    await self._stop()  # its stream may be ahead of the last prompt that the store has
                    raise InfraError(f"the source of the prompts failed: {reply.error}")
                if reply.error:
                    remedy = "Change the keys of `task`, or what they name."
                    raise ConfigError("task", self._run_dir.name, f"gives no prompts: {reply.error}", remedy)
                self.skipped = reply.skipped
                if reply.tasks:
                    self._state = reply.tasks[-1][1]
                return list(reply.tasks)
            raise InfraError(
                f"the prompt feeder gave no prompts, three times in a row ({'; '.join(failures)}); "
                "its output is in the store's log"
            )

    async def close(self) -> None:
        """End the child."""
        await self._stop()

    async def _ask(self, count: int, patience_s: float) -> FeedReply:
        """The reply; TimeoutError if the child sends nothing for `patience_s`."""
        process, fresh = self._process, False
        if process is None or process.returncode is not None:
            process, fresh = await self._start(), True
        assert process.stdin is not None and process.stdout is not None
        request = wire.encode(FeedRequest(count, restore=fresh, state=self._state if fresh else None))
        process.stdin.write(_HEADER.pack(len(request)) + request)
        async with asyncio.timeout(patience_s):
            await process.stdin.drain()
        while True:
            async with asyncio.timeout(patience_s):
                (size,) = _HEADER.unpack(await process.stdout.readexactly(_HEADER.size))
            async with asyncio.timeout(patience_s):
                data = await process.stdout.readexactly(size)
            if not (reply := wire.decode(data, FeedReply)).progress:
                return reply
            self._doing = reply.progress

    async def _start(self) -> asyncio.subprocess.Process:
        self._doing = "its start"
        self._process = await lifeline.child(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu", lifeline.PARENT_ENV: str(os.getpid())},
            start_new_session=True,  # signals of the terminal must reach it through the store only
        )
        return self._process

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

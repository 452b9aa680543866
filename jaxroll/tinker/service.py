"""Sessions, models and promises of a Tinker server: what its clients have, and the order in which it is computed.

Requests of one model run in the order of their sequence ids, in any order of arrival; those of
different models take turns. A repeated request (same ids) is the same promise. Weights reach the sampler process by the
resharding transfer (`jaxroll.transfer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxroll import wire
from jaxroll.config.derived import tokenizer_folder
from jaxroll.errors import DataError, InfraError, JaxRollError
from jaxroll.records import Version, VersionRef
from jaxroll.rpc.client import RawClient
from jaxroll.tinker import messages
from jaxroll.tinker.sampler import BASE, LoadCall, SampleCall, SampleReply
from jaxroll.tinker.trainer import ClientModel, Trainer
from jaxroll.transfer.ends import Publisher

HELD_S = 30.0  # a fetch of a result that is not ready is answered after this time; the client repeats it
GAP_S = 120.0  # a request whose predecessor does not arrive fails after this time
KEPT_S = 300.0  # a result that was fetched can be fetched again for this time, if the connection broke
SAMPLE_S, LOAD_S = 3600.0, 600.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_SCHEME = "tinker://"
OnDevice = Callable[[Callable[[], Any]], Awaitable[Any]]


class RefusedRequest(Exception):
    """A request that is answered with an error status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.status = message, status


@dataclass
class Promise:
    """A result under way: JSON values, or protobuf bytes. `fetched_s` is when a client got it, on the loop's clock."""

    session: str
    task: asyncio.Future[dict[str, Any] | bytes]
    reply: dict[str, Any]
    fetched_s: float | None = None


@dataclass
class ClientSession:
    """A client: what it has, and when it last sent something, on the loop's clock."""

    id: str
    seen_s: float
    models: set[str] = field(default_factory=set)
    samplers: set[str] = field(default_factory=set)


@dataclass
class ServedModel:
    """A model under training and the order of its requests."""

    id: str
    session: str
    base: str
    trained: ClientModel | None = None
    next: int = 1  # the sequence id that may run
    advanced: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class SamplingWeights:
    """Weights that a sampling session uses: the base model's, a folder's, or a snapshot of a model."""

    name: str  # of the sampler's copy
    session: str
    path: str | None = None
    folder: Path | None = None


class Tinker:
    """The sessions, models and promises of one server. Belongs to one event loop.

    `on_device` runs a job on the JAX thread. A session that is silent for `patience_s` ends, and with it its models,
    its samples under way and its results.
    """

    def __init__(
        self,
        name: str,
        trainer: Trainer,
        on_device: OnDevice,
        sampler: RawClient,
        publisher: Publisher,
        folder: Path,
        patience_s: float,
    ) -> None:
        self.name, self._trainer, self._on_device, self._sampler = name, trainer, on_device, sampler
        self._publisher, self._folder, self._patience_s = publisher, folder, patience_s
        self.sessions: dict[str, ClientSession] = {}
        self.models: dict[str, ServedModel] = {}
        self.weights: dict[str, SamplingWeights] = {}
        self.promises: dict[str, Promise] = {}
        self._publishing = asyncio.Lock()  # the channel keeps the newest versions only
        self._loads = 0

    @property
    def context(self) -> int:
        """The most tokens of a datum, and of a prompt and its answer together."""
        return self._trainer.context

    def described(self) -> dict[str, Any]:
        """The base model, as clients see it."""
        folder = tokenizer_folder(self._trainer.config)
        kind = str(folder) if folder else None
        return {"arch": self._trainer.spec.name, "model_name": self.name, "tokenizer_id": kind}

    def about(self, path: Any) -> dict[str, Any]:
        """The description of saved weights."""
        return self._trainer.about(self.folder_of(path))

    # --- sessions

    def begin(self) -> str:
        """A new session."""
        id = secrets.token_hex(8)
        self.sessions[id] = ClientSession(id, self._now_s())
        return id

    def session(self, id: Any) -> ClientSession:
        """The session `id`, active now. RefusedRequest if it has ended."""
        if (found := self.sessions.get(str(id))) is None:
            raise RefusedRequest(f"session {str(id)[:40]} has ended, or was never begun here", 410)
        found.seen_s = self._now_s()
        return found

    def forget(self, id: str) -> bool:
        """Forget a session with its models, weights and results, and cancel what computes for it. False if unknown."""
        session = self.sessions.pop(id, None)
        if session is None:
            return False
        for key in [key for key, promise in self.promises.items() if promise.session == id]:
            self.promises.pop(key).task.cancel()
        for model in session.models:
            self.models.pop(model, None)
        for name in session.samplers:
            self.weights.pop(name, None)
        return True

    async def end(self, id: str) -> None:
        """Forget a session, here and in the sampler."""
        if self.forget(id):
            with contextlib.suppress(JaxRollError):
                await self._sampler.call("Drop", wire.encode(id), LOAD_S, patience_s=5.0)

    async def watch(self) -> None:
        """End silent sessions and forget results that were fetched, forever."""
        while True:
            await asyncio.sleep(1.0)
            await self.expire()

    async def expire(self) -> None:
        """End the sessions that are silent for too long by now, and forget results that were fetched long ago."""
        now_s = self._now_s()
        for session in list(self.sessions.values()):
            if now_s - session.seen_s > self._patience_s:
                print(f"tinker: session {session.id} is silent for {self._patience_s:g} s and ends", flush=True)
                await self.end(session.id)
        for key, promise in list(self.promises.items()):
            if promise.fetched_s is not None and now_s - promise.fetched_s > KEPT_S:
                del self.promises[key]

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    # --- promises

    def promise(
        self, session: str, key: str, work: Callable[[], Awaitable[dict[str, Any] | bytes]], **more: Any
    ) -> dict[str, Any]:
        """The reply to a request: the promise `key`, which `work` fulfils. The same key is the same promise."""
        if key not in self.promises:
            task = asyncio.ensure_future(work())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # fetched later, or never
            self.promises[key] = Promise(session, task, {"request_id": key, **more})
        return self.promises[key].reply

    async def fetch(self, key: str) -> dict[str, Any] | bytes | None:
        """The result of a promise, its failure as {"error": …, "category": …}, or None if it is not ready yet."""
        if (promise := self.promises.get(key)) is None:
            raise RefusedRequest(
                f"request {key[:80]} is unknown: its session has ended, or the server was started again", 410
            )
        if (session := self.sessions.get(promise.session)) is not None:
            session.seen_s = self._now_s()
        await asyncio.wait([promise.task], timeout=HELD_S)
        if not promise.task.done():
            return None
        promise.fetched_s = self._now_s()
        if promise.task.cancelled():
            return {"error": "the request was cancelled", "category": "user"}
        error = promise.task.exception()
        if error is None:
            return promise.task.result()
        is_users = isinstance(error, (DataError, RefusedRequest))
        if not isinstance(error, (JaxRollError, RefusedRequest)):
            print(f"tinker: {key}: {error!r}", flush=True)
        return {"error": str(error) or repr(error), "category": "user" if is_users else "server"}

    def cancel(self, key: str) -> None:
        """Cancel a request that samples; others are parts of an order and run."""
        if key in self.promises and key.rpartition(":")[0] in self.weights:
            self.promises[key].task.cancel()

    # --- models

    def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`create_model`: a model with adapters, or without `lora_config` one that is trained whole."""
        session, number = self.session(body.get("session_id")), _int(body, "model_seq_id")
        config = body.get("lora_config")

        def make() -> ClientModel:
            if config is None:
                return self._trainer.create(None, 0)
            seed = config.get("seed")
            return self._trainer.create(
                _int(config, "rank"),
                secrets.randbelow(2**31) if seed is None else int(seed),
                attention=bool(config.get("train_attn", True)),
                mlp=bool(config.get("train_mlp", True)),
            )

        self._check_base(body.get("base_model"))
        kind = (body.get("optimizer_config") or {}).get("type", "adamw")
        if kind != "adamw":
            raise RefusedRequest(f"optimizer_config.type = {kind!r}: this server has adamw")
        return self._made(session, number, make, "create_model")

    def _made(self, session: ClientSession, number: int, make: Callable[[], ClientModel], kind: str) -> dict[str, Any]:
        id = f"{session.id}:train:{number}"  # clients derive it by themselves, too
        if id not in self.models:
            self.models[id] = ServedModel(id, session.id, self.name)
            session.models.add(id)

        async def work() -> dict[str, Any]:
            self.models[id].trained = await self._on_device(make)
            return {"type": kind, "model_id": id}

        return self.promise(session.id, f"{id}:0", work, model_id=id)

    def model(self, id: Any) -> ServedModel:
        """The model `id` of a live session. RefusedRequest otherwise."""
        if (found := self.models.get(str(id))) is None:
            raise RefusedRequest(f"model {str(id)[:80]} does not exist: its session has ended, or it was unloaded", 404)
        self.session(found.session)
        return found

    def ordered(
        self, body: Mapping[str, Any], job: Callable[[ServedModel, ClientModel], Awaitable[dict[str, Any] | bytes]]
    ) -> dict[str, Any]:
        """The promise of a request of one model, which runs after those with lower sequence ids."""
        model, number = self.model(body.get("model_id")), _int(body, "seq_id")
        if number < model.next and f"{model.id}:{number}" not in self.promises:
            raise RefusedRequest(
                f"request {number} of model {model.id} was answered, and its result is no longer here", 410
            )

        async def work() -> dict[str, Any] | bytes:
            try:
                await self._wait_for_earlier(model, number)
                if model.trained is None:
                    raise InfraError(f"model {model.id} could not be created")
                return await job(model, model.trained)
            finally:
                model.next = max(model.next, number + 1)
                model.advanced.set()
                model.advanced = asyncio.Event()

        return self.promise(model.session, f"{model.id}:{number}", work, model_id=model.id)

    async def _wait_for_earlier(self, model: ServedModel, number: int) -> None:
        """Return when the requests before `number` have ended. DataError if the next of them does not arrive."""
        if (created := self.promises.get(f"{model.id}:0")) is not None:
            await asyncio.wait([created.task])
        while model.next < number:
            missing = f"{model.id}:{model.next}"
            here = missing in self.promises
            try:
                async with asyncio.timeout(None if here else GAP_S):
                    await model.advanced.wait()
            except TimeoutError:
                if missing not in self.promises and model.next < number:
                    if model.trained is not None:
                        model.trained.broken = f"request {model.next} did not arrive"
                    raise DataError(
                        f"request {model.next} of model {model.id} did not arrive in {GAP_S:g} s, and "
                        f"request {number} would come after it"
                    ) from None

    def forward_backward(self, body: bytes) -> dict[str, Any]:
        """A pass over data. Faults of the data are the failure of the promise, so that the order goes on."""
        message = messages.opened(body)

        async def job(_: ServedModel, trained: ClientModel) -> bytes:
            try:
                asked = messages.forward_backward(message)
            except DataError as error:
                if not message.forward_only:
                    trained.broken = str(error)
                raise
            outputs, metrics = await self._on_device(lambda: self._trainer.run(trained, asked))
            return messages.trained(outputs, metrics)

        return self.ordered({"model_id": message.model_id, "seq_id": message.seq_id}, job)

    def step(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`optim_step`."""
        params = body.get("adam_params")

        async def job(_: ServedModel, trained: ClientModel) -> dict[str, Any]:
            if not isinstance(params, dict):
                raise DataError("adam_params are needed: this server has Adam only")
            try:
                values = {name: float(value) for name, value in params.items()}
                metrics = await self._on_device(lambda: self._trainer.step(trained, values))
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"adam_params: {error!r}") from error
            return {"type": "optim_step", "metrics": metrics}

        return self.ordered(body, job)

    def unload(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`unload_model`: forget a model after its earlier requests."""
        model = self.model(body.get("model_id"))

        async def work() -> dict[str, Any]:
            self.models.pop(model.id, None)
            return {"type": "unload_model", "model_id": model.id}

        return self.promise(model.session, f"{model.id}:unload", work)

    # --- weights

    def _path(self, model: str, kind: str, name: str) -> tuple[str, Path]:
        if not NAME.fullmatch(name):
            raise DataError(f"path = {name[:80]!r}: use letters, digits, dots, dashes and underscores, 128 at most")
        return f"{_SCHEME}{model}/{kind}/{name}", self._folder / model / kind / name

    def folder_of(self, path: Any) -> Path:
        """The folder of a path that a client names. RefusedRequest if it is none of this server's."""
        parts = str(path).removeprefix(_SCHEME).split("/")
        whole = str(path).startswith(_SCHEME) and len(parts) == 3 and all(NAME.fullmatch(part) for part in parts)
        if not whole or not (found := self._folder.joinpath(*parts)).is_dir():
            raise RefusedRequest(f"{str(path)[:160]!r} names no weights that this server holds", 404)
        return found

    def save(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`save_weights`: parameters and optimizer state, from which training can go on."""
        name, overwrite = body.get("path"), bool(body.get("overwrite"))

        async def job(model: ServedModel, trained: ClientModel) -> dict[str, Any]:
            path, folder = self._path(model.id, "weights", str(name or f"step-{trained.steps}"))
            if folder.exists() and not overwrite:
                raise DataError(f"{path} exists: give another name, or overwrite = true")
            about = {"base_model": self.name, "user_metadata": body.get("user_metadata")}
            await self._on_device(lambda: self._trainer.save(trained, folder, whole=True, about=about))
            return {"type": "save_weights", "path": path}

        return self.ordered(body, job)

    def load(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`load_weights`: into a fresh model, or as the first request of a new one."""
        folder, with_state = self.folder_of(body.get("path")), bool(body.get("optimizer"))
        if body.get("session_id") is not None:
            session, number = self.session(body["session_id"]), _int(body, "model_seq_id")
            make = lambda: self._trainer.load(folder, optimizer=with_state)  # noqa: E731
            reply = self._made(session, number, make, "load_weights")
            return reply

        async def job(model: ServedModel, trained: ClientModel) -> dict[str, Any]:
            load = lambda: self._trainer.load(folder, optimizer=with_state, into=trained)  # noqa: E731
            model.trained = await self._on_device(load)
            return {"type": "load_weights", "path": body["path"], "model_id": model.id}

        return self.ordered(body, job)

    def save_for_sampler(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`save_weights_for_sampler`: a named folder, or without a name weights for one new sampling session."""
        name, kind = body.get("path"), body.get("kind", "snapshot")
        if kind != "snapshot":
            raise RefusedRequest(f"kind = {kind!r}: this server has snapshots, whose weights do not change")
        seq = None if name is not None else _int(body, "sampling_session_seq_id")

        async def job(model: ServedModel, trained: ClientModel) -> dict[str, Any]:
            if name is None:
                id = f"{model.session}:sample:{seq}"
                self.weights[id] = SamplingWeights(f"{model.session}/{id}", model.session)
                self.session(model.session).samplers.add(id)
                await self._send(trained, self.weights[id].name)
                return {"type": "save_weights_for_sampler", "sampling_session_id": id}
            path, folder = self._path(model.id, "sampler_weights", str(name))
            about = {"base_model": self.name, "user_metadata": body.get("user_metadata")}
            await self._on_device(lambda: self._trainer.save(trained, folder, whole=False, about=about))
            await self._sampler.call("Drop", wire.encode(path), LOAD_S)  # an earlier save of that name
            return {"type": "save_weights_for_sampler", "path": path}

        return self.ordered(body, job)

    async def _send(self, trained: ClientModel, name: str) -> None:
        """Give the sampler the weights of a model under `name`."""
        async with self._publishing:
            self._loads += 1
            version = Version(trained.number, self._loads)

            def publish() -> VersionRef:
                return self._publisher.publish(version, trained.params)

            ref, adapters = await self._on_device(publish), trained.lora
            described = None if adapters is None else (adapters.rank, adapters.alpha, adapters.targets)
            body = await self._sampler.call("Load", wire.encode(LoadCall(name, ref, described)), LOAD_S)
        if error := wire.decode(body, SampleReply).error:
            raise InfraError(f"the sampler did not get the weights: {error}")

    # --- sampling

    def begin_sampling(self, body: Mapping[str, Any]) -> str:
        """A sampling session over the base model, or over saved weights."""
        session, path = self.session(body.get("session_id")), body.get("model_path")
        id = f"{session.id}:sample:{_int(body, 'sampling_session_seq_id')}"
        if path is None:
            self._check_base(body.get("base_model"))
            self.weights[id] = SamplingWeights(BASE, session.id)
        else:
            self.weights[id] = SamplingWeights(str(path), session.id, str(path), self.folder_of(path))
        session.samplers.add(id)
        return id

    def sampler(self, id: Any) -> SamplingWeights:
        """The weights of a sampling session. RefusedRequest if it has ended."""
        if (found := self.weights.get(str(id))) is None:
            raise RefusedRequest(f"sampling session {str(id)[:80]} has ended, or was never begun here", 404)
        return found

    def sample(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`asample`."""
        id = body.get("sampling_session_id")
        if id is None:
            raise RefusedRequest("sampling_session_id is needed: create a sampling session first")
        weights, number, count = self.sampler(id), _int(body, "seq_id"), _int(body, "num_samples") or 1
        self.session(weights.session)
        key = f"{id}:{number}"

        async def work() -> bytes:
            prompt, params = messages.sampling(body, self._trainer.context, self._trainer.text.eos_id)
            call = SampleCall(weights.name, prompt, params, count, bool(body.get("prompt_logprobs")))
            reply = SampleReply(missing=True)
            for _ in range(3):  # a sampler that was started again, or dropped weights, gets them and is asked again
                reply = wire.decode(await self._sampler.call("Sample", wire.encode(call), SAMPLE_S), SampleReply)
                if not reply.missing:
                    break
                await self._restore(weights)
            if reply.missing or reply.error:
                raise DataError(reply.error or f"the weights {weights.name} left the sampler: save them with a name")
            return messages.sampled(reply.completions, reply.prompt_logprobs)

        ids = [f"{key}:{member}" for member in range(max(count, 0))]
        return self.promise(weights.session, key, work, sample_sequence_ids=ids)

    async def _restore(self, weights: SamplingWeights) -> None:
        if weights.folder is None:
            raise DataError(
                "the sampler no longer holds this snapshot (it keeps the newest ones, and was perhaps "
                "started again): save weights with a name to sample from them later"
            )
        folder = weights.folder
        await self._send(await self._on_device(lambda: self._trainer.load(folder, optimizer=False)), weights.name)

    def _check_base(self, base: Any) -> None:
        if base not in (self.name, self._trainer.config.model.path or self.name):
            raise RefusedRequest(f"base_model = {str(base)[:120]!r}: this server has {self.name!r}", 404)


def _int(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RefusedRequest(f"{name} = {value!r}: a number from 0 is needed")
    return value

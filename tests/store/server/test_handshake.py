"""The first message of a caller: protocol, run, config, role, token and address."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from jaxroll.config import digest
from jaxroll.errors import (
    ConfigError,
    StaleClient,
    StoreRefusal,
    Unauthorized,
)
from jaxroll.rpc import protocol
from jaxroll.store import messages as msg
from jaxroll.store.client import StoreClient
from tests.harness.store.machine import V0


def test_wrong_protocol_config_role_and_token_are_turned_away(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()
    secret = protocol.create(tmp_path)
    shown_by_sampler = protocol.bearer(secret, "sampler")

    async def turned_away() -> None:
        async with small.serving(tmp_path, config) as address:
            with pytest.raises(Unauthorized, match="no valid token"):
                async with small.connected(tmp_path, config, "sampler", token="wrong"):
                    pass
            with pytest.raises(Unauthorized, match="no valid token"):
                await StoreClient.connect(address, role="sampler", name="s", config_digest=digest(config), patience_s=1)
            with pytest.raises(Unauthorized, match="no valid token"):
                async with small.connected(tmp_path, config, "learner", token=shown_by_sampler):
                    pass
            with pytest.raises(Unauthorized, match="same config"):
                async with small.connected(tmp_path, config, "sampler", config_digest="0" * 32):
                    pass
            with pytest.raises(Unauthorized, match="different configs"):
                async with small.connected(tmp_path, config, "sampler", config_digest=""):
                    pass
            async with small.connected(tmp_path, config, "sampler", token=shown_by_sampler) as sampler:
                with pytest.raises(Unauthorized, match="the role sampler may not call Begin"):
                    await sampler.begin(None)
                with pytest.raises(Unauthorized, match="protocol"):
                    await sampler._call("Hello", msg.Hello(99, digest(config)), msg.Welcome)
            async with small.connected(tmp_path, config, "observer", config_digest="") as observer:
                assert (await observer.status())["issued"] == 0
                with pytest.raises(Unauthorized):
                    await observer.lease(V0, 1)

    run(turned_away())


def test_a_caller_of_another_run_is_stale(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    async def stale() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "sampler") as sampler:
            sampler._raw.run_id = "another"
            with pytest.raises(StaleClient, match="belongs to another"):
                await sampler.status()

    run(stale())


def test_a_message_too_large_is_refused_before_it_is_read(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(max_message_mb=1)

    async def large() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "sampler") as sampler:
            with pytest.raises(StoreRefusal, match="1048577 bytes; the limit is 1048576"):
                await sampler._raw.call("Put", bytes(2**20 + 1), 5.0)
            assert (await sampler.status())["issued"] == 0

    run(large())


@pytest.mark.parametrize("metadata", [{"name": "../x"}, {"session": ""}, {"right": "root"}, {"name": "a" * 65}])
def test_hostile_metadata_is_refused(tmp_path: Path, small: SimpleNamespace, run, metadata: dict[str, str]) -> None:
    config = small.configured()

    async def hostile() -> None:
        async with (
            small.serving(tmp_path, config) as address,
            grpc.aio.insecure_channel(address, options=protocol.client_options(2**20)) as channel,
        ):
            said = {"right": "sampler", "name": "s", "session": "x", "run": ""} | metadata
            call = channel.unary_unary(f"/{msg.SERVICE}/Hello")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(b"", metadata=[(f"jaxroll-{k}", v) for k, v in said.items()], timeout=5)
            assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)

    run(hostile())


def test_other_addresses_need_a_token_and_consent(tmp_path: Path, small: SimpleNamespace, run) -> None:
    async def exposed() -> None:
        async with small.serving(tmp_path, small.configured(), host="0.0.0.0"):
            pass

    with pytest.raises(ConfigError, match="no token"):
        run(exposed())
    protocol.create(tmp_path)
    with pytest.raises(ConfigError, match="plain text"):
        run(exposed())

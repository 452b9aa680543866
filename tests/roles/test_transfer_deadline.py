"""The deadline of a transfer follows from the size of the model, in every role that waits for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from jaxroll import sharding
from jaxroll.config import Config, ModelConfig, RoleArgs, TransferConfig
from jaxroll.models import families, folders
from jaxroll.roles import build
from jaxroll.roles.build import publisher
from jaxroll.roles.weights import RoleLog
from jaxroll.store.server import server

TWICE = 3 * 10**9  # parameters of 12 GB in float32


def test_up_to_six_gigabytes_it_is_that_of_the_config_and_then_grows_with_the_size(tmp_path: Path) -> None:
    limit = lambda config: folders.with_transfer_deadline(config).transfer.deadline_s  # noqa: E731
    assert limit(Config()) == 60
    eight = replace(Config(), model=ModelConfig(size="qwen3_8b"))
    assert limit(eight) == pytest.approx(60 * 4 * 8.19 / 6, rel=1e-3)
    assert limit(replace(eight, transfer=TransferConfig(dtype="bfloat16"))) == pytest.approx(limit(eight) / 2)
    assert limit(replace(eight, transfer=TransferConfig(deadline_s=30))) == pytest.approx(limit(eight) / 2)
    elsewhere = replace(Config(), model=ModelConfig(size="qwen3_8b", path=str(tmp_path / "model")))
    assert limit(elsewhere) == limit(eight), "the folder is on other hosts, or not there yet, as for `jaxroll plan`"
    unknown = replace(elsewhere, model=replace(elsewhere.model, size="of my own"))
    assert limit(unknown) == 60


class Reached(Exception):
    """The transfer's end is made."""


def test_learner_sampler_and_store_wait_for_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "parameter_count", lambda spec: TWICE)
    config = replace(Config(), transfer=TransferConfig(channel="tcp", deadline_s=7))
    with publisher(RoleArgs(config, tmp_path)) as serves:
        assert serves._config.deadline_s == 14

    def receiver(transfer: TransferConfig, **_: Any) -> None:
        raise Reached(transfer.deadline_s)

    monkeypatch.setattr(build, "Receiver", receiver)
    monkeypatch.setattr(build, "tokenizer", lambda config: build.tokenizers.CharTokenizer("abc"))
    progress = RoleLog("sampler-0", lambda _: None)
    more: dict[str, Any] = {"slots": 2, "weight_swap": "drain", "token": "", "progress": progress}
    with pytest.raises(Reached, match="14"):
        build.inference(config, "sampler", sharding.MeshConfig(), **more)

    def slots(most: int, slot_s: float) -> None:
        raise Reached(slot_s)

    monkeypatch.setattr(server, "UpdateSlots", slots)
    keeper = MagicMock()
    keeper.settings.limiter.window.return_value = 1
    with pytest.raises(Reached, match="28"):
        server._Store(config, keeper, MagicMock(), MagicMock(), 0.0, None, lambda: 0)

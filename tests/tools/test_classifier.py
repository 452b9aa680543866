"""Reward models in a folder: the scores of transformers, by the model alone and through its process."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxroll.config.rewards import RewardModelSettings
from jaxroll.errors import DataError
from jaxroll.records import Message
from jaxroll.rewards.remote import Classifier, HttpError, JudgeRequest, ProcessSettings, RemoteParts
from jaxroll.tools.classifier import RewardModel
from tests.golden.write_families import CHATS, CONVERSATIONS, tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
TALKS = [tuple(Message(*turn) for turn in [*turns, ("assistant", "nus")]) for turns in CONVERSATIONS]


def scored(variant: str) -> dict[str, Any]:
    return json.loads((GOLDEN / variant / "scores.json").read_text())


def folder_of(variant: str, folder: Path) -> Path:
    """The reward model of a golden, as `save_pretrained` writes it."""
    folder.mkdir()
    found = scored(variant)
    (folder / "config.json").write_text(json.dumps(found["config"]))
    offset = variant == "gemma3_text"
    save_file(
        {key: tensor(key, tuple(shape), offset=offset) for key, shape in found["tensors"].items()},
        folder / "model.safetensors",
    )
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(GOLDEN / variant / file, folder)
    return folder


def served(folder: Path, **changes: Any) -> ProcessSettings:
    return ProcessSettings(
        **{"path": str(folder), "dtype": "float32", "max_tokens": 128, "batch_tokens": 256} | changes
    )


@pytest.mark.parametrize("variant", CHATS)
def test_scores_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    model, wanted = RewardModel(served(folder_of(variant, tmp_path / "hf"))), scored(variant)
    ids = [model.tokens(talk) for talk in TALKS]
    assert [one.tolist() for one in ids] == wanted["ids"], "rendered as TRL renders prompt and completion"
    np.testing.assert_allclose(model.scores(ids), wanted["scores"], atol=1e-4, rtol=0)
    assert np.std(wanted["scores"]) > 0.3, "equal scores would prove little"


def test_batches_are_bounded_and_long_conversations_keep_their_end(tmp_path: Path) -> None:
    folder, wanted = folder_of("qwen2", tmp_path / "hf"), scored("qwen2")
    model = RewardModel(served(folder, batch_tokens=64))
    shapes = []
    batch = model._batch
    model._batch = lambda ids, rows, length: shapes.append((rows, length)) or batch(ids, rows, length)  # type: ignore[method-assign]
    found = model.scores([model.tokens(talk) for talk in TALKS])
    np.testing.assert_allclose(found, wanted["scores"], atol=1e-4, rtol=0)
    assert len(shapes) == 3 and all(rows * length <= 128 for rows, length in shapes)
    short = RewardModel(served(folder, max_tokens=5))
    assert short.tokens(TALKS[0]).tolist() == wanted["ids"][0][-5:]
    with pytest.raises(DataError, match="refused"):
        model.tokens([])


def test_a_part_of_a_reward_asks_the_process_once_for_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def score(self: Classifier, messages: Any, timeout_s: float) -> dict[str, float]:
        asked.append((self._settings, messages, timeout_s))
        if len(asked) == 1:
            raise HttpError("timeout")
        return {"score": 0.25}

    monkeypatch.setattr(Classifier, "score", score)
    settings = RewardModelSettings(path="models/judge", max_tokens=64, timeout_s=9.0, backoff_s=1e-3)

    async def play() -> None:
        parts = RemoteParts(tmp_path / "verdicts.db")
        request = JudgeRequest(({"role": "user", "content": "3+4?"},), "It is 7.", "7", "7")
        assert [await parts.value("reward_model", settings, request) for _ in range(2)] == [0.25, 0.25]
        wanted = ProcessSettings("models/judge", "float32", 64, settings.batch_tokens)
        talk = [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "It is 7."}]
        assert asked == [(wanted, talk, 9.0)] * 2
        assert parts.counts == {"reward_model: calls": 2, "reward_model: timeout": 1, "reward_model: cached": 1}
        parts.close()

    asyncio.run(play())


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_process_that_hangs_or_dies_is_replaced(tmp_path: Path) -> None:
    wanted = scored("qwen2")["scores"]
    messages = [[{"role": message.role, "content": message.content} for message in talk] for talk in TALKS]

    async def play() -> None:
        classifier = Classifier(served(folder_of("qwen2", tmp_path / "hf")))
        try:
            found = await asyncio.gather(*(classifier.score(talk, 100.0) for talk in messages))
            np.testing.assert_allclose([one["score"] for one in found], wanted, atol=1e-4, rtol=0)
            first = classifier._process
            assert first is not None
            first.send_signal(signal.SIGSTOP)
            with pytest.raises(HttpError, match="timeout"):
                await classifier.score(messages[0], 0.2)
            assert await first.wait() == -signal.SIGKILL
            assert abs((await classifier.score(messages[0], 100.0))["score"] - wanted[0]) < 1e-4
            second = classifier._process
            assert second is not None and second.pid != first.pid
            with pytest.raises(ValueError, match="refused"):
                await classifier.score([], 100.0)
            second.kill()
            with pytest.raises(HttpError, match="process"):
                await classifier.score(messages[0], 100.0)
        finally:
            classifier.close()

    asyncio.run(play())

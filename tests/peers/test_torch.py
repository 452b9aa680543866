"""Comparisons with transformers: it writes the same goldens again, and exported weights return from it unchanged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig, ModelConfig
from jaxroll.engine.requests import Request
from jaxroll.errors import DataError
from jaxroll.learner import weights as own
from jaxroll.models import families, folders, params
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Message
from jaxroll.text.tokenizers import HFTokenizer
from jaxroll.tools import weights
from tests.golden.write_families import VARIANTS
from tests.harness import naive_engine
from tests.models.test_family_goldens import GOLDEN as FAMILIES
from tests.models.test_family_goldens import golden, logits_of, whole_rows

pytestmark = [pytest.mark.soak, pytest.mark.process, pytest.mark.timeout(300)]
GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3"


def test_transformers_writes_the_goldens_that_we_keep(tmp_path: Path, peer) -> None:
    """It writes the same tensors bit for bit, the same continuations and chats, and the same logits up to rounding."""
    said = peer("torch", "../../golden/write_qwen3.py", str(tmp_path))
    assert said["torch"].startswith("2.13.0") and "cu" not in said["torch"], "not the pinned build"
    for variant in ("tied", "untied", "moe"):
        kept, written = GOLDEN / variant, tmp_path / variant
        assert sorted(p.name for p in kept.iterdir()) == sorted(p.name for p in written.iterdir())
        for file in kept.iterdir():
            if file.suffix != ".npz":
                assert (written / file.name).read_bytes() == file.read_bytes(), f"{variant}/{file.name}"
        old, new = np.load(kept / "expected.npz"), np.load(written / "expected.npz")
        assert np.array_equal(old["tokens"], new["tokens"]) and np.array_equal(old["greedy"], new["greedy"])
        assert np.abs(old["logits"] - new["logits"]).max() < 1e-5
        assert said[variant]["parameters"] == families.parameter_count(folders.described(kept))


@pytest.mark.parametrize("variant", ["tied", "untied", "moe"])
def test_the_slow_loop_generates_the_greedy_tokens_of_transformers(variant: str) -> None:
    config, expected = ModelConfig(path=str(GOLDEN / variant)), np.load(GOLDEN / variant / "expected.npz")
    spec = params.spec(config, vocab_size=280)
    values = {name: jax.numpy.asarray(value) for name, value in params.weights(config, spec).items()}
    wanted = SamplingParams(max_tokens=expected["greedy"].shape[1], temperature=0.0)
    for row, prompt in enumerate(expected["tokens"]):
        request = Request(row, prompt, GenerationKey(row, 0), wanted)
        assert naive_engine.generate(spec, values, request, seed=0)[0].tolist() == expected["greedy"][row].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("embeddings", ["tied", "untied"])
def test_what_is_exported_comes_back_from_transformers_bit_for_bit(
    tmp_path: Path, peer, embeddings: str, dtype: str
) -> None:
    """Ours → safetensors in several files → from_pretrained → save_pretrained in several files → ours."""
    spec = families.ModelSpec("own", 64, 3, 24, 4, 2, 8, 40, tied_embeddings=embeddings == "tied", rope_theta=123.0)
    values = params.init(spec, jax.random.key(11), sharding.build(MeshConfig()), sharding.LEARNER)
    own.save(tmp_path / "ours", values, spec, {})
    with weights.opened(tmp_path / "ours", None) as source:
        weights.export(source, tmp_path / "theirs", dtype, shard_bytes=9_000)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    said = peer("torch", "reload_model.py", str(tmp_path / "theirs"), str(tmp_path / "back"))
    assert said["dtype"] == f"torch.{dtype}" and said["files"] > 1
    assert said["missing"] == [] and said["unexpected"] == [] and said["tied"] == (embeddings == "tied")
    weights.import_folder(tmp_path / "back", tmp_path / "again", weights.AS_STORED)
    weights.import_folder(tmp_path / "theirs", tmp_path / "direct", weights.AS_STORED)
    again, direct = (folders.weight_tensors(tmp_path / name) for name in ("again", "direct"))
    assert again.keys() == values.keys() == direct.keys()
    for name in values:
        assert again.leaf(name) == direct.leaf(name) and again[name].tobytes() == direct[name].tobytes()
        assert np.array_equal(again[name], np.asarray(values[name]).astype(again[name].dtype))
    described = [json.loads((tmp_path / name / "model.json").read_text()) for name in ("again", "direct")]
    assert described[0] == described[1] and described[0]["rope_theta"] == 123.0


# --- the other families


def test_transformers_writes_the_goldens_of_the_families_that_we_keep(tmp_path: Path, peer) -> None:
    peer("torch", "../../golden/write_families.py", str(tmp_path))
    for variant in VARIANTS:
        kept, written = FAMILIES / variant, tmp_path / variant
        assert sorted(p.name for p in kept.iterdir()) == sorted(p.name for p in written.iterdir())
        for file in kept.iterdir():
            if file.name == "scores.json":
                before, after = (json.loads(path.read_text()) for path in (file, written / file.name))
                assert np.abs(np.subtract(before.pop("scores"), after.pop("scores"))).max() < 1e-5 and before == after
            elif file.suffix != ".npz":
                assert (written / file.name).read_bytes() == file.read_bytes(), f"{variant}/{file.name}"
        old, new = np.load(kept / "expected.npz"), np.load(written / "expected.npz")
        assert np.array_equal(old["tokens"], new["tokens"]) and np.array_equal(old["greedy"], new["greedy"])
        assert np.abs(old["logits"] - new["logits"]).max() < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exported_family_comes_back_from_transformers_bit_for_bit(tmp_path: Path, peer, variant: str) -> None:
    spec, values, _ = golden(variant)
    own.save(tmp_path / "ours", values, spec, {})
    with weights.opened(tmp_path / "ours", None) as source:
        weights.export(source, tmp_path / "theirs", "float32", shard_bytes=9_000)
    said = peer("torch", "reload_model.py", str(tmp_path / "theirs"), str(tmp_path / "back"))
    assert said["missing"] == [] and said["unexpected"] == [] and said["tied"] == spec.tied_embeddings
    assert (
        said["kind"]
        == json.loads((FAMILIES / variant / "config.json").read_text()).get(
            "architectures", [VARIANTS[variant][0] + "ForCausalLM"]
        )[0]
    )
    weights.import_folder(tmp_path / "back", tmp_path / "again", weights.AS_STORED)
    again = folders.weight_tensors(tmp_path / "again")
    assert again.keys() == values.keys()
    assert all(np.array_equal(again[name], np.asarray(values[name])) for name in values)
    assert dataclasses.replace(folders.described(tmp_path / "again"), name=spec.name) == spec


def test_the_text_model_of_a_model_of_text_and_images_is_that_of_transformers(tmp_path: Path, peer) -> None:
    peer("torch", "write_images.py", str(tmp_path))
    spec = folders.described(tmp_path)
    values = {name: jax.numpy.asarray(value) for name, value in params.leaves(tmp_path, spec).items()}
    expected = np.load(tmp_path / "expected.npz")
    logits = np.asarray(logits_of(spec, values, *whole_rows(expected["tokens"])))
    assert expected["logits"].std() > 0.5 and np.abs(logits - expected["logits"]).max() < 1e-4


# --- the chat templates of released models

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": 'Adds "a" & é.',
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
    },
}
DATE = {"date_string": "26 Jul 2024"}
RENDERED: list[dict[str, Any]] = [
    {"template": template, "args": args, "tools": tools}
    for template, args, tools in [
        ("qwen2_5", {}, []),
        ("qwen2_5", {}, [ADD]),
        ("qwen3", {}, []),
        ("qwen3", {"enable_thinking": False}, [ADD, ADD]),
        ("qwen3_instruct_2507", {}, [ADD]),
        ("llama3", {}, []),
        ("llama3_1", DATE, []),
        ("llama3_1", DATE | {"tools_in_user_message": False}, [ADD]),
        ("llama3_2", DATE, []),
        ("llama3_2", DATE, [ADD]),
        ("gemma3", {}, []),
    ]
]
TALKS = [
    [("user", "sun")],
    [("system", " Be brief.\n"), ("user", "  <a href='x'>é 🜚</a> {{ 1 }} {% if %}\n\n")],
    [("user", "one"), ("assistant", "<think>\n1 → eno\n</think>\n\neno "), ("user", "two")],
    [("system", "s"), ("user", "1+1"), ("assistant", "<tool_call>{}</tool_call>"), ("tool", "2"), ("tool", '{"a": 3}')],
    [("user", "a"), ("user", "b")],
    [("system", "only")],
]  # fmt: skip


def test_chat_templates_of_released_models_are_rendered_as_by_transformers(tmp_path: Path, peer) -> None:
    talks = [[{"role": role, "content": content} for role, content in talk] for talk in TALKS]
    (tmp_path / "cases.json").write_text(json.dumps({"cases": RENDERED, "conversations": talks}))
    said = peer("trl", "render_chats.py", str(tmp_path / "cases.json"), str(tmp_path))
    assert said == {"trl": "1.16.0", "transformers": "5.23.0"}
    refused = 0
    for number, case in enumerate(RENDERED):
        tokenizer = HFTokenizer(tmp_path / str(number), case["args"])
        for talk, want in zip(TALKS, json.loads((tmp_path / str(number) / "chats.json").read_text()), strict=True):
            messages = tuple(Message(*message) for message in talk)
            if want["prompt"] is None:
                refused += 1
                with pytest.raises(DataError):
                    tokenizer.render(messages, tools=case["tools"])
                continue
            assert tokenizer.render(messages, tools=case["tools"]) == want["prompt"], (case, talk)
            if not case["tools"]:
                assert tokenizer.conversation(messages) == want["whole"], (case, talk)
        if "enable_thinking" not in case["args"]:  # whose template writes empty thoughts for the newest answer only
            turns, shown = (Message("user", "one"), Message("assistant", "eno"), Message("user", "two")), case["tools"]
            first, later = (
                tokenizer.render(turns[:1], tools=shown),
                tokenizer.render(turns[2:], first=False, tools=shown),
            )
            assert [*first, *tokenizer.encode("eno"), *later] == tokenizer.render(turns, tools=shown), case
    assert 0 < refused < len(RENDERED), "Gemma's template refuses roles that do not alternate"

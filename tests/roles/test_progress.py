"""Report of a role's devices and attention implementations, and the reasons of an engine's choice."""

import dataclasses

import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine import programs
from jaxroll.engine.requests import Sizes
from jaxroll.errors import ConfigError
from jaxroll.models import families
from jaxroll.roles.weights import RoleLog

MESH = sharding.build(MeshConfig(data=2))
SIZES = Sizes(
    slots=4, max_tokens=512, rows=2, inserts=2, buckets=(16, 256), chunk=1, max_stops=1, page_tokens=64, shards=2
)


def test_the_choice_of_attention_is_reported_with_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict] = []
    chosen = programs.choose_kernels(
        families.spec("nano"), MESH, dataclasses.replace(SIZES, max_tokens=128)
    ).described()
    RoleLog("sampler-0", rows.append).devices(MESH, chosen)
    expected = {"prefill": "xla (no fused kernel on cpu)", "paged": "dense (auto on cpu)"}
    (row,) = rows
    assert (row["role"], row["kind"], row["platform"], row["attention"]) == ("sampler-0", "devices", "cpu", expected)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("attention: prefill xla (no fused kernel on cpu), paged dense (auto on cpu)")


def test_an_engine_judges_by_its_largest_bucket_and_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "platform", lambda mesh: "tpu")
    spec = families.spec("qwen3_0p6b", compute_dtype="bfloat16")
    serving = programs.choose_kernels(spec, MESH, SIZES)
    assert (serving.prefill.name, serving.paged.name) == ("splash", "pallas")
    serving = programs.choose_kernels(spec, MESH, dataclasses.replace(SIZES, buckets=(16,), page_tokens=20))
    assert "16 tokens" in serving.prefill.reason
    assert "20 tokens" in serving.paged.reason


def test_an_engine_reads_short_requests_side_by_side_where_there_is_room() -> None:
    spec = families.spec("nano")
    few = dataclasses.replace(SIZES, max_tokens=128, pages=8)
    assert "requests have up to 512 tokens" in programs.choose_kernels(spec, MESH, SIZES).paged.reason
    assert "sampler.cache_pages" in programs.choose_kernels(spec, MESH, few).paged.reason


def test_an_engine_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"sampler\.paged_attention"):
        programs.choose_kernels(families.spec("nano"), MESH, SIZES, paged="pallas")

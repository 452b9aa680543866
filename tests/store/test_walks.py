"""Walks: the files through which a lease, a put, a sample, … pass are those of docs/walks.md, and the limits hold."""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path

import pytest

from tests.harness.run_walks import EPISODE, TRAINING, VERSION, role_walks
from tests.harness.store.store_walks import store_walks
from tests.harness.walks import ROOT

PAGE = Path(__file__).parents[2] / "docs" / "walks.md"
LIMITS = {"one lease": 8, "one put": 6, TRAINING: 6, VERSION: 10, "the life of a sample": 30}
LEAVES = {"clock.py", "errors.py", "records.py", "wire.py"}
LISTED = ("one lease", "one put", "one claim", EPISODE, TRAINING, VERSION)
MISSED = {
    "one lease": 11,
    "weight version": 11,
    "the life of a sample": 35,
}  # measured numbers above the limit; they may only fall


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Files by walk. A sample's life is: lease, episode, put, claim, and the way of the claim to the optimizer."""
    with pytest.MonkeyPatch.context() as patch:
        # A `LoopThread` of an earlier test notes the starts of threads; the process of a store has none.
        patch.setattr(threading.Thread, "start", getattr(threading.Thread.start, "__wrapped__", threading.Thread.start))
        store = {name: set(files) for name, files in store_walks(tmp_path_factory.mktemp("store")).items()}
    with pytest.MonkeyPatch.context() as patch:
        roles = {name: set(files) for name, files in role_walks(tmp_path_factory.mktemp("roles"), patch).items()}
    life = set.union(*store.values(), roles[EPISODE], roles[TRAINING])
    return {f"one {name}": files for name, files in store.items()} | roles | {"the life of a sample": life}


def files_on_page(walk: str) -> list[str]:
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (text,) = [part for part in section if part.lower().startswith(walk)]
    return re.findall(r"^\| `([\w/]+\.py)` \|", text, flags=re.MULTILINE)


@pytest.mark.parametrize("walk", LISTED)
def test_the_page_lists_the_files_of_the_walk(walk: str, measured: dict[str, set[str]]) -> None:
    listed = files_on_page(walk)
    assert len(listed) == len(set(listed))
    assert set(listed) == measured[walk], "the walk has changed: update docs/walks.md"


@pytest.mark.parametrize(("walk", "limit"), LIMITS.items())
def test_walks_are_within_their_limits_or_known_misses(walk: str, limit: int, measured: dict[str, set[str]]) -> None:
    count = len(measured[walk] - LEAVES)
    verdict = "missed" if walk in MISSED else "met"
    assert count == MISSED[walk] > limit if walk in MISSED else count <= limit
    assert f"| {walk} | {limit} | {count} | {verdict} |" in PAGE.read_text()


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_leaves_import_nothing_of_the_package(leaf: str) -> None:
    for node in ast.walk(ast.parse((ROOT / leaf).read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not any(name.split(".")[0] == "jaxroll" for name in names), (leaf, names)

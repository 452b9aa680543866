"""The pinned packages: requirements.txt is complete and needs no compiler, Dockerfiles install the pins exactly."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "launch" / "docker"
GYM = ("reasoning-gym", "python-dateutil")  # the first gets the second, undeclared, through cellpylib
NO_WHEELS = {"cellpylib", "pycosat", "zss"}  # as long as tests/data/test_gym.py plays without them


def requirements(file: str) -> list[Requirement]:
    lines = (ROOT / file).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def closure(roots: list[Requirement]) -> set[str]:
    """The names of `roots` and of all that they depend on, as the installed packages declare it."""
    found: set[tuple[str, str]] = set()
    open_ends = [(each, "") for each in roots]
    while open_ends:
        each, extra = open_ends.pop()
        name = canonicalize_name(each.name)
        if name in NO_WHEELS or not (each.marker is None or each.marker.evaluate({"extra": extra})):
            continue
        new = {(name, wanted) for wanted in ("", *each.extras)} - found
        found |= new
        declared = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
        open_ends += [(inner, wanted) for _, wanted in new for inner in declared]
    return {name for name, _ in found}


def test_requirements_hold_the_core_and_reasoning_gym_with_all_that_they_need() -> None:
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    listed = {each.name for each in requirements("requirements.txt") if each.marker is None or each.marker.evaluate()}
    assert listed == closure([Requirement(line) for line in (*core, *GYM)])


def test_requirements_are_pinned_as_in_the_constraints() -> None:
    pins = {(each.name, str(each.specifier)) for each in requirements("requirements.txt")}
    assert pins <= {(each.name, str(each.specifier)) for each in requirements("constraints.txt")}


@pytest.mark.parametrize("kind", ["cpu", "gpu", "tpu"])
def test_a_dockerfile_is_what_the_script_writes(kind: str) -> None:
    written = runpy.run_path(str(DOCKER / "write.py"))["dockerfile"](kind)
    assert written == (DOCKER / f"{kind}.Dockerfile").read_text(), "run `python launch/docker/write.py`"


@pytest.mark.parametrize(
    ("kind", "accelerator"), [("cpu", set()), ("gpu", {"jax-cuda13-plugin", "nvidia-cudnn-cu13"}), ("tpu", {"libtpu"})]
)
def test_a_dockerfile_installs_the_pins_of_the_constraints(kind: str, accelerator: set[str]) -> None:
    text = (DOCKER / f"{kind}.Dockerfile").read_text()
    installed = dict(re.findall(r"^  (\S+)==(\S+)", text, re.MULTILINE))
    pinned = {
        each.name: str(each.specifier)[2:]
        for each in requirements("constraints.txt")
        if "< '3.12'" not in str(each).replace('"', "'")
    }
    assert installed == {name: pinned[name] for name in installed}
    assert text.count("==") == len(installed) > 60 and accelerator <= set(installed)
    assert not [name for name in installed if name.endswith("-cu12")]

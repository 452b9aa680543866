"""The packages of jaxroll/ import only packages of lower floors, and some of them load without JAX; files are short.

docs/design.md shows the table. A package imports only from floors below it. The modules of floor 0
may import one another, without a cycle. Imports are read from the source, also inside functions.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "jaxroll"

JaxUse = Literal[
    "none",  # loads where JAX is not installed
    "no backend",  # may import JAX, but importing the room takes no device
    "any",
]


@dataclass(frozen=True)
class Room:
    floor: int
    jax: JaxUse = "any"
    forbidden: tuple[str, ...] = ()  # top-level modules that the package must not import, in addition to JAX's


PURE = ("asyncio", "threading", "time", "sqlite3", "socket", "subprocess")

ROOMS: Mapping[str, Room] = {
    "config": Room(0, "none"),
    "loop_thread": Room(0, "none"),  # the event loop of a role, which foreign code cannot block
    "lifeline": Room(0, "none"),  # death with the parent process, stop signals, priority, standard streams
    "records": Room(0, "none"),
    "protocols": Room(0, "none"),
    "wire": Room(0, "none"),
    "metrics": Room(0, "none"),
    "errors": Room(0, "none"),
    "clock": Room(0, "none"),
    "run_paths": Room(0, "none"),  # names of the files in a run's folder, today and in earlier versions
    "disk": Room(0, "none"),  # full and broken disks, and untrusted files
    "rpc": Room(1, "none"),
    "algorithms": Room(1),
    "sharding": Room(1),
    "text": Room(1, "none"),
    "policy": Room(0, "none", forbidden=PURE),  # config rules call the limiter that the store uses
    "rewards": Room(2, "none"),
    "transfer": Room(2),
    "kernels": Room(2),
    "models": Room(3),
    "engine": Room(4),
    "data": Room(3, "no backend"),
    "envs": Room(4, "none"),
    "rollout": Room(5, "none"),
    "store": Room(5, "none"),
    "learner": Room(5),
    "serving": Room(6),
    "report": Room(6, "none"),
    "tools": Room(7),
    "testing": Room(6, "none"),  # users check their environments
    "ui": Room(7, "none"),  # the dashboard reads runs
    "sim": Room(8, "none"),
    "tinker": Room(7),
    "roles": Room(7),
    "control": Room(9, "none"),
    "__main__": Room(10, "none"),
}
# Stricter rules for parts of a package: modules or subpackages. Their floor is that of the package.
PARTS: Mapping[str, Room] = {
    "engine.scheduler": Room(4, "none", forbidden=PURE),
    "engine.sequence": Room(4, "none", forbidden=PURE),
    "serving.service": Room(6, "none"),
    "serving.agents": Room(6, "none"),
    "store.core": Room(5, "none", forbidden=PURE),
}
JAX_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax")
MAX_LINES = 500  # of a file
LIMIT_S = 800.0  # of loading all rooms, on a machine with many times more work than cores; alone it takes seconds
NAMES_WITHOUT_MEANING = ("utils", "common", "helpers", "misc")


# --- reading the source


@dataclass(frozen=True)
class Import:
    """One import of a dotted module (`from a import b` reads as a.b) at a place in the source."""

    path: Path
    line: int
    module: str

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Every import in one file, at any position, relative ones made absolute; import_module("literal") too."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *(node.module.split(".") if node.module else ())])
            modules = [f"{stem}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _callee(node) in ("import_module", "__import__") and node.args:
            argument = node.args[0]
            modules = [argument.value] if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else []
        else:
            continue
        for module in modules:
            yield Import(path.relative_to(root), node.lineno, module)


def _callee(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def room_of(path: Path) -> str:
    """The room of a file: `jaxroll/store/client.py` → store, `jaxroll/wire.py` → wire, `jaxroll/__init__.py` → ''."""
    name = path.parts[1].removesuffix(".py")
    return "" if name == "__init__" else name


def sources(root: Path) -> list[Path]:
    return sorted(path for path in (root / PACKAGE).rglob("*.py") if "__pycache__" not in path.parts)


def complaints(root: Path, rooms: Mapping[str, Room] = ROOMS) -> list[str]:
    """The violations of the table in the tree under root, one line each."""
    found = []
    graph: dict[str, set[str]] = {}
    modules = {dotted(path.relative_to(root)) for path in sources(root)}
    for path in sources(root):
        relative = path.relative_to(root)
        home = room_of(relative)
        for place in (relative, *relative.parents):
            if place.stem in NAMES_WITHOUT_MEANING:
                found.append(f"{place}: {place.stem!r} says nothing about what is inside; find its name")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES:
            found.append(f"{relative}: {lines} lines, at most {MAX_LINES}: move what belongs elsewhere")
        if not (path.parent / "__init__.py").exists():
            found.append(
                f"{relative}: its folder has no __init__.py, so it is neither packaged nor loaded by this test"
            )
        if home and home not in rooms:
            found.append(f"{'/'.join(relative.parts[:2])}: {home!r} is not a room in the table of tests/test_floors.py")
            continue
        name = dotted(relative)
        for item in imports_of(path, root):
            found.extend(f"{item.path}:{item.line}: {what}" for what in _import_complaints(item, home, rooms))
            for part, rule in PARTS.items():
                if f"{name}.".startswith(f"{PACKAGE}.{part}.") and item.top in (*rule.forbidden, *JAX_LIBRARIES):
                    found.append(f"{item.path}:{item.line}: {part} must not import {item.top}")
            if (target := module_imported(item, modules)) and target != name:
                graph.setdefault(name, set()).add(target)
    if cycle := cycle_in(graph):
        found.append(f"files import one another in a circle: {' → '.join(cycle)}")
    return list(dict.fromkeys(found))


def dotted(relative: Path) -> str:
    """The module of a file: `jaxroll/store/server/keeper.py` → jaxroll.store.server.keeper."""
    return ".".join(relative.with_suffix("").parts).removesuffix(".__init__")


def module_imported(item: Import, modules: set[str]) -> str:
    """The module of this tree that an import loads; '' for others. `from a.b import c` loads a.b unless c is one."""
    if item.module in modules:
        return item.module
    parent = item.module.rpartition(".")[0]
    return parent if parent in modules and parent != PACKAGE else ""


def _room_imported(item: Import) -> str:
    return item.module.split(".")[1] if "." in item.module else ""


def _import_complaints(item: Import, home: str, rooms: Mapping[str, Room]) -> Iterator[str]:
    """The violation by one import in the package `home` ('' is jaxroll's own __init__)."""
    if item.top != PACKAGE:
        if home and rooms[home].jax == "none" and item.top in JAX_LIBRARIES:
            yield f"{home} works without JAX and imports {item.module}"
        if home and item.top in rooms[home].forbidden:
            yield f"{home} must not import {item.top}"
        return
    target = _room_imported(item)
    if target.startswith("__") and target != "__main__":  # jaxroll itself: __version__, __file__
        return
    if home == "":
        if target:
            yield f"the package's __init__ imports {target}; it imports nothing, so that every room loads alone"
    elif target not in rooms:
        if target:
            yield f"{home} imports {target}, which is not a room in the table"
    elif target != home and not _may_import(rooms[home], rooms[target]):
        yield (
            f"{home} (floor {rooms[home].floor}) imports {target} (floor {rooms[target].floor}); "
            "a room imports only from floors below it"
        )


def _may_import(home: Room, target: Room) -> bool:
    return target.floor < home.floor or target.floor == home.floor == 0


def cycle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """One cycle, its first node repeated at the end; empty when there is none."""
    finished: set[str] = set()

    def walk(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in finished:
            return []
        for successor in sorted(graph.get(node, ())):
            if cycle := walk(successor, [*trail, node]):
                return cycle
        finished.add(node)
        return []

    for start in sorted(graph):
        if cycle := walk(start, []):
            return cycle
    return []


# --- loading the rooms

_LOAD_ROOMS = """
import importlib, importlib.abc, pkgutil, sys, traceback

root, blocked, names = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{fullname} is blocked: this room works without JAX", name=fullname)
        return None

def load(name):
    room = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(room, "__path__", []), name + "."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    assert room.__file__.startswith(root), f"{name} was loaded from {room.__file__}"
    if "jax" in sys.modules:
        from jax._src import xla_bridge  # no public way to ask without initialising one
        backends = xla_bridge._backends
        assert not backends, f"importing {name} initialized the backends {sorted(backends)}"

sys.meta_path.insert(0, Block())
sys.path.insert(0, root)
failed = 0
for name in names:
    for module in [module for module in sys.modules if module.partition(".")[0] == "jaxroll"]:
        del sys.modules[module]  # so that a room finds only what it loads itself; installed packages stay
    try:
        load(name)
    except BaseException:
        failed = 1
        print(name, traceback.format_exc(), sep="\\n", file=sys.stderr)
sys.exit(failed)
"""


def load_alone(root: Path, rooms: Sequence[str], blocked: Sequence[str]) -> str:
    """The reasons why rooms cannot be loaded, each without the others; empty when all can. One interpreter loads all:
    most of the time goes to the installed packages, which it keeps."""
    arguments = [sys.executable, "-c", _LOAD_ROOMS, str(root), ",".join(blocked), *(f"{PACKAGE}.{r}" for r in rooms)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run(arguments, cwd=root, env=environment, timeout=LIMIT_S, check=False, **streams)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"


def existing_rooms(use: JaxUse) -> list[str]:
    return sorted(
        {room_of(path.relative_to(ROOT)) for path in sources(ROOT)} & {n for n, r in ROOMS.items() if r.jax == use}
    )


# --- this repository


def test_imports_keep_to_the_floors() -> None:
    found = complaints(ROOT)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.timeout(LIMIT_S + 60)
def test_rooms_load_without_jax() -> None:
    why_not = load_alone(ROOT, existing_rooms("none"), blocked=JAX_LIBRARIES)
    assert not why_not, f"these rooms do not load with {', '.join(JAX_LIBRARIES)} blocked:\n{why_not}"


def test_rooms_load_without_taking_a_device() -> None:
    why_not = load_alone(ROOT, existing_rooms("no backend"), blocked=())
    assert not why_not, f"importing these rooms went wrong:\n{why_not}"


# --- the checker has been red


def _plant(root: Path, files: Mapping[str, str]) -> Path:
    """Write a package of these files, with an empty __init__.py in every folder that has none."""
    for name, text in {"__init__.py": "", **files}.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in [path for path in (root / PACKAGE).rglob("*") if path.is_dir()]:
        (folder / "__init__.py").touch()
    return root


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"store/log.py": "from jaxroll import records\nimport jaxroll.wire as wire\n"}, id="down"),
        pytest.param({"store/log.py": "from . import machine\nfrom .machine import step\n"}, id="own room"),
        pytest.param(
            {"store/deep/log.py": "from ..machine import step\nfrom ... import records\n"}, id="relative, down"
        ),
        pytest.param(
            {"records.py": "from jaxroll.errors import X\n", "wire.py": "from .records import Y\n"}, id="words"
        ),
        pytest.param(
            {"control/cli.py": "def main():\n    from jaxroll.roles import learner\n"}, id="inside a function"
        ),
        pytest.param({"store/log.py": "from jaxroll import __version__\nimport jaxroll\n"}, id="the package itself"),
        pytest.param({"models/layers.py": "import jax, flax.nnx\n"}, id="jax where it belongs"),
        pytest.param({"store/log.py": "\n" * 500}, id="500 lines"),
        pytest.param({"data/tasks.py": "import jax\n"}, id="data may import jax"),
        pytest.param({"__main__.py": "from jaxroll.control.cli import main\n"}, id="the command"),
    ],
)
def test_checker_accepts(tmp_path: Path, files: dict[str, str]) -> None:
    assert complaints(_plant(tmp_path, files)) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(
            {"store/log.py": "import jaxroll.roles.learner\n"},
            ["store/log.py:1: store (floor 5) imports roles"],
            id="up",
        ),
        pytest.param({"store/log.py": "from jaxroll import rollout\n"}, ["imports rollout (floor 5)"], id="same floor"),
        pytest.param(
            {"store/log.py": "\nfrom ..learner.step import train\n"}, ["log.py:2: store (floor 5)"], id="relative"
        ),
        pytest.param({"store/log.py": "from .. import learner\n"}, ["imports learner"], id="relative, the room itself"),
        pytest.param({"store/a/b.py": "from ...learner import x\n"}, ["imports learner"], id="relative, deep"),
        pytest.param({"store/__init__.py": "from ..learner import x\n"}, ["imports learner"], id="relative, __init__"),
        pytest.param(
            {"sim/run.py": "def f():\n    from jaxroll.control import cli\n"}, ["sim/run.py:2: "], id="in a function"
        ),
        pytest.param(
            {"rpc/a.py": "if TYPE_CHECKING:\n    from jaxroll.text import x\n"}, ["imports text"], id="for types"
        ),
        pytest.param(
            {"rpc/a.py": "m = importlib.import_module('jaxroll.store')\n"}, ["imports store"], id="import_module"
        ),
        pytest.param(
            {"records.py": "import jaxroll.rpc\n"}, ["records (floor 0) imports rpc (floor 1)"], id="a word, up"
        ),
        pytest.param({"report/a.py": "from jaxroll.tools import x\n"}, ["imports tools"], id="same floor, jax"),
        pytest.param({"store/log.py": "def f():\n    import jax.numpy\n"}, ["store works without JAX"], id="jax"),
        pytest.param({"records.py": "from flax import nnx\n"}, ["records works without JAX"], id="flax in a word"),
        pytest.param({"policy/limiter.py": "import asyncio\n"}, ["policy must not import asyncio"], id="asyncio"),
        pytest.param({"policy/limiter.py": "from time import monotonic\n"}, ["must not import time"], id="a clock"),
        pytest.param({"trainer/loop.py": ""}, ["'trainer' is not a room"], id="unknown room"),
        pytest.param({"trainer.py": ""}, ["'trainer' is not a room"], id="unknown module"),
        pytest.param(
            {"store/log.py": "from jaxroll.nowhere import x\n"},
            ["imports nowhere, which is not a room"],
            id="unknown target",
        ),
        pytest.param({"store/utils/a.py": ""}, ["'utils' says nothing"], id="utils folder"),
        pytest.param({"store/helpers.py": ""}, ["'helpers' says nothing"], id="helpers module"),
        pytest.param({"common/a.py": ""}, ["'common' says nothing", "'common' is not a room"], id="common room"),
        pytest.param(
            {"__init__.py": "from jaxroll import records\n"}, ["__init__ imports records"], id="package __init__"
        ),
        pytest.param(
            {
                "wire.py": "from jaxroll import records\n",
                "records.py": "import jaxroll.clock\n",
                "clock.py": "from . import wire\n",
            },
            ["in a circle: jaxroll.clock → jaxroll.wire → jaxroll.records → jaxroll.clock"],
            id="words in a circle",
        ),
        pytest.param(
            {
                "store/a.py": "from jaxroll.store.b import x\n",
                "store/b.py": "def f():\n    from jaxroll.store import a\n",
            },
            ["in a circle: jaxroll.store.a → jaxroll.store.b → jaxroll.store.a"],
            id="files of one package in a circle",
        ),
        pytest.param({"store/core/a.py": "import sqlite3\n"}, ["store.core must not import sqlite3"], id="a pure part"),
        pytest.param({"store/a.py": "\n" * 501}, ["store/a.py: 501 lines, at most 500"], id="a long file"),
    ],
)
def test_checker_refuses(tmp_path: Path, files: dict[str, str], expected: list[str]) -> None:
    found = complaints(_plant(tmp_path, files))
    assert len(found) == len(expected)
    for text, line in zip(expected, found, strict=True):
        assert text in line


def test_loading_finds_jax_behind_another_room(tmp_path: Path) -> None:
    files = {
        "store/a/b.py": "from jaxroll.algorithms import ratios\n",
        "algorithms/ratios.py": "import jax\n",
        "rpc/a/b.py": "import json\n",
        "wire.py": "",
    }
    root = _plant(tmp_path, files)
    assert complaints(root) == []
    found = load_alone(root, ("rpc", "store", "wire"), blocked=JAX_LIBRARIES)
    assert "jax is blocked" in found
    named = [line for line in found.splitlines() if line.startswith(PACKAGE)]
    assert named == [f"{PACKAGE}.store"], "a clean room and a single module load"


def test_loading_finds_what_only_another_room_has_loaded(tmp_path: Path) -> None:
    files = {
        "wire.py": "import jaxroll.rpc.a\n",
        "rpc/a.py": "",
        "store/a.py": "import jaxroll\nFOUND = jaxroll.rpc.a\n",
    }
    root = _plant(tmp_path, files)
    assert "has no attribute 'rpc'" in load_alone(root, ("wire", "store"), blocked=JAX_LIBRARIES)


def test_loading_finds_an_initialised_backend(tmp_path: Path) -> None:
    root = _plant(
        tmp_path,
        {"data/a.py": "import jax\nN = jax.device_count()\n", "wire.py": "import jax\n"},
    )
    found = load_alone(root, ("wire", "data"), blocked=())
    assert "importing jaxroll.data initialized the backends ['cpu']" in found
    assert f"{PACKAGE}.wire" not in found


def test_checker_refuses_a_folder_without_init(tmp_path: Path) -> None:
    root = _plant(tmp_path, {"store/log.py": ""})
    (root / PACKAGE / "store" / "__init__.py").unlink()
    assert ["no __init__.py" in line for line in complaints(root)] == [True]

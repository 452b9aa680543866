"""`generate`, `eval`, `serve` and `weights export` × every class of damage to the trained weights that they read.

The commands run here as their child process does, with the real readers, up to the engine, which no damage may reach.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import jax
import pytest

from jaxroll import config as configs
from jaxroll import sharding as layouts
from jaxroll.config import MeshConfig
from jaxroll.control import cli, run_dir
from jaxroll.data import sources
from jaxroll.errors import EXIT_CONFIG, EXIT_FAILURE
from jaxroll.learner import state as states
from jaxroll.learner import weights
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.models import folders, params
from jaxroll.records import Version
from jaxroll.text import tokenizers
from jaxroll.tools import generate, sft
from tests.control.test_bad_files import cut
from tests.control.test_inputs_of_commands import BINARY, CLASSES, OTHERS, REMEDY, damaged, forbidden, gone
from tests.harness.damages import Damage, folder, outcome, too_large, writes

LINES = ("generate run hello", "eval run", "serve run --port=0", "weights export run out")
WARM, STEP = "run/warm", "run/checkpoints/0000.00000001"


# Of this file only the existence matters to all lines but the last: the run's config describes the model.
NOT_READ = (f"{WARM}/{folders.MODEL_FILE}", {"unreadable", "corrupt", "foreign", "too large", "interrupted"})


def another_model(home: Path) -> None:
    """Arrays of a model with fewer layers."""
    path = home / WARM / folders.SINGLE
    held = folders.opened(path)
    kept = {name: held.leaf(name) for name in list(held)[:2]}
    values = {name: held[name].copy() for name in kept}
    path.unlink()
    folders.write(path, kept, values.__getitem__)


def header_too_large(home: Path) -> None:
    """A safetensors file whose header would fill the memory."""
    (home / WARM / folders.SINGLE).write_bytes((1 << 40).to_bytes(8, "little") + b"{}")


def arrays(damage: Damage) -> Damage:
    """The damage of every file with the checkpoint's arrays."""

    def damage_all(home: Path) -> None:
        for path in (home / STEP / "state").rglob("*"):
            if path.is_file():
                damage(path)

    return damage_all


def halved(path: Path) -> None:
    """Cut the file in its middle."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


NO_LIMIT, NO_LOCK = "weights have no bound", "it is renamed into place and never changed"
FILES: dict[str, dict[str, Damage | str]] = {
    f"{WARM}/{folders.SINGLE}": {
        "missing": gone(f"{WARM}/{folders.SINGLE}"),
        "unreadable": forbidden(f"{WARM}/{folders.SINGLE}"),
        "wrong type": folder(f"{WARM}/{folders.SINGLE}"),
        "corrupt": writes(f"{WARM}/{folders.SINGLE}", BINARY),
        "foreign": another_model,
        "too large": header_too_large,
        "in use": NO_LOCK,
        "interrupted": cut(f"{WARM}/{folders.SINGLE}"),
    },
    f"{WARM}/{folders.MODEL_FILE}": {
        "missing": gone(f"{WARM}/{folders.MODEL_FILE}"),
        "unreadable": forbidden(f"{WARM}/{folders.MODEL_FILE}"),
        "wrong type": folder(f"{WARM}/{folders.MODEL_FILE}"),
        "corrupt": writes(f"{WARM}/{folders.MODEL_FILE}", BINARY),
        "foreign": writes(f"{WARM}/{folders.MODEL_FILE}", OTHERS),
        "too large": too_large(f"{WARM}/{folders.MODEL_FILE}"),
        "in use": NO_LOCK,
        "interrupted": cut(f"{WARM}/{folders.MODEL_FILE}"),
    },
    f"{STEP}/about/metadata": {
        "missing": gone(f"{STEP}/about/metadata"),
        "unreadable": forbidden(f"{STEP}/about/metadata"),
        "wrong type": folder(f"{STEP}/about/metadata"),
        "corrupt": writes(f"{STEP}/about/metadata", BINARY),
        "foreign": writes(f"{STEP}/about/metadata", b'{"name": "another program"}'),
        "too large": too_large(f"{STEP}/about/metadata"),
        "in use": NO_LOCK,
        "interrupted": writes(f"{STEP}/about/metadata", b""),
    },
    f"{STEP}/state": {
        "missing": gone(f"{STEP}/state"),
        "unreadable": forbidden(f"{STEP}/state"),
        "wrong type": writes(f"{STEP}/state", b"x"),
        "corrupt": arrays(lambda path: path.write_bytes(BINARY)),
        "foreign": arrays(lambda path: path.write_bytes(OTHERS)),
        "too large": NO_LIMIT,
        "in use": NO_LOCK,
        "interrupted": arrays(halved),
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder: a run with a warm start and a checkpoint of its model."""
    home = tmp_path_factory.mktemp("trained") / "home"
    home.mkdir()
    config = configs.parse(configs.override(configs.to_dict(configs.parse(configs.defaults())), ["model.size=nano"]))
    run_dir.create(home / "run", config, [])
    text = tokenizers.build(config.tokenizer, sources.alphabet(config.task))
    tokenizers.note(home / "run", text)
    spec, layout = (
        params.spec(config.model, text.vocab_size),
        layouts.Layout(layouts.build(MeshConfig()), layouts.LEARNER),
    )
    values = params.init(spec, jax.random.key(3), layout.mesh, layout.rules)
    weights.save(home / WARM, values, spec, sft.described(config))
    checkpoints = Checkpoints(home / "run" / "checkpoints", 3)
    checkpoints.save(Version(0, 1), 1, states.fresh(values, spec, layout, states.build(config.learner).transform))
    checkpoints.wait()
    checkpoints.close()
    return home


class ReachedError(Exception):
    """The engine was to be made."""


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: object, **__: object) -> None:
        raise ReachedError

    monkeypatch.setattr(generate, "Engine", reached)
    monkeypatch.setattr(cli.lifeline, "bind_from_env", lambda: True)  # a child, which does not start another one


def answered(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code, 0 if the weights were read, and stderr."""
    try:
        return outcome(words.split(), capsys)
    except ReachedError:
        return 0, ""


@pytest.mark.parametrize(
    "words", [LINES[0], *(pytest.param(words, marks=pytest.mark.soak) for words in LINES[1:3]), LINES[3]]
)
def test_trained_weights_with_damage(
    words: str, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = []
    for file, classes in FILES.items():
        assert set(classes) == set(CLASSES)
        for kind, damage in {"undamaged": lambda home: None, **classes}.items():
            if isinstance(damage, str) or (words != LINES[-1] and file == NOT_READ[0] and kind in NOT_READ[1]):
                continue
            if words.startswith("eval") and kind == "unreadable":
                continue  # its scorers are processes, which the other user may not start; `generate` reads the same
            with tempfile.TemporaryDirectory() as made:
                home = Path(made) / "home"
                home.parent.chmod(0o777)
                shutil.copytree(base, home)
                if file.startswith(WARM):
                    shutil.rmtree(home / "run" / "checkpoints")
                monkeypatch.chdir(home)
                monkeypatch.setenv("XDG_STATE_HOME", str(home))
                with damaged(home, kind, damage):
                    try:
                        code, err = answered(words, capsys)
                    except Exception as error:  # noqa: BLE001  # all of them are listed
                        wrong.append(f"{words} | {file} | {kind}: raised {type(error).__name__}: {str(error)[:300]}")
                        continue
                    finally:
                        monkeypatch.chdir("/")
                found = [] if kind == "undamaged" else [*objections(file, code, err)]
                if kind == "unreadable" and "ermission" not in err:
                    found.append("does not say why it cannot be read")
                if kind == "undamaged" and code:
                    found.append(f"ended with {code}")
                if code and (home / "out").exists():
                    found.append("left a folder")
                wrong += [f"{words} | {file} | {kind}: {text}: {err[:500]!r}" for text in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "damage",
    [folder("own.token"), writes("own.token", b"\xff\xfe"), writes("own.token", OTHERS), too_large("own.token")],
)
def test_serve_with_a_bad_token_file_takes_no_port(
    damage: Damage, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(base, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setattr(generate.http, "listen", lambda *_, **__: pytest.fail("it took a port"))
    damage(tmp_path / "home")
    code, err = answered("serve run --token-file=own.token", capsys)
    assert code == EXIT_CONFIG and "own.token" in err and REMEDY.search(err) and err.count("\n") == 1, err


def objections(file: str, code: int, err: str) -> list[str]:
    """Sentences that say what is wrong with the outcome."""
    found = [] if code in (EXIT_FAILURE, EXIT_CONFIG) else [f"ended with {code}"]
    if err.count("\n") != 1 or not err.startswith("error: ") or len(err) > 1500:
        found.append("is not one line of an error")
    if (WARM if file.startswith(WARM) else STEP) not in err and not err.startswith("error: RUN ="):
        found.append(f"does not name the folder of {file}")
    if "model.path" in err:
        found.append("blames a key that the user has not set")
    if not REMEDY.search(err) and "remove that folder" not in err:
        found.append("names no remedy")
    return found

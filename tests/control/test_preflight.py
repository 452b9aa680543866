"""Preflight: the command refuses what a role would refuse, with key, value and remedy, before JAX starts."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.config import MODEL_SIZES
from jaxroll.control import cli, preflight
from jaxroll.errors import ConfigError, InfraError
from jaxroll.models import families, hf_config, params
from tests.harness.refused_inputs import CASES, HUGGING_FACE, ROOT, SMOKE, Case, module, named, weights


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_command_refuses_what_a_role_would(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, overrides, key, value, words = case
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "game", raising=False)
    if make is not None:
        make(tmp_path)
    assert cli.main(["config", f"--config={SMOKE}", *(f"--config.{text}" for text in overrides)]) == 64
    printed = capsys.readouterr()
    assert printed.out == "", "nothing is resolved"
    (line,) = printed.err.splitlines()
    assert line.startswith((f"error: {key} = ", f"error: {key}: "))
    assert value in line and words in line, line
    assert line.endswith((".", "?")), "the last sentence must be a remedy"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_the_configs_pass(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = configs.load(path)
    assert preflight.check_described(loaded) is None  # it raises what does not pass
    _check_here(path.stem, loaded)


# Configs of packages that have an environment of their own (.venv-more): they are refused with the extra.
NEEDS = {"pettingzoo_tictactoe": "pettingzoo", "textarena_frozen_lake": "textarena", "textworld_home": "textworld"}


def _check_here(name: str, config: configs.Config) -> None:
    if name.startswith("verifiers_"):  # tests/peers/test_verifiers.py plays them where the package is installed
        absent = dataclasses.replace(config.task, args={**config.task.args, "python": "/nowhere/python"})
        with pytest.raises(ConfigError, match="make venv-verifiers"):
            preflight.check(dataclasses.replace(config, task=absent))
    elif name.startswith("openenv_"):  # its server does not run
        with pytest.raises(InfraError, match=r"cannot be reached.*task\.args\.url"):
            preflight.check(config)
    elif name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        with pytest.raises(ConfigError, match=r"pip install 'jaxroll\[(envs-more|textworld)\]'"):
            preflight.check(config)
    else:
        assert config.model.path or preflight.check(config) is None


TEMPLATE = """{%- for message in messages %}{{ message.role + message.content + eos_token }}{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant' + ('' if enable_thinking is defined and enable_thinking else ' ') }}
{%- endif %}"""


def released(folder: Path, spec: families.ModelSpec) -> None:
    """A folder as of a released model: the names and shapes of this model's tensors, a tokenizer and a template."""
    folder.mkdir()
    config = hf_config.to_huggingface(spec, "bfloat16")
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    first = params.abstract(dataclasses.replace(spec, layers=1, windows=spec.windows[:1]))  # all layers are alike
    for ours in hf_config.ours(spec):
        leaf = first[re.sub(r"layers\.\d+", "layers.00", ours)]
        shape = params.shape(ours, leaf.shape[hf_config.of_experts(ours) :])
        for theirs in hf_config.names(spec, ours):
            start, end = end, end + 2 * math.prod(shape)
            header[theirs] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # a hole: no disk is used
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "tests" / "golden" / "families" / "qwen3" / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("gsm8k_*.py")), ids=lambda path: path.stem)
def test_the_configs_of_released_models_pass_with_a_model_of_their_size(path: Path, tmp_path: Path) -> None:
    loaded = configs.load(path)
    spec = families.spec(loaded.model.size, compute_dtype=loaded.model.dtype)
    assert path.stem == f"gsm8k_{spec.name}" == loaded.run.name
    assert loaded.learner.row_tokens >= loaded.task.max_prompt_tokens + loaded.sampling.max_tokens
    model = tmp_path / "model"
    here = [f"model.path={model}", f"tokenizer.path={model}", f"task.path={tmp_path / 'rows'}", "task.heldout_items=9"]
    with pytest.raises(ConfigError, match=r"model\.path"):
        preflight.check(configs.load(path, here))
    released(model, spec)
    rows = ({"question": f"{index:b}".translate({48: "a", 49: "b"}), "answer": f"#### {index}"} for index in range(20))
    (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
    preflight.check(configs.load(path, here))
    with pytest.raises(ConfigError, match=r"learner\.mesh\.tensor = 257: does not divide"):
        preflight.check(configs.load(path, [*here, "learner.mesh.tensor=257"]))


TYPED_COMMANDS = [
    (path.stem, line)
    for path in sorted((ROOT / "configs").glob("*.py"))
    for line in re.findall(r"\bjaxroll (?:train|sft|demo) [^)\n]*", path.read_text())
    if "--config=" in line
]


@pytest.mark.parametrize(("name", "line"), TYPED_COMMANDS, ids=[line for _, line in TYPED_COMMANDS])
def test_the_commands_in_the_configs_are_accepted(name: str, line: str) -> None:
    overrides, words = cli.split_overrides(shlex.split(line)[1:])
    options = cli.parser().parse_args(words)
    assert options.config == f"configs/{name}.py"
    config = configs.load(ROOT / options.config, overrides)
    assert preflight.check_described(config) is None  # it raises what does not pass
    _check_here(name, config)


@pytest.mark.parametrize(
    "module_text",
    [
        "from jaxroll.algorithms import registry\n@registry.register('mine')\ndef f(learner): ...",
        "from jaxroll.algorithms.registry import register\nfor name in ('mine', 'yours'): register(name)(print)",
    ],
)
def test_an_algorithm_of_your_own_is_found_without_jax(module_text: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "game", raising=False)
    module(module_text)(tmp_path)
    assert preflight.check(configs.load(SMOKE, ["learner.algorithm=game:mine"])) is None
    assert "game" not in sys.modules, "its source is read, not run"


def test_the_sizes_of_the_schema_are_those_of_the_families() -> None:
    assert families.names() == MODEL_SIZES


def test_a_whole_checkpoint_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts = named(1)
    counts["model.norm.weight"] += families.parameter_count(hf_config.from_huggingface(HUGGING_FACE)) - len(counts)
    weights(counts)(tmp_path)
    assert preflight.check(configs.load(SMOKE, ["model.path=hf"])) is None  # it raises what does not pass


@pytest.mark.process
def test_refusing_and_accepting_work_without_jax(tmp_path: Path) -> None:
    """JAX and grain cannot be imported here: a refusal that took a device would need them."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('jax', 'jaxlib', 'flax', 'grain', 'optax')))\n"  # None: ImportError
        "from jaxroll.control import cli\n"
        f"print(cli.main(['config', '--config={SMOKE}', '--config.sampler.mesh.tensor=3']),\n"
        f"      cli.main(['config', '--config={SMOKE}']))\n"
    )
    words = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1] == "64 0", done.stderr


# --- every refusal in the roles' packages happens before a role starts, or cannot

ROOMS = (
    "rpc",
    "algorithms",
    "sharding",
    "text",
    "policy",
    "kernels",
    "models",
    "engine",
    "data",
    "rewards",
    "envs",
    "rollout",
    "store",
    "learner",
    "transfer",
    "serving",
    "roles",
)
TYPED = "the schema or a bound refuses the value first"
RULED = "a rule of config/rules.py is at least as strict"
CODE = "only a programming mistake"
CALLED = "an adapter for a user's program; no role starts it"
OWN = "a custom algorithm, whose module only the learner loads; a rule refuses the presets"
HERE = "what this machine is or has: an address, a device, a package, a file of the run"

# Functions in the roles' packages that raise ConfigError: the cases above in which the command refuses first, or the
# reason why it cannot. A file without a function covers all of its functions that have no entry.
REFUSALS: dict[str, str | tuple[str, ...]] = {
    "rpc/protocol.py::right_of": CODE,
    "rpc/protocol.py": HERE,
    "rpc/protocol.py::check_exposure": HERE,
    "rpc/client.py::GrpcTransport._written": HERE,
    "rpc/tls.py": HERE,
    "rpc/http.py::token": HERE,
    "rpc/server.py::RawServer.bind": HERE,
    "algorithms/losses.py::loss": CODE,
    "algorithms/registry.py::_custom": (
        "algorithm's module absent",
        "algorithm absent in its module",
        "algorithm not registered",
    ),
    "sharding.py::platform": HERE,
    "sharding.py::build": HERE,
    "sharding.py::spec": CODE,
    "sharding.py::sharding": CODE,
    "sharding.py::_mesh_axes": CODE,
    "text/tokenizers.py::jinja_format": ("chat template broken",),
    "text/tokenizers.py::jinja_format.rendered": ("chat template without an end",),
    "text/tokenizers.py::jinja_format.render": ("tools that the template does not show",),
    "text/tokenizers.py::plain_format": ("tools without a template",),
    "text/tokenizers.py::_check_args": ("an argument that the template does not read",),
    "text/tokenizers.py::_reading": ("folder without a tokenizer",),
    "text/tokenizers.py::HFTokenizer.__init__": RULED,
    "text/tokenizers.py::HFTokenizer._ends": ("tokenizer without an end",),
    "text/tokenizers.py::HFTokenizer._chat_format": ("chat template no text", "an argument of no template"),
    "text/tokenizers.py::_load": ("folder without a tokenizer", "tokenizer unreadable"),
    "text/tokenizers.py::_read_json": ("tokenizer's settings unreadable", "tokenizer's settings a list"),
    "text/tokenizers.py::CharTokenizer.__init__": ("a character that is reserved",),
    "text/tokenizers.py::CharTokenizer.render": ("tools in a row",),
    "text/tokenizers.py::of_run": HERE,
    "text/tokenizers.py::build": TYPED,
    "policy/routing.py::Pools.of": ("a pool without a source",),
    "roles/session.py::Session._pool": HERE,
    "policy/selection.py::Curriculum.__post_init__": ("curriculum's band empty",),
    "policy/selection.py::Filter.__post_init__": ("filter unknown", "filter's band empty"),
    "policy/selection.py::_check_known": HERE,
    "policy/selection.py::Filter.check": ("filter's module absent", "filter that fails"),
    "policy/limiter.py::AgeLimiter.__post_init__": RULED,
    "kernels/choice.py::check": ("a kernel in float32", "a kernel on another platform", "a kernel for short prompts"),
    "kernels/choice.py::check_quantised": ("quantised experts",),
    "models/families.py::ModelSpec.__post_init__": ("model of odd heads", "heads without keys"),
    "models/families.py::ModelSpec._check_windows": CODE,
    "models/families.py::ModelSpec._check_experts": ("more experts a token than experts", "biases of no experts"),
    "models/families.py::RopeScaling.__post_init__": ("a rope without a context",),
    "models/families.py::check_size": ("model of no layers", "no number of layers"),
    "models/families.py::check_number": ("a rope base that is no number",),
    "models/families.py::check_flag": ("a flag that is a number",),
    "models/hf_config.py::_not_supported": ("another rope", "a text model that is a list"),
    "models/hf_config.py::_refuse_unknown": ("an unknown option",),
    "models/hf_config.py::_values": ("another architecture",),
    "models/hf_config.py::_check_readable": CODE,
    "models/families.py::spec": TYPED,
    "models/hf_config.py::from_huggingface": ("model without a size",),
    "models/families.py::check_routing": ("routing of no experts", "biases under adapters", "records too large"),
    "models/families.py::check_mesh": ("sampler's heads", "learner's width", "a mesh for the model of the path"),
    "models/folders.py::spec": ("a model smaller than its tokenizer",),
    "models/folders.py::described": ("a model of ours with another key",),
    "models/folders.py::weight_tensors": ("model without weights", "weights unreadable", "an index of nothing"),
    "models/folders.py::check_weights": ("weights of another model", "weights too few"),
    "models/folders.py::classifier": (
        "another model for a reward model",
        "a reward model of two labels",
        "a reward model without a score head",
    ),
    "models/folders.py::of_draft": ("a draft model without weights", "a draft model of odd heads"),
    "models/folders.py::with_draft": ("a draft model that is a critic",),
    "text/tokenizers.py::check_draft": ("a draft model with another tokenizer",),
    "models/folders.py::read_json": ("folder without a model", "a list for a config.json"),
    "learner/peft.py": ("adapters that are not there",),
    "models/params.py::leaves": ("weights of another model", "weights too few"),
    "engine/programs.py::check_sizes": RULED,
    "engine/sequence.py::fitting_pages": HERE,  # the memory of its devices
    "serving/jetstream_proxy.py": CALLED,
    "rpc/http.py::listen": HERE,
    "data/files.py::TableSource.__init__": ("no parquet",),
    "data/files.py::TableSource._refused": ("no parquet",),
    "data/files.py::DatasetSource._files": ("no saved dataset",),
    "data/files.py::_existing": ("no such rows",),
    "data/files.py::_some_rows": ("no rows",),
    "data/files.py::bad_row": ("a malformed row",),
    "envs/calculator.py::CalculatorSource.__init__": ("tool without arithmetic",),
    "data/sources.py::check_game": (
        "no such game",
        "another game's environment",
        "a game's environment for questions",
        "a source with the environment of the others",
    ),
    "data/sources.py::_loaded": ("game's module absent",),
    "envs/registry.py::check": ("reward's function absent",),
    "envs/registry.py::check_agent": ("agent's function absent",),
    "envs/adapters/games.py::_count": ("no turn", "no games"),
    "envs/adapters/games.py::library": HERE,
    "envs/adapters/gymnasium_env.py::_formatter": ("function of observations absent",),
    "envs/adapters/gymnasium_env.py::_labels": (
        "environment without discrete actions",
        "a name for one of two actions",
    ),
    "envs/adapters/gymnasium_env.py::shown": HERE,  # an environment of the user
    "envs/adapters/gymnasium_env.py::text_env": ("gymnasium's environment absent", "environment without text"),
    "envs/adapters/openenv_env.py::Settings.address": HERE,
    "envs/adapters/gymnasium_env.py::text_aec": HERE,
    "envs/adapters/gymnasium_env.py::_function": HERE,
    "envs/adapters/text_games.py": HERE,
    "envs/adapters/tool_calls.py::ToolCallGame.__init__": ("problems absent",),
    "envs/adapters/verifiers_env.py": HERE,
    "envs/executors.py::Executors.raise_when_worn_out": HERE,  # a budget that a run spends
    "envs/registry.py::share": ("game's share",),
    "envs/registry.py::settings_of": ("game's setting wrong",),
    "envs/registry.py::refuse_unknown": ("game's setting unknown",),
    "data/sources.py::GymSource.__init__": ("no compact prompt",),
    "data/sources.py::_create_dataset": ("task's setting unknown", "task's setting wrong", "task's range"),
    "data/sources.py::_settings_in_mixture": ("mixture of tasks",),
    "data/sources.py::allowed": ("task unknown",),
    "data/tasks.py::_set_tasks": ("a set with too few rows",),
    "data/tasks.py::_errors_about": ("a malformed row of a set", "a malformed row of a mixture"),
    "data/tasks.py::_hold_out": ("task too small", "prompts too long"),
    "data/tasks.py::PromptPipeline.__next__": ("every row held out",),
    "data/tasks.py::PromptPipeline.restore": HERE,
    "data/tasks.py::of": ("too few rows", "rows held out first"),
    "data/tasks.py::_endless": RULED,
    "data/sources.py::open_source": TYPED,
    "data/preparation.py::_check_part": ("every row held out", "a source of a mixture held out"),
    "data/preparation.py::_check_length": ("rows for the warm start too long",),
    "data/preparation.py::no_example": (
        "every row of the warm start held out",
        "a source without worked answers",
    ),
    "envs/registry.py::factory": ("environment unknown", "environment absent in its module"),
    "envs/registry.py::_load": ("environment's module absent", "environment's module broken"),
    "store/core/admission.py::Settings.__post_init__": TYPED,
    "store/client.py::_raw_client": HERE,
    "store/log/database.py": HERE,
    "store/server/server.py::serve": HERE,
    "store/server/standby.py::LogFollower._call": HERE,
    "learner/checkpoint.py::Checkpoints.__init__": TYPED,
    "learner/checkpoint.py::Checkpoints.at": HERE,
    "learner/checkpoint.py::_check_same": HERE,
    "learner/checkpoint.py::_check_base": HERE,
    "learner/packing.py::row_buckets": RULED,
    "learner/shared_prompts.py": RULED,
    "learner/trainer.py::Trainer.__init__": OWN,
    "learner/packing.py::pack": ("rows for the warm start too long",),
    "learner/state.py::check_host_memory": HERE,  # the memories of its devices
    "learner/state.py::placed": HERE,
    "learner/state.py::_on_devices": HERE,
    "transfer/channel_shm.py::SharedSegments.__init__": HERE,  # a system without memfd
    "transfer/channel_tensorstore.py::url_of": HERE,
    "learner/weights.py::blaming": HERE,
    "learner/weights.py::load": HERE,
    "learner/weights.py::initial_of_role": HERE,
    "learner/weights.py::model_spec": HERE,
    "learner/weights.py::_json": HERE,
    "learner/weights.py::_file": HERE,
    "roles/store.py::FeederProcess.next": ("every row held out",),
    "learner/multihost.py": HERE,
    "roles/learner.py::LearnerSession._cannot_start": HERE,
    "roles/learner.py::_run_follower.start": HERE,
    "roles/learner.py::LearnerSession._new_log": HERE,
}


def test_every_refusal_of_a_role_is_on_the_list() -> None:
    rooms = {room: ROOT / "jaxroll" / room for room in ROOMS}
    paths = {room: list(path.rglob("*.py")) or [path.with_suffix(".py")] for room, path in rooms.items()}
    found = {site for of_room in paths.values() for path in of_room for site in sites(path)}
    new = sorted(site for site in found - REFUSALS.keys() if site.partition("::")[0] not in REFUSALS)
    assert not new, f"can `jaxroll config` refuse these first? Say so in REFUSALS: {new}"
    files = {site.partition("::")[0] for site in found}
    assert not (gone := sorted(REFUSALS.keys() - found - files)), f"not raised any more: {gone}"


def test_the_list_names_existing_cases() -> None:
    named = {case for entry in REFUSALS.values() if isinstance(entry, tuple) for case in entry}
    assert named <= CASES.keys()


def sites(path: Path) -> set[str]:
    """package/file.py::function of every ConfigError that is constructed in the file."""
    found = set()
    file = path.relative_to(ROOT / "jaxroll").as_posix()

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}" if name else child.name
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == "ConfigError":
                found.add(f"{file}::{name}")
            walk(child, inner)

    walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def test_what_the_rules_accept_the_limiter_and_the_engine_accept() -> None:
    """For the RULED entries: over a grid of settings, the rules are at least as strict as the constructors."""
    smoke, refused, accepted = configs.load(SMOKE), 0, 0
    for alpha, groups, publish_every, buffer in itertools.product(
        (0.0, 0.1, 0.5, 0.7, 1.0, 1.5, 2.0), (1, 3, 10, 30), (1, 2, 3), (0, 1, 5, 17, 33, 60, 90)
    ):
        schedule = dataclasses.replace(
            smoke.schedule, alpha=alpha, groups_per_step=groups, publish_every=publish_every, buffer_groups=buffer
        )
        made = dataclasses.replace(smoke, schedule=schedule)
        try:
            configs.check(made)
        except ConfigError:
            refused += 1
            continue
        preflight.check_described(made)
        accepted += 1
    assert refused > 100 and accepted > 100

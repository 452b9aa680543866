"""Files of `jaxroll launch --on=LAUNCHER`, compared with golden files and run with stand-ins for their programs."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jaxroll import config as configs
from jaxroll.control import cli, launchers
from jaxroll.errors import ConfigError

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "launchers"
SCHEMA = ROOT / "third_party" / "jobset" / "jobset.v1alpha2.schema.json"
COMMON = ["--config=configs/rlvr_tiny.py", "--name=spell"]
TPU_VM = ["--zone=us-central2-b", "--accelerator=v5litepod-8", "--runtime=v2-alpha-tpuv5-lite", "--run=/shared/spell",
          "--scratch=/local/spell"]  # fmt: skip
TWO_HOSTS = ["--config.placement.learner_hosts=2", "--config.learner.mesh.fsdp=8", "--config.sampler.count=3",
             "--config.evaluator.every=0"]  # fmt: skip
SAMPLERS = ["--config.placement.sampler_hosts=2", "--config.sampler.mesh.tensor=4", "--config.sampler.count=2",
            "--config.evaluator.every=0"]  # fmt: skip
CASES = {
    "slurm": ["--on=slurm", "--run=/shared/spell", "--scratch=/local/spell", "--accelerator=gpu:h100", "--queue=gpus"],
    "slurm_two_hosts": ["--on=slurm", "--run=/shared/spell", "--scratch=/local/spell", "--insecure", *TWO_HOSTS],
    "jobset": ["--on=jobset", "--image=registry/jaxroll:gpu", "--run=/runs/spell", "--accelerator=gpu"],
    "jobset_tpu": ["--on=jobset", "--image=registry/jaxroll:tpu", "--run=/runs/spell", "--queue=team", "--spot",
                   "--accelerator=tpu:tpu-v5-lite-podslice:2x2", *TWO_HOSTS],
    "slurm_samplers": ["--on=slurm", "--run=/shared/spell", "--scratch=/local/spell", "--insecure", *SAMPLERS],
    "jobset_samplers": ["--on=jobset", "--image=registry/jaxroll:gpu", "--run=/runs/spell", "--accelerator=gpu",
                        *SAMPLERS],
    "tpu_vm_samplers": ["--on=tpu-vm", *TPU_VM, "--insecure", *SAMPLERS],
    "skypilot": ["--on=skypilot", "--accelerator=H100", "--spot", "--config.placement.actors=2"],
    "ray": ["--on=ray", "--run=/shared/spell", "--scratch=/local/spell", "--accelerator=gpu:H100"],
    "ray_two_hosts": ["--on=ray", "--run=/shared/spell", "--scratch=/local/spell", "--accelerator=gpu", "--insecure",
                      "--address=head:6379", "--config.placement.actors=1", *TWO_HOSTS],
    "ray_samplers": ["--on=ray", "--run=/shared/spell", "--scratch=/local/spell", "--accelerator=gpu", "--insecure",
                     *SAMPLERS],
    "tpu_vm": ["--on=tpu-vm", *TPU_VM, "--spot", "--project=lab"],
    "tpu_vm_slice": ["--on=tpu-vm", *TPU_VM, "--insecure", *TWO_HOSTS],
}  # fmt: skip


def launched(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = cli.main(["launch", *COMMON, *words, "--dry-run"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def files(text: str) -> dict[str, str]:
    """The files of a dry run, by name."""
    parts = text.split("# --- ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


@pytest.mark.parametrize("name", CASES)
def test_the_files_are_the_golden_ones(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """If this fails on an intended change, run with JAXROLL_UPDATE_GOLDEN=1 and commit the file."""
    text, golden = launched(capsys, *CASES[name]), GOLDEN / f"{name}.txt"
    if os.environ.get("JAXROLL_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), test_the_files_are_the_golden_ones.__doc__
    for file, content in files(text).items():
        if content.startswith("#!/bin/bash"):
            subprocess.run(["bash", "-n"], input=content, text=True, check=True)
        else:
            assert yaml.safe_load(content), file


@pytest.mark.parametrize("name", ["slurm", "jobset", "skypilot", "ray", "tpu_vm"])
def test_a_run_without_samplers_starts_none_and_its_other_roles_as_before(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with_one = files(launched(capsys, *CASES[name]))
    without = files(launched(capsys, *CASES[name], "--config.sampler.count=0"))
    assert without.keys() == with_one.keys()
    for file, text in without.items():
        if file == "sampler.yaml":  # the task of one sampler, launched for each
            assert text.count("--join=") == 1
            continue
        assert "--join=" not in text and ("--join=" in with_one[file] or name == "skypilot"), file
        assert "--nodes=0" not in text and not re.search(r"(parallelism|completions): 0", text)
        assert text.count("jaxroll learner") == with_one[file].count("jaxroll learner") > 0


@pytest.mark.parametrize("name", ["slurm", "jobset", "skypilot", "ray", "tpu_vm"])
def test_samplers_of_the_learner_are_not_launched(capsys: pytest.CaptureFixture[str], name: str) -> None:
    words = ("--config.schedule.mode=sync", "--config.sampler.flush_tokens=8", "--config.evaluator.every=0",
             "--config.placement.actors=0")  # fmt: skip
    two = files(launched(capsys, *CASES[name], *words, "--config.sampler.count=2"))
    three = launched(capsys, *CASES[name], *words, "--config.sampler.count=3", "--config.placement.learner_samplers=1")
    found = {file: re.sub(r"\W*--config.placement.learner_samplers=1", "", text) for file, text in files(three).items()}
    assert {file: text.replace("sampler.count=3", "sampler.count=2") for file, text in found.items()} == two


def closed(schema: Any) -> Any:
    """The schema as the API server applies it: a field that it does not name is a mistake."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        schema.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
    return schema


def test_jobset_manifests_keep_the_published_schema(capsys: pytest.CaptureFixture[str]) -> None:
    schema = closed(json.loads(SCHEMA.read_text()))
    schema["properties"]["metadata"] = {"type": "object"}
    for name in ("jobset", "jobset_tpu", "jobset_samplers"):
        manifest = yaml.safe_load(files(launched(capsys, *CASES[name]))["jobset.yaml"])
        jsonschema.Draft7Validator(schema).validate(manifest)
        manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["comand"] = []
        with pytest.raises(jsonschema.ValidationError, match="comand"):
            jsonschema.Draft7Validator(schema).validate(manifest)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--on=slurm"], "--scratch"),
        (["--on=ray"], "--scratch"),
        (["--on=ray", "--scratch=/x", "--accelerator=v5p"], "--accelerator"),
        (["--on=ray", "--scratch=/x", "--accelerator=tpu", *TWO_HOSTS], "placement.learner_hosts"),
        (["--on=jobset", "--run=/x"], "--image"),
        (["--on=jobset", "--image=x"], "--run"),
        (["--on=jobset", "--image=x", "--run=/x", "--accelerator=tpu"], "--accelerator"),
        (["--on=tpu-vm", "--zone=z"], "--zone"),
        (["--on=skypilot", *TWO_HOSTS], "placement.learner_hosts"),
        (["--on=skypilot", *SAMPLERS], "placement.sampler_hosts"),
        (["--on=ray", "--scratch=/x", "--accelerator=tpu", *SAMPLERS], "placement.sampler_hosts"),
        (["--on=slurm", "--scratch=x", "--config.placement.colocated=True"], "placement.colocated"),
        (["--on=nomad"], "--on"),
        (["--on=slurm", "--on=jobset"], "--on"),
        ([], "--on"),
    ],
)
def test_unusable_options_are_refused(capsys: pytest.CaptureFixture[str], words: list[str], key: str) -> None:
    assert cli.main(["launch", *COMMON, *words, "--dry-run"]) == 64
    assert capsys.readouterr().err.startswith(f"error: {key}")


# Words with which each way to launch works: every option that it reads changes the output of one of them.
SPREAD = ["--on=store=vm-a", "--on=learner=vm-a", "--on=sampler=vm-a", "--devices-per-host=8"]
LAUNCHES = {
    "--on=local": [["--config.placement.platform=cpu"]],
    "--on=ssh": [[*SPREAD, "--tls=runs/tls"], ["--devices-per-host=1", "--gpu-memory-mb=80000"]],
    "--on=ray": [["--scratch=/local/spell"]],
    "--on=slurm": [["--scratch=/local/spell"]],
    "--on=jobset": [["--image=registry/jaxroll:gpu", "--run=/runs/spell"]],
    "--on=skypilot": [[]],
    "--on=tpu-vm": [TPU_VM],
    "--target=gpu": [[*SPREAD, "--tls=runs/tls"], ["--devices-per-host=1", "--gpu-memory-mb=80000"]],
    "--target=tpu_vm": [[*SPREAD, "--tls=runs/tls", "--zone=z"]],
}
VALUES = {"name": "other", "accelerator": "gpu", "image": "other", "queue": "other", "scratch": "/other", "port": "7",
          "address": "other",
          "runtime": "other", "zone": "other", "project": "other", "tls": "/other", "workdir": "/other",
          "python": "other", "devices-per-host": "1", "gpu-memory-mb": "1", "spot": None, "insecure": None,
          "new-log": None,
          "on": "evaluator=other", "target": "gpu"}  # fmt: skip
PARSER = cli.parser()


def outcome(config: Any, *words: str) -> str:
    """The text that a launch would hand over, or its error."""
    overrides, rest = cli.split_overrides(words)
    options = PARSER.parse_args(["launch", "--config=configs/rlvr_tiny.py", *rest])
    options.overrides = overrides
    try:
        launcher = launchers.launcher_of(options)
        if launcher in launchers.LAUNCHERS:
            return str(launchers.files_of(config, launcher, options))
        found = ""
        for options.dry_run in (True, False):
            found += launchers.shown(config, launcher, options)
        return found
    except ConfigError as error:
        return f"error: {error}"


@pytest.mark.parametrize("launch", LAUNCHES)
def test_every_option_changes_something_or_is_refused(launch: str) -> None:
    assert {*launchers.OPTIONS, "on", "target"} == set(VALUES), "a new option belongs into this table"
    refused = set()
    for option, value in VALUES.items():
        if option == "target" and launch.startswith("--target"):
            continue
        word, changes = f"--{option}" if value is None else f"--{option}={value}", 0
        for words in LAUNCHES[launch]:
            config = configs.load(ROOT / "configs" / "rlvr_tiny.py", cli.split_overrides(words)[0])
            found, without = outcome(config, launch, *words, word), outcome(config, launch, *words)
            assert not without.startswith("error"), without
            if re.search("does not read it|chooses the hosts", found):
                assert re.match(rf"error: --{option} = .* Leave ", found), found
                refused.add(option)
            changes += found != without
        assert changes, f"{launch} ignores {word}"
    assert refused & set(launchers.OPTIONS) == {
        name for name, row in launchers.OPTIONS.items() if launch.partition("=")[2] not in row[3]
    }


def test_options_in_vain_are_not_refused_where_they_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    """The test above would accept that all are refused, so here is what each launch reads, written out."""
    read = {
        launch: {name for name in launchers.OPTIONS if launch.partition("=")[2] in launchers.OPTIONS[name][3]}
        for launch in LAUNCHES
    }
    all_of_them, given = {"workdir", "python", "port", "insecure"}, {"name", "accelerator"}
    assert read == {
        "--on=local": set(),
        "--on=ssh": all_of_them | {"tls", "devices-per-host", "gpu-memory-mb", "new-log"},
        "--on=ray": all_of_them | given | {"scratch", "address"},
        "--on=slurm": all_of_them | given | {"queue", "scratch"},
        "--on=jobset": all_of_them | given | {"image", "queue", "spot"},
        "--on=skypilot": all_of_them | given | {"spot"},
        "--on=tpu-vm": all_of_them | given | {"scratch", "runtime", "zone", "project", "spot"},
        "--target=gpu": all_of_them | {"tls", "devices-per-host", "gpu-memory-mb"},
        "--target=tpu_vm": all_of_them | {"tls", "devices-per-host", "zone", "project"},
    }


def stand_in(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def engine_env(tmp_path: Path) -> dict[str, str]:
    """The environment in which programs of launchers are stand-ins that write their arguments into `calls`."""
    kept = {name: os.environ[name] for name in ("HOME", "PYTHONPATH") if name in os.environ}
    return kept | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NOTES": str(tmp_path / "calls")}


ROLE = 'echo "$3 ${@:4} TOKEN=${JAXROLL_TOKEN:+set}" >> "$NOTES"'


def test_a_slurm_job_starts_every_role_and_starts_a_dead_one_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stand_in(tmp_path / "bin", "scontrol", 'echo "${@: -1}-1"; echo "${@: -1}-2"')
    stand_in(tmp_path / "bin", "sleep", "exit 0")
    stand_in(tmp_path / "bin", "srun", 'SLURM_PROCID=0 SLURMD_NODENAME=n bash -c "${@: -1}"')
    learner = 'if [ "$3" = learner ]; then n=$(grep -c ^learner "$NOTES"); [ "$n" -ge 3 ] && exit 0; exit 9; fi'
    stand_in(tmp_path / "bin", "python3", f'{ROLE}; {learner}; [ "$3" = sft ] && exit 0; exec /bin/sleep 30')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "token").write_text("secret-of-the-run\n")
    words = [f"--run={tmp_path / 'run'}", "--scratch=/local/spell", "--on=slurm", "--insecure"]
    script = files(launched(capsys, *words))["job.sbatch"]
    assert "secret-of-the-run" not in script
    env = engine_env(tmp_path) | {f"SLURM_JOB_NODELIST_HET_GROUP_{group}": f"group{group}" for group in range(4)}
    done = subprocess.run(["bash"], input=script, text=True, env=env, timeout=60, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sorted({call.partition(" ")[0] for call in calls}) == ["evaluator", "learner", "sampler", "sft", "store"]
    assert sum(call.startswith("learner ") for call in calls) == 3, "it dies twice"
    assert all(call.endswith("TOKEN=set") for call in calls)
    assert any("--store=group0-1:7077 --host=group1-1" in call for call in calls)
    assert any(call.startswith("sampler --join=group0-1:7077 --drain=20") for call in calls)
    assert stat.S_IMODE((tmp_path / "run" / "token").stat().st_mode) == 0o600


GCLOUD = r"""
words="$*"; name=""
for word in "$@"; do case $word in spell-*) name=$word; break;; esac; done
echo "$words" | head -n 1 >> "$NOTES"
state="$NOTES.$name"
case "$words" in
  *queued-resources\ create*) echo ACTIVE > "$state" ;;
  *queued-resources\ describe*) cat "$state" ;;
  *queued-resources\ delete*) rm -f "$state" ;;
  *tpu-vm\ describe*) echo "ip-of-$name" ;;
  *tpu-vm\ ssh*)
    command="${@: -2:1}"; command="${command#--command=}"
    case $command in *learner*)
      if [ ! -e "$NOTES.preempted" ]; then touch "$NOTES.preempted"; echo SUSPENDED > "$state"; exit 255; fi ;; esac
    mkdir -p "$NOTES.home.$name"; cd "$NOTES.home.$name" && HOME="$PWD" bash -c "$command" ;;
esac
"""


def test_a_preempted_tpu_vm_is_created_again_and_all_are_deleted_at_the_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stand_in(tmp_path / "bin", "gcloud", GCLOUD)
    ended = 'echo "$3 after ${JAXROLL_ENDED:-nothing}" >> "$NOTES.ended"'
    stand_in(tmp_path / "bin", "python3", f"{ROLE}; {ended}; case $3 in learner | sft) exit 0 ;; esac; exec sleep 30")
    run = tmp_path / "run"
    run.mkdir()
    (run / "token").write_text("secret-of-the-run\n")
    words = ["--on=tpu-vm", *TPU_VM, f"--run={run}", "--insecure", "--spot", "--config.evaluator.every=0"]
    script = files(launched(capsys, *words))["tpu_vm.sh"]
    env = engine_env(tmp_path) | {"POLL_S": "0.05"}
    done = subprocess.run(["bash"], input=script, text=True, env=env, timeout=60, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text()
    assert "secret-of-the-run" not in calls + script
    assert calls.count("create spell-learner-0 ") == 2 and calls.count("create spell-sampler-0 ") == 1
    assert [calls.count(f"delete spell-{role}-0") for role in ("learner", "sampler")] == [2, 1]
    (sampler,) = (line for line in calls.splitlines() if "create spell-sampler-0" in line)
    assert sampler.endswith("--spot --zone=us-central2-b")
    ends = (tmp_path / "calls.ended").read_text().splitlines()
    assert "learner after 255" in ends and "sampler after nothing" in ends
    token = tmp_path / "calls.home.spell-learner-0" / ".jaxroll" / "spell" / "token"
    assert token.read_text() == "secret-of-the-run\n" and stat.S_IMODE(token.stat().st_mode) == 0o600


def test_secrets_reach_a_host_through_the_standard_input_of_ssh(tmp_path: Path, monkeypatch: Any) -> None:
    stand_in(
        tmp_path / "bin", "ssh", 'echo "$*" >> "$NOTES"; mkdir -p "$NOTES.host"; cd "$NOTES.host"; exec bash -c "$2"'
    )
    for name, value in engine_env(tmp_path).items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    (run / "tls").mkdir(parents=True)
    for name in ("token", "tls/ca.pem", "tls/cert.pem", "tls/ca-key.pem"):
        (run / name).write_text(f"content of {name}")
    target = launchers.Target("gpu", "c.py", hosts={"learner": "gpu-a", "store": "localhost"}, run="runs/x")
    launchers.send_secrets(target, run)
    there = tmp_path / "calls.host" / "runs" / "x"
    found = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert found == {"token", "tls/ca.pem", "tls/cert.pem"}, "the key of the authority stays"
    assert all(stat.S_IMODE((there / name).stat().st_mode) == 0o600 for name in found)
    assert "content" not in (tmp_path / "calls").read_text() and "gpu-a" in (tmp_path / "calls").read_text()


def test_kubernetes_gets_the_secrets_in_a_private_file(tmp_path: Path, monkeypatch: Any) -> None:
    stand_in(tmp_path / "bin", "kubectl", 'echo "$*" >> "$NOTES"')
    for name, value in engine_env(tmp_path).items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    assert cli.main(["launch", *COMMON, "--on=jobset", "--image=x", f"--run={run}"]) == 0
    secret = run / "launch" / "secret.json"
    assert set(json.loads(secret.read_text())["data"]) == {"token"}
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [shlex.split(call)[-1] for call in calls] == [str(secret), str(run / "launch" / "jobset.yaml")]


@pytest.mark.parametrize("launcher", ["slurm", "skypilot", "tpu_vm"])
@pytest.mark.parametrize(("uptime_s", "starts", "code"), [(0, 11, 7), (290, 11, 7), (300, 25, 0)])
def test_failures_before_a_long_run_do_not_count(
    capsys: pytest.CaptureFixture[str], launcher: str, uptime_s: int, starts: int, code: int
) -> None:
    """As under the supervisor: ten restarts in a row, but any number over a long time. Each start takes `uptime_s`."""
    text = "\n".join(files(launched(capsys, *CASES[launcher])).values())
    if launcher == "skypilot":
        (loop,) = {textwrap.dedent(one) for one in re.findall(r"^ *tries=0; while .*?exit \$code$", text, re.M | re.S)}
    else:
        named, call = {"slurm": ("role", 'role 0 1 ""'), "tpu_vm": ("supervise", "supervise run")}[launcher]
        loop = re.search(rf"^{named}\(\) {{.*?^}}$", text, re.M | re.S)[0] + f"\n{call}; exit $?"  # type: ignore[index]
    stand_ins = [
        "SECONDS=0; calls=0; POLL_S=0; sleep() { :; }; sed() { cat; }; trap 'echo starts $calls' EXIT; set -o pipefail",
        'run() { echo "after ${JAXROLL_ENDED:-nothing}"; again; return $?; }',
        f"again() {{ calls=$((calls + 1)); SECONDS=$((SECONDS + {uptime_s})); [ $calls -ge 25 ] || return 7; }}",
        "srun() { run; }",
    ]
    if launcher == "tpu_vm":  # its command runs in a pipe, whose variables are lost
        loop = loop.replace('"$@" 2>&1 | sed -u "s/^/$2: /"; code=${PIPESTATUS[0]}', "run; code=$?")
    script = "\n".join([*stand_ins, loop])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    said = done.stdout.splitlines()
    assert (said[-1], done.returncode) == (f"starts {starts}", code), done.stderr
    assert said[:-1] == ["after nothing", *["after 7"] * (starts - 1)], "each start knows how the last process ended"


def test_a_container_that_starts_again_knows_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "python3", 'echo "$JAXROLL_ENDED" >> "$NOTES"')
    words = [word for word in CASES["jobset"] if not word.startswith("--run=")]
    manifest = yaml.safe_load(files(launched(capsys, *words, f"--run={tmp_path}"))["jobset.yaml"])
    jobs = {job["name"]: job["template"]["spec"]["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]}
    command = jobs["sampler"]["containers"][0]["command"]
    for index in ("0", "0", "1"):
        env = engine_env(tmp_path) | {"ROLE_INDEX": index, "STORE_HOST": "s", "HOST_NAME": "h"}
        subprocess.run(command, env=env, timeout=30, check=True)
    assert (tmp_path / "calls").read_text().splitlines() == ["", "its container ended", ""]

"""The public SDK of Tinker, unmodified, trains and samples through `jaxroll tinker-serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxroll import config as configs
from jaxroll.data import preparation, sources
from jaxroll.text import tokenizers
from tests.docs.blocks import blocks

pytestmark = [pytest.mark.soak, pytest.mark.process, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-tinker" / "bin" / "python"
CONFIG = ROOT / "configs/demo.py"  # learner and sampler on two devices each, by different axes
START_S = 180.0


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    if not PYTHON.exists():
        missing = pytest.fail if "tinker" in os.environ.get("JAXROLL_PEERS", "").split() else pytest.skip
        missing("the SDK is not installed; run `make venv-tinker`")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a short warm start: the base model."""
    path = tmp_path_factory.mktemp("tinker") / "spell"
    command = [sys.executable, "-m", "jaxroll", "sft", f"--config={CONFIG}", f"--run={path}", "--config.sft.steps=100"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=400)
    return path


@pytest.fixture(scope="module")
def data(warm: Path) -> str:
    """Questions of the run's task with their answers, as ids."""
    config = configs.load(CONFIG)
    text, rows = tokenizers.build(config.tokenizer, sources.alphabet(config.task)), {}
    for task, worked in preparation.examples(config, 3000):
        answer = [*map(int, text.encode(worked[-1].content)), text.eos_id]
        rows[task.question_hash] = {"prompt": [*map(int, text.render(task.messages))], "answer": answer}
    file = warm / "questions.json"
    file.write_text(json.dumps(list(rows.values())))
    return str(file)


@pytest.fixture
def server(warm: Path) -> Iterator[tuple[str, str]]:
    """URL and key of a server over the run, which ends with the test."""
    command = [sys.executable, "-m", "jaxroll", "tinker-serve", str(warm), "--port=0", "--session-timeout=20"]
    at = warm / "tinker.addr"
    at.unlink(missing_ok=True)
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            by_s = time.monotonic() + START_S
            while not at.exists():
                assert process.poll() is None and time.monotonic() < by_s, "the server did not start"
                time.sleep(0.1)
            url, name, token_file = at.read_text().strip().split("\t")
            assert name == "spell"
            yield url, f"tml-{Path(token_file).read_text().strip()}"
        finally:
            process.terminate()
            assert process.wait(timeout=30) == 0


def test_the_checks_of_the_protocol(server: tuple[str, str], data: str, peer: Any) -> None:
    found = peer("tinker", "tinker_client.py", "check", *server, data)
    assert found["pairs"] > 50 and found["scaled"] < 1e-3, "log-probs at a temperature are those of scaled logits"
    assert found["repeated"] > 0.8 and found["apart"] < 1e-4, "a token of a sequence has the log-prob that it has alone"
    assert found["mismatch"] < 1e-4, "sampler and trainer agree on log-probs"
    assert found["same_seed"] and found["different"] > 1 and found["saved"] and found["resumed"] and found["rank"] == 8
    assert "lacks logprobs" in found["refused"] and len(found["losses"]) == 5


def test_a_supervised_loop_and_then_rl_lift_the_reward(server: tuple[str, str], data: str, peer: Any) -> None:
    found = peer("tinker", "tinker_client.py", "learn", *server, data, "0")
    assert found["after"] - found["before"] >= 15
    assert found["mismatch"] < 1e-4


def test_eight_tenants_train_at_once_and_each_samples_its_own_model(server: tuple[str, str], peer: Any) -> None:
    assert peer("tinker", "tinker_client.py", "tenants", *server, "8")["right"] == [True] * 8


def test_eight_tenants_get_their_requests_in_order(server: tuple[str, str], peer: Any) -> None:
    """Requests sent at once have the results of those sent one by one; saved weights are those of their place."""
    for found in peer("tinker", "tinker_client.py", "ordered", *server, "8")["tenants"]:
        assert found and found["same"] and found["different"] == 12, found
        assert found["saved"] < 1e-4 < 10 * found["later"], found


def test_a_killed_client_leaves_no_model(server: tuple[str, str], warm: Path) -> None:
    url, key = server
    program = str(ROOT / "tests/peers/programs/tinker_client.py")
    with subprocess.Popen([PYTHON, program, "stay", url, key], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        model = client.stdout.readline().strip()
        assert _status(url, key, model) == 200
        client.kill()
    ended = f"session {model.partition(':')[0]} is silent"
    by_s = time.monotonic() + 100
    while (
        ended not in (warm / "logs" / "trainer.log").read_text()
    ):  # a question about the model would be a sign of life
        assert time.monotonic() < by_s, "the session of a killed client goes on"
        time.sleep(0.5)
    assert _status(url, key, model) == 404


def test_a_killed_sampler_starts_again_and_gets_named_weights(server: tuple[str, str], warm: Path) -> None:
    program, killed = str(ROOT / "tests/peers/programs/tinker_client.py"), warm / "killed"
    killed.unlink(missing_ok=True)
    command = [PYTHON, program, "outlive", *server, str(killed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None and client.stdout.readline().strip() == "ready"
        running = {one: one.info["cmdline"] or () for one in psutil.process_iter(["cmdline"])}
        (sampler,) = (one for one, words in running.items() if {f"--run={warm}", "--part=sampler"} <= set(words))
        sampler.kill()
        killed.touch()
        found = json.loads(client.stdout.readlines()[-1])
    assert found["base"] and found["named"] and found["new"]
    assert "no longer holds this snapshot" in found["snapshot"]


def test_the_client_of_the_page_trains(server: tuple[str, str], tmp_path: Path) -> None:
    """docs/tinker.md, for this model, whose tokenizer is not that of transformers."""
    (block,) = (block for block in blocks(ROOT / "docs/tinker.md") if block.language == "python")
    ids = 'model.get_tokenizer().encode("The capital of France is Paris")'
    assert ids in block.text and '"Qwen3-0.6B"' in block.text
    program = tmp_path / "page.py"
    program.write_text(
        block.text.replace(ids, "[1, 5, 6, 7, 8, 3, 9]").replace('"Qwen3-0.6B"', '"spell"')
        + "print(len(answer.sequences[0].tokens))\n"
    )
    env = {**os.environ, "TINKER_BASE_URL": server[0], "TINKER_API_KEY": server[1]}
    done = subprocess.run([PYTHON, program], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and 1 <= int(done.stdout.split()[-1]) <= 8, done.stderr[-2000:]


def _status(url: str, key: str, model: str) -> int:
    body = json.dumps({"model_id": model}).encode()
    asked = urllib.request.Request(f"{url}/api/v1/get_info", body, {"X-API-Key": key})
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code

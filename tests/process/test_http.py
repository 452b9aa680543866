"""HTTP clients of a run: of a sampler while it trains, and of `jaxroll serve` afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from safetensors import numpy as safetensors

from jaxroll.errors import EXIT_INTERRUPTED
from jaxroll.run_paths import RunPaths
from tests.harness.train_process import LEARNING, ROOT, START_S, Train

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]
PROMPT = "stone"


def waited(seen, what: str):
    """The first true value of `seen()`."""
    deadline, pause = time.monotonic() + START_S, threading.Event()
    while time.monotonic() < deadline:
        if found := seen():
            return found
        pause.wait(0.1)
    pytest.fail(f"waited {START_S:g} s for {what}", pytrace=False)


def versions(client: openai.OpenAI) -> list[str]:
    """The weight versions of one answer."""
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=4,
        top_p=0.9,  # also where the run does not truncate
        extra_body={"return_token_ids": True},
    )
    extra = answer.choices[0].model_extra
    assert sum(run["count"] for run in extra["weight_versions"]) == len(extra["token_ids"])
    return [run["version"] for run in extra["weight_versions"]]


def test_weights_advance_under_a_client_and_the_run_is_served_as_generate_answers(free_run_dir) -> None:
    paths = RunPaths(free_run_dir)
    with Train(free_run_dir, *LEARNING, "--config.schedule.steps=5000", "--config.sampler.http_port=0") as train:
        train.until_step(2)
        url, token = paths.http_address("sampler-0").read_text().strip(), paths.http_token.read_text().strip()
        assert stat.S_IMODE(paths.http_token.stat().st_mode) == 0o600
        with openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0) as client:
            first = versions(client)[0]
            waited(lambda: versions(client)[-1] != first, "a later version")
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()

    env = {"JAXROLL_CACHE": str(ROOT / ".cache" / "jax"), **os.environ, "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "jaxroll"]
    told = subprocess.run(
        [*command, "generate", str(free_run_dir), PROMPT, "--max-tokens=6"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=START_S,
    )
    output = free_run_dir.parent / "serve.out"
    with output.open("w") as out:
        serving = subprocess.Popen(
            [*command, "serve", str(free_run_dir), "--port=0", "--slots=2"], cwd=ROOT, env=env, stdout=out, stderr=out
        )
    try:
        line = waited(lambda: [row for row in output.read_text().splitlines() if row.startswith("serves ")], "a server")
        url = line[0].split(" on ")[1].split(",")[0]
        with openai.OpenAI(base_url=url, api_key=token, max_retries=0) as client:
            asked = [{"role": "user", "content": PROMPT}]
            name = client.models.list().data[0].id
            answer = client.chat.completions.create(model=name, messages=asked, temperature=0, max_tokens=6)
            text = answer.choices[0].message.content
        told_text = told.stdout.splitlines()[-1].removeprefix(f"{PROMPT} -> ").removesuffix("  [length]")
        assert name == free_run_dir.name and text == told_text
    finally:
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 0, output.read_text()


def test_another_trainer_pushes_a_folder_and_tensors_to_a_server(tmp_path: Path) -> None:
    golden = ROOT / "tests" / "golden" / "qwen3" / "tied"
    tensors = {n: a for file in sorted(golden.glob("*.safetensors")) for n, a in safetensors.load_file(file).items()}
    changed = {name: -array if name.endswith("o_proj.weight") else array for name, array in tensors.items()}
    (folder := tmp_path / "changed").mkdir()
    for file in (one for one in golden.iterdir() if "model" not in one.name):
        shutil.copy(file, folder)
    safetensors.save_file(changed, folder / "model.safetensors")
    env = {
        "JAXROLL_CACHE": str(ROOT / ".cache" / "jax"),
        **os.environ,
        "XLA_FLAGS": "",
        "XDG_STATE_HOME": str(tmp_path),
    }
    output = tmp_path / "serve.out"
    command = [sys.executable, "-m", "jaxroll", "serve", str(golden), "--port=0", "--slots=2"]
    with output.open("w") as out:
        serving = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
    try:
        line = waited(lambda: [row for row in output.read_text().splitlines() if row.startswith("serves ")], "a server")
        url = line[0].split(" on ")[1].split(",")[0].removesuffix("/v1")
        shown = {"Authorization": f"Bearer {(tmp_path / 'jaxroll/http.token').read_text().strip()}"}
        with httpx.Client(base_url=url, headers=shown, timeout=START_S) as api:

            def answer() -> tuple[list[int], list[float], str]:
                sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 1}
                body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
                (choice,) = api.post("/inference/v1/generate", json=body).raise_for_status().json()["choices"]
                (runs,) = choice["weight_versions"]
                return choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]], runs["version"]

            first = answer()
            pushed = api.post("/update_weights", json={"update_info": {"path": str(folder)}})
            assert pushed.raise_for_status().json()["weight_version"] == "0.1", pushed.text
            second = answer()
            api.post("/start_weight_update").raise_for_status()
            raw = {"content-type": "application/octet-stream"}
            api.post("/update_weights", content=safetensors.save(tensors), headers=raw).raise_for_status()
            api.post("/finish_weight_update").raise_for_status()
            third = answer()
        assert [one[2] for one in (first, second, third)] == ["0.0", "0.1", "0.2"]
        assert first[:2] == third[:2] != second[:2], "the first weights are back, to the last bit"
    finally:
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 0, output.read_text()

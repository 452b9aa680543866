"""For .venv-jetstream: JetStream's own benchmark client, unmodified, drives its server over JaxRoll's engine.

    python jetstream_client.py FOLDER

FOLDER has weights.npz and work.json, as for jetstream_serve.py, with `requests`; the server's socket and the client's
files are made there. The last line has the prompt, the number of tokens and the text of each answer, and the numbers
of successful requests and generated tokens that the client reports.
"""

import base64
import json
import logging
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import jetstream
from jetstream_serve import Work, serving

CLIENT = Path(jetstream.__path__[0]).parent / "benchmarks" / "benchmark_serving.py"
LIMIT_S, SEED = 200, 0


def wanted(count: int) -> list[tuple[str, int]]:
    """Prompt and number of tokens of the client's `count` requests, which it draws from SEED in this order."""
    draws, asked = random.Random(SEED), list[tuple[str, int]]()
    for _ in range(count):
        prompt, _length, _output = draws.randint(1, 1000), draws.randint(10, 100), draws.randint(1, 1000)
        asked.append((f"Prompt {prompt}", draws.randint(1, 10)))
    return asked


def measured(folder: Path, address: str, count: int) -> str:
    """The output of the client, with one token for each byte; its answers are in FOLDER/answers.json."""
    vocabulary = folder / "bytes.tiktoken"
    vocabulary.write_text("".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)))
    server, _, port = address.partition(":")
    words = [sys.executable, str(CLIENT), f"--server={server}", f"--port={port}", "--dataset=test", "--model=llama-3"]
    words += [f"--tokenizer={vocabulary}", f"--total-mock-requests={count}", "--request-rate=inf", "--disable-tqdm"]
    words += [f"--seed={SEED}", "--save-request-outputs", f"--request-outputs-file-path={folder / 'answers.json'}"]
    environment = os.environ | {"TIKTOKEN_CACHE_DIR": ""}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def main() -> None:
    folder = Path(sys.argv[1])
    logging.getLogger().setLevel(logging.WARNING)  # JetStream puts DEBUG on stdout
    work = Work(folder)
    count = work.given["requests"]
    with serving(work, folder) as address:
        output = measured(folder, address, count)
    answers = json.loads((folder / "answers.json").read_text())
    texts = [(one["prompt"], one["generated_text"]) for one in answers if one["success"]]
    asked = wanted(count)
    assert [prompt for prompt, _ in texts] == [prompt for prompt, _ in asked]
    reported = re.findall(r"^(?:Successful requests|Total generated tokens): (\d+)$", output, re.MULTILINE)
    found = [(*one, text) for one, (_, text) in zip(asked, texts, strict=True)]
    print(json.dumps({"answers": found, "reported": [int(number) for number in reported]}))


if __name__ == "__main__":
    main()

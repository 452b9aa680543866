"""Stands in for `python -m jaxroll ROLE --run=DIR`: notes the call; the learner ends at once, the others on SIGTERM."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from jaxroll import lifeline

lifeline.bind_from_env()
words = sys.argv[3:]  # after -m jaxroll
role = words[0]
run_dir = Path(next(word for word in words if word.startswith("--run=")).removeprefix("--run="))
with (run_dir / "calls.jsonl").open("a") as file:
    file.write(json.dumps({"words": words, "xla": os.environ.get("XLA_FLAGS", "")}) + "\n")
if role == "sft":
    (run_dir / ".warm-done").touch()
elif role == "store":
    (run_dir / "store.addr").write_text("127.0.0.1:1")
if role in ("store", "sampler"):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(60)
if role == "learner":  # with it the run ends: not before the sampler beside it has noted its call
    give_up_s = time.monotonic() + 30
    while time.monotonic() < give_up_s:
        said = [json.loads(line)["words"][0] for line in (run_dir / "calls.jsonl").read_text().splitlines()]
        if said.count("sampler") >= said.count("learner"):
            break
        time.sleep(0.02)
    if (run_dir / "refuse").exists():
        sys.exit(64)

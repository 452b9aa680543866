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
if role == "learner" and (run_dir / "refuse").exists():
    sys.exit(64)

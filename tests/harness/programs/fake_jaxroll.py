"""A stand-in for `python -m jaxroll`: it notes the call; the learner ends at once, other roles end on SIGTERM.

The learner and the warm start continue while the run's folder holds a file `hold`.
"""

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
    given = os.environ.get("JAXROLL_RUN_CONFIG", "")
    file.write(json.dumps({"words": words, "xla": os.environ.get("XLA_FLAGS", ""), "given": given}) + "\n")


def noted(role: str) -> int:
    """The number of calls of a role that are noted; a process that writes at the same time may show half a line."""
    *lines, _ = (run_dir / "calls.jsonl").read_text().split("\n")
    return [json.loads(line)["words"][0] for line in lines].count(role)


if any(word.startswith("--fork=") for word in words):
    (run_dir / ".forked").touch()
if role in ("sft", "learner"):
    hold_until_s = time.monotonic() + 60
    while (run_dir / "hold").exists() and time.monotonic() < hold_until_s:
        time.sleep(0.02)
if role == "sft":  # it ends when FAKE_COMPILERS processes have noted their calls
    give_up_s = time.monotonic() + 30
    while time.monotonic() < give_up_s:
        if noted("compile") >= int(os.environ.get("FAKE_COMPILERS", "0")):
            break
        time.sleep(0.02)
    (run_dir / ".warm-done").touch()
elif role == "store":
    (run_dir / "store.addr").write_text("127.0.0.1:1")
if role in ("store", "sampler"):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(60)
if role == "learner":  # the run ends with it: wait until the sampler has noted its call
    give_up_s = time.monotonic() + 30
    while time.monotonic() < give_up_s:
        if noted("sampler") >= noted("learner"):
            break
        time.sleep(0.02)
    if (run_dir / "refuse").exists():
        sys.exit(64)

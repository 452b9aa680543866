"""Run a supervisor over processes described in a JSON file: supervise.py RUN_DIR SPECS; exit with the run's code."""

import json
import sys
from pathlib import Path

from jaxroll import config as configs
from jaxroll import lifeline
from jaxroll.config import SupervisorConfig
from jaxroll.control.live import open_view
from jaxroll.control.program import ProcessSpec
from jaxroll.control.supervisor import Supervisor


def specs_from(values: list[dict]) -> list[ProcessSpec]:
    return [
        ProcessSpec(
            v["name"],
            v["name"].partition("-")[0],
            tuple(v["argv"]),
            {},
            tuple(v.get("after", ())),
            Path(v["ready_file"]) if v.get("ready_file") else None,
            v.get("gang", ""),
        )
        for v in values
    ]


def main() -> int:
    run_dir, file = Path(sys.argv[1]), Path(sys.argv[2])
    values = json.loads(file.read_text())
    config = SupervisorConfig(**values["config"])
    lifeline.harden().patience_s = lifeline.NOT_SHOWN_S  # as `jaxroll train` does
    view = open_view(run_dir, configs.to_dict(configs.parse({"schedule": {"steps": 5}})))
    try:
        return Supervisor(specs_from(values["specs"]), run_dir, config, view).run()
    finally:
        view.close()


if __name__ == "__main__":
    sys.exit(main())

"""The demo: a new run of configs/demo.py, its link `runs/demo`, and its report, with the whole time."""

from __future__ import annotations

import time
from pathlib import Path

import jaxroll
from jaxroll import config as configs
from jaxroll.control import preflight, run_dir, train
from jaxroll.errors import ConfigError

NAME = "demo"


def find_config(file: str | None, here: Path) -> Path:
    """The demo's config file: `file`, else configs/demo.py under `here`, else beside the package."""
    if file is not None:
        return Path(file)
    for root in (here, Path(jaxroll.__file__).parent.parent):
        if (root / "configs" / "demo.py").is_file():
            return root / "configs" / "demo.py"
    raise ConfigError("--config", "configs/demo.py", f"not found under {here}",
                      "Run the demo in a checkout of JaxRoll, or give --config=FILE.")  # fmt: skip


def demo(file: str | None, seed: int, overrides: list[str], argv: list[str]) -> int:
    """Run the demo from start to report; the exit code."""
    from jaxroll.report import cli as report

    began = time.monotonic()
    config = configs.load(find_config(file, Path.cwd()), [f"run.seed={seed}", *overrides])
    preflight.check(config)
    inventory = train.find_inventory(config)
    with run_dir.new_unique_run(Path("runs"), NAME, config, argv, suffix=f"-seed{seed}") as path:
        run_dir.link(path, NAME)
        print(f"The demo runs in {path.parent.name}/{path.name} (seed {seed}).", flush=True)
        code = train.train(config, path, inventory)
    if code:
        return code
    failed = report.main(path, as_json=False)
    print(f"The whole demo took {time.monotonic() - began:.0f} s.", flush=True)
    return int(failed or 0)

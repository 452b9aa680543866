"""Write the Dockerfiles of this folder: requirements.txt, extras of real models and an accelerator, each at its pin.

`make constraints` runs it. Needs `packaging`, to read the conditions of the pins.
"""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = "3.12"
# The machine that the pins' conditions are read for; all that they name.
IMAGE = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "implementation_name": "cpython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
# For the configs of real models: chat templates, mathematical equality, Parquet (the extras hf, math and data).
RECIPES = r"jinja2|markupsafe|math-verify|latex2sympy2-extended|antlr4-python3-runtime|pyarrow"
# Kind of image: (further packages of constraints.txt, by name; options of `docker run`).
KINDS = {
    "cpu": ("", ""),
    "gpu": (r"jax-cuda13-.*|nvidia-.*(?<!-cu12)", " --gpus all"),
    "tpu": (r"libtpu|requests|certifi|charset-normalizer|idna|urllib3", " --privileged --net=host"),
}
TEMPLATE = """\
# JaxRoll's image for {kind}. Written by launch/docker/write.py from requirements.txt and constraints.txt.
#   docker build -f launch/docker/{kind}.Dockerfile -t jaxroll:{kind} .
#   docker run --rm --shm-size=8g{options} -v "$PWD/runs:/jaxroll/runs" jaxroll:{kind} doctor
FROM python:{python}-slim
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /jaxroll
RUN pip install --no-deps --only-binary :all: \\
{pins}
COPY pyproject.toml README.md LICENSE ./
COPY jaxroll jaxroll
COPY configs configs
RUN pip install --no-deps -e .
ENTRYPOINT ["jaxroll"]
"""


def pins(file: Path, names: str = ".*") -> list[str]:
    """The pins in `file` that hold in the image, as `name==version`, of packages whose name matches `names`."""
    lines = (line for line in file.read_text().splitlines() if line and not line.startswith("#"))
    wanted = (each for each in map(Requirement, lines) if re.fullmatch(names, each.name))
    return [f"{each.name}{each.specifier}" for each in wanted if each.marker is None or each.marker.evaluate(IMAGE)]


def dockerfile(kind: str) -> str:
    """The text of the Dockerfile of one kind."""
    names, options = KINDS[kind]
    further = pins(ROOT / "constraints.txt", f"{RECIPES}|{names}" if names else RECIPES)
    chosen = sorted({*pins(ROOT / "requirements.txt"), *further})
    return TEMPLATE.format(kind=kind, options=options, python=PYTHON, pins=" \\\n".join(f"  {pin}" for pin in chosen))


if __name__ == "__main__":
    for kind in KINDS:
        (HERE / f"{kind}.Dockerfile").write_text(dockerfile(kind))

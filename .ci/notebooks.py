"""Write the project's address into the notebooks of colabs/: `python .ci/notebooks.py`.

A notebook cannot import jaxroll before it has cloned it, so its cell `settings` repeats `jaxroll.PROJECT_URL`. With an
address on GitHub its cell `title` gets a link to Colab. All notebooks have the same cell `install`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jaxroll

FOLDER = Path(__file__).resolve().parents[1] / "colabs"
REPOSITORY = re.compile(r'^REPOSITORY = ".*"', re.MULTILINE)
LINK = re.compile(r"\n\[Open in Colab\]\(.*\)\n")
INSTALL_OF = "jaxroll_demo.ipynb"  # the other notebooks copy its cell `install`


def written(name: str, url: str) -> str:
    """The text of the notebook file `name`, with the address `url`."""
    notebook = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    install = _cell(json.loads((FOLDER / INSTALL_OF).read_text(encoding="utf-8")), "install")
    title, settings = _cell(notebook, "title"), _cell(notebook, "settings")
    _cell(notebook, "install")["source"] = install["source"]
    settings["source"] = _lines(REPOSITORY.sub(f'REPOSITORY = "{url}"', "".join(settings["source"])))
    heading, _, text = LINK.sub("", "".join(title["source"])).partition("\n")
    github = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(\.git)?/?", url)
    address = f"https://colab.research.google.com/github/{github[1]}/blob/main/colabs/{name}" if github else ""
    link = f"\n[Open in Colab]({address})\n" if github else ""
    title["source"] = _lines(f"{heading}\n{link}{text}")
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def names() -> list[str]:
    """The file names of all notebooks."""
    return sorted(path.name for path in FOLDER.glob("*.ipynb"))


def _cell(notebook: dict[str, Any], id: str) -> dict[str, Any]:
    return next(cell for cell in notebook["cells"] if cell["id"] == id)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    for each in names():
        (FOLDER / each).write_text(written(each, jaxroll.PROJECT_URL), encoding="utf-8")

"""Hooks of the documentation site: pages from README.md and other files outside docs/, API pages from docstrings.

MkDocs calls `on_config`, `on_files` and `on_page_markdown` (mkdocs.yml). Links between these files are rewritten to the
pages of the site. Other links into the repository use the project's public address; while it is empty they are text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import jaxroll

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "launch/README.md": "launch.md",
}
WITHOUT_PAGE = ("jaxroll.serving.jetstream",)  # needs google-jetstream
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)|src=\"([^\":]+)\"")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the empty sections of the navigation, and set the address of the repository if there is one."""
    config.repo_url = jaxroll.PROJECT_URL or None
    listed = set(re.findall(r"'([\w/]+\.md)'", str(config.nav)))
    others = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in listed)
    reference = [{package: f"api/{package}.md"} for package in packages()]
    sections: dict[str, list[Any]] = {"Results": results(), "Reference": reference, "Other": others}
    config.nav = [item for item in (_filled(item, sections) for item in config.nav or []) if item != {"Other": []}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and rewrite links out of docs/ in the others."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=linked((ROOT / source).read_text(), source, name)))
    for package, modules in packages().items():
        blocks = "\n".join(f"::: {module}\n" for module in modules)
        files.append(File.generated(config, f"api/{package}.md", content=f"# {package}\n\n{blocks}"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page in docs/ that lead out of it."""
    source = Path("docs") / page.file.src_uri
    return linked(markdown, str(source), page.file.src_uri) if (ROOT / source).exists() else markdown


def results() -> list[str]:
    """The result pages: the index, the questions by name, the appendix."""
    names = sorted(path.name for path in (ROOT / "docs" / "results").glob("*.md"))
    ends = ("index.md", "history.md")
    return [f"results/{name}" for name in (ends[0], *(n for n in names if n not in ends), ends[1])]


def packages() -> dict[str, list[str]]:
    """The modules of each package of jaxroll that have a docstring, by the package's name; the others by themselves."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "jaxroll").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if "__main__" in parts or name in WITHOUT_PAGE or not path.read_text().lstrip().startswith('"""'):
            continue
        package = parts[1] if len(parts) > 2 else "jaxroll"
        found.setdefault(package, []).append(name)
    return found


def linked(markdown: str, source: str, name: str) -> str:
    """`markdown` of the file `source` with links that work on the page `name` of the site."""

    def target(match: re.Match[str]) -> str:
        link, section, image = match[1], match[2] or "", match[3]
        path = ((ROOT / source).parent / (link or image)).resolve()
        inside = path.relative_to(ROOT).as_posix()
        page = PAGES.get(inside) or (inside.removeprefix("docs/") if inside.startswith("docs/") else None)
        if page is None:
            return f"]({jaxroll.PROJECT_URL}/blob/main/{inside})" if jaxroll.PROJECT_URL else "]"
        relative = "../" * name.count("/") + page
        return f'src="{relative}"' if image else f"]({relative}{section})"

    return LINK.sub(target, markdown)


def _filled(item: Any, sections: dict[str, list[Any]]) -> Any:
    name = next(iter(item)) if isinstance(item, dict) else ""
    return {name: sections[name]} if sections.get(name) else item

"""Write docs/config_keys.md from jaxroll/config/schema.py: type, default, bounds and description of every key.

python .ci/config_keys.py          # write the page
python .ci/config_keys.py --check  # fail if the page is out of date
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxroll.config import schema, schema_system  # noqa: E402
from jaxroll.run_paths import RENAMED  # noqa: E402

PAGE = ROOT / "docs" / "config_keys.md"
HEAD = """# Config keys

Generated from `jaxroll/config/schema.py` by `.ci/config_keys.py`. `jaxroll config --config=FILE` prints all values.
[Configs](configs.md) explains config files and overrides.
"""


def descriptions(source: str) -> dict[tuple[str, str], str]:
    """The comment above each field, by class and field."""
    lines, found = source.splitlines(), {}
    for owner in ast.parse(source).body:
        for node in owner.body if isinstance(owner, ast.ClassDef) else ():
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                first = node.lineno - 1
                while lines[first - 1].lstrip().startswith("# "):
                    first -= 1
                words = [line.strip().removeprefix("# ") for line in lines[first : node.lineno - 1]]
                found[owner.name, node.target.id] = " ".join(words)
    return found


def type_of(hint: Any) -> str:
    """The type of a key, or its choices."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return f"tuple of {get_args(hint)[0].__name__}"
    return hint.__name__


def bounds_of(hint: Any) -> str:
    """The bounds of a number, as a suffix of its type."""
    for bounds in getattr(hint, "__metadata__", ()):
        signs = (("≥", bounds.least), (">", bounds.above), ("≤", bounds.most))
        return " " + ", ".join(f"{sign} {value}" for sign, value in signs if value is not None)
    return ""


def default_of(field: dataclasses.Field) -> str:
    """The default as it is written in a config file."""
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    return f"`{value!r}`" if value != "" else "empty"


def section(name: str, kind: type, texts: dict[tuple[str, str], str]) -> str:
    """One heading and the table of its keys."""
    plain, full = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    rows = []
    for field in dataclasses.fields(kind):
        text = texts[kind.__name__, field.name]
        if not text:
            raise SystemExit(f"{kind.__name__}.{field.name} has no comment that describes it")
        if dataclasses.is_dataclass(plain[field.name]):
            rows.append(f"| `{field.name}.*` | see [mesh](#mesh) | | {text} |")
        else:
            type_text = type_of(plain[field.name]) + bounds_of(full[field.name])
            rows.append(f"| `{field.name}` | {type_text} | {default_of(field)} | {text} |")
    head = f"\n## {name}\n\n{kind.__doc__}\n\n| key | type | default | description |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def page() -> str:
    """The whole page."""
    texts = {}
    for module in (schema, schema_system):
        texts |= descriptions(Path(module.__file__).read_text(encoding="utf-8"))
    sections = {field.name: get_type_hints(schema.Config)[field.name] for field in dataclasses.fields(schema.Config)}
    parts = [section(name, kind, texts) for name, kind in sections.items()]
    parts.insert(1, section("mesh", schema.MeshConfig, texts))
    renamed = "".join(f"| `{old}` | `{new}` |\n" for old, new in RENAMED.items())
    note = "\n## Renamed keys\n\nAn old name is refused with the new one. Runs with old names are migrated.\n\n"
    return HEAD + "".join(parts) + note + "| old | new |\n|---|---|\n" + renamed


def main() -> int:
    """0, or 1 if the page is out of date."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE} is out of date: run python .ci/config_keys.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The prose check finds what its rules are for, and leaves plain text alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

KEY = "told"  # a word of the rules, as an identifier in code

PATH = Path(__file__).resolve().parent.parent / ".ci" / "prose.py"
_spec = importlib.util.spec_from_file_location("prose_check", PATH)
assert _spec is not None and _spec.loader is not None
prose = importlib.util.module_from_spec(_spec)
sys.modules["prose_check"] = prose
_spec.loader.exec_module(prose)

RULES = prose.read_rules()


def phrases(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return [complaint.phrase for complaint in prose.complaints(path, RULES)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.example[:40])
def test_each_rule_finds_its_example(tmp_path: Path, rule) -> None:
    opening = rule.example if rule.example[0].isupper() else f"See {rule.example}."
    if "text" in rule.kinds:
        assert phrases(tmp_path / "page.md", f"{opening}\n")
    assert phrases(tmp_path / "module.py", f'def f():\n    """{opening}"""\n')


def test_every_kind_of_text_is_read(tmp_path: Path) -> None:
    source = '''"""A module that nobody reads."""
# A comment that somebody reads.
raise ValueError(f"{name} is told of it at once")
'''
    assert phrases(tmp_path / "module.py", source) == ["nobody", "somebody", "told"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", "Run `python -m nobody` once.\n\n```\nwho said nobody\n```\n"),
        ("module.py", f'{KEY} = {{"{KEY}": 1}}\nprint("{KEY}")\nsql = "SELECT who FROM {KEY}"\n'),
        ("module.py", 'def f():\n    """Return the share of rows that a caller may read."""\n'),
        ("page.md", "The sampler swaps its weights when the learner publishes a version.\n"),
    ],
)
def test_code_and_plain_sentences_are_left_alone(tmp_path: Path, name: str, text: str) -> None:
    assert phrases(tmp_path / name, text) == []

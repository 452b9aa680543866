"""Help texts: every command in its group, with an example that works."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import jaxroll
from jaxroll.control import cli

ROOT = Path(__file__).parents[2]
COMMANDS = [one for group in cli.GROUPS.values() for one in group]


def test_help_lists_every_command_in_its_group_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and max(map(len, lines)) <= 120
    groups = [line[:-1] for line in lines if line.endswith(":") and " " not in line]
    assert groups == list(cli.GROUPS) == ["run", "inspect", "models", "roles", "setup"]
    for one in COMMANDS:
        at = next(i for i, line in enumerate(lines) if line.startswith(f"  {one.name} "))
        assert one.text in lines[at] and lines[at + 1].strip() == f"$ {one.example}"


@pytest.mark.parametrize("one", COMMANDS, ids=lambda one: one.name)
def test_help_of_a_command_ends_with_its_example_which_is_valid(
    one: cli.Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        cli.main([one.name, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: jaxroll {one.name} ") and " ".join(shown.split()).endswith(one.example)
    words = shlex.split(one.example)
    assert words[:2] == ["jaxroll", one.name]
    options, extra = cli.parser().parse_known_args(words[1:])
    assert not extra
    if config := getattr(options, "config", None):
        assert (ROOT / config).is_file()
    if "--dry-run" in words:
        monkeypatch.chdir(ROOT)
        assert cli.main(words[1:]) == 0


@pytest.mark.parametrize("option", ["PROMPT", "--temperature", "--top-k", "--stop", "--max-tokens", "--samples"])
def test_help_of_generate_shows_its_arguments(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    assert option in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"jaxroll {jaxroll.__version__}\n"

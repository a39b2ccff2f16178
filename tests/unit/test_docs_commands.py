"""docs/commands.md and docs/checks.md say what the commands take and how they end."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
from django.core.management import BaseCommand

from django_redis_lock import management
from django_redis_lock.management.commands import locks, run_locked

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "commands.md").read_text()
EVERYWHERE = {*BaseCommand().create_parser("", "")._option_string_actions}


def parser(name: str) -> object:
    command = {"locks": locks.Command, "run_locked": run_locked.Command}[name]()
    return command.create_parser("manage.py", name)


def own_options(name: str) -> set[str]:
    top = parser(name)
    subparsers = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    parsers = [top, *(one for action in subparsers for one in action.choices.values())]
    return {option for one in parsers for option in one._option_string_actions} - EVERYWHERE


def shown() -> list[str]:
    pages = [page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    blocks = "".join("".join(re.findall(r"```shell\n(.*?)```", p, re.DOTALL)) for p in pages)
    return re.findall(r"^python manage\.py (?:locks|run_locked).*$", blocks, re.MULTILINE)


@pytest.mark.parametrize("line", shown())
def test_every_command_line_that_is_shown_is_understood(line: str) -> None:
    _, _, name, *words = shlex.split(line, comments=True)
    found = parser(name).parse_args(words)
    assert name == "locks" or found.command


def test_command_lines_are_shown() -> None:
    assert len(shown()) >= 12


def test_every_option_of_run_locked_is_in_its_table() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)", TEXT, re.MULTILINE)
    assert sorted(rows) == sorted(own_options("run_locked"))


def test_every_option_of_locks_is_mentioned() -> None:
    assert {option for option in own_options("locks") if f"{option}" not in TEXT} == set()


def test_every_exit_code_is_in_the_table() -> None:
    table = TEXT[TEXT.index("## Exit codes") : TEXT.index("## Rights")]
    rows = set(map(int, re.findall(r"^\| (\d+) \|", table, re.MULTILINE)))
    constants = (code for name, code in vars(management.Exit).items() if name.isupper())
    assert rows == {0, *constants}


def test_every_default_of_run_locked_is_the_one_in_the_table() -> None:
    defaults = dict(re.findall(r"^\| `--([a-z-]+)[^|]*\| `([^`]*)` \|", TEXT, re.MULTILINE))
    parsed = vars(parser("run_locked").parse_args(["name"]))
    for option, shown in defaults.items():
        if option != "timeout":  # The setting TIMEOUT.
            value = parsed[option.replace("-", "_")]
            assert shown == (f"{value:g}" if isinstance(value, float) else str(value)), option

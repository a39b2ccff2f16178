"""What is true of every page: links lead somewhere, files exist, code compiles; and of commands,
checks and ``docs/architecture.md``: what they name is there."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import shlex
import textwrap
from pathlib import Path

import pytest
from django.core.management import BaseCommand

import django_redis_lock
from django_redis_lock import management
from django_redis_lock.conf import Conf
from django_redis_lock.management.commands import locks, run_locked
from django_redis_lock.protocol import keys

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
#: Of README and docs, with the bars of their tables.
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of ``page``, as GitHub and MyST make them."""
    text = FENCED.sub("", page.read_text())
    titles = [title.strip().lower() for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text()))


def snippets(page: Path) -> list[str]:
    found = re.findall(r"^( *)```python\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target.parent.name == "images" and not target.parent.exists():
            continue  # A source distribution has no pictures.
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", DOCS, ids=_name)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|pml))`", page.read_text()))
    folders = (ROOT, ROOT / "django_redis_lock")
    assert {name for name in named if not any((each / name).is_file() for each in folders)} == set()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_python_snippet_compiles(page: Path) -> None:
    for code in snippets(page):
        compile(code, _name(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_name_that_a_snippet_imports_from_here_exists(page: Path) -> None:
    missing = []
    for code in snippets(page):
        tree = compile(code, "", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and module.partition(".")[0] in ("django_redis_lock", "django"):
                if not importlib.util.find_spec(module):
                    assert module == "django.tasks"  # Since Django 6.0.
                    continue
                found = importlib.import_module(module)
                missing += [
                    each.name
                    for each in node.names
                    if not hasattr(found, each.name)
                    and not importlib.util.find_spec(f"{module}.{each.name}")
                ]
    assert missing == []


def test_every_page_is_on_the_site() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    listed = re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL)
    pages = {line for block in listed for line in block.splitlines() if line and line[0] != ":"}
    assert pages == {page.stem for page in DOCS} - {"index"}


def test_every_setting_and_its_default_is_on_its_page() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| [^|]+ \| `([^`]*)` \|", text, re.MULTILINE))
    shown = {}
    for name in Conf.names():
        default = getattr(Conf(), name)
        number = isinstance(default, float)
        shown[name] = f"{default:g}" if number else repr(default).replace("'", '"')
    assert rows == shown


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    shown = re.findall(r"auto(?:class|exception|function):: (\w+)\n", text)
    assert sorted(shown) == sorted(django_redis_lock.__all__)


def test_how_it_works_has_every_key() -> None:
    text = "".join(
        (ROOT / "docs" / name).read_text() for name in ("how_it_works.md", "how_values_work.md")
    )
    parts = keys._COMPANION.decode().rpartition("(")[2].rstrip(")").split("|")
    named = {re.sub(r"\[.*", "", part) for part in parts}
    assert "grants" in named
    assert {part for part in named if not re.search(rf"`\{{[KV]\}}:{part}", text)} == set()
    for key in (keys.INDEX, keys.NEWS, keys.FLIGHTS):
        assert f"| `{key.decode()}` |" in text


# -- commands and checks ------------------------------------------------------------------------


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


# -- docs/architecture.md -----------------------------------------------------------------------

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_every_function_of_the_page_is_in_its_file() -> None:
    folder = ROOT / "django_redis_lock"
    files = set(re.findall(r"`([a-z_/]+\.py)`", ARCHITECTURE))
    assert not {f for f in files if not (f.startswith("tests/") or (folder / f).is_file())}
    steps = re.findall(r"`([a-z_/]+\.py)` · ((?:`\w+`(?:, )?)+)", ARCHITECTURE)
    assert len(steps) > 10
    assert not [
        f"{file} · {name}"
        for file, names in steps
        for name in re.findall(r"\w+", names)
        if not re.search(
            rf"^ *(?:async )?(?:def|class) {name}\b", (folder / file).read_text(), re.M
        )
    ]

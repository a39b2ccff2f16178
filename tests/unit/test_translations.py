"""The catalogues: every text is in them, translated, and compiled."""

from __future__ import annotations

import ast
import gettext
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from django.utils.translation.template import templatize

import django_redis_lock
from tests.support.sources import nodes, tree

PACKAGE = Path(django_redis_lock.__file__).parent
LANGUAGES = {"de": 2, "zh_Hans": 1}
FUNCTIONS = ("_", "gettext", "gettext_lazy", "gettext_noop", "ngettext", "ngettext_lazy")
#: What stands for a value in a text.
PLACE = re.compile(r"%\(\w+\)[sd]|%%|%")

Texts = dict[str, "str | None"]


@cache
def texts() -> Texts:
    """All texts of the package that are to be translated, with their plurals."""
    found: Texts = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(_calls(tree(path)))
    for path in sorted(PACKAGE.rglob("*.html")):
        # Django turns a template into what looks like calls in a program.
        pieces = re.findall(r" n?gettext\((?:.*?)\) | _\((?:.*?)\) ", _one_line(path), re.S)
        for piece in pieces:
            found.update(_calls(ast.parse(piece.strip())))
    return found


def _one_line(path: Path) -> str:
    return templatize(path.read_text()).replace("count)", "1)")


def _calls(within: ast.AST) -> Iterator[tuple[str, str | None]]:
    for node in nodes(within):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in FUNCTIONS and isinstance(node.args[0], ast.Constant):
            given = [a.value for a in node.args if isinstance(a, ast.Constant)]
            yield given[0], given[1] if node.func.id.startswith("ngettext") else None


Catalogue = dict[str, list[str]]


def compiled(language: str) -> Catalogue:
    """What the compiled catalogue says of each text, in each of its forms."""
    with (PACKAGE / "locale" / language / "LC_MESSAGES/django.mo").open("rb") as file:
        kept = gettext.GNUTranslations(file)._catalog
    found: Catalogue = {}
    for key, text in kept.items():
        found.setdefault(key if isinstance(key, str) else key[0], []).append(text)
    del found[""]
    return found


def written(language: str) -> Catalogue:
    """The same from the catalogue that people write."""
    source = (PACKAGE / "locale" / language / "LC_MESSAGES/django.po").read_text()
    assert "fuzzy" not in source
    assert "#~" not in source
    found: Catalogue = {}
    for entry in source.split("\n\n")[1:]:
        parts: dict[str, str] = {}
        keyword = ""
        for start, text in re.findall(r'^(msg\S+)? ?(".*")$', entry, re.M):
            keyword = start or keyword
            parts[keyword] = parts.get(keyword, "") + ast.literal_eval(text)
        found[parts["msgid"]] = [t for k, t in parts.items() if k.startswith("msgstr")]
    return found


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_catalogue_has_every_text_and_no_other(language: str) -> None:
    """If not: ``make messages``, and translate what is new."""
    assert set(written(language)) == set(texts())


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_translated_in_all_its_forms(language: str) -> None:
    for text, forms in written(language).items():
        plural = texts()[text]
        assert len(forms) == (LANGUAGES[language] if plural else 1), text
        values = [set(PLACE.findall(original)) for original in (text, plural or text)]
        for form in forms:
            assert form.strip(), text
            assert set(PLACE.findall(form)) in values, text
        assert set(PLACE.findall(forms[-1])) == values[-1], text


@pytest.mark.parametrize("language", LANGUAGES)
def test_it_is_compiled(language: str) -> None:
    """If not: ``make messages``."""
    assert compiled(language) == written(language)

"""The examples of docs/admin.md work as they stand there, and what it shows is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.contrib.auth.models import Group

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "admin.md").read_text()


@pytest.mark.django_db
def test_the_permissions() -> None:
    exec(example("Permission"), {})
    operators = Group.objects.get(name="operators")
    assert operators.permissions.count() == 2


def example(word: str) -> str:
    (found,) = (code for code in re.findall(r"```python\n(.*?)```", TEXT, re.S) if word in code)
    return str(found)


def test_the_pictures() -> None:
    shown = re.findall(r"\]\((images/.*?)\)", TEXT)
    assert len(shown) == len(set(shown)) == 26
    for name in shown:
        assert (DOCS / name).read_bytes().startswith(b"\x89PNG")
    on_all_pages = " ".join(page.read_text() for page in DOCS.glob("*.md"))
    assert {path.name for path in (DOCS / "images").glob("admin-*")} == set(
        re.findall(r"\]\(images/(admin-.*?)\)", on_all_pages)
    )

"""The examples of the pages on values (``PAGES``) work as they stand there."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.template import Context, Template

from django_redis_lock import conf
from django_redis_lock.cache import GetOrSetArguments

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("cache_stampedes", "writes", "cached", "whole_pages")
TEXT = "".join((DOCS / f"{name}.md").read_text() for name in PAGES)


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


class Product:
    """Stands for a model."""

    class objects:
        @staticmethod
        def filter(pk__in: list[int]) -> list[Any]:
            return [SimpleNamespace(pk=pk) for pk in pk__in]


@pytest.mark.django_db
def test_the_examples_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {
        "fetch_rates": lambda: {"EUR": 1},
        "Product": Product,
        "order": SimpleNamespace(save=lambda: None),
    }
    first, *others = examples("python")
    before = set(threading.enumerate())
    exec(first.replace("sleep(2)", "sleep(0.2)"), names)
    for thread in set(threading.enumerate()) - before:
        if thread.name.endswith("(visitor)"):
            thread.join()
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "building", *["the report"] * 3]
    for code in others:
        if "await" in code:
            lines = "".join(f"    {line}\n" for line in code.splitlines())
            exec(f"async def main():\n{lines}    return report", names)
            assert asyncio.run(names["main"]()) == "the report"
        else:
            exec(code, names)
    assert names["products"]["product-2"].pk == 2
    assert names["rates"] == {"EUR": 1}


def test_a_cached_function_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "cached.md").read_text()
    code, shown = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL).groups()
    exec(code, {"__name__": "reports"})
    assert capsys.readouterr().out == shown


def test_the_example_of_a_template() -> None:
    (source,) = examples("django")
    assert "what takes long" in Template(source).render(Context({}))


def test_every_option_and_its_default_is_there(settings: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {}
    for name in set(GetOrSetArguments.__annotations__) - {"group"}:  # That has no setting.
        default = getattr(conf.Conf(), name.upper())
        shown = f'"{default}"' if isinstance(default, str) else str(default)
        shown = f"{default:g}" if type(default) in (int, float) else shown
        row = rf"\| `{name}` \| [^|]+ \| `{re.escape(shown)}` \|"
        assert re.search(row, TEXT), f"{name}: {shown}"

"""The examples of docs/cache_stampedes.md work as they stand there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.cache import cache
from django.template import Context, Template

from django_redis_lock import conf
from django_redis_lock.cache import GetOrSetArguments

TEXT = (Path(__file__).parents[3] / "docs" / "cache_stampedes.md").read_text()


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


class Product:
    """Stands for a model."""

    class objects:
        @staticmethod
        def filter(pk__in: list[int]) -> list[Any]:
            return [SimpleNamespace(pk=pk) for pk in pk__in]


@pytest.mark.django_db
def test_the_examples_in_python() -> None:
    names: dict[str, Any] = {
        "build_report": lambda: "the report",
        "fetch_rates": lambda: {"EUR": 1},
        "Product": Product,
        "order": SimpleNamespace(save=lambda: None),
    }
    for code in examples("python"):
        if "await" in code:
            lines = "".join(f"    {line}\n" for line in code.splitlines())
            exec(f"async def main():\n{lines}    return report", names)
            assert asyncio.run(names["main"]()) == "the report"
        else:
            exec(code, names)
    assert names["products"]["product-2"].pk == 2
    assert names["rates"] == {"EUR": 1}
    assert cache.get("report") == "the report"


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

"""The examples of the pages on locked() work as they stand there."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.cache import cache
from django.core.management import CommandError, call_command
from django.test import RequestFactory

from django_redis_lock import LockError, LockNotAcquired, contention, current_lock
from django_redis_lock.conf import SETTING
from django_redis_lock.decorators.options import _OF_LOCKS, MISSING, Options

DOCS = Path(__file__).parents[3] / "docs"
TEXT = "".join(
    (DOCS / f"{name}.md").read_text() for name in ("one_at_a_time", "answers", "transactions")
)
OF_LOCKS = (DOCS / "locks.md").read_text().partition("\n## Options\n")[2].partition("\n## ")[0]


@pytest.fixture
def names(db: None) -> dict[str, Any]:
    """What the examples define, and what they need to be defined."""
    done: list[Any] = []
    balances = {7: 0}
    names: dict[str, Any] = {
        "done": done,
        "mail": done.append,
        "build_report": lambda: done.append("the report"),
        "read_balance": balances.__getitem__,
        "write_balance": balances.__setitem__,
        "balances": balances,
        "shop": "north",
        "import_prices": lambda shop, fence: done.append((shop, fence)),
        "rows": lambda shop: ["a row"],
        "store": lambda row, fence: done.append((row, fence)),
    }
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)):
        exec(compile(code, f"example {number}", "exec"), names)
    return names


def test_views(names: dict[str, Any]) -> None:
    request = RequestFactory().get("/")
    request.user = SimpleNamespace(pk=5)
    post = RequestFactory().post("/")
    post.user = request.user
    report, basket = names["Report"].as_view(), names["Basket"].as_view()
    assert names["send_invoice"](request, pk=7).content == b"sent"
    assert report(request, slug="a").content == b"report a"
    assert basket(post).content == b"ordered"
    assert asyncio.run(names["export"](request)).content == b"all of it"
    with cache.lock("invoice-7"), cache.lock("report-a"), cache.lock("basket-5"):
        assert names["send_invoice"](request, pk=7).status_code == 409
        assert names["send_invoice"](request, pk=8).status_code == 200
        assert report(request, slug="a").status_code == 409
        assert basket(post).status_code == 409
    answer = names["in_words"](contention.Conflict("x", retry_after=7))
    assert answer.content == b"Come again in 7 s."


def test_functions(names: dict[str, Any]) -> None:
    order = SimpleNamespace(customer_id=5)
    with cache.lock("customer-5"), pytest.raises(LockNotAcquired):
        names["ship"](order, express=True)
    with cache.lock("stock-7-all"), pytest.raises(LockNotAcquired):
        names["count"](SimpleNamespace(pk=7))
    with cache.lock("sync-7"), cache.lock("mailing-7"):
        assert names["synchronise"](7) is names["send_mailing"](7) is None
    names["import_shop"]("north")
    assert names["done"][-1][0] == "a row"
    assert any(done[0] == "north" for done in names["done"])
    assert names["balances"] == {7: 100}


def test_the_command(names: dict[str, Any]) -> None:
    errors = StringIO()
    call_command(names["Command"](stderr=errors))
    assert names["done"][-1] == "the report"
    call_command(names["Command"](stderr=errors))
    assert errors.getvalue().startswith("nightly-report was released, and its min_hold ends in ")
    shown = next(line for line in TEXT.splitlines() if line.startswith("CommandError"))
    assert shown.endswith(". More: manage.py locks show nightly-report")
    with pytest.raises(CommandError, match=r"manage\.py locks show"):
        raise contention.Conflict("nightly-report").command_error(1)


def test_every_option_and_its_default_is_there() -> None:
    for option in (field for field in dataclasses.fields(Options) if field.init):
        row = re.search(rf"\| `{option.name}` \| [^|]+ \|([^|]*)\|", TEXT)
        if row is None:
            assert_as_of_a_lock(option)
            continue
        default, written = option.default, row[1].strip()
        if option.name in ("key", "label"):
            assert written == "the dotted name"
        elif default is SETTING or default is MISSING:
            assert written in ("setting `TIMEOUT`", "")
        else:
            shown = f'"{default}"' if isinstance(default, str) else str(default)
            assert written == f"`{shown}`", option.name


def assert_as_of_a_lock(option: dataclasses.Field[Any]) -> None:
    """The page of locks has it, with the same default."""
    assert option.name in _OF_LOCKS
    (row,) = re.findall(rf"\| `{option.name}` \|.*\|([^|]*)\|[^|]*\|\n", OF_LOCKS) or [None]
    if row is None:
        assert f"`{option.name}` (`{option.default}`" in OF_LOCKS
    else:
        default = "setting" if row.strip().startswith("setting") else option.default
        assert row.strip().startswith(default if default == "setting" else f"`{default}`")


def test_every_ready_made_answer_is_there() -> None:
    answers = set(contention.__all__) - {"Conflict", "OnConflict", "request_of", "unavailable"}
    table = TEXT.partition("| `on_conflict=` | |")[2].partition("```")[0]
    assert set(re.findall(r"^\| `(\w+)", table, re.MULTILINE)) == answers


def test_outside_there_is_no_current_lock() -> None:
    with pytest.raises(LockError):
        current_lock()

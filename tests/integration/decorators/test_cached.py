"""``cached()``: functions whose results are kept, each computed once at a time."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.core.cache import cache, caches
from django.core.exceptions import ImproperlyConfigured
from django.views.decorators.cache import never_cache

from django_redis_lock import cached, events
from tests.processes import PATIENCE, until
from tests.support.values import Asking, Broken, blocked

calls: list[Any] = []


@pytest.fixture(autouse=True)
def _no_calls() -> Iterator[None]:
    calls.clear()
    yield
    calls.clear()


@cached
def motto() -> str:
    """What we go by."""
    calls.append("motto")
    return "once is enough"


@cached("report-{year}-{part}", timeout=60)
def report(year: int, part: str = "all") -> tuple[int, str, int]:
    calls.append((year, part))
    return year, part, len(calls)


@cached("areport-{year}", timeout=60)
async def areport(year: int) -> tuple[int, int]:
    calls.append(year)
    await asyncio.sleep(0)
    return year, len(calls)


@pytest.mark.parametrize("function", [motto, report, areport], ids=lambda f: f.__name__)
def test_help_names_the_methods(function: Any) -> None:
    shown = pydoc.plain(pydoc.render_doc(function))
    for name in ("refresh", "invalidate", "mark_stale", "on_commit"):
        assert f"    {function.__name__}.{name}(…): " in shown
        assert getattr(function, name).__qualname__ == f"{function.__name__}.{name}"
        of_method = pydoc.plain(pydoc.render_doc(getattr(function, name)))
        assert f"\n{name}(" in of_method.replace("async ", "")
        assert "\n    " in of_method
    assert ".refresh(…): Compute and store the result for these arguments" in shown
    arguments = str(inspect.signature(function.__wrapped__))
    assert f"refresh{arguments}" in pydoc.plain(pydoc.render_doc(function.refresh))


def test_a_function_without_arguments(client: redis.Redis) -> None:
    assert [motto(), motto()] == ["once is enough"] * 2
    assert calls == ["motto"]
    assert cache.get("tests.integration.decorators.test_cached.motto") == "once is enough"
    assert motto.__name__ == "motto"
    assert motto.__doc__.startswith("What we go by.\n")


def test_each_combination_of_arguments_has_a_value_of_its_own(client: redis.Redis) -> None:
    assert report(2024) == report(year=2024) == report(2024, part="all") == (2024, "all", 1)
    assert report(2024, "half") == (2024, "half", 2)
    assert 50_000 < client.pttl(":1:report-%(int)2024-all") <= 60_000
    assert report.invalidate(2024) is True
    assert report.invalidate(2024) is False
    assert report(2024, "half") == (2024, "half", 2)
    assert report(2024) == (2024, "all", 3)


def test_refresh_computes_again_and_stores(client: redis.Redis) -> None:
    report(2024)
    assert report.refresh(2024) == (2024, "all", 2)
    assert report(2024) == (2024, "all", 2)
    assert 50_000 < client.pttl(":1:report-%(int)2024-all") <= 60_000
    assert report.refresh(2025) == (2025, "all", 3)


def test_methods_and_static_and_class_methods_in_either_order() -> None:
    class Shop:
        pk = 7

        @cached("prices-{self.pk}")
        def prices(self) -> int:
            return self.pk

        @cached("below-{pk}")
        @staticmethod
        def below(pk: int) -> int:
            return pk

        @staticmethod
        @cached("above-{pk}")
        def above(pk: int) -> int:
            return pk

        @cached("of {cls.__name__} below-{pk}")
        @classmethod
        def class_below(cls, pk: int) -> str:
            return f"{cls.__name__} {pk}"

        @classmethod
        @cached("of {cls.__name__} above-{pk}")
        def class_above(cls, pk: int) -> str:
            return f"{cls.__name__} {pk}"

    for shop in (Shop, Shop()):
        assert shop.below(5) == shop.above(5) == 5
        assert shop.class_below(6) == shop.class_above(6) == "Shop 6"
    assert Shop().prices() == cache.get("prices-%(int)7") == 7
    assert Shop.prices.invalidate(Shop()) is True
    assert Shop.below.invalidate(5) is Shop.above.invalidate(5) is True
    assert Shop.class_below.invalidate(Shop, 6) is Shop.class_above.invalidate(Shop, 6) is True


def decorated_in(decorate: Any, first: str) -> None:
    """A method, or a function that needs what is around it, as projects write them."""
    tenant = "ann"

    if first == "tenant":

        @decorate
        def rows(pk: int = 5) -> object:
            return (tenant, pk)
    elif first == "self":

        class Shop:
            @decorate
            def rows(self, pk: int = 5) -> object:
                return (self, pk)
    else:

        class Shops:
            @classmethod
            @decorate
            def rows(cls, pk: int = 5) -> object:
                return (cls, pk)


@pytest.mark.parametrize("below", [lambda made: made, never_cache], ids=["", "decorated"])
@pytest.mark.parametrize(
    ("first", "good"),
    [("tenant", None), ("self", "{self.pk}-{pk}"), ("cls", "{cls.__name__}-{pk}")],
)
def test_whose_value_it_is_must_be_known(first: str, good: str | None, below: Any) -> None:
    """Otherwise one account, class or customer would get the value of another."""
    with pytest.raises(ValueError, match=f"{first}.* get the value of another.*key=lambda"):
        decorated_in(lambda made: cached("rows-{pk}")(below(made)), first)
    decorated_in(lambda made: cached(key=lambda *args: "rows")(below(made)), first)
    if good:
        decorated_in(lambda made: cached(good)(below(made)), first)
    with pytest.raises(ValueError, match=r"names no argument|get the value of another"):
        decorated_in(lambda made: cached("rows")(below(made)), first)


def test_a_nested_function_may_call_itself() -> None:
    @cached("sum-{n}")
    def total(n: int) -> int:
        return n + total(n - 1) if n else 0

    assert total(3) == 6


def test_a_class_method_without_a_key_has_a_value_for_each_class() -> None:
    class Base:
        @cached
        @classmethod
        def name(cls) -> str:
            return cls.__name__

        @classmethod
        @cached
        def other(cls) -> str:
            return cls.__name__

        def method(self) -> str:
            return super().__repr__()

    class Sub(Base):
        pass

    for _ in range(2):
        assert (Base.name(), Sub.name()) == ("Base", "Sub")
        assert (Sub().other(), Base.other()) == ("Sub", "Base")
    assert Sub.name.invalidate(Sub) is True
    assert Base.name.invalidate(Base) is True
    assert Sub.name.invalidate(Sub) is False


def test_a_script_gives_the_key() -> None:
    """Each script is ``__main__``."""

    def rows() -> int:
        return 5

    rows.__module__ = "__main__"
    with pytest.raises(ValueError, match="another script: give a key"):
        cached(rows)
    assert cached("rows")(rows)() == 5


def test_a_key_made_by_a_function() -> None:
    @cached(key=lambda numbers: "-".join(map(str, numbers)))
    def total(numbers: list[int]) -> int:
        calls.append(numbers)
        return sum(numbers)

    assert total([1, 2]) == total([1, 2]) == 3
    assert cache.get("1-2") == 3
    assert len(calls) == 1


def test_version_and_options() -> None:
    @cached("x", version=7, timeout=60, stale=60, error_ttl=60)
    def failing() -> int:
        calls.append(1)
        raise Broken("no data")

    with pytest.raises(Broken):
        failing()
    with pytest.raises(Exception, match="no data"):
        failing()
    assert len(calls) == 1
    cache.set("x", 5, version=7)
    assert failing() == 5
    assert failing.invalidate() is True


@pytest.fixture
def slow() -> Iterator[Any]:
    begun, finish = threading.Event(), threading.Event()

    @cached(key=lambda: "slow")
    def slow() -> str:
        calls.append(1)
        begun.set()
        assert finish.wait(PATIENCE)
        return f"value {len(calls)}"

    slow.begun, slow.finish = begun, finish
    yield slow
    finish.set()


def test_during_a_refresh_others_get_the_old_value_or_wait(slow: Any, client: redis.Redis) -> None:
    cache.set("slow", "old", 3)
    refreshing = Asking(slow.refresh)
    assert slow.begun.wait(PATIENCE)
    assert slow() == "old"
    until(lambda: not client.exists(":1:slow"))  # It has run out: the flight goes on.
    waiting = Asking(slow)
    until(lambda: blocked(client) == 1)
    slow.finish.set()
    assert refreshing.found() == waiting.found() == "value 1"
    assert len(calls) == 1


def test_a_write_during_a_refresh_wins(slow: Any) -> None:
    refreshing = Asking(slow.refresh)
    assert slow.begun.wait(PATIENCE)
    cache.set("slow", "newer")
    slow.finish.set()
    assert refreshing.found() == "value 1"
    assert cache.get("slow") == "newer"


def test_a_failed_refresh_keeps_the_old_value() -> None:
    @cached("failing")
    def failing() -> int:
        raise Broken("no data")

    cache.set("failing", "old")
    with pytest.raises(Broken):
        failing.refresh()
    assert failing() == "old"


# -- coroutine functions -----------------------------------------------------------------------


def test_a_coroutine_function() -> None:
    async def use() -> None:
        assert asyncio.iscoroutinefunction(areport)
        assert await areport(2024) == await areport(year=2024) == (2024, 1)
        assert await areport.refresh(2024) == (2024, 2)
        assert await areport(2024) == (2024, 2)
        assert await areport.invalidate(2024) is True
        assert await areport.invalidate(2024) is False
        assert await asyncio.gather(*(areport(2024) for _ in range(5))) == [(2024, 3)] * 5

    asyncio.run(use())


# -- mistakes ----------------------------------------------------------------------------------


def plain(pk: int) -> int:
    return pk


def gives_later() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("decorate", "error", "words"),
    [
        (lambda: cached(plain), ValueError, "has arguments: give a key"),
        (lambda: cached("report")(plain), ValueError, "'report' names no argument of"),
        (lambda: cached("a", timeout=5)("b"), TypeError, "decorates functions"),
        (lambda: cached("{id}")(plain), ValueError, "has no argument 'id'"),
        (lambda: cached("{0}")(plain), ValueError, "name the argument"),
        (lambda: cached(""), ValueError, "must not be empty"),
        (lambda: cached(5), TypeError, "key must be"),
        (lambda: cached("a", key="b"), TypeError, "takes the key once"),
        (lambda: cached("a", ttl=5), TypeError, "ttl"),
        (lambda: cached(gives_later), TypeError, "they can be read only once"),
        (lambda: cached(int), TypeError, "decorates functions"),
    ],
)
def test_mistakes_show_at_decoration(decorate: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        decorate()


def test_mistakes_that_show_at_the_call() -> None:
    with pytest.raises(ValueError, match="stale must be"):
        cached("a", stale=-1)(lambda: 5)()
    with pytest.raises(ImproperlyConfigured, match="CACHES has no 'pages'"):
        cached("a", using="pages")(lambda: 5)()
    with pytest.raises(ValueError, match="must give a non-empty str"):
        cached(key=lambda pk: "")(plain)(5)
    assert caches["default"].get("a") is None


def test_each_function_of_one_decorator_has_its_own_group() -> None:
    heard: list[Any] = []
    keep = cached(timeout=60)

    def first() -> int:
        return 1

    def second() -> int:
        return 2

    one, two = keep(first), keep(second)
    events.subscribe(heard.append)
    try:
        assert (one(), two()) == (1, 2)
    finally:
        events.unsubscribe(heard.append)
    groups = [event.subject.group for event in heard if isinstance(event, events.Computed)]
    assert [group.rpartition(".")[2] for group in groups] == ["first", "second"]

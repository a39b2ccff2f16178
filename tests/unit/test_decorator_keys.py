"""``locked()`` at decoration: the lock's name, and options that make no sense."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, ClassVar

import pytest
from django.core.management.base import BaseCommand

from django_redis_lock import cached, locked
from django_redis_lock.decorators import section
from django_redis_lock.events import Subject
from django_redis_lock.exceptions import LockNotAcquired


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the locks that calls ask for; every lock is taken."""
    asked: list[str] = []

    class Taken:
        subject = Subject("", "")

        def acquire(self, **wait: Any) -> bool:
            return False

        def held(self) -> None:
            return None

    class Cache:
        def lock(self, name: str, **options: Any) -> Taken:
            asked.append(name)
            return Taken()

    monkeypatch.setattr(section, "lock_cache", lambda alias: Cache())
    return asked


def name(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The name of the lock for this call."""
    with pytest.raises(LockNotAcquired) as caught:
        function(*args, **kwargs)
    return str(caught.value.lock_name)


class User:
    pk = 5
    roles = ("admin", "staff")
    limits: ClassVar[dict[str, int]] = {"day": 3}


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("fixed", "fixed"),
        ("invoice-{pk}", "invoice-7"),
        ("{pk}", "7"),
        ("{pk:05d}", "00007"),
        ("{pk!r}-{user.pk}", "7-5"),
        ("{user.roles[1]}", "staff"),
        ("{user.limits[day]}", "3"),
        ("{size}", "10"),
        ("{{pk}}", "{pk}"),
        ("{{{pk}}}", "{7}"),
        ("{{tag}}:{pk}", "{tag}:7"),
        ("100%", "100%"),
        ("ключ {pk}", "ключ 7"),
    ],
)
def test_templates(template: str, wanted: str) -> None:
    @locked(template)
    def pay(user: User, pk: int, size: int = 10) -> None: ...

    assert name(pay, User(), 7) == wanted
    assert name(pay, user=User(), pk=7) == wanted
    assert name(pay, User(), 7, size=10) == wanted


@pytest.mark.parametrize("decorate", [locked, locked(), locked(label="x")])
def test_the_default_is_the_dotted_name(decorate: Callable[..., Any]) -> None:
    def work(**kwargs: Any) -> None: ...

    dotted = f"{__name__}.test_the_default_is_the_dotted_name.<locals>.work"
    assert name(decorate(work), pk=1) == dotted


def test_arguments_that_are_not_in_the_signature() -> None:
    @locked("{first}-{pk}-{rest}-{rest[0]}")
    def work(first: int, /, *rest: int, **kwargs: Any) -> None: ...

    assert name(work, 1, 2, pk=7) == "1-7-(2,)-2"


def test_a_callable_gets_the_arguments_of_the_call() -> None:
    @locked(key=lambda user, pk, size=1: f"{user.pk}/{pk}/{size}")
    def pay(user: User, pk: int, size: int = 10) -> None: ...

    assert name(pay, User(), 7) == "5/7/1"
    assert name(pay, User(), pk=7, size=2) == "5/7/2"


def test_a_method() -> None:
    class Shop:
        number = 3

        @locked("shop-{self.number}")
        def close(self) -> None: ...

    assert name(Shop().close) == "shop-3"


def test_a_command_class() -> None:
    @locked
    class Command(BaseCommand):
        def handle(self, *args: Any, **options: Any) -> None: ...

    assert Command.handle.__wrapped__
    with pytest.raises(Exception, match=r"test_a_command_class\.<locals>\.Command is held"):
        Command().handle()


def test_the_options_of_a_command() -> None:
    @locked("import-{shop}")
    class Command(BaseCommand):
        def handle(self, *args: Any, **options: Any) -> None: ...

    with pytest.raises(Exception, match="import-north is held"):
        Command().handle(shop="north")


# -- templates that make no sense --------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{id}", r"has no argument 'id' \(it has: user, pk\)"),
        ("invoice-{Pk}", "has no argument 'Pk'"),
        ("{}", "name the argument between the braces"),
        ("{0}", "name the argument between the braces"),
        ("{.pk}", "name the argument between the braces"),
        ("{pk:{width}}", "has no argument 'width'"),
        ("", "must not be empty"),
        ("  ", "must not be empty"),
    ],
)
def test_a_wrong_template_is_refused_at_decoration(template: str, words: str) -> None:
    def pay(user: User, pk: int) -> None: ...

    with pytest.raises(ValueError, match=words):
        locked(template)(pay)


@pytest.mark.parametrize("key", [7, b"bytes", object()])
def test_what_is_no_key_is_refused(key: Any) -> None:
    with pytest.raises(TypeError, match="key must be a str, a list, a callable or None"):
        locked(key=key)


def test_two_keys_are_refused() -> None:
    with pytest.raises(TypeError, match="takes the name of the lock once"):
        locked("a", key="b")


@pytest.mark.parametrize("given", ["", " ", None, 7, b"x", {"a"}, iter("a")])
def test_what_gives_no_name_is_refused_at_the_call(given: Any, names: list[str]) -> None:
    @locked(key=lambda: given)
    def work() -> None: ...

    words = "the key of .*{} must give a non-empty str, or a list of them, not "
    with pytest.raises(ValueError, match=words.format("work")):
        work()
    with pytest.raises(ValueError, match=words.format("a with block")), locked(key=lambda: given):
        pass
    with pytest.raises(ValueError, match="must give a non-empty str, not ''"):
        locked("{name}")(lambda name: None)("")
    assert not names


@pytest.mark.parametrize("template", ["{pk}", "{user.pk}", "{user[pk]}"])
def test_a_template_that_this_call_does_not_fit_is_refused_at_the_call(template: str) -> None:
    @locked(template)
    def work(**kwargs: Any) -> None: ...

    with pytest.raises(ValueError, match=r"arguments: .* \(it has: user, kwargs\)"):
        work(user=(1,))


def test_a_call_the_function_does_not_take_is_refused_as_usual() -> None:
    @locked("{pk}")
    def work(pk: int) -> None: ...

    with pytest.raises(TypeError, match=r"<locals>\.work\(\): missing .* argument: 'pk'"):
        work()


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"exit_code": 3}, {"unavailable_exit_code": 3}, {"status_code": 503}]
)
def test_what_is_no_view_and_no_command_has_no_such_answer(options: dict[str, Any]) -> None:
    async def on_its_own() -> None: ...

    for target in (on_its_own, lambda: None):
        with pytest.raises(TypeError, match="means nothing for a function without arguments"):
            locked("x", **options)(target)
    locked("x", **options)(lambda command_or_request: None)


# -- what cannot be decorated ------------------------------------------------------------------


async def async_generator() -> AsyncIterator[int]:
    yield 1


def generator() -> Iterator[int]:
    yield 1


class CallableGenerator:
    def __call__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    "target",
    [async_generator, generator, functools.partial(generator), CallableGenerator().__call__],
)
def test_what_runs_after_the_lock_is_released_is_refused(target: Any) -> None:
    """Calling these only makes something that runs later, when the lock is long gone."""
    with pytest.raises(TypeError, match=r"a call returns a generator"):
        locked("x")(target)


def test_a_partial_needs_a_name() -> None:
    def work(pk: int, size: int) -> None: ...

    partial = functools.partial(work, size=3)
    assert name(locked("work-{pk}-{size}")(partial), 7) == "work-7-3"
    with pytest.raises(TypeError, match="has no dotted name"):
        locked(partial)


def test_a_lambda_needs_a_name() -> None:
    """All lambdas of a module have the same dotted name."""
    assert name(locked("work-{pk}")(lambda pk: pk), 7) == "work-7"
    for decorate in (locked, locked(label="x"), cached):
        with pytest.raises(TypeError, match=r"<lambda>.* has no dotted name .*: give a key"):
            decorate(lambda: 1)

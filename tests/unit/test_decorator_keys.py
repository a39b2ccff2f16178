"""``locked()`` at decoration: the lock's name, and options that make no sense."""

from __future__ import annotations

import functools
import math
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
    @locked("{pk}-{args}")
    def work(*args: Any, **kwargs: Any) -> None: ...

    assert name(work, 1, pk=7) == "7-(1,)"


def test_positional_arguments() -> None:
    @locked("{first}-{rest[0]}")
    def work(first: int, /, *rest: int) -> None: ...

    assert name(work, 1, 2) == "1-2"


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
        ("{pk", "'}'"),
        ("pk}", "'}'"),
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
def test_a_callable_that_gives_no_name_is_refused_at_the_call(given: Any, names: list[str]) -> None:
    @locked(key=lambda: given)
    def work() -> None: ...

    words = "the key of .*{} must give a non-empty str, or a list of them, not "
    with pytest.raises(ValueError, match=words.format("work")):
        work()
    with pytest.raises(ValueError, match=words.format("a with block")), locked(key=lambda: given):
        pass
    assert not names


def test_a_template_that_gives_nothing_is_refused_at_the_call(names: list[str]) -> None:
    @locked("{name}")
    def work(name: str) -> None: ...

    with pytest.raises(ValueError, match="must give a non-empty str, not ''"):
        work("")
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
    ("options", "words"),
    [
        ({"timeout": 0}, "timeout must be a number of seconds greater than 0, or None"),
        ({"timeout": -1}, "timeout must be"),
        ({"timeout": math.nan}, "timeout must be"),
        ({"timeout": math.inf}, "timeout must be"),
        ({"timeout": "30"}, "timeout must be"),
        ({"timeout": True}, "timeout must be"),
        ({"blocking_timeout": 5}, "blocking_timeout needs blocking=True"),
        ({"replicas": -1}, "replicas must be a whole number of 0 or more"),
        ({"replicas": True}, "replicas must be a whole number of 0 or more"),
        ({"replicas": 1, "using": ["a", "b", "c"]}, "replicas are for a lock on one server"),
        ({"blocking": True, "blocking_timeout": -1}, "blocking_timeout must be"),
        ({"blocking": True, "blocking_timeout": "5"}, "blocking_timeout must be"),
        ({"min_hold": -1}, "min_hold must be"),
        ({"min_hold": None}, "min_hold must be"),
        ({"max_hold": 0}, "max_hold must be"),
        ({"max_hold": 5, "min_hold": 6}, "min_hold must not be longer than max_hold"),
        ({"max_hold": 5, "timeout": None}, "max_hold needs a timeout"),
        ({"on_conflict": "skip"}, "on_conflict must be callable"),
        ({"on_conflict": print, "default": None}, "give either on_conflict or default"),
        ({"on_lost": "stop"}, 'on_lost must be callable or "terminate"'),
        ({"release": "commit"}, 'release must be "transaction" or "now"'),
        ({"using": 5}, "using must be the alias of a cache"),
        ({"label": 5}, "label must be a str"),
        ({"group": 5}, "group must be a str or None"),
        ({"group": "a\nb"}, "group must have 1 to 200 printable characters"),
        ({"lost_exit_code": 256}, "lost_exit_code must be"),
        ({"status_code": 99}, "status_code must be"),
        ({"status_code": 600}, "status_code must be"),
        ({"status_code": "409"}, "status_code must be"),
        ({"exit_code": -1}, "exit_code must be"),
        ({"exit_code": 256}, "exit_code must be"),
        ({"exit_code": None}, "exit_code must be"),
        (
            {"expire": 3},
            r"locked\(\) has no option 'expire'; write timeout=, in seconds; it has key, using",
        ),
        ({"name": "x"}, "has no option 'name'"),
    ],
)
def test_wrong_options_are_refused_at_decoration(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        locked("x", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": None},
        {"timeout": 0.5, "max_hold": 60},
        {"blocking": True},
        {"blocking": True, "blocking_timeout": 0},
        {"min_hold": 5, "max_hold": 5},
        {"exit_code": 0},
        {"exit_code": 255},
        {"status_code": 503},
        {"on_conflict": print},
        {"default": None},
        {"on_lost": print},
        {"release": "now"},
    ],
)
def test_good_options_are_taken(options: dict[str, Any]) -> None:
    assert callable(locked("x", **options))


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


@pytest.mark.parametrize("target", [User, int, Exception])
def test_other_classes_are_refused(target: Any) -> None:
    with pytest.raises(TypeError, match="functions, views, management commands and tasks, not"):
        locked(target)


@pytest.mark.parametrize("target", [5, None, "name", property(lambda self: 1)])
def test_what_cannot_be_called_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match="of a lock it takes the name"):
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

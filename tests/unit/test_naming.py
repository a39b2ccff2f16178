"""Names made from the arguments of a call: never the same for different ones."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import types
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from ipaddress import ip_network
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.sessions.models import Session
from django.db.models import Q, TextChoices
from django.http import QueryDict
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st

from django_redis_lock.decorators.key_template import (
    MAX_NAME_CHARACTERS,
    Template,
    namer,
    names_of,
    short,
)


def name(template: str, **values: Any) -> str:
    def function(**kwargs: Any) -> None: ...

    made = namer(template, function, "shop.function")
    return made((), values) if callable(made) else made


@pytest.mark.parametrize(
    ("template", "values", "wanted"),
    [
        ("{a}-{b}", {"a": "x-y", "b": "z"}, "x%2Dy-z"),
        ("{a}-{b}", {"a": "x", "b": "y-z"}, "x-y%2Dz"),
        ("{a}-{b}", {"a": "x", "b": "y"}, "x-y"),
        ("{a}: {b}", {"a": "x: y", "b": "100%"}, "x%3A y: 100%25"),
        ("{a}→{b}", {"a": "x→y", "b": "z"}, "x%E2%86%92y→z"),
        ("{a}1-{b}", {"a": "x1", "b": "1-2"}, "x11-1%2D2"),
        # With one field there is nothing to take it for.
        ("order-{a}-lines", {"a": "x-y%"}, "order-x-y%-lines"),
    ],
)
def test_values_that_could_be_taken_for_others_are_escaped(
    template: str, values: dict[str, Any], wanted: str
) -> None:
    assert name(template, **values) == wanted


TEXTS = st.text(alphabet="ab-:%2D/", max_size=4)
SEPARATORS = ("-", ":", "--", "-:", "%-", "2-", "/%2D")


@given(st.sampled_from(SEPARATORS), st.sampled_from(SEPARATORS), st.data())
def test_different_values_never_give_the_same_name(one: str, two: str, data: Any) -> None:
    template = Template(f"a{{a}}{one}{{b}}{two}{{c}}-")
    values = st.fixed_dictionaries(dict.fromkeys("abc", TEXTS))
    first, second = data.draw(values), data.draw(values)
    same = template.fill(first) == template.fill(second)
    assert same == (first == second)


def test_all_short_values_have_different_names() -> None:
    texts = ["".join(t) for n in range(3) for t in itertools.product("-%2D", repeat=n)]
    values = list(itertools.product(texts, repeat=2))
    for separator in SEPARATORS:
        template = Template(f"{{a}}{separator}{{b}}")
        assert len({template.fill({"a": a, "b": b}) for a, b in values}) == len(values)


@pytest.mark.parametrize("template", ["{a}{b}", "{a}2{b}", "{a}%{b}", "x-{a}{b!r}"])
def test_fields_with_nothing_between_them_are_refused(template: str) -> None:
    with pytest.raises(ValueError, match="put a separator such as '-' between the fields"):
        name(template)


@pytest.mark.parametrize("length", [MAX_NAME_CHARACTERS + 1, MAX_NAME_CHARACTERS + 2, 10_000])
def test_a_long_name_ends_in_a_hash(length: int) -> None:
    long = "order-" + "x" * (length - 6)
    shortened = name("order-{a}", a=long[6:])
    assert len(shortened) == MAX_NAME_CHARACTERS + 1
    assert shortened.startswith("order-xxxxx")
    assert shortened == short(long) != short(long[:-1] + "y")
    assert short(shortened) != shortened
    assert name("order-{a}", a="x" * (MAX_NAME_CHARACTERS - 6)) == long[:MAX_NAME_CHARACTERS]


@pytest.mark.parametrize(
    ("key", "names"),
    [
        (("a", "b"), ("a", "b")),
        (("a", "b-{x}"), ("a", "b-1")),
        (("{x}", "b"), ("1", "b")),
        ("b-{x}", "b-1"),
        ("b", "b"),
        (lambda x: [f"row-{x}", "b"], ("row-1", "b")),
        (lambda x: f"row-{x}", "row-1"),
    ],
)
def test_several_names_with_fields_and_without(key: Any, names: Any) -> None:
    made = names_of(key, lambda x: x, "shop.function")
    assert (made((), {"x": 1}) if callable(made) else made) == names


def test_a_long_name_is_the_same_in_each_version() -> None:
    """In a rolling deployment, two versions must exclude each other."""
    assert short("x" * 201) == f"{'x' * 168}~12bf1cc881648017342067435dc826c6"


class Thing:
    pk = 7

    def __str__(self) -> str:
        return "named"


@dataclasses.dataclass
class Point:
    tags: Any


class Row(NamedTuple):
    tags: Any


class Pixel(enum.Enum):
    RED = 1


class Colour(TextChoices):
    RED = "red"


class Level(enum.IntEnum):
    ONE = 1


#: What has no text that tells it from all others, in each process.
OTHERS = [
    *({"a", "b"}, frozenset("ab"), {"a": 1}, {"a": 1}.keys(), deque("ab"), iter("ab"), range(3)),
    *(Thing(), Point(7), object(), print, lambda: 1, Decimal, 1j, bytearray(b"x"), timedelta(1)),
    *(Session.objects.all(), Q(pk=1), QueryDict("a=1"), gettext_lazy("red"), PurePosixPath("a")),
    *(ip_network("10.0.0.0/8"), types.SimpleNamespace(tags=7), Fraction(1, 3)),
]
CONTAINERS: list[Callable[[Any], Any]] = [
    *(lambda value: value, lambda value: [value], lambda value: (1, [value])),
    *(Row, lambda value: SimpleLazyObject(lambda: value)),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("container", CONTAINERS)
def test_what_is_not_of_the_closed_set_is_refused(
    container: Callable[[Any], Any], value: Any
) -> None:
    for template in ("thing-{a}", "thing-{a!r}", "thing-{a!s:>20}"):
        for typed in (False, True):
            with pytest.raises(ValueError, match=r"\{a\} .*name an attribute.*or give a function"):
                Template(template, typed).fill({"a": container(value)})


def saved(kind: Any, database: str = "default", **fields: Any) -> Any:
    made = kind(**fields)
    made._state.adding, made._state.db = False, database
    return made


@pytest.mark.parametrize(
    ("value", "wanted", "typed"),
    [
        ("a", "a", "a"),
        (mark_safe("a"), "a", "a"),
        (Colour.RED, "red", "red"),
        (7, "7", "%(int)7"),
        (Level.ONE, "1", "%(int)1"),
        (True, "True", "%(bool)True"),
        (None, "None", "%(None)None"),
        (1.5, "1.5", "%(float)1.5"),
        (b"x", "b'x'", "%(bytes)b'x'"),
        (Decimal("1.50"), "1.50", "%(object)1.50"),
        (date(2024, 5, 1), "2024-05-01", "%(object)2024-05-01"),
        (datetime(2024, 5, 1, 9), "2024-05-01 09:00:00", "%(object)2024-05-01 09:00:00"),
        (time(9, 30), "09:30:00", "%(object)09:30:00"),
        (UUID(int=7), str(UUID(int=7)), f"%(object){UUID(int=7)}"),
        (Pixel.RED, "Pixel.RED", "%(object)Pixel.RED"),
        (AnonymousUser(), "AnonymousUser", "%(object)AnonymousUser"),
        (
            ["a", 1, None, 1.5, b"x"],
            "['a', 1, None, 1.5, b'x']",
            "%(list)['a', 1, None, 1.5, b'x']",
        ),
        ((1, [2]), "(1, [2])", "%(tuple)(1, [2])"),
        ((7,), "(7,)", "%(tuple)(7,)"),
        (Row(7), "(7,)", "%(tuple)(7,)"),
        (saved(User, pk=7, username="a"), "auth.user:7", "%(auth.user)7"),
        (saved(User, "other", pk=7), "auth.user@other:7", "%(auth.user@other)7"),
        ([saved(User, pk=7)], "[auth.user('7')]", "%(list)[auth.user('7')]"),
    ],
)
def test_each_type_of_the_closed_set_has_one_text(value: Any, wanted: str, typed: str) -> None:
    assert Template("{a}").fill({"a": value}) == wanted
    assert Template("{a}", typed=True).fill({"a": value}) == typed


def test_an_object_that_was_read_from_a_replica_is_the_same(settings: Any) -> None:
    class Router:
        def db_for_write(self, model: Any, **hints: Any) -> str:
            return "default"

    assert name("{a}", a=saved(User, "replica", pk=7)) == "auth.user@replica:7"
    settings.DATABASE_ROUTERS = [Router()]
    assert name("{a}", a=saved(User, "replica", pk=7)) == "auth.user:7"


class Form:
    instance = User(username="new")

    def __getitem__(self, name: str) -> Any:
        return self.instance


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{a}", User(username="new")),
        ("{a}", [User(username="new")]),
        ("{a.pk}", User(username="new")),
        ("{a.username}", User(username="new")),
        ("{a.instance.pk}", Form()),
        ("{a[instance].pk}", Form()),
        ("{a[0].pk}", [User()]),
        ("{a!s}", User(username="new")),
        ("{a.pk}", SimpleLazyObject(User)),
    ],
)
def test_an_object_that_is_not_saved_has_no_name(template: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"auth\.User .*not saved, or deleted"):
        name(template, a=value)
    assert name("{a.pk}", a=AnonymousUser()) == "None"


@pytest.mark.parametrize("text", ["invoice-%s", "%d", "%(pk)s", "a-%r-b"])
def test_a_name_in_the_syntax_of_percent_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"as in \{pk\}"):
        Template(text)
    assert Template("100% sure, 50%discount").fill({}) == "100% sure, 50%discount"


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="which is not valid text"):
        name("thing-{a}", a="\ud800")


@pytest.mark.parametrize("template", ["{pk", "pk}", "{pk!x}"])
def test_what_is_no_template_says_how_to_write_a_brace(template: str) -> None:
    with pytest.raises(ValueError, match=r"brace|conversion"):
        name(template, pk=1)

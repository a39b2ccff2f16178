"""Names made from the arguments of a call: never the same for different ones."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from decimal import Decimal
from ipaddress import ip_network
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from django.contrib.sessions.models import Session
from django.http import QueryDict
from django.utils.functional import SimpleLazyObject
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


class Named(Thing):
    def __str__(self) -> str:
        return "named"


@dataclasses.dataclass
class Point:
    tags: Any
    cached: Any = dataclasses.field(default=0, repr=False)


@dataclasses.dataclass
class NamedPoint(Point):
    def __str__(self) -> str:
        return "named"


class Array(Named):
    """As of numpy: from a thousand items on, its text has ``...`` in the middle."""

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[int]:
        return iter(range(1000))


class Row(NamedTuple):
    tags: Any


OTHERS = [
    *({"a", "b"}, frozenset("ab"), {"a": 1}.keys(), {"a": 1}.values(), deque("ab"), iter("ab")),
    *(Thing(), object(), print.__call__, print, lambda: 1, (n for n in "ab")),
    *(
        Array(),
        Session.objects.all(),
        types.SimpleNamespace(tags={"a", "b"}),
        types.MappingProxyType({"a": {1}}),
    ),
]
CONTAINERS: list[Callable[[Any], Any]] = [
    *(lambda value: value, lambda value: [value], lambda value: (1, [value])),
    *(lambda value: {"a": value}, lambda value: defaultdict(list, a=value)),
    *(Point, Row, lambda value: SimpleLazyObject(lambda: value)),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_text_that_differs_between_processes_or_is_cut_short_is_refused(
    container: Callable[[Any], Any], value: Any
) -> None:
    words = rf"\{{a\}} .*{type(value).__name__}.* differ between processes"
    for template in ("thing-{a}", "thing-{a!r}"):
        with pytest.raises(ValueError, match=words):
            name(template, a=container(value))


def test_an_address_in_a_text_is_refused() -> None:
    class Wrong:
        def __str__(self) -> str:
            return repr(self)

    for value in (Wrong(), [Named()]):
        with pytest.raises(ValueError, match="which differs between processes"):
            name("thing-{a}", a=value)


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        *((None, "None"), (True, "True"), (1.5, "1.5"), (b"x", "b'x'"), (range(3), "range(0, 3)")),
        *((Decimal("1.50"), "1.50"), (date(2024, 5, 1), "2024-05-01"), (UUID(int=7), UUID(int=7))),
        *((timedelta(1), "1 day, 0:00:00"), (ip_network("10.0.0.0/8"), "10.0.0.0/8")),
        *((Color.RED, "Color.RED"), (PurePosixPath("a/b"), "a/b"), (Decimal, "<class 'decimal.D")),
        *((Named(), "named"), (NamedPoint({1}), "named"), (SimpleLazyObject(Named), "named")),
        *((["a", 1], "['a', 1]"), ((1, [2]), "(1, [2])"), (Row(7), "Row(tags=7)")),
        *((Point([7], {1}), "Point(tags=[7])"), (Session(pk="7"), "7")),
        (QueryDict("a=1&a=2"), "<QueryDict: {'a': ['1', '2']}>"),
    ],
)
def test_plain_values_and_those_with_a_text(value: Any, wanted: Any) -> None:
    assert name("thing-{a}", a=value).startswith(f"thing-{wanted}")


def test_the_order_of_a_dict_makes_no_difference() -> None:
    assert name("{a}", a={"y": 1, 2: {"d": 3, "c": 4}}) == "{'y': 1, 2: {'c': 4, 'd': 3}}"
    assert name("{a}", a=[{2: {"c": 4, "d": 3}, "y": 1}]) == "[{'y': 1, 2: {'c': 4, 'd': 3}}]"


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="which is not valid text"):
        name("thing-{a}", a="\ud800")


@pytest.mark.parametrize("template", ["{pk", "pk}", "{pk!x}"])
def test_what_is_no_template_says_how_to_write_a_brace(template: str) -> None:
    with pytest.raises(ValueError, match=r"brace|conversion"):
        name(template, pk=1)

"""``@cached("search-{q}")``: a value that is no text does not share a key with its text, nor with a
value of another type; text is as it was, and the names of locks are."""

from __future__ import annotations

import datetime
import enum
import itertools
import uuid
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from django.contrib.auth.models import AnonymousUser, Group, User
from django.db.models import IntegerChoices, TextChoices
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import mark_safe

from django_redis_lock.decorators.key_template import Template, namer

ONE, ANOTHER = uuid.uuid4(), datetime.date(2024, 1, 1)


class Masked(str):
    """A text that hides itself where it is shown."""

    def __str__(self) -> str:
        return "***"


class Pair(NamedTuple):
    user: Any
    number: int = 1


#: Objects of the database with one text, and such whose primary keys are texts.
OBJECTS = [
    *(User(pk=1, username="sam"), User(pk=2, username="sam"), Group(pk=1, name="sam")),
    *(User(pk=pk) for pk in ("1)x", "1%29x", "1-x", "%1", "1'", "1', '2", "(1", "auth.user")),
]
#: Values that must not share a key.
DIFFERENT: list[Any] = [
    *(None, "None", "", b"None"),
    *(True, "True", False, "False"),
    *(1, "1", 1.0, "1.0", "01", Decimal("1.0"), -1, "-1"),
    *(float("nan"), "nan", float("inf"), "inf"),
    *(b"1", "b'1'", (1,), [1], ["1"], [None], ["None"], "[1]", "(1,)", "{'a': 1}"),
    *(ONE, str(ONE), ANOTHER, str(ANOTHER)),
    *([Masked("a")], (Masked("a"),), [Masked("b")], [[Masked("b")]]),
    *("%(int)1", "%25(int)1", "%2525(int)1", "%(None)None", "%(bool)True", "%", "%25", "%(", "("),
    *("%28int)1", "100%", "%(object)1.0", "a-b", "a", "é %(int)1"),
    *(*OBJECTS, AnonymousUser(), "sam", "auth.user:1", "AnonymousUser"),
    *([each] for each in OBJECTS),
    *((each,) for each in OBJECTS),
    *([1, [each]] for each in OBJECTS),
    *(Pair(each) for each in OBJECTS),
    *(OBJECTS[:2], OBJECTS[1::-1]),
]


class Level(IntegerChoices):
    ONE = 1


class Number(enum.IntEnum):
    ONE = 1


class Colour(TextChoices):
    RED = "red"


class Text(str):
    pass


#: Values of which each stands for the first.
SAME: list[list[Any]] = [
    [1, Level.ONE, Number.ONE],
    ["red", Colour.RED, Text("red"), mark_safe("red")],
    [["red"], [mark_safe("red")]],
    [None, SimpleLazyObject(lambda: None)],
    [User(pk=5), SimpleLazyObject(lambda: User(pk=5)), User(pk=5, username="renamed")],
    [[User(pk=5)], [SimpleLazyObject(lambda: User(pk=5))], [User(pk=5, username="renamed")]],
]


def name(value: Any, template: str = "search-{q}", typed: bool = True) -> Any:
    made: Any = namer(template, lambda q, other="x": q, "f", typed=typed)
    return made((value,), {})


@pytest.mark.parametrize("template", ["search-{q}", "{q}", "search-{q}.{other}", "{q}i{other}"])
def test_different_values_have_different_keys(template: str) -> None:
    made = [name(value, template) for value in DIFFERENT if value != "" or template != "{q}"]
    assert len(set(made)) == len(made)


def test_two_values_in_one_key() -> None:
    made: Any = namer("{q}-{other}", lambda q, other: q, "f", typed=True)
    pairs = list(itertools.product(DIFFERENT, repeat=2))
    assert len({made(pair, {}) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize("values", SAME, ids=["int", "text", "list", "None", "object", "objects"])
def test_values_that_stand_for_each_other_share_a_key(values: list[Any]) -> None:
    assert len({name(value) for value in values}) == 1


@pytest.mark.parametrize("text", ["", "red", "None", "1", "100%", "%", "%41", "50%(off)", "é", "-"])
def test_text_is_as_it_was(text: str) -> None:
    for template in ("search-{q}", "search-{q}-{other}"):
        assert name(text, template) == name(text, template, typed=False)


def test_a_conversion_or_a_format_says_what_it_wants() -> None:
    for template in ("search-{q!s}", "search-{q:d}", "search-{q!r}"):
        assert name(7, template) == "search-7"
    assert name("7", "search-{q!s}") == "search-7"
    assert name(OBJECTS[0], "search-{q!s}") == "search-sam"


def test_attributes_and_items() -> None:
    template = Template("{q.pk}/{q.tags[0]}", typed=True)
    values = [SimpleNamespace(pk=pk, tags=[tag]) for pk, tag in [(1, 1), ("1", 1), (1, "1")]]
    made = [template.fill({"q": value}) for value in values]
    assert made == ["%(int)1/%(int)1", "1/%(int)1", "%(int)1/1"]

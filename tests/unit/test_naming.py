"""Names made from the arguments of a call: never the same for different ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_redis_lock.decorators.key_template import MAX_NAME_CHARACTERS, Template, namer, short


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


class Thing:
    pk = 7


@pytest.mark.parametrize(
    "value", [Thing(), [Thing()], object(), print.__call__, lambda: 1, {"a": Thing()}]
)
def test_a_text_that_differs_between_processes_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="which differs between processes"):
        name("thing-{a}", a=value)
    assert name("thing-{a.pk}", a=Thing()) == "thing-7"


@pytest.mark.parametrize("value", [{"a", "b"}, frozenset("ab")])
def test_an_order_that_differs_between_processes_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="is a set, whose order differs"):
        name("thing-{a}", a=value)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="which is not valid text"):
        name("thing-{a}", a="\ud800")


@pytest.mark.parametrize("template", ["{pk", "pk}", "{pk!x}"])
def test_what_is_no_template_says_how_to_write_a_brace(template: str) -> None:
    with pytest.raises(ValueError, match=r"brace|conversion"):
        name(template, pk=1)

"""Figures as they are counted, kept and read; and the charts made of them. No Redis runs here."""

from __future__ import annotations

import random
import time
import xml.etree.ElementTree as ET

import pytest

from django_redis_lock.contrib.metrics import (
    BOUNDS,
    Distribution,
    figures,
    histogram_svg,
    sparkline_svg,
)
from django_redis_lock.contrib.metrics.collecting import observe
from django_redis_lock.events import group_of
from django_redis_lock.formatting import ENGLISH

SVG = "{http://www.w3.org/2000/svg}"


def distribution(*seconds: float) -> Distribution:
    counted = figures.new()
    for each in seconds:
        observe(counted, figures.HOLDS, each)
    return Distribution.of(counted, figures.HOLDS)


# -- figures -----------------------------------------------------------------------------------


def test_what_redis_keeps_is_what_was_counted() -> None:
    counted = figures.new()
    for place in range(len(counted)):
        counted[place] = place * 1000
    assert figures.unpack(figures.pack(counted)) == counted


def test_a_class_ends_at_its_bound() -> None:
    counts = distribution(0.0, 0.0001, 0.00011, 3600.0, 3600.1, 1e6).counts
    assert counts[0] == 2
    assert counts[1] == 1
    assert counts[-2:] == (1, 2)
    assert sum(counts) == 6


def test_what_few_or_long_times_allow_to_say() -> None:
    empty = distribution()
    assert (empty.count, empty.average, empty.quantile(0.95)) == (0, None, None)
    assert distribution(*[1.0] * 19).p95 is None
    assert distribution(*[1.0] * 20).p95 is not None
    assert distribution(1e6).quantile(0.95) == BOUNDS[-1]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 1.0])
def test_a_quantile_lies_in_the_class_of_the_true_one(share: float) -> None:
    random.seed(share)
    seconds = sorted(random.lognormvariate(-3, 2) for _ in range(1000))
    true = seconds[max(0, round(share * 1000) - 1)]
    found = distribution(*seconds).quantile(share)
    assert found is not None
    upper = next(bound for bound in BOUNDS if bound >= true)
    lower = max((bound for bound in BOUNDS if bound < true), default=0.0)
    assert lower <= found <= upper


@pytest.mark.parametrize("longest", [0.0021, 31.0, 5000.0])
def test_no_quantile_is_above_the_longest(longest: float) -> None:
    kept = figures.new()
    for _ in range(30):
        observe(kept, figures.HOLDS, longest)
    read = figures.unpack(figures.pack(kept))
    found = Distribution.of(read, figures.HOLDS)
    assert (found.p95, found.largest) == (min(longest, BOUNDS[-1]), longest)
    figures.add(read, kept)  # Of another process: the longest is no sum.
    assert Distribution.of(read, figures.HOLDS).largest == longest


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("import", "import"),
        ("invoice-17", "invoice-*"),
        ("1b4e28ba-2fa1-11d2-883f-0016d3cca427", "*"),
        ("page.9f86d081884c7d659a2feaa0c55ad015.en", "page.*.en"),
        ("facade", "facade"),
        ("a\nb", "a\\nb"),
        ("\udc80", "\\udc80"),
        ("x" * 300, "x" * 200),
        ("", ""),
    ],
)
def test_the_group_of_a_name(name: str, group: str) -> None:
    assert group_of(name) == group


@pytest.mark.parametrize("part", ["x", "a-", "abcdef12-", "7" * 99 + " "])
def test_a_name_that_a_visitor_makes_long_costs_no_time(part: str) -> None:
    began = time.process_time()
    group_of(part * (5_000_000 // len(part)))
    assert time.process_time() - began < 0.5


# -- charts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 µs"),
        (0.00025, "250 µs"),
        (0.001, "1 ms"),
        (0.0025, "2.5 ms"),
        (0.9999, "1 s"),
        (30.0, "30 s"),
        (60.0, "1 min"),
        (90.0, "1 min 30 s"),
        (1800.0, "30 min"),
        (7200.0, "2 h"),
    ],
)
def test_times_are_shown_in_the_unit_people_use(seconds: float, shown: str) -> None:
    assert ENGLISH.measured(seconds) == shown


CHARTS = [
    histogram_svg(distribution(), "Nothing"),
    histogram_svg(distribution(0.002), "Once"),
    histogram_svg(distribution(*(0.001 * n for n in range(1, 200)), 1e6), "HolderInfo"),
    histogram_svg(distribution(*BOUNDS), "All"),
    sparkline_svg((), "Nothing"),
    sparkline_svg((5,), "One"),
    sparkline_svg((0, 3, 9, 1), "Some"),
]


@pytest.mark.parametrize("chart", CHARTS)
def test_a_chart_is_accessible_and_does_without_style_and_script(chart: str) -> None:
    svg = ET.fromstring(chart)
    assert svg.get("role") == "img"
    named = (svg.get("aria-labelledby") or "").split()
    texts = {element.get("id"): element.text for element in svg.iter() if element.get("id")}
    assert len(named) == 2
    assert all(texts[name] for name in named)
    for element in svg.iter():
        assert not set(element.attrib) & {"style", "onclick", "onload"}
        assert element.tag.removeprefix(SVG) not in {"style", "script", "foreignObject", "image"}


@pytest.mark.parametrize("evil", ["</title><script>alert(1)</script>", '"><b>', "a & b", "\udc80"])
def test_a_title_cannot_inject_anything(evil: str) -> None:
    for chart in (histogram_svg(distribution(1), evil, evil), sparkline_svg((1, 2), evil, evil)):
        svg = ET.fromstring(chart.encode(errors="replace").decode())
        assert not list(svg.iter(f"{SVG}script"))
        assert svg[0].text == evil.encode(errors="replace").decode()

"""Tables and words of the commands."""

from __future__ import annotations

import math
from io import StringIO
from operator import itemgetter
from typing import Any

import pytest
from django.core.management.base import BaseCommand

from django_redis_lock.management import Column, actions, clip, duration, table, width_of

COLUMNS = (
    Column("NAME", itemgetter(0), shrinks=True),
    Column("HELD", itemgetter(1), right=True),
    Column("BY", itemgetter(2), shrinks=True),
)
ROWS = (
    ("invoice-4711", "4m 12s", "web-1:17"),
    ("import-from-the-supplier/2026-11-21", "3s", "worker-2:4711 (nightly)"),
)


def test_a_table_is_as_wide_as_its_texts_where_there_is_room() -> None:
    assert table(COLUMNS, ROWS, None) == [
        "NAME                                   HELD  BY",
        "invoice-4711                         4m 12s  web-1:17",
        "import-from-the-supplier/2026-11-21      3s  worker-2:4711 (nightly)",
    ]


def test_what_is_too_wide_loses_its_middle() -> None:
    assert table(COLUMNS, ROWS, 50) == [
        "NAME                    HELD  BY",
        "invoice-4711          4m 12s  web-1:17",
        "import-fro…026-11-21      3s  worker-2:4…(nightly)",
    ]


def test_a_table_that_cannot_shrink_any_more_stays_readable() -> None:
    lines = table(COLUMNS, ROWS, 10)
    assert lines[2] == "impo…-21      3s  work…ly)"


def test_colours_do_not_count() -> None:
    command = BaseCommand(stdout=StringIO(), force_color=True)
    head, first, second = actions._table(command, COLUMNS, ROWS, [command.style.ERROR, str], None)
    plain = table(COLUMNS, ROWS, None)
    assert head == command.style.MIGRATE_HEADING(plain[0]) != plain[0]
    assert first == command.style.ERROR(plain[1]) != plain[1]
    assert second == plain[2]


@pytest.mark.parametrize(
    ("text", "width", "clipped"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdef", 5, "ab…ef"),
        ("abcdef", 4, "ab…f"),
        ("報告書報告書", 12, "報告書報告書"),
        ("報告書報告書", 9, "報告…告書"),
        ("報告書報告書", 8, "報告…書"),
    ],
)
def test_wide_characters_take_two_cells(text: str, width: int, clipped: str) -> None:
    assert clip(text, width) == clipped


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert width_of(StringIO()) is None
    assert width_of(Terminal()) == 70
    closed = Terminal()
    closed.close()
    assert width_of(object()) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "?"),
        (math.inf, "forever"),
        (0.9, "0s"),
        (59.9, "59s"),
        (252, "4m 12s"),
        (11_100, "3h 5m"),
        (90_000 * 2, "2d 2h"),
    ],
)
def test_durations(seconds: Any, words: str) -> None:
    assert duration(seconds) == words

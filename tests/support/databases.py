"""Two databases in files, each with an account; and a test of Django around what is done there."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.db import connections
from django.test import TestCase

DATABASES = ("shop", "till")


def use(folder: Path, **options: Any) -> None:
    """Have two databases, in files."""
    for alias in DATABASES:
        as_default = connections.settings["default"]
        name = str(folder / f"{alias}.sqlite3")
        connections.settings[alias] = {**as_default, "NAME": name, **options}


def forget() -> None:
    for alias in DATABASES:
        connections[alias].close()
        del connections[alias], connections.settings[alias]


@contextmanager
def accounts(folder: Path) -> Iterator[None]:
    """Two databases in which an account holds nothing."""
    use(folder)
    for alias in DATABASES:
        execute("CREATE TABLE account (balance integer)", alias)
        execute("INSERT INTO account VALUES (0)", alias)
    yield
    forget()


def in_test_case(body: Callable[[TestCase], None]) -> None:
    """Call ``body`` in the transactions that Django's TestCase opens around a test."""

    class Tests(TestCase):
        databases = frozenset({"shop"})

        def runTest(self) -> None:
            body(self)

    result = unittest.TestResult()
    Tests.setUpClass()
    try:
        Tests().run(result)
    finally:
        Tests.tearDownClass()
        Tests.doClassCleanups()  # Else no later test could use another database.
    assert result.wasSuccessful(), (result.errors, result.failures)


def execute(sql: str, using: str = "shop") -> Any:
    with connections[using].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()


def balance() -> int:
    return int(execute("SELECT balance FROM account")[0])

"""``manage.py locks`` as from a shell, and locks for it to list."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.core.management import BaseCommand

from django_redis_lock import Lock
from django_redis_lock.management.commands.locks import Command
from tests.holding import hurry
from tests.processes import PATIENCE, until

Run = Callable[..., tuple[int, str, str]]

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "commands.md").read_text()
TABLE = TEXT.split("\n## JSON\n")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| (.*?) \| (.*) \|$", TABLE, re.MULTILINE)
FIELDS = {of.replace("`", ""): set(re.findall(r"`(\w+)`", told)) for of, told in ROWS}
#: Of a group the page names two fields more than the other page has attributes, and three less.
FIGURES = (DOCS / "monitoring.md").read_text().partition("| attribute of a `Summary` |")[2]
FIRST_CELLS = re.findall(r"^\| ([^|]*) \|", FIGURES.partition("\n\n")[0], re.MULTILINE)
FIELDS["a group"] ^= set(re.findall(r"`(\w+)`", " ".join(FIRST_CELLS)))


def check(of: str, *objects: dict[str, Any]) -> None:
    """The fields of what programs read are those of docs/commands.md."""
    assert objects
    for one in objects:
        assert set(one) == FIELDS[of], of


def called(command: BaseCommand, capfd: Any, *words: str) -> tuple[int, str, str]:
    """As from a shell: exit code, standard output and error."""
    code: Any = 0
    try:
        command.run_from_argv(["manage.py", *words])
    except SystemExit as end:
        code = end.code
    return (code, *capfd.readouterr())


@pytest.fixture
def run(capfd: Any) -> Run:
    return lambda *words: called(Command(), capfd, "locks", *words)


@contextmanager
def held(client: redis.Redis, name: str, using: str = "default", **options: Any) -> Iterator[Lock]:
    """A lock that has said who holds it."""
    lock = caches[using].lock(name, **options)
    assert lock.acquire(blocking=False)
    hurry()
    until(lambda: client.exists(lock.keys.owner))
    yield lock
    lock.raise_on_release_error = False
    lock.__exit__(None, None, None)


@contextmanager
def waiting(client: redis.Redis, lock: Lock) -> Iterator[None]:
    """Somebody waits for ``lock``."""
    other = Lock(client, lock.name, timeout=60, limit=lock.limit)
    thread = threading.Thread(target=lambda: other.acquire() and other.release(), name="next")
    thread.start()
    until(lambda: client.zcard(lock.keys.waiters))
    yield
    if lock.owned():
        lock.release()
    thread.join(PATIENCE)

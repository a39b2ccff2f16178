"""The setting USING: one cache for the locks of everything that names none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from django.core.cache import caches
from django.core.management import call_command

from django_redis_lock import current_lock, locked
from django_redis_lock.contention import Conflict
from django_redis_lock.management.commands.locks import Command

KEY = b"locks:lock:1:job"


@pytest.fixture(autouse=True)
def locks_cache(settings: Any) -> None:
    locks = {**settings.CACHES["default"], "KEY_PREFIX": "locks"}
    settings.CACHES = {**settings.CACHES, "locks": locks}
    settings.DJANGO_REDIS_LOCK = {"USING": "locks"}


@locked("job")
def function() -> bytes:
    return current_lock().keys.lock


@locked("job")
async def coroutine() -> bytes:
    return current_lock().keys.lock


def block() -> bytes:
    with locked("job") as lock:
        return lock.keys.lock


@pytest.mark.parametrize("call", [function, lambda: asyncio.run(coroutine()), block])
def test_locked_takes_its_locks_there(call: Callable[[], bytes]) -> None:
    assert call() == KEY
    with locked("job", using="default") as lock:
        assert lock.keys.lock == b":lock:1:job"


def test_run_locked_excludes_locked_and_the_cache_itself(capfd: Any) -> None:
    with caches["locks"].lock("job"), pytest.raises(Exception, match="job is held by"):
        call_command("run_locked", "job", "--", "check")
    with caches["default"].lock("job"):
        call_command("run_locked", "job", "--shell", "--", "echo done")
    assert "done" in capfd.readouterr().out


def test_the_commands_look_there_first(capfd: Any) -> None:
    Command().run_from_argv(["manage.py", "locks", "show", "job"])
    assert "locks:lock:1:job" in capfd.readouterr().out
    assert "--using" not in Conflict("job", using="locks").line()
    assert "--using default" in Conflict("job", using="default").line()

"""The page "Held locks" as a test reads it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import unescape
from typing import Any

import redis
from django.core.cache import caches
from django.http import HttpResponse
from django.test import Client

from django_redis_lock import Lock
from django_redis_lock.ops.inventory.listing import inspect
from tests.holding import hurry
from tests.processes import until

PAGE = "/admin/django_redis_lock/heldlock/"


OURS = "django_redis_lock.cache.RedisCache"


def hold(name: str, alias: str = "default", **options: Any) -> Lock:
    lock: Lock = caches[alias].lock(name, **options)
    assert lock.acquire(blocking=False)
    return lock


def named(lock: Lock, client: redis.Redis) -> Lock:
    """``lock``, as soon as it is said who holds it."""
    hurry()
    until(lambda: client.exists(lock.local.hold.keys.owner))
    return lock


@contextmanager
def queued(name: str, thread: str = "the next one") -> Iterator[Lock]:
    """A thread that waits for the lock ``name``, and holds it then for as long as the block."""
    lock = caches["default"].lock(name, thread_local=False)
    waiter = threading.Thread(target=lambda: lock.acquire(blocking_timeout=60), name=thread)
    waiter.start()
    until(lambda: inspect(lock.redis, lock.keys.lock).waiters)
    try:
        yield lock
    finally:
        lock.reset()
        waiter.join(60)


def text_of(response: HttpResponse) -> str:
    """What a reader sees of the page's main part, with single spaces."""
    assert response.status_code == 200
    main = response.content.decode().partition("<main")[2].partition("</main>")[0]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", main)).split())


def rows_of(response: HttpResponse) -> list[dict[str, str]]:
    """The cells of the table's body, by the columns' names: the first class of each."""
    table = response.content.decode().partition('<table id="result_list"')[2]
    body = table.partition("<tbody")[2].partition("</tbody>")[0]
    body = re.sub(r"<template>.*?</template>", "", body, flags=re.S)
    cell = r'<t[hd][^>]* class="(\w+)[^>]*>(.*?)</t[hd]>'
    rows = []
    for row in body.split("<tr")[1:]:
        texts = {name: re.sub(r"<[^>]*>", " ", held) for name, held in re.findall(cell, row, re.S)}
        rows.append({name: " ".join(unescape(text).split()) for name, text in texts.items()})
    return rows


def state_of(browser: Client, page: str = PAGE, query: Mapping[str, str] | None = None) -> Any:
    """What a refresh by the script of an open page brings."""
    response = browser.get(page, {**(query or {}), "live": "1"})
    assert response.status_code == 200
    return response.context["data"]

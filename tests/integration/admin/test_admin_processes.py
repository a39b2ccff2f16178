"""Locks by process, and who waits for whom, on the admin page."""

from __future__ import annotations

import pytest
import redis
from django.test import Client

from django_redis_lock import Lock
from tests.holding import hurry, silence
from tests.processes import until
from tests.support.admin import PAGE, hold, text_of

pytestmark = pytest.mark.django_db


def held_by(
    client: redis.Redis, name: str, pid: int, thread: str = "MainThread", limit: int = 1
) -> Lock:
    lock = hold(name, timeout=60, limit=limit)
    owner = lock.local.hold.keys.owner
    hurry()
    until(lambda: client.exists(owner))
    client.hset(owner, mapping={"host": "web", "pid": pid, "thread": thread})
    return lock


def wait_for(client: redis.Redis, lock: Lock, pid: int, thread: str = "MainThread") -> None:
    seconds = int(client.time()[0])
    client.zadd(lock.keys.waiters, {f"1 {seconds - 5} {pid} web {thread}": (seconds + 60) * 1000})


def test_what_a_process_holds_and_waits_for(admin_client: Client, client: redis.Redis) -> None:
    first, second = held_by(client, "first", 1), held_by(client, "second", 2)
    held_by(client, "third", 1)
    wait_for(client, first, 2)
    wait_for(client, second, 3)
    text = text_of(admin_client.get(f"{PAGE}processes/"))
    assert text.index("web:1") < text.index("web:2") < text.index("web:3")  # Most locks first.
    assert "second held by web:2 → which waits for first held by web:1" in text
    assert "Deadlock" not in text
    refresh = admin_client.get(f"{PAGE}processes/", {"live": "1"})
    assert "held by web:2" in refresh.content.decode()


def test_a_silent_process_is_marked_as_in_the_list(
    admin_client: Client, client: redis.Redis
) -> None:
    dead = held_by(client, "first", 1)
    held_by(client, "second", 2)
    silence(client, dead.keys.lock, 4000.0)
    for page in (PAGE, f"{PAGE}processes/"):
        assert text_of(admin_client.get(page)).count("silent for") == 1
        assert admin_client.get(page).content.decode().count('data-is="silent"') == 1
    wait_for(client, dead, 2)  # In vain.
    text = text_of(admin_client.get(f"{PAGE}processes/"))
    assert "Waits for first held by web:1 silent for" in text


@pytest.mark.parametrize(
    ("thread", "deadlock"), [("MainThread", True), ("another thread goes on", False)]
)
def test_two_that_wait_for_each_other(
    admin_client: Client, client: redis.Redis, thread: str, deadlock: bool
) -> None:
    first, second = held_by(client, "first", 1, thread), held_by(client, "second", 2)
    wait_for(client, first, 2)
    wait_for(client, second, 1)
    text = text_of(admin_client.get(f"{PAGE}processes/"))
    assert ("Deadlock: the processes in red wait for each other." in text) == deadlock

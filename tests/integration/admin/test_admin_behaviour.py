"""How locks behave, on the admin page: the figures of each group of names, and of each process."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.http import HttpResponse
from django.test import Client

from django_redis_lock import Lock, events
from django_redis_lock.contrib import metrics
from django_redis_lock.history import CrashRecord
from django_redis_lock.ops.admin.rows import Ref
from django_redis_lock.ops.inventory.listing import LOCK
from tests.holding import crash, hurry, silence
from tests.processes import until
from tests.redis_server import RedisServer
from tests.support.admin import OURS, PAGE, hold, named, text_of

pytestmark = pytest.mark.django_db

OF_A_PERIOD = ("acquired", "wait", "hold", "problems")


def figures(response: HttpResponse, period: str = "hour") -> dict[str, dict[str, str]]:
    """The rows of the table, by their names: what they say of one period."""
    assert response.status_code == 200
    section = response.content.decode().partition('id="behaviour"')[2]
    body = section.partition("<tbody")[2].partition("</tbody>")[0]
    found = {}
    for row in body.split("<tr")[1:]:
        cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)
        cells = [re.sub(r"<(title|desc|text).*?</\1>", "", cell, flags=re.S) for cell in cells]
        texts = [" ".join(unescape(re.sub(r"<[^>]*>", " ", cell)).split()) for cell in cells]
        name, held, *rest = texts
        first = ("hour", "day").index(period) * len(OF_A_PERIOD)
        found[name] = {"name": name, "held": held, "cache": rest[8] if rest[8:] else ""}
        found[name].update(zip(OF_A_PERIOD, rest[first:], strict=False))
    return found


@pytest.mark.parametrize("period", ["hour", "day"])
def test_a_lock(admin_client: Client, period: str) -> None:
    for number in range(3):
        with caches["default"].lock(f"invoice-{number}"):
            assert not caches["default"].lock(f"invoice-{number}").acquire(blocking=False)
    hold("invoice-7")
    metrics.flush()
    response = admin_client.get(PAGE)
    row = figures(response, period)["invoice-*"]
    assert (row["held"], row["acquired"], row["problems"]) == ("1", "4", "3 rejected")
    assert re.fullmatch(r"[\d.]+ (µs|ms|s)", row["wait"])  # Too few for 95 %.
    # How many are held leads to them, by their group.
    link = re.search(r'<a href="(\?q=invoice[^"]*)">1</a>', response.content.decode())
    assert link is not None
    listed = admin_client.get(f"{PAGE}{link[1]}").context["data"]["rows"]
    assert [lock["name"] for lock in listed] == ["invoice-7"]
    text = text_of(admin_client.get(listed[0]["url"]))
    assert "Counted together as invoice-*." in text
    assert "Last hour Last day Acquired 4" in text


def test_a_holder_that_crashed_is_counted(admin_client: Client, client: redis.Redis) -> None:
    lock = named(hold("job", timeout=60), client)
    crash(lock)
    client.delete(lock.keys.lock)  # As when its lifetime is over.
    assert caches["default"].lock("job").acquire(blocking=False)
    hurry(CrashRecord)

    def problems() -> str:
        metrics.flush()
        return figures(admin_client.get(PAGE))["job"]["problems"]

    until(lambda: problems() == "1 crashed")


def test_computations(admin_client: Client) -> None:
    for _ in range(4):
        caches["default"].get_or_set("report", lambda: 1, 60)
    metrics.flush()
    row = figures(admin_client.get(PAGE))["report"]
    assert row["acquired"] == "75.0 % hits, 1 computed, 0 saved"


def test_locks_that_were_taken_without_redis(admin_client: Client) -> None:
    lock = caches["default"].lock("export")
    for _ in range(2):
        events.emit(events.FellBack(lock.subject, "local", OSError()))
    with lock:
        metrics.flush()
        row = figures(admin_client.get(PAGE))["export"]
        assert (row["acquired"], row["problems"]) == ("1", "2 without Redis")
        address = f"{PAGE}{Ref('default', lock.keys.lock, LOCK)}/change/"
        assert "2 without Redis" in admin_client.get(address).content.decode()


def test_search_and_filter(admin_client: Client, redis_server: RedisServer, settings: Any) -> None:
    settings.CACHES = {
        "default": {"BACKEND": OURS, "LOCATION": redis_server.url},
        "same": {"BACKEND": OURS, "LOCATION": redis_server.url},
        "site": {"BACKEND": OURS, "LOCATION": redis_server.url, "KEY_PREFIX": "site"},
    }
    for alias, name in (("default", "one"), ("same", "two"), ("site", "three")):
        hold(name, alias).release()
    metrics.flush()

    def found(**query: str) -> list[tuple[str, str]]:
        rows = figures(admin_client.get(PAGE, query)).values()
        return sorted((row["name"], row["cache"]) for row in rows)

    assert {("one", "default"), ("two", "default"), ("three", "site")} <= set(found())
    assert found(q="TW") == [("two", "default")]
    assert ("three", "site") in found(using="site")
    assert ("one", "default") not in found(using="site")


# -- processes ----------------------------------------------------------------------------------


def held_by(
    client: redis.Redis, name: str, pid: int, thread: str = "MainThread", limit: int = 1
) -> Lock:
    lock = named(hold(name, timeout=60, limit=limit), client)
    owner = lock.local.hold.keys.owner
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

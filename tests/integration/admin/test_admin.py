"""The page "Held locks" in Django's admin: what it shows, to whom, and when Redis is away."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest
import redis
from django.contrib.auth.models import Permission, User
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.http import HttpResponse
from django.test import Client

from django_redis_lock.contrib import metrics
from django_redis_lock.history import Heartbeat, note_call
from django_redis_lock.middleware import doing
from django_redis_lock.ops.admin import listing
from django_redis_lock.ops.admin.rows import Choice, Ref, duration
from django_redis_lock.ops.held_locks import shown_id
from django_redis_lock.ops.inventory.listing import LOCK
from django_redis_lock.protocol.holders import Owner
from django_redis_lock.protocol.keys import events_key
from django_redis_lock.transport.server import run
from tests.holding import hurry, settle, silence
from tests.processes import until
from tests.redis_server import RedisServer
from tests.support.admin import OURS, PAGE, hold, named, rows_of, state_of, text_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def staff(client: redis.Redis) -> Iterator[User]:
    return User.objects.create_user("staff", is_staff=True)


@pytest.fixture
def browser(staff: User) -> Client:
    """A logged-in member of the staff without any permission."""
    browser = Client()
    browser.force_login(staff)
    return browser


# -- what it shows -----------------------------------------------------------------------------


def test_held_locks_are_shown_and_free_ones_are_not(admin_client: Client) -> None:
    text = text_of(admin_client.get(PAGE))
    assert "No lock is held at the moment." in text
    assert "0 locks" in text
    locks = [hold(name) for name in ("one", "two", "three")]
    hold("free").release()
    response = admin_client.get(PAGE)
    assert not any(lock.local.token in response.content for lock in locks)
    assert len(rows_of(response)) == 3
    text = text_of(response)
    assert all(name in text for name in ("one", "two", "three"))
    assert "free" not in text
    assert "3 locks" in text
    assert "at least" not in text


def test_what_it_says_of_a_lock(admin_client: Client, client: redis.Redis) -> None:
    lock = hold("report", label="the nightly report", timeout=3600)
    keys = named(lock, client).keys
    client.hset(keys.owner, mapping={"host": "web-1", "pid": 4711, "thread": "Worker-2"})
    client.hincrby(keys.owner, "fence", -7_200_000_000)
    client.zadd(keys.waiters, {"a waiter": (int(client.time()[0]) + 60) * 1000})
    (row,) = rows_of(admin_client.get(PAGE))
    assert row.pop("left").startswith("59 min")
    assert row == {
        "action": "",
        "status": "alive",
        "name": "report the nightly report",
        "holder": "web-1:4711 Worker-2",
        "held": "2 h 0 min",
        "waiting": "1",
    }


def test_all_caches_that_can_lock_are_listed(
    admin_client: Client, redis_server: RedisServer, settings: Any
) -> None:
    settings.CACHES = {
        "default": {"BACKEND": OURS, "LOCATION": redis_server.url, "KEY_PREFIX": "one"},
        "second": {"BACKEND": OURS, "LOCATION": redis_server.url, "KEY_PREFIX": "two"},
        "memory": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
        "gone": {"BACKEND": "no_such_package.Cache"},
    }
    hold("a")
    hold("b", "second")
    rows = rows_of(admin_client.get(PAGE))
    assert sorted((row["name"], row["cache"]) for row in rows) == [
        ("a", "default"),
        ("b", "second"),
    ]


def test_pages(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PER_PAGE", 2)
    for number in range(5):
        hold(f"{number}")
    seen = []
    for page in (1, 2, 3):
        rows = rows_of(response := admin_client.get(PAGE, {"o": "lock", "p": page}))
        seen += [row["name"] for row in rows]
        assert "5 locks" in text_of(response)
    assert seen == list("01234")
    beyond = admin_client.get(PAGE, {"o": "lock", "p": 9})
    assert [row["name"] for row in rows_of(beyond)] == ["4"]
    assert 'href="?o=lock&amp;p=2"' in beyond.content.decode()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"q": "REPORT"}, ["nightly-report"]),
        ({"q": "lock:"}, []),
        ({"q": "NEW books"}, ["import"]),
        ({"q": "web-9:77"}, ["import"]),
        ({"status": "silent"}, ["import"]),
        ({"status": "expiring"}, []),
        ({"age": "60"}, ["import"]),
        ({"kind": "lock"}, ["import", "nightly-report"]),
        ({"kind": "computation"}, []),
        ({"using": "default"}, ["import", "nightly-report"]),
        (
            {"using": "no such cache", "kind": "odd", "o": "odd", "p": "x"},
            ["import", "nightly-report"],
        ),
    ],
    ids=str,
)
def test_search_and_filters(
    admin_client: Client, client: redis.Redis, query: Any, found: list[str]
) -> None:
    hold("nightly-report")
    keys = named(hold("import", label="new books", timeout=600), client).keys
    client.hset(keys.owner, mapping={"host": "web-9", "pid": 77, "since": f"{time.time() - 100}"})
    silence(client, keys.lock, 300)
    client.zadd(keys.waiters, {"a waiter": (int(client.time()[0]) + 60) * 1000})
    response = admin_client.get(PAGE, query)
    # Whatever is left of them, the line on top says what there is.
    if query.get("kind") != "computation":
        assert "2 held · 1 silent · 1 waiting · oldest 1 min" in text_of(response)
    assert sorted(row["name"].split()[0] for row in rows_of(response)) == found
    if not found:
        assert "No held lock matches." in text_of(response)


@pytest.mark.parametrize(
    ("order", "names"), [("lock", "abc"), ("-lock", "cba"), ("left", "bac"), ("-left", "cab")]
)
def test_sorting(admin_client: Client, order: str, names: str) -> None:
    for name, timeout in (("a", 60), ("b", 30), ("c", None)):
        hold(name, timeout=timeout)
    response = admin_client.get(PAGE, {"o": order})
    assert [row["name"] for row in rows_of(response)] == list(names)
    wanted = "descending" if order.startswith("-") else "ascending"
    assert f'aria-sort="{wanted}"' in response.content.decode()


def test_the_most_urgent_come_first(admin_client: Client, client: redis.Redis) -> None:
    """Silent ones, then those that end soon and are not renewed."""
    names = ("well", "ends", "silent")
    keys = {name: named(hold(name, timeout=60), client).keys for name in names}
    client.pexpire(keys["ends"].lock, 9000)
    silence(client, keys["silent"].lock, 200)
    rows = [(row["name"], row["status"]) for row in rows_of(admin_client.get(PAGE))]
    assert [name for name, _ in rows] == ["silent", "ends", "well"]
    assert [status for _, status in rows[1:]] == ["expiring", "alive"]


# -- what its script asks for ------------------------------------------------------------------


def test_the_state_is_what_the_page_shows(admin_client: Client, client: redis.Redis) -> None:
    lock = named(hold("a lock", label="for a test", timeout=60), client)
    state = state_of(admin_client)
    (row,) = state["rows"]
    assert (row["name"], row["label"], row["alias"]) == ("a lock", "for a test", "default")
    assert 50 < row["left"] <= 60
    assert row["bar"] == 60
    assert state["count"] == "1 lock"
    assert state_of(admin_client, query={"q": "other"})["rows"] == []
    refresh = admin_client.get(PAGE, {"live": "1"}).content.decode()
    assert "a lock" in refresh
    assert lock.local.token.decode() not in refresh


# -- one lock ----------------------------------------------------------------------------------


def page_of(browser: Client, **query: str) -> str:
    """The address of the page of the one lock that is held."""
    (row,) = state_of(browser, query=query)["rows"]
    return str(row["url"])


def test_the_page_of_a_lock(admin_client: Client, client: redis.Redis) -> None:
    lock = hold("report", label="the nightly report", timeout=3600)
    keys = named(lock, client).keys
    settle()
    hurry(Heartbeat)
    until(lambda: client.keys("django_redis_lock:process:*"))
    run(client, note_call(lock.keys.lock, "lost", Owner("x"), "it expired", held=75.0))
    alive = (int(client.time()[0]) + 60) * 1000
    waiters = {"9 200.5 7 web-2 Second": alive, "3 100.0 8 web-1 First": alive}
    client.zadd(keys.waiters, waiters)
    text = text_of(response := admin_client.get(page_of(admin_client)))
    assert text.index("the nightly report") < text.index("web-1, process 8, thread First")
    assert text.index("thread First") < text.index("web-2, process 7, thread Second")
    assert f"lost held for 1 min 15 s by unknown ({shown_id('x')}) it expired" in text
    assert "(one is due every 10 s)" in text
    assert "Key in Redis :lock:1:report" in text
    assert re.search(r"since \d\d:\d\d:\d\d UTC", text)
    assert lock.local.token not in response.content


def test_names_cannot_inject_anything(admin_client: Client, client: redis.Redis) -> None:
    """Nor labels, nor the names of holders and waiters, on any page."""
    evil = "<img src=x onerror=alert(1)>"
    lock = named(hold(f"{evil}\nsecond line\u202e", label=evil), client)
    metrics.flush()
    listed = admin_client.get(PAGE)
    assert "<img" not in listed.content.decode()
    (row,) = rows_of(listed)
    assert row["name"] == rf"{evil}\nsecond line\u202e {evil}"
    client.hset(lock.keys.owner, mapping={"host": evil, "thread": evil + "\n\u202e"})
    event = {"what": evil, "id": evil, "pid": 1, "host": evil, "note": evil + "\ud800"}
    client.set(events_key(lock.keys.lock), "5 " + json.dumps(event))
    alive = (int(client.time()[0]) + 60) * 1000
    client.zadd(lock.keys.waiters, {f"1 5.0 7 {evil} {evil}": alive})
    page = page_of(admin_client)
    assert "<img" not in admin_client.get(page).content.decode()
    assert "<img" not in admin_client.get(page, {"live": "1"}).content.decode()
    state = state_of(admin_client, page)
    assert "\u202e" not in state["place"]
    chosen = {"selected": state["choice"]}
    assert "<img" not in admin_client.post(f"{PAGE}release/", chosen).content.decode()
    lock.release()
    assert "<img" not in admin_client.get(page).content.decode()


@pytest.mark.parametrize(
    "ref", ["a", "a/b", "1", "AAAA", "bG9jawBubyBzdWNoIGNhY2hlAGtleQ", "%00", "é"]
)
def test_no_such_lock(admin_client: Client, ref: str) -> None:
    assert admin_client.get(f"{PAGE}{ref}/change/").status_code == 404
    assert admin_client.get(f"{PAGE}{ref}/change/", {"live": "1"}).status_code == 404
    assert admin_client.get(f"{PAGE}{ref}/history/").status_code == 404


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "under 1 s"),
        (59.9, "59 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (86399, "23 h 59 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


# -- what others have named does no harm -------------------------------------------------------


def test_what_the_holder_is_doing_is_shown_and_searched(
    admin_client: Client, client: redis.Redis
) -> None:
    with doing("POST /invoices/<17>/ (request 4f1c)"):
        lock = named(hold("a", label="invoice", timeout=60), client)
    other = hold("b")
    (row,) = rows_of(admin_client.get(PAGE, {"q": "INVOICES/"}))
    assert row["name"] == "a invoice · POST /invoices/<17>/ (request 4f1c)"
    assert {row["name"] for row in rows_of(admin_client.get(PAGE))} == {row["name"], "b"}
    other.release()
    page = text_of(admin_client.get(f"{PAGE}{Ref('default', lock.keys.lock, LOCK)}/change/"))
    assert "Doing POST /invoices/<17>/ (request 4f1c)" in page


def test_it_works_under_a_strict_content_security_policy(admin_client: Client) -> None:
    hold("a", label="b")
    content = admin_client.get(PAGE).content.decode()
    assert not re.findall(r"<script(?![^>]*\ssrc=)", content)
    assert not re.findall(r"<style|\sstyle=|\son\w+=|javascript:", content)
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", content)


# -- to whom -----------------------------------------------------------------------------------


def test_staff_see_page_and_menu_entry_with_permission(browser: Client, staff: User) -> None:
    assert browser.get(PAGE).status_code == 403
    assert "heldlock" not in browser.get("/admin/").content.decode()
    assert browser.get("/admin/django_redis_lock/").status_code == 404
    staff.user_permissions.add(Permission.objects.get(codename="view_heldlock"))
    hold("a lock")
    assert "a lock" in text_of(browser.get(PAGE))
    index = browser.get("/admin/").content.decode()
    assert f'href="{PAGE}"' in index
    assert "Redis locks" in index
    assert f"{PAGE}add/" not in index


# -- when Redis is away ------------------------------------------------------------------------


def box(response: HttpResponse) -> str:
    found = re.findall(
        r'<p class="errornote" data-id="[^"]+">(.*?)</p>', response.content.decode(), re.S
    )
    return unescape(" ".join(re.sub(r"<[^>]*>", " ", "\n".join(found)).split()))


@pytest.mark.parametrize("ignore", [False, True])
def test_redis_is_away_and_comes_back(
    admin_client: Client, own_server: RedisServer, settings: Any, ignore: bool
) -> None:
    options = {"IGNORE_EXCEPTIONS": ignore}
    settings.CACHES = {"default": {"BACKEND": OURS, "LOCATION": own_server.url, "OPTIONS": options}}
    assert not box(admin_client.get(PAGE))
    own_server.stop()
    response = admin_client.get(PAGE)
    assert "The cache “default” cannot be read" in box(response)
    text = text_of(response)
    assert "No lock is held" not in text
    assert "0 locks" not in text
    own_server.start()
    assert not box(admin_client.get(PAGE))


def test_one_redis_of_two_is_away(
    admin_client: Client, redis_server: RedisServer, own_server: RedisServer, settings: Any
) -> None:
    settings.CACHES = {
        "away": {"BACKEND": OURS, "LOCATION": own_server.url},
        "default": {"BACKEND": OURS, "LOCATION": redis_server.url},
    }
    hold("still listed")
    own_server.stop()
    response = admin_client.get(PAGE)
    assert "“away”" in box(response)
    assert "“default”" not in box(response)
    assert len(rows_of(response)) == 1


def test_a_cache_that_cannot_lock(
    admin_client: Client, redis_server: RedisServer, settings: Any
) -> None:
    options = {"CLIENT_CLASS": "django_redis.client.ShardClient"}
    settings.CACHES = {
        "default": {"BACKEND": OURS, "LOCATION": [redis_server.url], "OPTIONS": options}
    }
    assert "ShardClient cannot lock" in box(admin_client.get(PAGE))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"OPTIONS": {"LOCK_LOCK_PREFIX": 5}}, "LOCK_LOCK_PREFIX"),
        ({"KEY_FUNCTION": "tests.integration.admin.test_admin.refuse_keys"}, "no key"),
    ],
)
def test_a_cache_whose_configuration_is_wrong(
    admin_client: Client,
    settings: Any,
    redis_server: RedisServer,
    wrong: dict[str, Any],
    message: str,
    shared: bool,
) -> None:
    settings.CACHES = {"default": {"BACKEND": OURS, "LOCATION": redis_server.url, **wrong}}
    if shared:
        settings.CACHES["other"] = {"BACKEND": OURS, "LOCATION": redis_server.url}
    assert message in text_of(admin_client.get(PAGE))
    ref = str(Ref("default", b"key", LOCK))
    response = admin_client.get(f"{PAGE}{ref}/change/")
    assert message in text_of(response)
    assert "free" not in text_of(response)
    sent = {"selected": str(Choice(Ref("default", b"key", LOCK), "0" * 8, None))}
    assert message in text_of(admin_client.post(f"{PAGE}release/", sent))
    sent["confirmed"] = "yes"
    response = admin_client.post(f"{PAGE}release/", sent, follow=True)
    assert "may not have been released" in response.content.decode()


def refuse_keys(key: str, prefix: str, version: int) -> str:
    raise ImproperlyConfigured("no key can be made")


# -- the model without a table -----------------------------------------------------------------


def test_the_migration_is_complete() -> None:
    call_command("makemigrations", "django_redis_lock", check=True, dry_run=True, verbosity=0)


# -- in other languages ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "title", "count"),
    [("de", "Gehaltene Sperren", "1 Sperre"), ("zh-hans", "被持有的锁", "1 个锁")],
)
def test_other_languages(
    admin_client: Client, settings: Any, language: str, title: str, count: str
) -> None:
    settings.LANGUAGE_CODE = language
    lock = hold("a", timeout=70)
    text = text_of(response := admin_client.get(PAGE))
    assert title in response.content.decode()
    assert count in text
    # Numbers for the script are no numbers for people.
    assert re.search(r'data-at="\d+\.\d+"', response.content.decode())
    lock.release()

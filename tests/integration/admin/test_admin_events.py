"""Latest events of all locks, the mark in the menu, and what helps with many locks."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from html import unescape
from typing import Any
from urllib.parse import urlencode

import pytest
import redis
from django.contrib.auth.models import Permission, User
from django.core.cache import caches
from django.core.management import call_command
from django.test import Client

from django_redis_lock import LockNotOwnedError
from django_redis_lock.history import note_call
from django_redis_lock.ops.admin import listing, menu
from django_redis_lock.ops.inventory import latest_news, list_held
from django_redis_lock.protocol.holders import Owner
from django_redis_lock.protocol.identity import hostname
from django_redis_lock.transport import server_of
from django_redis_lock.transport.server import run
from tests.holding import hurry, silence
from tests.processes import until
from tests.redis_server import RedisServer
from tests.support.admin import PAGE, hold, named, rows_of, text_of

pytestmark = pytest.mark.django_db
EVENTS = f"{PAGE}events/"


def note(client: Any, name: str, what: str, host: str, why: str = "", at: float = 0) -> None:
    owner = Owner(f"{name}{what}", host, 7, "MainThread", f"label of {name}")
    key = f":lock:1:{name}".encode()
    when = int(at * 1e6) or None
    run(client, note_call(key, what, owner, why, 3.0, at=when, server=server_of(client)))


# -- the events ----------------------------------------------------------------------------------


def test_nothing_went_wrong(admin_client: Client, client: redis.Redis) -> None:
    hold("report").release()
    assert "Nothing went wrong in the last day." in text_of(admin_client.get(EVENTS))


def test_events_of_all_locks_the_latest_first_and_filtered(
    admin_client: Client, client: redis.Redis
) -> None:
    now = time.time()
    note(client, "a", "crashed", "web-1", at=now - 300)
    note(client, "b", "lost", "web-2", "it expired before it was released", at=now - 200)
    note(client, "c", "reset", "web-1", "ops (admin): it hangs", at=now - 100)
    note(client, "d", "released", "web-1", at=now - 50)
    note(client, "e", "crashed", "web-3", at=now - 90_000)
    text = text_of(admin_client.get(EVENTS))
    assert re.search(
        r" c released by force by ops \(admin\): it hangs web-1:7 label of c .*"
        r" b lost it expired before it was released web-2:7 label of b .*"
        r" a crashed, or cut off web-1:7 label of a ",
        text,
    )
    assert "web-3" not in text  # More than a day ago.
    assert "label of d" not in text
    assert "label of b" not in text_of(admin_client.get(EVENTS, {"host": "web-1"}))
    assert "label of a" not in text_of(admin_client.get(EVENTS, {"what": "lost"}))
    for none in ({"what": "lost", "host": "web-1"}, {"host": "<script>", "what": "?"}):
        text = text_of(admin_client.get(EVENTS, none))
        assert "No event matches." in text
        assert "Nothing went wrong" not in text


def test_who_may_not_see_the_locks_sees_no_events(client: redis.Redis) -> None:
    browser = Client()
    user = User.objects.create_user("staff", is_staff=True)
    browser.force_login(user)
    assert browser.get(EVENTS).status_code == 403
    user.user_permissions.add(Permission.objects.get(codename="view_heldlock"))
    assert browser.get(EVENTS).status_code == 200
    assert browser.post(EVENTS).status_code == 405


def test_while_redis_is_down(admin_client: Client, own_server: RedisServer, settings: Any) -> None:
    backend = "django_redis_lock.cache.RedisCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": own_server.url}}
    own_server.stop()
    text = text_of(admin_client.get(EVENTS))
    assert "The cache “default” cannot be read" in text
    assert "Nothing went wrong" not in text


def test_what_really_happens(admin_client: Client, client: redis.Redis) -> None:
    """A holder that notices, one that is released by force here, in code and by a command."""
    with suppress(LockNotOwnedError), caches["default"].lock("lost", timeout=60) as lock:
        named(lock, client)
        client.delete(lock.name)
        hurry()
        until(lambda: lock.lost)
    for name in ("by code", "by command"):
        named(hold(name), client)
    caches["default"].lock("by code").reset()
    call_command("locks", "release", "by command", "--yes")
    until(lambda: len(latest_news(client)) == 3)
    text = text_of(admin_client.get(EVENTS))
    assert re.search(r" lost lost its key was deleted or replaced by another program", text)
    assert f"by code released by force by reset() in {hostname()}, process " in text
    assert re.search(r"by command released by force by \S+ \(manage.py locks\) ", text)


# -- the menu ------------------------------------------------------------------------------------


@pytest.fixture
def uncounted() -> Iterator[None]:
    menu._number, menu._due = 0, 0.0
    yield
    menu._number, menu._due = 0, 0.0


@pytest.mark.usefixtures("uncounted")
def test_the_menu_shows_that_a_holder_is_silent(admin_client: Client, client: redis.Redis) -> None:
    def entry() -> str:
        menu._due = 0.0
        (found,) = re.findall(
            r'heldlock/"[^>]*>\s*(Held locks[^<]*)</a>',
            admin_client.get("/admin/").content.decode(),
        )
        return str(found).strip()

    assert entry() == "Held locks"
    lock = named(hold("report", timeout=300), client)
    silence(client, lock.keys.lock, 200)
    until(lambda: entry() == "Held locks ⚠ 1 silent")
    lock.release()
    until(lambda: entry() == "Held locks")


# -- many locks ----------------------------------------------------------------------------------


def test_all_that_match_can_be_released(
    admin_client: Client, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PER_PAGE", 2)
    for name in ("job-1", "job-2", "job-3", "other"):
        hold(name)
    query = {"q": "job"}
    assert "all 3 that match, on all pages" in text_of(admin_client.get(PAGE, query))
    assert "that match" not in text_of(admin_client.get(PAGE, {"q": "job-1"}))
    sent = {"all": "1", "address": urlencode(query)}
    page = admin_client.post(f"{PAGE}release/", sent)
    text = text_of(page)
    assert all(name in text for name in ("job-1", "job-2", "job-3"))
    assert "other" not in text
    (chosen,) = re.findall(r'name="selected" value="([^"]*)"', page.content.decode())
    confirmed = {"selected": chosen, "confirmed": "yes", "address": sent["address"]}
    admin_client.post(f"{PAGE}release/", confirmed)
    assert [lock.name for lock in list_held(client, b":lock:1:").locks] == ["other"]


def test_a_holder_leads_to_all_of_its_locks_and_to_its_end(
    admin_client: Client, client: redis.Redis
) -> None:
    lock = named(hold("report"), client)
    content = admin_client.get(PAGE).content.decode()
    page = admin_client.get(re.findall(r'href="([^"]+/change/)"', content)[0]).content.decode()
    command = f"kill -TERM {lock.local.hold.process.pid}"
    assert f'<code dir="ltr">{command}</code>' in page
    assert f'data-copy="{command}"' in page
    (query,) = re.findall(r'<bdi dir="ltr"><a title="[^"]*" href="\?([^"]*)">', content)
    (row,) = rows_of(admin_client.get(f"{PAGE}?{unescape(query)}"))
    assert row["name"].startswith("report")
    client.set(":lock:1:of another program", "0" * 32, px=60_000)
    assert "q=unknown" not in admin_client.get(PAGE).content.decode()

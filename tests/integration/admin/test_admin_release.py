"""Releasing locks on the admin page: by whom, what is asked, what is done, what is kept of it."""

from __future__ import annotations

import logging
import re
import threading
from functools import partial
from io import StringIO
from typing import Any

import pytest
import redis
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.core.cache import caches
from django.core.management import call_command
from django.db import OperationalError
from django.http import HttpResponse
from django.test import Client

from django_redis_lock.admin import HeldLockAdmin
from django_redis_lock.ops.admin import releasing
from django_redis_lock.ops.held_locks import shown_id
from django_redis_lock.ops.inventory.listing import inspect
from tests.holding import silence
from tests.processes import until
from tests.redis_server import RedisServer
from tests.support.admin import OURS, PAGE, hold, named, rows_of, state_of, text_of

pytestmark = pytest.mark.django_db

RELEASE = f"{PAGE}release/"


def choices(browser: Client) -> list[str]:
    """What the boxes of the list stand for."""
    return [row["choice"] for row in state_of(browser)["rows"]]


def confirm(browser: Client, *selected: str, **more: str) -> HttpResponse:
    return browser.post(RELEASE, {"selected": selected, "confirmed": "yes", **more})


def said(browser: Client, response: HttpResponse) -> str:
    """What the page says that one is led to."""
    assert response.status_code == 302
    return browser.get(response["Location"]).content.decode()


@pytest.fixture
def viewer(client: redis.Redis) -> Client:
    """One of the staff who may look, and no more."""
    user = User.objects.create_user("viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_heldlock"))
    browser = Client()
    browser.force_login(user)
    return browser


# -- asking ------------------------------------------------------------------------------------


def test_it_is_asked_first(admin_client: Client, client: redis.Redis) -> None:
    lock = named(hold("report", label="the nightly report", timeout=60), client)
    (choice,) = choices(admin_client)
    response = admin_client.post(RELEASE, {"selected": choice})
    text = text_of(response)
    owner = lock.holder()
    assert owner is not None
    assert "report" in text
    assert "the nightly report" in text
    assert f"{owner.host}, process {owner.pid}" in text
    assert "No process waits for it, so it will be free." in text
    assert "two processes work at the same time" in text
    assert "learns of it at once, or within 20 s if Redis cannot notify it" in text
    assert f"Still running: stop it first, on {owner.host}. kill -TERM {owner.pid} Copy" in text
    assert 'value="Release 1 lock"' in response.content.decode()
    silence(client, lock.keys.lock, 236)
    text = text_of(admin_client.post(RELEASE, {"selected": choice}))
    assert "No heartbeat for 3 min 5" in text
    assert "kill -TERM" not in text
    assert lock.owned()
    assert lock.local.token not in response.content
    assert choice in response.content.decode()


def test_it_says_at_once_what_will_not_be_released(admin_client: Client) -> None:
    locks = [hold("free soon"), hold("another's soon"), hold("kept")]
    chosen = choices(admin_client)
    locks[0].release()
    locks[1].release()
    hold("another's soon")
    response = admin_client.post(RELEASE, {"selected": chosen})
    text = text_of(response)
    assert "“free soon” was free already." in text
    assert "“another's soon” has passed to another holder and was not released." in text
    assert response.content.decode().count('name="selected"') == 1
    locks[2].release()
    response = admin_client.post(RELEASE, {"selected": chosen})
    assert 'type="submit"' not in response.content.decode().partition("<main")[2]


# -- releasing ---------------------------------------------------------------------------------


def test_it_is_released_and_kept_in_the_log(
    admin_client: Client, admin_user: User, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    lock = named(hold("report", label="the nightly report"), client)
    owner = lock.holder()
    assert owner is not None
    (choice,) = choices(admin_client)
    with caplog.at_level(logging.WARNING, "django_redis_lock.admin"):
        response = confirm(admin_client, choice, reason="it hangs")
    assert not lock.locked()
    assert "“report” is released." in said(admin_client, response)
    holder = f"{owner.host}, process {owner.pid}, thread {owner.thread}, the nightly report"
    (entry,) = LogEntry.objects.all()
    assert (entry.user, entry.object_repr) == (admin_user, "report")
    by_force = f"Released by force. The holder was {holder} ({shown_id(owner.id)})."
    assert entry.change_message == f"{by_force} Reason: it hangs"
    for page in (f"{PAGE}history/", response["Location"].replace("/change/", "/history/")):
        history = text_of(admin_client.get(page))
        assert f"admin report {entry.change_message}" in history
    events = text_of(admin_client.get(response["Location"]))
    assert re.search(
        rf"released by force by admin \(admin\): it hangs held for .+ by {owner.host}:", events
    )
    assert entry.get_admin_url() == response["Location"]
    assert lock.local.token.decode() not in entry.change_message
    assert "Lock :lock:1:report released by force by admin (admin): it hangs" in caplog.text
    assert shown_id(owner.id) in caplog.text
    (event,) = (e for e in inspect(client, lock.keys.lock).events if e.what == "reset")
    assert (event.owner.id, event.note) == (owner.id, "admin (admin): it hangs")


def fails(*args: Any, **options: Any) -> None:
    raise OperationalError("attempt to write a readonly database")


@pytest.mark.parametrize("hook", ["log_change", "message_user"])
def test_all_chosen_locks_are_released_whatever_a_projects_hooks_do(
    admin_client: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hook: str,
) -> None:
    monkeypatch.setattr(HeldLockAdmin, hook, fails)
    locks = [hold(name) for name in "ab"]
    told = text_messages(confirm(admin_client, *choices(admin_client), address=""))
    assert not any(lock.locked() for lock in locks)
    assert "Traceback" in caplog.text
    if hook == "log_change":
        assert any("log could not be written for “a”, “b”;" in text for text in told)
    else:
        assert LogEntry.objects.count() == 2


def test_an_error_with_one_lock_leaves_the_others_to_be_released(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of a project's own key function."""
    first, second = hold("a"), hold("b")
    name_of = releasing.name_of

    def failing(alias: str, key: bytes, kind: str) -> str:
        if key == first.keys.lock:
            raise KeyError("tenant")
        return name_of(alias, key, kind)

    selected = choices(admin_client)
    monkeypatch.setattr(releasing, "name_of", failing)
    told = text_messages(confirm(admin_client, *selected, address=""))
    assert any("may not have been released" in text for text in told)
    assert any("“b” is released" in text for text in told)
    assert (first.locked(), second.locked()) == (True, False)


def text_messages(response: HttpResponse) -> list[str]:
    return [message.message for message in get_messages(response.wsgi_request)]


def test_a_release_by_a_command_is_on_the_locks_page(
    admin_client: Client, client: redis.Redis
) -> None:
    lock = named(hold("report"), client)
    page = re.search(rf'href="({PAGE}[^"]+/change/)"', admin_client.get(PAGE).content.decode())
    assert page is not None
    call_command("locks", "release", "report", "--yes", stdout=StringIO())
    assert not lock.locked()
    assert not LogEntry.objects.exists()
    history = text_of(admin_client.get(f"{PAGE}history/"))
    assert "Only releases in the admin. For a day, the page of each lock also shows" in history
    assert "(manage.py locks)" in text_of(admin_client.get(page[1]))


def test_a_lock_that_changed_hands_or_is_free_is_not_released(admin_client: Client) -> None:
    hold("a").release()
    first = hold("a")
    chosen = choices(admin_client)
    first.release()
    second = hold("a")
    assert "has passed to another holder" in said(admin_client, confirm(admin_client, *chosen))
    assert second.owned()
    second.release()
    assert "“a” was free already." in said(admin_client, confirm(admin_client, *chosen))
    assert not LogEntry.objects.exists()


def test_a_selection(admin_client: Client) -> None:
    for name in "abc":
        hold(name)
    by_name = {r["name"]: r["choice"] for r in state_of(admin_client)["rows"]}
    response = confirm(admin_client, by_name["a"], by_name["c"], by_name["a"], address="o=lock&p=1")
    assert response["Location"] == f"{PAGE}?o=lock"
    assert [row["name"] for row in rows_of(admin_client.get(PAGE))] == ["b"]
    assert LogEntry.objects.count() == 2


def test_one_is_led_back_to_where_one_came_from(admin_client: Client) -> None:
    hold("a"), hold("b")
    first, second = state_of(admin_client)["rows"]
    from_list, from_lock = {"address": ""}, {}
    for lock, came, back in ((first, from_list, PAGE), (second, from_lock, second["url"])):
        asked = admin_client.post(RELEASE, {"selected": lock["choice"], **came})
        assert f'<a href="{back}" class="button cancel-link">' in asked.content.decode()
        kept = re.findall(r'name="(address)" value="()"', asked.content.decode())
        assert dict(kept) == came
        assert confirm(admin_client, lock["choice"], **came)["Location"] == back


def test_a_computation_is_ended(admin_client: Client) -> None:
    done = threading.Event()
    work = partial(caches["default"].get_or_set, "report", lambda: done.wait(20), 60)
    leader = threading.Thread(target=work)
    leader.start()
    until(lambda: choices(admin_client))
    (choice,) = choices(admin_client)
    assert [row["name"] for row in rows_of(admin_client.get(PAGE))] == ["report computation"]
    assert len(rows_of(admin_client.get(PAGE, {"kind": "computation"}))) == 1
    assert rows_of(admin_client.get(PAGE, {"kind": "lock"})) == []
    text = text_of(admin_client.post(RELEASE, {"selected": choice}))
    assert "its result is not stored" in text
    assert "“report” is released" in said(admin_client, confirm(admin_client, choice))
    assert not choices(admin_client)
    done.set()
    leader.join()
    assert caches["default"].get("report") is None


def test_redis_is_away(admin_client: Client, own_server: RedisServer, settings: Any) -> None:
    settings.CACHES = {"default": {"BACKEND": OURS, "LOCATION": own_server.url}}
    hold("a")
    (choice,) = choices(admin_client)
    own_server.stop()
    text = text_of(admin_client.post(RELEASE, {"selected": choice}))
    assert "Redis did not answer as it should" in text
    text = said(admin_client, confirm(admin_client, choice))
    assert "“a” may not have been released" in text  # The reply may have been lost.


# -- by whom -----------------------------------------------------------------------------------


def test_who_may_only_look_may_not_release(viewer: Client) -> None:
    lock = hold("a")
    (choice,) = choices(viewer)
    for page in (PAGE, state_of(viewer)["rows"][0]["url"]):
        assert "Release" not in viewer.get(page).content.decode()
    assert viewer.post(RELEASE, {"selected": choice}).status_code == 403
    assert confirm(viewer, choice).status_code == 403
    assert lock.owned()


def test_a_get_changes_nothing(admin_client: Client) -> None:
    lock = hold("a")
    query = {"selected": choices(admin_client)[0], "confirmed": "yes"}
    assert "Nothing was released." in said(admin_client, admin_client.get(RELEASE, query))
    assert lock.owned()


def test_a_request_of_another_site_is_refused(admin_user: User) -> None:
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(admin_user)
    lock = hold("a")
    assert confirm(browser, *choices(browser)).status_code == 403
    assert lock.owned()


def test_one_holder_of_several_is_released(admin_client: Client, client: redis.Redis) -> None:
    locks = [named(hold("api", limit=5, label=label, timeout=60), client) for label in "abc"]
    rows = state_of(admin_client)["rows"]
    labels = {f"{row['name']} {row['label']} {row['kind_label']}" for row in rows}
    assert labels == {f"api {of} Place {n} · 3 of 5" for n, of in enumerate("abc", 1)}
    row = next(row for row in rows if row["label"] == "b")
    page = admin_client.get(row["url"])
    assert page.context["title"] == "api"
    assert "All holders: 3 of 5 Place 1 " in text_of(page)
    assert "Holder Place 2 · 3 of 5 " in text_of(page)
    asked = text_of(admin_client.post(RELEASE, {"selected": row["choice"]}))
    assert "Holder Place 2 · 3 of 5 " in asked
    labels_of_all = [each["label"] for each in page.context["data"]["holders"]]
    assert labels_of_all == ["a", "b", "c"]
    assert "is released" in said(admin_client, confirm(admin_client, row["choice"]))
    assert [lock.owned() for lock in locks] == [True, False, True]
    page = admin_client.get(row["url"])
    assert "All holders: 2 of 5 Place 1 " in text_of(page)
    assert "This lock is free." not in text_of(page)
    locks[0].release()
    state = state_of(admin_client, rows[0]["url"])
    assert (state["taken"], state.get("free")) == ("1 of 5", None)
    locks[2].release()
    assert "This lock is free." in text_of(admin_client.get(row["url"]))

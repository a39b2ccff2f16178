"""The page "Held locks" on admin sites of one's own, alone and beside Django's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis
from django.contrib.admin import AdminSite
from django.contrib.auth.models import User
from django.test import Client
from django.urls import path

from django_redis_lock.admin import HeldLockAdmin
from django_redis_lock.contrib import metrics
from django_redis_lock.models import HeldLock
from tests.support.admin import hold, named, state_of

pytestmark = pytest.mark.django_db


def site(name: str, *, with_locks: bool = True) -> AdminSite:
    made = AdminSite(name)
    made.register(User)
    if with_locks:
        made.register(HeldLock, HeldLockAdmin)
    return made


def test_a_subclass_may_change_the_title(admin_client: Client, settings: Any) -> None:
    class Ours(HeldLockAdmin):
        def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
            return super().changelist_view(request, {"title": "Our locks"})

    ours = AdminSite("ours")
    ours.register(HeldLock, Ours)
    settings.ROOT_URLCONF = (path("ours/", ours.urls),)
    page = admin_client.get("/ours/django_redis_lock/heldlock/")
    assert page.context["title"] == "Our locks"


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"admin/": site("admin")},
        {"admin/": site("admin", with_locks=False)},
        {"admin/": site("admin"), "third/": site("third", with_locks=False)},
    ],
    ids=["alone", "beside the default", "only there", "among three"],
)
def test_every_address_stays_in_the_site_that_was_asked(
    admin_client: Client, settings: Any, others: dict[str, AdminSite]
) -> None:
    ops = site("ops")
    urls = {"sub/ops/": ops, **others}
    settings.ROOT_URLCONF = tuple(path(route, made.urls) for route, made in urls.items())
    hold("report")
    home = "/sub/ops/django_redis_lock/heldlock/"
    pages = [admin_client.get(home)]
    (row,) = state_of(admin_client, home)["rows"]
    pages.append(admin_client.get(row["url"]))
    pages.append(admin_client.post(f"{home}release/", {"selected": row["choice"]}))
    for page in pages:
        assert page.status_code == 200
        content = page.content.decode()
        led_to = re.findall(r'(?:href|action)="(/[^"]*)"', content)
        outside = [
            to for to in led_to if not to.startswith(("/sub/ops/", "/static/")) and to != "/"
        ]
        assert outside == []
    answer = admin_client.post(f"{home}release/", {"selected": row["choice"], "confirmed": "yes"})
    assert answer["Location"].startswith("/sub/ops/")


class Team(HeldLockAdmin):
    """Its users see the locks of one team, and release fewer."""

    def has_view_permission(self, request: Any, obj: Any = None) -> bool:
        return obj is None or obj.name.startswith("a:")

    def has_release_permission(self, request: Any, obj: Any = None) -> bool:
        return obj is None or not obj.name.endswith("!")


@pytest.fixture
def everything_and_team(settings: Any) -> None:
    everything, team = AdminSite("everything"), AdminSite("team")
    everything.register(HeldLock, HeldLockAdmin)
    team.register(HeldLock, Team)
    settings.ROOT_URLCONF = (path("everything/", everything.urls), path("team/", team.urls))


@pytest.mark.usefixtures("everything_and_team")
def test_permissions_for_one_lock(admin_client: Client) -> None:
    """As in every ModelAdmin, a subclass may decide on each object."""
    locks = {name: hold(name) for name in ("a:mine", "a:watched!", "b:others")}
    home = "/{}/django_redis_lock/heldlock/"
    rows = {row["name"]: row for row in state_of(admin_client, home.format("everything"))["rows"]}
    assert set(rows) == set(locks)
    seen = state_of(admin_client, home.format("team"))["rows"]
    may_be_chosen = {row["name"]: bool(row["choice"]) for row in seen}
    assert may_be_chosen == {"a:mine": True, "a:watched!": False}
    pages_of_team = (home.format("team"), *(row["url"] for row in seen))
    contents = [admin_client.get(page).content.decode() for page in pages_of_team]
    boxes = [content.count('name="selected"') for content in contents]
    assert boxes == [1, *(may_be_chosen[row["name"]] for row in seen)]
    pages = {name: row["url"].replace("everything", "team") for name, row in rows.items()}
    found = {name: admin_client.get(url).status_code for name, url in pages.items()}
    assert found == {"a:mine": 200, "a:watched!": 200, "b:others": 403}
    history = pages["b:others"].replace("/change/", "/history/")
    assert admin_client.get(history).status_code == 403
    choices = [row["choice"] for row in rows.values()]
    admin_client.post(f"{home.format('team')}release/", {"selected": choices, "confirmed": "yes"})
    assert {name: lock.owned() for name, lock in locks.items()} == {
        "a:mine": False,
        "a:watched!": True,
        "b:others": True,
    }


@pytest.mark.usefixtures("everything_and_team")
@pytest.mark.parametrize("route", ["", "?q=others", "processes/", "events/", "history/"])
def test_a_lock_that_is_hidden_is_on_no_page(
    admin_client: Client, client: redis.Redis, route: str
) -> None:
    """Its name says whose it is. Among them: what it waits for, its events, its releases, the
    figures of its group."""
    home = "/{}/django_redis_lock/heldlock/"
    for name in ("a:mine", "b:others"):
        hold(name)
        (row,) = (
            row
            for row in state_of(admin_client, home.format("everything"))["rows"]
            if row["name"] == name
        )
        post = {"selected": row["choice"], "confirmed": "yes"}
        admin_client.post(f"{home.format('everything')}release/", post)  # Noted in log and events.
        admin_client.get(home.format("everything"))  # Shows the message.
        named(hold(name), client)
    metrics.flush()

    def names(site: str) -> set[str]:
        page = admin_client.get(home.format(site) + route)
        assert page.status_code == 200
        text = re.sub(r'value="[^"]*"', "", page.content.decode())  # What was searched for.
        return set(re.findall("a:mine|b:others", text))

    assert "b:others" in names("everything")
    assert "b:others" not in names("team")
    assert "q=" in route or "a:mine" in names("team")

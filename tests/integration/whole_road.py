"""What people see of a site, with an installation that lacks one optional part.

``python tests/integration/whole_road.py``, with the package on the path, and ``REDIS_URL``. Writes
a JSON object: for each step an empty text if it works, or what it says is missing.
"""

# ruff: noqa: E402  (what needs Django is imported after the settings)

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable
from io import StringIO
from types import ModuleType
from typing import Any

import django
from django.conf import settings

settings.configure(
    SECRET_KEY="secret" * 9,
    ALLOWED_HOSTS=["testserver"],
    INSTALLED_APPS=[
        *("django.contrib.contenttypes", "django.contrib.auth", "django.contrib.sessions"),
        *("django.contrib.messages", "django.contrib.admin", "django_redis_lock"),
    ],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {
                "context_processors": [
                    "django.template.context_processors.request",
                    "django.contrib.auth.context_processors.auth",
                    "django.contrib.messages.context_processors.messages",
                ]
            },
        }
    ],
    CACHES={
        "default": {
            "BACKEND": "django_redis_lock.cache.RedisCache",
            "LOCATION": os.environ["REDIS_URL"],
        }
    },
    ROOT_URLCONF="road_urls",
)
django.setup()

from django.contrib import admin
from django.contrib.auth.models import User
from django.core.cache import cache
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from django_redis_lock import locked
from django_redis_lock.extension import PartMissing


@locked(using="default")
def view(request: HttpRequest) -> HttpResponse:
    return HttpResponse("done")


urls: Any = ModuleType("road_urls")
urls.urlpatterns = [path("admin/", admin.site.urls), path("view/", view)]
sys.modules["road_urls"] = urls

said: dict[str, str] = {}


def step(name: str, does: Callable[[], str | None]) -> None:
    try:
        said[name] = does() or ""
    except (PartMissing, CommandError) as missing:
        said[name] = str(missing)


def command(*words: str) -> Callable[[], None]:
    def run() -> None:
        try:
            call_command(*words, stdout=StringIO(), stderr=StringIO())
        except CommandError as error:
            if "not installed" in str(error) or words[:2] != ("locks", "doctor"):
                raise  # The doctor has something to say about a server for tests.

    return run


def check() -> str:
    missing = [message.msg for message in run_checks() if "not installed" in message.msg]
    return missing[0] if missing else ""


def page(address: str) -> Callable[[], str]:
    def get() -> str:
        client = Client()
        client.force_login(User.objects.get())
        answer = client.get(address)
        if answer.status_code == 501:
            return answer.content.decode()
        assert answer.status_code == 200, answer.status_code
        return ""

    return get


def value() -> None:
    assert cache.get_or_set("value", lambda: 1, 60) == 1


def on_a_virtual_clock() -> None:
    from django_redis_lock.testing import override  # noqa: PLC0415  # It may be missing.

    with override(), cache.lock("report", timeout=5):
        pass


step("check", check)
step("migrate", command("migrate", "--verbosity", "0"))
User.objects.create_superuser("ann", "ann@example.com", "secret")
LIST = "/admin/django_redis_lock/heldlock/"
with cache.lock("road", timeout=60) as lock:
    road = b"\0".join((b"lock", b"default", lock.keys.lock))
    ROAD = base64.b64encode(road, b"-~").rstrip(b"=").decode()  # As the list has it.
    step("admin index", page("/admin/"))
    step("admin list", page(LIST))
    step("admin lock", page(f"{LIST}{ROAD}/change/"))
    step("admin events", page(f"{LIST}events/"))
    step("admin processes", page(f"{LIST}processes/"))
    step("locks", command("locks"))
step("locks stats", command("locks", "stats"))
step("locks doctor", command("locks", "doctor"))
step("run_locked", command("run_locked", "job", "--", "check"))
step("run_locked --shell", command("run_locked", "job", "--shell", "--", "true"))
step("view", page("/view/"))
step("value", value)
step("clear", cache.clear)
step("testing.override", on_a_virtual_clock)
print(json.dumps(said))

"""A plugin for pytest: where a package's tests configure a cache in memory, they get NEIGHBOUR_URL
and NEIGHBOUR_BACKEND instead, whichever way they configure it."""

from __future__ import annotations

import os
from typing import Any

from django.apps import apps
from django.conf import global_settings
from django.core.cache import CacheHandler

IN_MEMORY = ("django.core.cache.backends.locmem.LocMemCache", "tests.cache_mockup.Cache")
_configured = CacheHandler.configure_settings
_really = apps.is_installed


def _swapped(handler: CacheHandler, settings: dict[str, Any] | None) -> dict[str, Any]:
    caches: dict[str, Any] = _configured(handler, settings)
    here = os.environ["NEIGHBOUR_URL"]
    ours = {"BACKEND": os.environ["NEIGHBOUR_BACKEND"]}
    return {
        # As each cache in memory has values of its own, each has a database.
        alias: {**of, **ours, "LOCATION": f"{here}/{number}"} if of["BACKEND"] in IN_MEMORY else of
        for number, (alias, of) in enumerate(caches.items())
    }


def _is_installed(name: str) -> bool:
    return name == "django_redis_lock" or _really(name)


CacheHandler.configure_settings = _swapped
# Some compare all messages of checks, and without our app there is one that asks for it.
apps.is_installed = _is_installed
# Users of tests: with the usual hash, those of django-constance take minutes, and on a busy machine
# longer than they may.
global_settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

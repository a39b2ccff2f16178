"""``python -m tests.django_suite``: Django's own tests of cache backends, pages and ``caches``, on
our backends, ``cached_page`` and ``CachedPageMiddleware``. (Its asynchronous tests are of
``DummyCache`` only.)

They are in Django's source distribution only, which is downloaded for the Django that is installed.
DJANGO_SOURCE names a folder in which it has been unpacked.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import expectedFailure

import django
from django.conf import settings
from django.core.management import call_command
from django.test import RequestFactory, TestCase, override_settings
from django.test.utils import setup_test_environment

from django_redis_lock import cached_page
from django_redis_lock.middleware import CachedPageMiddleware

from .redis_server import RedisServer
from .source_distribution import download

#: About pages, and about ``caches``.
CLASSES = (
    "CacheUtils",
    "PrefixedCacheUtils",
    "CacheHEADTest",
    "CacheI18nTest",
    "PrefixedCacheI18nTest",
    "CacheMiddlewareTest",
    "TestWithTemplateResponse",
    "CacheHandlerTest",
)
MEMORY, REDIS = "django_redis_lock.cache.LocMemCache", "django_redis_lock.cache.RedisCache"
#: What our backends do otherwise than Django's tests of all backends expect, as django-redis does:
#: any key is taken, and ``delete_many`` returns how many there were. Redis itself drops values when
#: its memory is full.
AS_DJANGO_REDIS = (
    "test_invalid_key_characters",
    "test_invalid_key_length",
    "test_invalid_with_version_key_length",
    "test_delete_many_no_keys",
)
DIFFERENT: dict[str, tuple[str, ...]] = {
    MEMORY: AS_DJANGO_REDIS,
    REDIS: (*AS_DJANGO_REDIS, "test_cull", "test_zero_cull"),
}
LOCAL = "django.core.cache.backends.locmem.LocMemCache"


def load(source: Path) -> Any:
    """The module of the tests, with our names in it."""
    sys.path.insert(0, str(source / "tests"))
    settings.configure(
        SECRET_KEY="only for these tests",
        INSTALLED_APPS=["cache"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        CACHES={"default": {"BACKEND": LOCAL}},
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
        USE_TZ=False,
        LANGUAGE_CODE="en",
    )
    django.setup()
    setup_test_environment()
    call_command("migrate", run_syncdb=True, verbosity=0)
    tests: Any = importlib.import_module("cache.tests")
    tests.cache_page, tests.CacheMiddleware = cached_page, CachedPageMiddleware
    return tests


def run(tests: Any, backend: str, location: str) -> bool:
    """Run them on ``backend``; returns whether all have passed."""
    suite = unittest.TestSuite()
    for name in CLASSES:
        case = getattr(tests, name)
        given = case._overridden_settings or {}
        caches = {
            alias: {**options, "BACKEND": backend, "LOCATION": f"{location}{number}"}
            for number, (alias, options) in enumerate(given.get("CACHES", {}).items())
        }
        if caches:
            case._overridden_settings = {**given, "CACHES": caches}
        suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(case))
    case = common(tests, backend, location)
    suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(case))
    print(f"\n{backend}")
    found = unittest.TextTestRunner().run(suite)
    return bool(found.testsRun) and found.wasSuccessful()


def common(tests: Any, backend: str, location: str) -> Any:
    """The tests of all backends. One that is DIFFERENT must fail."""
    given = tests.caches_setting_for_tests(BACKEND=backend, LOCATION=f"{location}0")
    body = {
        name: expectedFailure(getattr(tests.BaseCacheTests, name)) for name in DIFFERENT[backend]
    }
    body.update(factory=RequestFactory(), tearDown=lambda case: tests.cache.clear())
    case = type("BackendTests", (tests.BaseCacheTests, TestCase), body)
    return override_settings(CACHES=given)(case)


def main() -> int:
    """Returns 1 if a test fails, 0 if none does or the source cannot be had."""
    with tempfile.TemporaryDirectory() as folder, RedisServer() as server:
        given = os.environ.get("DJANGO_SOURCE")
        source = Path(given) if given else download("django", django.__version__, Path(folder))
        if source is None:
            print("Skipped: Django's source distribution cannot be downloaded.")
            return 0
        tests = load(source)
        passed = [
            run(tests, MEMORY, "memory "),
            run(tests, REDIS, server.url.rpartition("/")[0] + "/"),
        ]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())

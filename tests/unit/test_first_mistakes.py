"""The mistakes that newcomers make: each is refused by a sentence that says what to write."""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand
from django.http import HttpResponse
from django.template import Template, TemplateSyntaxError
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View

from django_redis_lock import (
    AsyncLock,
    Lock,
    LockError,
    cached,
    cached_page,
    current_lock,
    idempotent,
    locked,
)
from django_redis_lock.cache import cache as typed_cache
from django_redis_lock.cache import caches
from django_redis_lock.contention import redirect_to, respond, retry_task
from django_redis_lock.contrib.testing import MemoryServer
from django_redis_lock.decorators import key_template

pytestmark = pytest.mark.usefixtures("redis_locks")

#: Type checkers refuse most of this, so it is hidden from them.
cache: Any = typed_cache
any_locked: Any = locked
any_cached: Any = cached
any_page: Any = cached_page
TIME = datetime.timedelta(seconds=5)


def run(use: Callable[[], Any]) -> None:
    async def work() -> None:
        await use()

    asyncio.run(work())


async def within(make: Callable[[], Any], *, asynchronous: bool) -> None:
    if asynchronous:
        async with make():
            pass
    else:
        with make():
            pass


async def awaited(make: Callable[[], Any]) -> None:
    await make()


def view(request: Any, pk: int = 5) -> HttpResponse:
    return HttpResponse()


async def aview(request: Any) -> HttpResponse:
    return HttpResponse()


async def compute() -> int:
    return 1


def function(pk: int) -> None: ...


class Page(View):
    def get(self, request: Any) -> HttpResponse:
        return HttpResponse()


class Command(BaseCommand):
    def handle(self, *args: Any, **options: Any) -> None: ...


def twice() -> None:
    lock = cache.lock("a")
    lock.acquire()
    lock.release()
    lock.release()


def elsewhere() -> None:
    lock = cache.lock("a", timeout=60)
    lock.acquire()
    errors: list[LockError] = []

    def release() -> None:
        try:
            lock.release()
        except LockError as error:
            errors.append(error)

    thread = threading.Thread(target=release)
    thread.start()
    thread.join()
    lock.release()
    raise errors[0]


def template(text: str) -> Callable[[], Any]:
    return lambda: Template("{% load redis_lock %}" + text)


def page_method() -> Any:
    class WithMethod(View):
        @any_page(300)
        def get(self, request: Any) -> HttpResponse:
            return HttpResponse()

    return WithMethod.as_view()(RequestFactory().get("/"))


#: By what was meant: the call, and words of the error.
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "another alias": (
        lambda: caches["chache"],
        "CACHES has no 'chache'; caches that can lock: ",
    ),
    "negative timeout": (lambda: cache.lock("a", timeout=-1), "a number of seconds greater than 0"),
    "timedelta": (lambda: cache.lock("a", timeout=TIME), "write its total_seconds()"),
    "timedelta, locked": (lambda: any_locked("a", timeout=TIME), "write its total_seconds()"),
    "timedelta, value": (lambda: cache.get_or_set("a", 1, TIME), "write its total_seconds()"),
    "timedelta, page": (lambda: any_page(TIME), "write its total_seconds()"),
    "milliseconds": (lambda: cache.lock("a", timeout=30 * 10**9), "given in seconds"),
    "text": (lambda: cache.lock("a", timeout="30"), "a number of seconds"),
    "field": (lambda: locked("invoice-{id}")(function), "has no argument 'id' (it has: pk)"),
    "empty field": (lambda: locked("invoice-{}")(function), "name the argument between the braces"),
    "no f": (lambda: locked("invoice-{pk}").__enter__(), "write f'invoice-{pk}'"),
    "async with lock": (
        lambda: run(lambda: within(lambda: cache.lock("a"), asynchronous=True)),
        "async with cache.alock(",
    ),
    "with alock": (
        lambda: run(lambda: within(lambda: cache.alock("a"), asynchronous=False)),
        "async with. In a thread: with cache.lock(",
    ),
    "alock in a thread": (lambda: cache.alock("a"), "in a thread use lock()"),
    "await alock": (lambda: run(lambda: awaited(lambda: cache.alock("a"))), "await lock.acquire()"),
    "await lock": (lambda: run(lambda: awaited(lambda: cache.lock("a"))), "cache.alock("),
    "typo": (lambda: cache.lock("a", bloking_timeout=5), "write blocking_timeout="),
    "typo, locked": (lambda: any_locked("a", min_hould=5), "write min_hold="),
    "typo, value": (lambda: cache.get_or_set("a", 1, stales=5), "write stale="),
    "wait": (lambda: cache.lock("a", wait=5), "write blocking_timeout=, in seconds"),
    "blocking_timeout of a value": (
        lambda: cache.get_or_set("a", 1, blocking_timeout=5),
        "write wait=, in seconds",
    ),
    "auto_renewal": (lambda: cache.lock("a", auto_renewal=True), "write renew="),
    "unknown": (lambda: cache.lock("a", colour=1), "no option 'colour'; it has timeout, sleep"),
    "release twice": (twice, "has not acquired it in this thread"),
    "release elsewhere": (elsewhere, "thread_local=False"),
    "no blocking": (
        lambda: locked("a", blocking_timeout=5),
        "needs blocking=True",
    ),
    "coroutine function": (lambda: cache.get_or_set("a", compute), "use aget_or_set()"),
    "negative wait": (lambda: idempotent(scope=None, wait=-1), "a number of seconds"),
    "no parentheses": (lambda: cached(function), "give a key that names them, as in {pk}"),
    "no field": (lambda: cached("report")(function), "name one, as in {pk}"),
    "timeout first": (lambda: any_cached(300), '@cached("report-{year}", timeout=300)'),
    "timeout second": (lambda: any_cached("a", 300), '@cached("report-{year}", timeout=300)'),
    "timeout of locked": (lambda: any_locked(30), '@locked("name", timeout=30)'),
    "timeout of locked, second": (lambda: any_locked("a", 30), 'locked("name", timeout=30)'),
    "page without parentheses": (
        lambda: any_page(view)(RequestFactory().get("/")),
        "write @cached_page(300)",
    ),
    "page of a class": (
        lambda: any_page(300)(Page),
        "@method_decorator(cached_page(300), name=",
    ),
    "page of a method": (page_method, "write @method_decorator(cached_page(300))"),
    "exit code of a view": (lambda: locked("a", exit_code=3)(view), "exit_code means nothing"),
    "exit code of a class": (lambda: locked("a", exit_code=3)(Page), "exit_code means nothing"),
    "exit code of an asynchronous view": (
        lambda: locked("a", exit_code=3)(aview),
        "exit_code means nothing for a view",
    ),
    "exit code of a handler": (
        lambda: locked("a", exit_code=3)(Page.get),
        "exit_code means nothing for a view",
    ),
    "status of a command": (lambda: locked("a", status_code=429)(Command), "status_code means no"),
    "a name for a function": (lambda: any_locked("a", on_conflict="skip"), "contention"),
    "retry of a class": (lambda: any_locked("a", on_conflict=retry_task)(Page), "a Celery task"),
    "not called": (lambda: locked("a", on_conflict=redirect_to), "on_conflict=redirect_to(…)"),
    "not called either": (lambda: locked("a", on_conflict=respond), "on_conflict=respond(…)"),
    "max_hold": (lambda: cache.lock("a", timeout=5, max_hold=60), "max_hold needs renew=True"),
    "cancel_on_lost": (lambda: cache.lock("a", cancel_on_lost=True), "cache.alock()"),
    "outside": (current_lock, "works inside what locked() decorates"),
    "a string of aliases": (lambda: cache.lock("a", using="default"), "a list of cache aliases"),
    "key of a lock": (lambda: cache.set("a", 1, version="lock:1"), "Choose another"),
    "tag without a name": (template("{% cached 60 %}{% endcached %}"), "{% cached 500 sidebar %}"),
    "option of the tag": (
        template("{% cached 60 side ttl=5 %}{% endcached %}"),
        "cached has no option 'ttl'; it has using, stale, wait, jitter",
    ),
}
for name in ("expire", "ttl", "lease", "lease_time", "ex", "expiry"):
    for what, call in {
        "lock": lambda name: cache.lock("a", **{name: 5}),
        "alock": lambda name: run(lambda: cache.alock("a", **{name: 5})),
        "lock of several": lambda name: cache.lock(["a", "b"], **{name: 5}),
        "Lock": lambda name: Lock(cache._lock_client(), "a", **{name: 5}),
        "AsyncLock": lambda name: AsyncLock(None, "a", **{name: 5}),
        "locked": lambda name: any_locked("a", **{name: 5}),
        "cached": lambda name: any_cached("a", **{name: 5}),
        "cached_page": lambda name: any_page(300, **{name: 5}),
        "get_or_set": lambda name: cache.get_or_set("a", 1, **{name: 5}),
    }.items():
        MISTAKES[f"{name} of {what}"] = partial(call, name), "write timeout=, in seconds"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_what_to_write(mistake: str) -> None:
    call, words = MISTAKES[mistake]
    kinds = (TypeError, ValueError, LockError, RuntimeError, ImproperlyConfigured)
    with pytest.raises((*kinds, TemplateSyntaxError)) as raised:
        call()
    assert words in str(raised.value)


@pytest.mark.parametrize("mistake", ["async with lock", "with alock", "release twice"])
def test_a_mistake_leaves_no_lock(mistake: str, redis_locks: MemoryServer) -> None:
    test_a_mistake_names_what_to_write(mistake)
    assert redis_locks.held() == []


def test_the_exit_code_of_a_method_of_a_command() -> None:
    @method_decorator(locked("a", exit_code=3), name="handle")
    class Decorated(Command): ...

    Decorated().handle()


def test_a_cache_without_location(settings: Any) -> None:
    settings.CACHES = {
        "default": settings.CACHES["default"],
        "nowhere": {"BACKEND": "django_redis_lock.cache.RedisCache"},
    }
    # Within the override it is in memory, as any other.
    assert caches["nowhere"].get_or_set("a", 1) == 1


@pytest.mark.parametrize("decorate", [locked, cached], ids=["locked", "cached"])
@pytest.mark.parametrize("field", ["request.user.pk", "request.user.id", "view.request.user.pk"])
def test_one_name_for_all_who_are_not_logged_in(
    decorate: Any, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    def of_view(view: Any, request: Any) -> int:
        return 5

    key_template._warn_of_anonymous.cache_clear()
    decorated = decorate(f"basket-{{{field}}}")(of_view)
    request = RequestFactory().get("/")
    for user in (User(pk=7), AnonymousUser(), AnonymousUser()):
        request.user = user
        decorated(SimpleNamespace(request=request), request)
        expected = 0 if user.pk else 1
        assert caplog.text.count("below @login_required") == expected

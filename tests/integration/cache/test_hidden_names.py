"""Key functions that hide which locks are whose, or what they are called: the holders store the
names, and whatever lists, shows, searches or releases locks has them. Releasing many locks takes
few round trips."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.test import Client
from django.urls import reverse

from django_redis_lock import Lock
from django_redis_lock.cache import RedisCache
from django_redis_lock.locking import Renewal
from django_redis_lock.locking import hold as holds
from django_redis_lock.ops.held_locks import held_locks
from django_redis_lock.ops.inventory import FLIGHT, Inventory, releasing
from tests.holding import crash, hurry
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.values import Asking

BACKEND = "django_redis_lock.cache.RedisCache"
NAMES = ("nightly", "invoice-{17}", "é " * 40)


def sha(key: str, prefix: str, version: Any) -> str:
    return hashlib.sha256(f"{prefix}:{version}:{key}".encode()).hexdigest()


def long_hashed(key: str, prefix: str, version: Any) -> str:
    return f"{prefix}:{version}:{key if len(key) < 30 else sha(key, prefix, version)}"


FUNCTIONS: dict[str, Callable[..., str]] = {
    "a hash": sha,
    "a hash of long names": long_hashed,
    "a hash after the prefix": lambda key, *where: f"site:{sha(key, *where)}",
    "prefix and version last": lambda key, prefix, version: f"{key}:{prefix}:{version}",
    "lower case": lambda key, prefix, version: f"{prefix}:{version}:{key.lower()}",
    "reversed": lambda key, prefix, version: f"{prefix}:{version}:{key[::-1]}",
    "cut": lambda key, *where: sha(key, *where)[:16],
}


each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))


@pytest.fixture
def two(settings: Any, redis_server: RedisServer) -> Iterator[Callable[..., RedisCache]]:
    """Makes two caches in one database, the first with this key function."""

    def make(function: Any) -> RedisCache:
        settings.CACHES = {
            "default": {
                "BACKEND": BACKEND,
                "LOCATION": redis_server.url,
                "KEY_FUNCTION": function,
                "KEY_PREFIX": "own",
            },
            "beside": {"BACKEND": BACKEND, "LOCATION": redis_server.url},
        }
        cache: Any = caches["default"]
        return cache

    yield make
    caches.close_all()


def describe(client: redis.Redis, *locks: Any) -> None:
    """Have the holders describe themselves now."""
    hurry(Renewal)
    for lock in locks:
        until(lambda lock=lock: client.hexists(lock.local.hold.keys.owner, "id"))


def names(inventory: Inventory) -> list[str]:
    return sorted(lock.name for lock in inventory.locks)


@each_function
def test_a_cache_lists_and_resets_its_own_locks(
    two: Any, client: redis.Redis, function: Any
) -> None:
    cache = two(function)
    own = [cache.lock(name) for name in NAMES]
    others = [
        caches["beside"].lock("nightly"),
        cache.lock("nightly", version=2),
        RedisCache(cache._server, {"KEY_FUNCTION": function, "KEY_PREFIX": "else"}).lock("nightly"),
        Lock(client, "bare", 60),
    ]
    for lock in (*own, *others):
        assert lock.acquire(blocking=False)
    # At once: until the holders have described themselves, it waits.
    assert names(cache.held_locks()) == sorted(NAMES)
    assert names(cache.held_locks(limit=1))[0] in NAMES
    assert not cache.held_locks(limit=1).complete
    assert cache.reset_all() == len(NAMES)
    assert names(cache.held_locks()) == []
    assert cache.reset_all() == 0
    assert not any(lock.locked() for lock in own)
    assert all(lock.owned() for lock in others)


@pytest.mark.parametrize(
    ("make", "places"),
    [
        (lambda cache: cache.lock("x"), 1),
        (lambda cache: cache.lock("x", limit=3), 3),
        (lambda cache: cache.lock("x", reentrant=True), 1),
        (lambda cache: cache.lock("x", timeout=None), 1),
        (lambda cache: cache.lock("x", id="chosen"), 1),
        (lambda cache: cache.lock("x", on_redis_down="local"), 1),
        (lambda cache: cache.lock(["x"]), 1),
    ],
    ids=["plain", "limit", "reentrant", "no lifetime", "chosen", "fallback", "several names"],
)
def test_kinds_of_locks(two: Any, make: Any, places: int) -> None:
    cache = two(sha)
    for _ in range(places):
        assert make(cache).acquire(blocking=False)
    assert names(cache.held_locks()) == ["x"] * places
    assert cache.reset_all() == places
    assert not cache.lock("x").locked()


def test_locks_over_several_servers(
    settings: Any, redis_server: RedisServer, client: redis.Redis
) -> None:
    """Here: several databases."""
    at, _, _ = redis_server.url.partition("?")
    urls = [f"{at.rpartition('/')[0]}/{n}" for n in range(3)]
    if "unix" in at:
        urls = [f"{at}?db={n}" for n in range(3)]
    config = {"BACKEND": BACKEND, "KEY_FUNCTION": sha}
    three = {f"r{n}": {**config, "LOCATION": url} for n, url in enumerate(urls)}
    settings.CACHES = {"default": three["r0"], **three}
    with caches["default"].lock("x", using=["r0", "r1", "r2"]):
        assert names(caches["r1"].held_locks()) == ["x"]
    caches.close_all()


def test_a_lock_whose_holder_never_describes_itself(
    two: Any, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process died within half a second: nobody can know whose it was."""
    monkeypatch.setattr(releasing, "DESCRIBED_WITHIN", 0.2)
    cache = two(sha)
    known, unknown = cache.lock("known"), cache.lock("unknown")
    with monkeypatch.context() as patch:
        patch.setattr(holds, "DESCRIBE_AFTER", math.inf)
        assert unknown.acquire()
        crash(unknown)
    for list_or_reset in (cache.held_locks, cache.reset_all):
        with pytest.raises(ImproperlyConfigured, match="holders of 1 have not stored"):
            list_or_reset()
    assert known.acquire()
    describe(client, known)
    assert names(cache.held_locks()) == ["known"]
    assert not cache.held_locks().complete
    with pytest.raises(ImproperlyConfigured, match="1 of this cache are released"):
        cache.reset_all()
    assert (known.locked(), unknown.locked()) == (False, True)


def test_names_cost_nothing_where_keys_show_them(two: Any, client: redis.Redis) -> None:
    two(sha)
    lock: Any = caches["beside"].lock("nightly")
    with lock:
        describe(client, lock)
        assert not client.hexists(lock.keys.owner, "name")


# -- for people ------------------------------------------------------------------------------------


@each_function
def test_lists_and_searches(two: Any, client: redis.Redis, function: Any) -> None:
    cache = two(function)
    own, beside = cache.lock("Invoice 17"), caches["beside"].lock("Invoice 17")
    with own, beside, cache.lock("else") as other:
        describe(client, own, beside, other)
        for search in ("", "invoice", "Invoice 17"):
            found = {(h.alias, h.name): h for h in held_locks(search=search).found}
            wanted = {("default", "Invoice 17"), ("beside", "Invoice 17")}
            assert set(found) == wanted | ({("default", "else")} if not search else set())
            assert not any(held.foreign for held in found.values())
        assert found["default", "Invoice 17"].group == found["beside", "Invoice 17"].group


def test_computations(two: Any, client: redis.Redis) -> None:
    cache, seen = two(sha), []

    def look(_: Any = None) -> Any:
        until(lambda: held_locks(kinds=(FLIGHT,)).found)
        seen.extend(h.name for h in held_locks(kinds=(FLIGHT,), search="repo").found)
        return {"report 2": 1}

    cache.get_or_set("report", look)
    cache.get_or_set_many(["report 2"], look)
    assert seen == ["report", "report 2"]


def test_a_cache_that_can_have_no_locks_lists_its_computations(two: Any) -> None:
    cache, seen = two(lambda key, *_: key), []

    def look() -> int:
        until(lambda: held_locks().found)
        seen.append(held_locks())
        return 1

    assert cache.get_or_set("report", look) == 1
    assert [held.name for held in seen[0].found] == ["report"]
    assert not seen[0].failures


def test_commands(two: Any, client: redis.Redis) -> None:
    cache = two(sha)
    locks = [cache.lock(name) for name in ("nightly", "import-1", "import-2")]
    for lock in locks:
        assert lock.acquire()
    describe(client, *locks)

    def run(*words: str) -> str:
        out = StringIO()
        call_command("locks", *words, stdout=out)
        return out.getvalue()

    assert "import-1" in run("list")
    assert "nightly" in run("list", "--search", "nightly")
    assert "held" in run("show", "nightly")
    assert "nightly is released" in run("release", "nightly", "--yes")
    assert run("reset", "import-*", "--yes").count("is released") == 2
    assert not any(lock.locked() for lock in locks)


@pytest.mark.django_db
def test_the_admin(two: Any, client: redis.Redis, admin_client: Client) -> None:
    with two(sha).lock("nightly") as lock:
        describe(client, lock)
        address = reverse("admin:django_redis_lock_heldlock_changelist")
        listed = admin_client.get(address, {"q": "nightly"})
        [row] = listed.context["data"]["rows"]
        assert row["name"] == "nightly"
        page = admin_client.get(row["url"])
        assert "nightly" in page.context["title"]


# -- many ------------------------------------------------------------------------------------------


def test_a_waiter_that_gets_its_turn_keeps_it(two: Any, client: redis.Redis) -> None:
    """Of many locks, too: what is acquired during the call is not released."""
    two(sha)
    cache: Any = caches["beside"]
    locks = [cache.lock(f"lock {n}", timeout=60) for n in range(300)]
    for lock in locks:
        assert lock.acquire(blocking=False)
    waiting = Asking(lambda: cache.lock("lock 7", timeout=60).acquire(blocking_timeout=PATIENCE))
    until(lambda: client.info("clients")["blocked_clients"] == 1)
    assert cache.reset_all() == 300
    assert waiting.found()
    assert [held.name for held in cache.held_locks().locks] == ["lock 7"]

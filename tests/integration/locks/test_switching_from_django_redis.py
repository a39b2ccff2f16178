"""A deploy from ``django_redis.cache.RedisCache``: its processes and ours run side by side."""

from __future__ import annotations

import pytest
from django.utils.module_loading import import_string
from django_redis import get_redis_connection

from tests.processes import Link, processes
from tests.redis_server import RedisServer

OLD, NEW = "django_redis.cache.RedisCache", "django_redis_lock.cache.RedisCache"
SAFE = {"LOCK_LOCK_PREFIX": ""}
ROUNDS = 25


def count_up(link: Link, backend: str, url: str, options: dict[str, str]) -> None:
    """Read, then write one more: two at once lose an addition."""
    cache, redis = import_string(backend)(url, {"OPTIONS": options}), get_redis_connection()
    for _ in range(ROUNDS):
        with cache.lock("import", timeout=60, blocking_timeout=20):
            redis.set("count", int(redis.get("count") or 0) + 1)


def hold(link: Link, backend: str, url: str, options: dict[str, str]) -> None:
    with import_string(backend)(url, {"OPTIONS": options}).lock("import", timeout=60):
        link.say("holds it")
        link.hear()


def test_no_update_is_lost_while_old_and_new_processes_run(redis_server: RedisServer) -> None:
    old = processes(count_up, OLD, redis_server.url, {}, count=2)
    new = processes(count_up, NEW, redis_server.url, SAFE, count=2)
    with old as before, new as after:
        before.go()
        after.go()
        before.results()
        after.results()
    assert int(get_redis_connection().get("count")) == 4 * ROUNDS


@pytest.mark.parametrize(("holder", "other"), [(OLD, NEW), (NEW, OLD)])
@pytest.mark.parametrize(("options", "excluded"), [(SAFE, True), ({}, False)])
def test_what_the_prefix_decides(
    redis_server: RedisServer, holder: str, other: str, options: dict[str, str], excluded: bool
) -> None:
    """With the default prefix they do not exclude each other: the pages must not say so."""
    given = {OLD: {}, NEW: options}
    with processes(hold, holder, redis_server.url, given[holder]) as (process,):
        process.go()
        assert process.hear() == "holds it"
        cache = import_string(other)(redis_server.url, {"OPTIONS": given[other]})
        assert cache.lock("import", timeout=60).acquire(blocking=False) is not excluded
        process.say("enough")
        process.result()

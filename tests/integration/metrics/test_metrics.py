"""Figures of locks and computations: counted in each process, added up in Redis."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import redis
from celery.signals import worker_process_shutdown
from django.core.cache import caches

from django_redis_lock import Lock
from django_redis_lock.cache import RedisCache
from django_redis_lock.contrib import metrics
from django_redis_lock.contrib.metrics import collecting, figures
from django_redis_lock.contrib.metrics.report import Summary, read
from django_redis_lock.keeper import keeper
from django_redis_lock.protocol.keys import FIGURES
from django_redis_lock.transport.server import server_of
from tests.holding import outages
from tests.processes import WHOLE_END, Link, processes, until
from tests.redis_server import RedisServer
from tests.redis_topologies import ClusterServers, SentinelServers
from tests.support.python import python
from tests.support.values import Asking, Broken, Producer, slow, waiting_in_memory

__all__ = ["slow"]


@pytest.fixture
def cache(client: redis.Redis) -> RedisCache:
    found: Any = caches["default"]
    return found


def summary(group: str | None = None, period: str = "hour") -> metrics.Summary:
    metrics.flush()
    return metrics.summary("default", group, period)


# -- what is counted ---------------------------------------------------------------------------


@pytest.mark.parametrize("period", ["hour", "day"])
def test_a_lock(cache: RedisCache, period: str) -> None:
    lock = cache.lock("import")
    for _ in range(3):
        with lock:
            assert not cache.lock("import").acquire(blocking=False)
    with lock:
        assert not cache.lock("import").acquire(blocking_timeout=0.02)
    found = summary("import", period)
    assert (found.acquisitions, found.rejected, found.timeouts, found.lost) == (4, 3, 1, 0)
    assert (found.attempts, found.success_rate, found.contended) == (8, 0.5, 0)
    assert found.holds.count == 4
    assert found.average_wait is not None
    assert 0 < found.average_wait < 60
    assert found.p95_wait is None  # Of so few.
    assert found.acquisitions_over_time[-2:] in {(0, 4), (1, 3), (2, 2), (3, 1), (4, 0)}
    assert len(found.acquisitions_over_time) == {"hour": 13, "day": 25}[period]


def test_a_lock_that_was_waited_for_and_one_that_was_lost(
    cache: RedisCache, client: redis.Redis
) -> None:
    lock = cache.lock("import")
    lock.acquire()
    waiting = Asking(cache.lock("import", timeout=30).acquire)
    until(lambda: client.info("clients")["blocked_clients"])
    lock.release()
    assert waiting.found() is True
    client.delete(cache.lock("import").name)
    until(lambda: summary("import").lost)
    found = summary("import")
    assert (found.acquisitions, found.contended, found.lost) == (2, 1, 1)
    assert found.holds.count == 2


def test_computations(cache: RedisCache, slow: Producer) -> None:
    threads = [Asking(cache.get_or_set, "report-2024", slow) for _ in range(4)]
    until(lambda: waiting_in_memory() == 3)
    slow.finish.set()
    assert [thread.found() for thread in threads] == ["computed"] * 4
    with pytest.raises(Broken):
        cache.get_or_set("report-2025", Producer(Broken("no data")))
    found = summary("report-*")
    assert (found.computed, found.failed, found.saved, found.stale) == (1, 1, 3, 0)
    assert found.computations.count == 2
    assert found.attempts == 0
    assert found.success_rate is None


def test_all_groups_together_and_one_by_one(cache: RedisCache) -> None:
    for name in ("import", "invoice-17", "invoice-18"):
        with cache.lock(name):
            pass
    with cache.lock("export", group="reports"):
        pass
    assert summary().acquisitions == 4
    assert [(s.group, s.acquisitions) for s in metrics.summaries()] == [
        ("invoice-*", 2),
        ("import", 1),
        ("reports", 1),
    ]


def test_sites_that_share_a_database_have_separate_metrics(
    redis_server: RedisServer, client: redis.Redis, settings: Any
) -> None:
    site = {**settings.CACHES["default"], "KEY_PREFIX": "shop"}
    settings.CACHES = {**settings.CACHES, "shop": site}
    for alias, count in (("default", 1), ("shop", 2)):
        for _ in range(count):
            with caches[alias].lock("import"):
                pass
    metrics.flush()
    assert metrics.summary("default").acquisitions == 1
    assert metrics.summary("shop").acquisitions == 2


@pytest.mark.parametrize("where", ["settings", "options"])
def test_it_can_be_switched_off(
    client: redis.Redis, settings: Any, cache: RedisCache, where: str
) -> None:
    if where == "settings":
        settings.DJANGO_REDIS_LOCK = {"METRICS": False}
        with Lock(client, "bare", timeout=10):
            pass
    else:
        default = settings.CACHES["default"]
        options = {**default["OPTIONS"], "LOCK_METRICS": False}
        settings.CACHES = {"default": {**default, "OPTIONS": options}}
        cache = caches["default"]
    with cache.lock("import"):
        pass
    metrics.flush()
    assert not client.exists(*FIGURES.values())


# -- what is written ---------------------------------------------------------------------------


def lock_often(link: Link, count: int) -> None:
    for _ in range(count):
        with caches["default"].lock("import"):
            pass


IN_TWO_PROCESSES = """
import os, django
django.setup()
from django.core.cache import cache
child = os.fork()
for _ in range(50):
    with cache.lock("import"):
        pass
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_the_figures_of_several_processes_add_up(client: redis.Redis) -> None:
    # They write as they end.
    settings = os.environ["DJANGO_SETTINGS_MODULE"]
    python("-c", IN_TWO_PROCESSES, DJANGO_SETTINGS_MODULE=settings, **WHOLE_END)
    found = metrics.summary(group="import")
    assert found.acquisitions == found.holds.count == 100


def hold_forever(link: Link) -> None:
    lock_often(link, 10)
    metrics.flush()
    caches["default"].lock("import").acquire()
    link.say("held")
    threading.Event().wait()


def test_a_killed_process_costs_only_what_it_had_not_written(client: redis.Redis) -> None:
    with processes(hold_forever) as crew:
        crew.go()
        assert crew[0].hear() == "held"
        crew[0].kill()
    with caches["default"].lock("export"):
        pass
    assert summary("import").acquisitions == 10
    assert summary().acquisitions == 11


@pytest.mark.parametrize("of_celerys_pool", [False, True])
def test_a_forked_child_starts_with_nothing_and_writes_the_rest_as_it_ends(
    cache: RedisCache, of_celerys_pool: bool
) -> None:
    metrics.start()  # A worker has imported Celery before Django's setup.
    with cache.lock("import"):
        pass
    child = os.fork()
    if not child:
        with cache.lock("import"):
            pass
        if of_celerys_pool:
            worker_process_shutdown.send(sender=None, pid=os.getpid(), exitcode=0)
        else:
            metrics.flush()
        os._exit(0)  # As Celery's pool does, without ``atexit``.
    assert os.waitpid(child, 0)[1] == 0
    assert metrics.summary(group="import").acquisitions == 1
    assert summary("import").acquisitions == 2


def test_nothing_is_lost_while_redis_is_away(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collecting, "AWAY", 0.02)
    caplog.set_level("INFO", "django_redis_lock.metrics")
    client = own_server.client()
    with Lock(client, "bare", timeout=10):
        pass
    own_server.stop()
    [job] = metrics._metrics._jobs.values()
    keeper().reschedule(job, 0.0)
    until(lambda: "Could not write the figures; they are kept" in caplog.text)
    own_server.start()
    until(lambda: read(client, "", "day"))
    assert Summary.of("bare", "day", read(client, "", "day")["bare"]).acquisitions == 1


def test_the_end_of_a_process_does_not_wait_for_a_dead_redis(own_server: RedisServer) -> None:
    client = own_server.client()
    with Lock(client, "bare", timeout=10):
        pass
    own_server.pause()
    metrics.flush()
    own_server.resume()
    ours = [outage for outage in outages() if outage.server.endswith(f":{own_server.port}/0")]
    assert not ours, "the end of a process is no time to speak of one"
    assert metrics._metrics.servers() == {server_of(client)}


def test_figures_survive_the_emptying_of_the_cache(cache: RedisCache, client: redis.Redis) -> None:
    with cache.lock("import"):
        pass
    assert summary("import").acquisitions == 1
    cache.set("value", 1)
    cache.clear()
    assert cache.get("value") is None
    assert metrics.summary(group="import").acquisitions == 1
    assert 0 < client.ttl(FIGURES["hour"]) <= 14 * 300


# -- bounds ------------------------------------------------------------------------------------


def test_a_process_counts_a_limited_number_of_groups(
    cache: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "MAX_GROUPS", 3)
    for name in "abcdef":
        with cache.lock(name):
            pass
    summary()
    found = {s.group: s.acquisitions for s in metrics.summaries()}
    assert found == {"a": 1, "b": 1, "c": 1, metrics.OTHER: 3}


def test_what_is_too_old_goes_and_is_not_read(cache: RedisCache, client: redis.Redis) -> None:
    with cache.lock("import"):
        pass
    assert summary("import").acquisitions == 1
    for key, period in zip(FIGURES.values(), figures.PERIODS.values(), strict=True):
        now = int(client.hget(key, "now") or 0)
        bucket = {f: v for f, v in client.hgetall(key).items() if b" " in f}
        [packed] = bucket.values()
        oldest, too_old = now - period.buckets + 1, now - period.buckets
        for number in (oldest, too_old):
            client.hset(key, f"{number} \nimport", packed)
            client.hset(key, str(number), 1)
        client.hset(key, "now", now - 1)
    for period in figures.PERIODS:
        found = metrics.summary(group="import", period=period)
        assert found.acquisitions == 2
        assert found.acquisitions_over_time[0] == 1
    with cache.lock("export"):
        pass
    metrics.flush()
    for key, period in zip(FIGURES.values(), figures.PERIODS.values(), strict=True):
        now = int(client.hget(key, "now") or 0)
        numbers = {int(field.split(b" ")[0]) for field in client.hkeys(key) if field != b"now"}
        assert min(numbers) > now - period.buckets


def test_names_cannot_break_out(cache: RedisCache) -> None:
    with cache.lock("a\nb <script> \x1b[31m"):
        pass
    summary()
    [found] = metrics.summaries()
    assert found.group == "a\\nb <script> \\x1b[*m"


def test_on_a_cluster(cluster_servers: ClusterServers) -> None:
    client = cluster_servers.client()
    for name in ("one", "two", "three"):
        with Lock(client, name, timeout=10):
            pass
    metrics.flush()
    found = read(client, "", "hour")
    assert sorted(found) == ["one", "three", "two"]


def test_behind_sentinels(sentinel_servers: SentinelServers) -> None:
    client = sentinel_servers.client()
    with Lock(client, "one", timeout=10):
        pass
    metrics.flush()
    assert list(read(client, "", "hour")) == ["one"]

"""Prometheus and OpenTelemetry are told what happens, and cannot harm it."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess

from django_redis_lock import Lock, events
from django_redis_lock.cache import RedisCache
from django_redis_lock.conf import EXPORTERS
from django_redis_lock.contrib import exporters
from django_redis_lock.contrib.exporters import listening, opentelemetry, prometheus
from django_redis_lock.events import Computed, Crashed, FellBack, ServerDown, ServerUp, Subject
from django_redis_lock.extension import part
from django_redis_lock.transport import server_of
from tests.holding import hurry, silence
from tests.processes import PATIENCE, Link, processes, until
from tests.redis_server import RedisServer
from tests.support.python import python
from tests.support.values import (
    TERMS,
    Asking,
    Broken,
    Producer,
    age,
    blocked,
    elsewhere,
    lands_elsewhere,
    waiting_in_memory,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def cache() -> RedisCache:
    found: Any = caches["default"]
    return found


def live_a_little(cache: RedisCache, client: redis.Redis) -> None:
    """One of everything."""
    lock = cache.lock("invoice-1", timeout=30)
    lock.acquire()
    assert not cache.lock("invoice-1").acquire(blocking=False)
    assert not cache.lock("invoice-1").acquire(blocking_timeout=0.02)
    next_holder = cache.lock("invoice-1", timeout=30, thread_local=False)
    waiting = Asking(next_holder.acquire)
    until(lambda: blocked(client))
    lock.release()
    assert waiting.found() is True
    next_holder.release()
    told = threading.Event()

    def listen(event: Any) -> None:
        if isinstance(event, events.Lost):
            told.set()

    events.subscribe(listen)  # After the exporter, which another thread calls.
    lost = cache.lock("lost", timeout=0.05)
    lost.acquire()
    assert told.wait(PATIENCE)
    events.unsubscribe(listen)
    cache.get_or_set("report", Producer(), **TERMS)
    age(client)
    cache.get_or_set("report", Producer(Broken("no data")), **TERMS)
    age(client)
    elsewhere(client)
    cache.get_or_set("report", Producer(), **TERMS)
    client.delete(":1:report")
    asking = Asking(cache.get_or_set, "report", Producer())
    until(lambda: blocked(client))
    lands_elsewhere(client, 5)
    assert asking.found() == 5
    events.emit(ServerDown("redis:6379/0", OSError()))
    events.emit(ServerUp("redis:6379/0", 2.5, 7, 1))
    events.emit(FellBack(Subject("export", "export"), "local", OSError()))
    events.emit(Crashed(Subject("nightly", "nightly"), None))
    events.emit(Computed(Subject("alone", "alone"), 0.1, None, 3, without_redis=True))


# -- Prometheus --------------------------------------------------------------------------------


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    exporter = prometheus.start(registry)
    yield registry
    exporter.stop()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"django_redis_lock_{name}", labels)


def test_prometheus_counts(
    cache: RedisCache, client: redis.Redis, registry: CollectorRegistry
) -> None:
    live_a_little(cache, client)
    invoices = {"group": "invoice-*"}
    assert value(registry, "acquired_total", **invoices, contended="false") == 1
    assert value(registry, "acquired_total", **invoices, contended="true") == 1
    assert value(registry, "rejected_total", **invoices) == 1
    assert value(registry, "timeouts_total", **invoices) == 1
    assert value(registry, "crashed_total", group="nightly") == 1
    assert value(registry, "wait_seconds_count", **invoices) == 2
    assert value(registry, "hold_seconds_count", **invoices) == 2
    assert value(registry, "wait_seconds_bucket", **invoices, le="1800.0") == 2
    assert value(registry, "lost_total", group="lost") == 1
    report = {"group": "report"}
    assert value(registry, "values_computed_total", **report) == 1
    assert value(registry, "computations_failed_total", **report) == 1
    assert value(registry, "computation_seconds_count", **report) == 2
    assert value(registry, "computations_saved_total", **report, stale="true") == 1
    assert value(registry, "computations_saved_total", **report, stale="false") == 1
    assert value(registry, "refreshes_failed_total", **report) == 1
    assert value(registry, "outages_total", server="redis:6379/0") == 1
    assert value(registry, "outage_seconds_total", server="redis:6379/0") == 2.5
    assert value(registry, "fallbacks_total", group="export", how="local") == 1
    assert value(registry, "values_computed_without_redis_total", group="alone") == 3
    assert value(registry, "values_computed_without_redis_total", **report) == 0


def test_labels_are_bounded(cache: RedisCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MAX_GROUPS", 2)
    label = listening.Exporter([], [])._group
    assert [label(group) for group in "abcab"] == ["a", "b", "other", "a", "b"]


IN_TWO_WORKERS = """
import os, django
django.setup()
from django.core.cache import cache
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0  # They would wait for each other.
for _ in range(5):
    with cache.lock("import"):
        pass
"""


def counters(registry: CollectorRegistry, label: str) -> dict[str, float]:
    """The counters that have ``label``, such as ``group="export"``, and their values."""
    return {
        f"{sample.name.removeprefix('django_redis_lock_')} {sorted(sample.labels.items())}": (
            sample.value
        )
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
        and label in [f'{name}="{value}"' for name, value in sample.labels.items()]
    }


def test_what_a_group_can_suffer_is_zero_from_its_first_use_on(
    cache: RedisCache, client: redis.Redis, registry: CollectorRegistry
) -> None:
    """A counter that appears as 1 has no increase, so an alert would miss the first event."""
    lock, other = cache.lock("export", timeout=30), cache.lock("export")
    server = str(server_of(client))
    with lock:
        assert value(registry, "outages_total", server=server) == 0
        assert value(registry, "outage_seconds_total", server=server) == 0
        of_a_lock = counters(registry, 'group="export"')
        assert not other.acquire(blocking=False)
        cache.get_or_set("report", 1)
    for name in ("rejected", "timeouts", "lost", "crashed"):
        assert of_a_lock[f"{name}_total [('group', 'export')]"] == 0
    for how in ("local", "run"):
        assert of_a_lock[f"fallbacks_total [('group', 'export'), ('how', '{how}')]"] == 0
    of_a_value = counters(registry, 'group="report"')
    for name in ("values_computed_without_redis", "refreshes_failed", "computations_failed"):
        assert of_a_value[f"{name}_total [('group', 'report')]"] == 0
    # The rest of what can happen has a series, too, and what cannot has none.
    assert (len(of_a_lock), sum(of_a_lock.values())) == (8, 1)
    assert (len(of_a_value), sum(of_a_value.values())) == (9, 2)
    assert value(registry, "rejected_total", group="export") == 1


def test_a_waiter_has_these_series_before_it_gives_up(
    cache: RedisCache, client: redis.Redis, registry: CollectorRegistry
) -> None:
    with Lock(client, cache.lock("export").name, timeout=30):  # Another group.
        waiting = Asking(lambda: cache.lock("export").acquire(blocking_timeout=30))
        until(lambda: blocked(client))
        assert value(registry, "timeouts_total", group="export") == 0
    assert waiting.found() is True


@pytest.mark.parametrize("kind", ["prometheus", "opentelemetry"])
def test_gauges_say_what_is_held_now(
    cache: RedisCache,
    client: redis.Redis,
    registry: CollectorRegistry,
    exported: Exported,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(listening, "GAUGES_LAST_SECONDS", 0.0)

    def gauge(name: str, group: str) -> float | None:
        if kind == "prometheus":
            return value(registry, name, group=group)
        return {at["group"]: n for at, n in exported.points(name, 0)}.get(group)

    with cache.lock("export") as lock, cache.lock("import"):
        hurry()
        until(lambda: client.exists(lock.keys.owner))
        assert gauge("held_locks", "export") == gauge("held_locks", "import") == 1
        assert gauge("silent_locks", "export") == 0
        silence(client, lock.keys.lock, 4000.0)
        assert gauge("silent_locks", "export") == 1
        assert gauge("silent_locks", "import") == 0
        assert gauge("oldest_lock_seconds", "export") < PATIENCE
        client.delete(lock.keys.lock)
        lock.raise_on_release_error = False
    assert gauge("held_locks", "export") == 0


def test_an_outage_does_not_break_a_scrape(
    own_server: RedisServer, settings: Any, registry: CollectorRegistry
) -> None:
    backend = "django_redis_lock.cache.RedisCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": own_server.url}}
    with caches["default"].lock("export"):
        pass
    own_server.stop()
    scraped = generate_latest(registry).decode()
    assert 'acquired_total{contended="false",group="export"} 1.0' in scraped
    assert "held_locks{" not in scraped


def test_a_group_of_locks_makes_few_series(cache: RedisCache, registry: CollectorRegistry) -> None:
    """Most of them are buckets."""
    with cache.lock("export"):
        pass
    lines = generate_latest(registry).decode().splitlines()
    of_group = [line for line in lines if 'group="export"' in line and "_created{" not in line]
    # Buckets, count and sum of a wait and of a hold, and the gauges.
    assert len(of_group) == 8 + 2 * (18 + 2) + 3


def test_prometheus_in_several_processes(client: redis.Redis, tmp_path: Path) -> None:
    settings = "tests.exporting_settings"
    variables = {"DJANGO_SETTINGS_MODULE": settings, "PROMETHEUS_MULTIPROC_DIR": tmp_path}
    python("-c", IN_TWO_WORKERS, **variables)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(tmp_path))
    said = generate_latest(registry).decode()
    assert 'django_redis_lock_acquired_total{contended="false",group="import"} 10.0' in said
    assert 'django_redis_lock_hold_seconds_count{group="import"} 10.0' in said


def test_names_cannot_break_out(cache: RedisCache, registry: CollectorRegistry) -> None:
    with cache.lock('a"} 1\nforged 1'):
        pass
    lines = generate_latest(registry).decode().splitlines()
    assert not [line for line in lines if line.startswith("forged")]


# -- OpenTelemetry -----------------------------------------------------------------------------


class Exported:
    """What OpenTelemetry was told."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self._metrics = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meters = MeterProvider([self._metrics])

    @property
    def spans(self) -> Any:
        return self._spans.get_finished_spans()

    def of(self, operation: str) -> list[Any]:
        """The spans whose names begin so, and those of tests."""
        others = ("cache ", "lock ", "compute ")
        return [
            s for s in self.spans if s.name.startswith(operation) or not s.name.startswith(others)
        ]

    def points(self, name: str, least: float = 1) -> list[tuple[dict[str, Any], float]]:
        """The attributes of each data point of a metric, and how much, at ``least``."""
        data = self._metrics.get_metrics_data()
        assert data is not None
        found = []
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            if metric.name == f"django_redis_lock.{name}":
                for point in metric.data.data_points:
                    number = getattr(point, "count", getattr(point, "value", None))
                    if number >= least:
                        found.append((dict(point.attributes or {}), number))
        return found


@pytest.fixture
def exported() -> Iterator[Exported]:
    exported = Exported()
    exporter = opentelemetry.start(exported.tracers, exported.meters)
    yield exported
    events.unsubscribe(exporter)


def test_opentelemetry_has_metrics(
    cache: RedisCache, client: redis.Redis, exported: Exported
) -> None:
    live_a_little(cache, client)
    waits = [point for point in exported.points("wait") if point[0]["group"] == "invoice-*"]
    assert sorted(a["contended"] for a, count in waits if count == 1) == [False, True]
    assert ({"group": "lost"}, 1) in exported.points("lost")
    assert ({"group": "lost", "lost": True}, 1) in exported.points("hold")
    for name in ("rejected", "timeouts"):
        assert exported.points(name) == [({"group": "invoice-*"}, 1)]
    assert exported.points("crashed") == [({"group": "nightly"}, 1)]
    computed = [({"group": "report"}, 1), ({"group": "alone"}, 3)]
    assert exported.points("values_computed") == computed
    assert exported.points("values_computed_without_redis") == computed[1:]
    assert sorted(a["failed"] for a, _ in exported.points("computation")) == [False, False, True]
    assert sorted(a["stale"] for a, _ in exported.points("computations_saved")) == [False, True]
    assert exported.points("refreshes_failed") == [({"group": "report"}, 1)]
    assert exported.points("outages") == [({"server": "redis:6379/0"}, 1)]
    assert exported.points("fallbacks") == [({"group": "export", "how": "local"}, 1)]


def test_opentelemetry_too_has_zeros_from_the_first_use_on(
    cache: RedisCache, client: redis.Redis, exported: Exported
) -> None:
    with cache.lock("export"):
        cache.get_or_set("report", 1)
    for name in ("rejected", "timeouts", "lost", "crashed"):
        assert exported.points(name, 0) == [({"group": "export"}, 0)]
    both = [({"group": "export", "how": how}, 0) for how in ("local", "run")]
    assert exported.points("fallbacks", 0) == both
    assert exported.points("refreshes_failed", 0) == [({"group": "report"}, 0)]
    assert exported.points("outages", 0) == [({"server": str(server_of(client))}, 0)]


def test_a_span_for_each_wait(cache: RedisCache, client: redis.Redis, exported: Exported) -> None:
    tracer = exported.tracers.get_tracer("test")
    lock = cache.lock("invoice-1", timeout=30, label="nightly")
    with tracer.start_as_current_span("request") as request:
        lock.acquire()
        assert not cache.lock("invoice-1").acquire(blocking=False)
        assert not cache.lock("invoice-1").acquire(blocking_timeout=0.03)
    waiting = Asking(cache.lock("invoice-1", timeout=30, label="nightly").acquire)
    until(lambda: blocked(client))
    lock.release()
    waiting.found()
    timed_out, _, acquired = exported.of("lock wait")
    assert timed_out.name == acquired.name == "lock wait invoice-*"
    assert timed_out.parent.span_id == request.get_span_context().span_id
    assert timed_out.attributes["lock.acquired"] is False
    assert 0.02 < (timed_out.end_time - timed_out.start_time) / 1e9 < 30
    assert acquired.attributes["lock.acquired"] is True
    assert acquired.attributes["lock.name"] == "invoice-1"
    assert acquired.attributes["lock.label"] == "nightly"
    assert acquired.attributes["lock.fence"] > 0


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_a_span_around_each_computation(cache: RedisCache, exported: Exported, kind: str) -> None:
    tracer = exported.tracers.get_tracer("test")

    def inner() -> int:
        with tracer.start_as_current_span("query"):
            return 1

    def outer() -> int:
        return int(cache.get_or_set("inner", inner)) + 1

    async def later() -> int:
        return int(await cache.aget_or_set("inner", inner)) + 1

    if kind == "threads":
        assert cache.get_or_set("outer", outer) == 2
    else:
        assert asyncio.run(cache.aget_or_set("outer", later)) == 2
    query, of_inner, of_outer = exported.of("compute")
    assert [s.name for s in (of_inner, of_outer)] == ["compute inner", "compute outer"]
    assert query.parent.span_id == of_inner.context.span_id
    assert of_inner.parent.span_id == of_outer.context.span_id
    assert of_outer.parent is None
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_computation_that_fails_says_so(cache: RedisCache, exported: Exported) -> None:
    with pytest.raises(Broken):
        cache.get_or_set("report", Producer(Broken("no data")))
    [span] = exported.of("compute")
    assert span.status.status_code is StatusCode.ERROR
    assert span.events[0].name == "exception"


def test_spans_of_reads_and_stores(
    cache: RedisCache, client: redis.Redis, exported: Exported
) -> None:
    tracer = exported.tracers.get_tracer("test")
    with tracer.start_as_current_span("request") as request:
        for _ in range(2):
            cache.get_or_set("report-1", 1, **TERMS)
        age(client, ":1:report-1")
        cache.get_or_set("report-1", 2, **TERMS)
    gets = [span for span in exported.of("cache get") if span.name == "cache get report-*"]
    assert [span.attributes["cache.result"] for span in gets] == ["miss", "hit", "stale"]
    assert [span.attributes["cache.hit"] for span in gets] == [False, True, True]
    port = client.get_connection_kwargs()["port"]
    for span in gets:
        assert span.parent.span_id == request.get_span_context().span_id
        assert span.kind is SpanKind.CLIENT
        assert span.attributes["cache.name"] == "report-1"
        assert span.attributes["db.system.name"] == "redis"
        assert span.attributes["server.port"] == port
    puts = [span for span in exported.of("cache put") if span.name == "cache put report-*"]
    assert len(puts) == 2
    [computation, _] = [s for s in exported.of("compute") if s.name.startswith("compute")]
    assert gets[0].end_time <= computation.start_time <= computation.end_time <= puts[0].end_time


def follow(link: Link, url: str) -> None:
    """Waits for the value that the test computes; tells the links of the wait's span."""
    exported = Exported()
    opentelemetry.start(exported.tracers, exported.meters)
    cache = RedisCache(url, {})
    link.say("here")
    link.hear()
    assert cache.get_or_set("report", Producer()) == "of the leader"
    [wait] = exported.of("cache wait")
    link.say([(one.context.trace_id, one.context.span_id) for one in wait.links])


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_the_wait_of_a_follower_is_linked_to_the_computation(
    redis_server: RedisServer, cache: RedisCache, client: redis.Redis, exported: Exported, kind: str
) -> None:
    """Of another process, and of this one."""
    mine: list[Asking] = []
    with processes(follow, redis_server.url) as crew:
        crew.go()
        [other] = crew
        other.hear()

        def lead() -> str:
            other.say("go")
            mine.append(Asking(cache.get_or_set, "report", Producer()))
            until(lambda: blocked(client) + waiting_in_memory() == 2)
            return "of the leader"

        if kind == "threads":
            cache.get_or_set("report", lead)
        else:
            asyncio.run(cache.aget_or_set("report", lead))
        links = other.hear()
    assert mine[0].found() == "of the leader"
    [computation] = exported.of("compute")
    led_by = (computation.context.trace_id, computation.context.span_id)
    assert links == [led_by]
    [wait] = exported.of("cache wait")
    assert wait.name == "cache wait report"
    assert wait.end_time > wait.start_time
    assert [(link.context.trace_id, link.context.span_id) for link in wait.links] == [led_by]


# -- both --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPORTERS)
def test_an_exporter_that_fails_touches_nothing(
    cache: RedisCache,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the exporter is broken")

    if name == "prometheus":
        exporter: Any = prometheus.start(CollectorRegistry())
        for _, counter in exporter._metrics:
            monkeypatch.setattr(counter, "labels", broken)
    elif name == "sentry":
        pytest.importorskip("sentry_sdk", reason="sentry_sdk is not installed")
        exporter = exporters.load("sentry").start()
        for verb in ("record", "begin", "end"):
            monkeypatch.setattr(exporter, verb, broken)
    else:
        exporter = opentelemetry.start()
        monkeypatch.setattr(exporter._tracer, "start_span", broken)
        for instrument in exporter.instruments.values():
            verb = "record" if hasattr(instrument, "record") else "add"
            monkeypatch.setattr(instrument, verb, broken, raising=False)
    try:
        live_a_little(cache, client)
    finally:
        events.unsubscribe(exporter)
    assert "nothing else is affected" in caplog.text


@pytest.mark.usefixtures("nothing_is_declared")
@pytest.mark.parametrize("name", EXPORTERS)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, settings: Any, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    package, extra = exporters._NEEDS[name]
    part.cache_clear()
    monkeypatch.delitem(sys.modules, f"django_redis_lock.contrib.exporters.{name}", raising=False)
    for module in {package, *(m for m in sys.modules if m.partition(".")[0] == package)}:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImproperlyConfigured, match=rf"pip install django-redis-lock\[{extra}\]"):
        exporters.load(name)
    settings.DJANGO_REDIS_LOCK = {"EXPORTERS": [name]}
    exporters.start_configured()  # Logged, and no reason not to start.
    assert f"django-redis-lock[{extra}]" in caplog.text
    (message,) = run_checks(tags=["redis_lock"])
    assert message.id == "django_redis_lock.E008"
    assert f"django-redis-lock[{extra}]" in message.msg


@pytest.mark.sample(0)
@pytest.mark.parametrize("value", ['{"EXPORTERS": "prometheus"}', "None"])
def test_a_wrong_setting_is_a_check_and_no_traceback(tmp_path: Path, value: str) -> None:
    code = f"from testproject.settings import *\nDJANGO_REDIS_LOCK = {value}\n"
    (tmp_path / "wrong_settings.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    variables = {"DJANGO_SETTINGS_MODULE": "wrong_settings", "PYTHONPATH": path}
    ended = python("manage.py", "check", "--tag", "redis_lock", code=1, **variables)
    assert "(django_redis_lock.E00" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_prometheus_is_registered_once(cache: RedisCache) -> None:
    try:
        for _ in range(2):
            exporters.load("prometheus").start()
        reloaded = importlib.reload(prometheus)
        reloaded.start()
        with cache.lock("import"):
            pass
        mine = [x for x in events.listeners if type(x).__qualname__ == "Prometheus"]
        assert len(mine) == 1
        labels = {"group": "import", "contended": "false"}
        assert REGISTRY.get_sample_value("django_redis_lock_acquired_total", labels) == 1
    finally:
        for listener in events.listeners:
            if type(listener).__qualname__ == "Prometheus":
                listener.stop()


def test_a_cancelled_computation_leaves_no_span_open(cache: RedisCache, exported: Exported) -> None:
    async def main() -> None:
        begun = asyncio.Event()

        async def never() -> None:
            begun.set()
            await asyncio.Event().wait()

        asking = asyncio.create_task(cache.aget_or_set("report", never))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(main())
    assert [span.name for span in exported.of("compute")] == ["compute report"]

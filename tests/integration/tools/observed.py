"""What a tool sees of this package's cache: ``python -m tests.integration.tools.observed TOOL``.

A tool replaces functions of the whole process, so each is observed in a process of its own. It
prints JSON: for each operation a list of what the tool has recorded.
"""

# ruff: noqa: PLC0415  (each tool is imported in a process of its own, after the settings)

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import django
from django.conf import settings

PAGE = Path(__file__).parents[3] / "docs" / "other_tools.md"
TERMS = {"timeout": 60, "stale": 3600}

#: Records what a tool sees in a ``with`` block: the list is filled when the block ends.
Recorder = Callable[[], Any]


def recipe(tool: str) -> str:
    """The first example in the section of the page about ``tool``."""
    section = PAGE.read_text().split(f"\n## {tool}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]


def setup(
    backend: str = "django_redis_lock.cache.RedisCache", exporters: Sequence[str] = ()
) -> Any:
    """Django with one cache; returns the cache. Each acquisition counts as slow."""
    location = os.environ["REDIS_URL"]
    settings.configure(
        CACHES={"default": {"BACKEND": backend, "LOCATION": location}},
        INSTALLED_APPS=["django_redis_lock"],
        DJANGO_REDIS_LOCK={"EXPORTERS": exporters, "SLOW_ACQUISITION": 0},
    )
    django.setup()
    from django.core.cache import caches

    return caches["default"]


# -- the tools -----------------------------------------------------------------------------------


def sentry(exporter: bool = False, cache_spans: bool = True) -> tuple[Any, Recorder]:
    import sentry_sdk
    from sentry_sdk.integrations.django import DjangoIntegration
    from sentry_sdk.transport import Transport

    class Recording(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            event = envelope.get_transaction_event()
            if event is not None:
                spans.extend(event["spans"])

    spans: list[Any] = []
    sentry_sdk.init(
        dsn="http://key@127.0.0.1:1/1",
        transport=Recording,
        traces_sample_rate=1.0,
        integrations=[DjangoIntegration(cache_spans=cache_spans)],
    )

    @contextmanager
    def recording() -> Iterator[list[str]]:
        seen: list[str] = []
        spans.clear()
        with sentry_sdk.start_transaction(name="test"):
            yield seen
        for span in spans:
            hit = span["data"].get("cache.hit")
            command = span.get("tags", {}).get("redis.command", "pipeline")
            seen.append(
                {"db.redis": command}.get(span["op"], span["op"])
                + {True: " hit", False: " miss", None: ""}[hit]
            )

    return setup(exporters=["sentry"] if exporter else []), recording


def opentelemetry(exporter: bool = False) -> tuple[Any, Recorder]:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
        InMemorySpanExporter,
    )

    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    if not exporter:
        from opentelemetry.instrumentation.redis import RedisInstrumentor

        RedisInstrumentor().instrument()

    @contextmanager
    def recording() -> Iterator[list[str]]:
        seen: list[str] = []
        spans.clear()
        yield seen
        seen.extend(span.name for span in spans.get_finished_spans())

    return setup(exporters=["opentelemetry"] if exporter else []), recording


def elastic() -> tuple[Any, Recorder]:
    import elasticapm
    from elasticapm.transport.base import Transport

    class Recording(Transport):
        def queue(self, event_type: str, data: Any, flush: bool = False) -> None:
            if event_type == "span":
                spans.append(data)
            elif event_type == "close":  # As the process ends, which waits 10 s for it.
                super().queue(event_type, data, flush)

    spans: list[Any] = []
    module: Any = types.ModuleType("recording")
    module.Recording = Recording
    sys.modules["recording"] = module
    client = elasticapm.Client(
        service_name="test",
        transport_class="recording.Recording",
        central_config=False,
        cloud_provider=False,
        metrics_interval="0ms",
        span_compression_enabled=False,
    )
    elasticapm.instrument()

    @contextmanager
    def recording() -> Iterator[list[str]]:
        seen: list[str] = []
        spans.clear()
        client.begin_transaction("test")
        yield seen
        client.end_transaction("test", "ok")
        seen.extend(span["name"] for span in spans)

    return setup(), recording


def datadog() -> tuple[Any, Recorder]:
    os.environ.update(
        DD_TRACE_AGENT_URL="http://127.0.0.1:1",
        DD_INSTRUMENTATION_TELEMETRY_ENABLED="0",
        DD_REMOTE_CONFIGURATION_ENABLED="0",
        DD_DJANGO_INSTRUMENT_CACHES="1",
    )
    from ddtrace import patch
    from ddtrace.trace import TraceFilter, tracer

    class Recording(TraceFilter):
        def process_trace(self, trace: Any) -> None:
            spans.extend(trace)

    spans: list[Any] = []
    tracer.configure(trace_processors=[Recording()])
    patch(django=True, redis=True)

    @contextmanager
    def recording() -> Iterator[list[str]]:
        seen: list[str] = []
        spans.clear()
        with tracer.trace("test"):
            yield seen
        for span in spans:
            if span.name == "redis.command":
                seen.append(span.resource)
            elif span.name == "django.cache":
                seen.append(span.name)

    return setup(), recording


def new_relic() -> tuple[Any, Recorder]:
    os.environ.update(NEW_RELIC_DEVELOPER_MODE="true", NEW_RELIC_APP_NAME="test")
    import newrelic.agent

    newrelic.agent.initialize()
    application = newrelic.agent.register_application(timeout=5)

    def below(node: Any) -> Iterator[Any]:
        for child in node.children:
            yield child
            yield from below(child)

    @contextmanager
    def recording() -> Iterator[list[str]]:
        seen: list[str] = []
        with newrelic.agent.BackgroundTask(application, name="test") as transaction:
            yield seen
        operations = (node.operation for node in below(transaction.root_span))
        # How a connection begins is no part of the call.
        seen.extend(name for name in operations if not name.startswith("client_"))

    return setup(), recording


def django_prometheus() -> tuple[Any, Recorder]:
    from prometheus_client import REGISTRY

    def counts() -> dict[str, float]:
        return {
            name: REGISTRY.get_sample_value(f"django_cache_{name}_total", {"backend": "redis"}) or 0
            for name in ("get", "get_hits", "get_misses")
        }

    @contextmanager
    def recording() -> Iterator[list[str]]:
        seen: list[str] = []
        before = counts()
        yield seen
        for name, count in counts().items():
            seen += [name] * int(count - before[name])

    module: Any = types.ModuleType("caches")
    exec(recipe("django-prometheus"), module.__dict__)
    sys.modules["caches"] = module
    return setup("caches.MeasuredCache"), recording


TOOLS: dict[str, Callable[[], tuple[Any, Recorder]]] = {
    "sentry": sentry,
    "sentry_exporter": lambda: sentry(exporter=True, cache_spans=False),
    "sentry_both": lambda: sentry(exporter=True),
    "opentelemetry": opentelemetry,
    "opentelemetry_exporter": lambda: opentelemetry(exporter=True),
    "elastic": elastic,
    "datadog": datadog,
    "new_relic": new_relic,
    "django_prometheus": django_prometheus,
}


# -- the operations ------------------------------------------------------------------------------


def operations(cache: Any) -> dict[str, Callable[[], Any]]:
    """What is done while the tool looks, in this order."""

    def lock() -> None:
        with cache.lock("import"):
            pass

    def wait() -> None:
        held = cache.lock("import", thread_local=False)
        held.acquire()
        threading.Timer(0.1, held.release).start()
        lock()

    def get_or_set(key: str, **terms: Any) -> Callable[[], Any]:
        return lambda: cache.get_or_set(key, lambda: 1, **terms)

    def aget_or_set(key: str, **terms: Any) -> Callable[[], Any]:
        return lambda: asyncio.run(cache.aget_or_set(key, lambda: 1, **terms))

    def get_or_set_many() -> Any:
        return cache.get_or_set_many(["a", "b"], lambda keys: dict.fromkeys(keys, 1))

    def aget_or_set_many() -> Any:
        return cache.aget_or_set_many(["a", "b"], lambda keys: dict.fromkeys(keys, 1))

    return {
        "get": lambda: cache.get("there"),
        "set": lambda: cache.set("there", 1),
        "aget": lambda: asyncio.run(cache.aget("there")),
        "aset": lambda: asyncio.run(cache.aset("there", 1)),
        "get_or_set, miss": get_or_set("missing"),
        "get_or_set, hit": get_or_set("there"),
        "get_or_set(stale=…), stale": get_or_set("stale", **TERMS),
        "get_or_set(stale=…), hit": get_or_set("fresh", **TERMS),
        "aget_or_set, miss": aget_or_set("missing-too"),
        "aget_or_set, hit": aget_or_set("there"),
        "get_or_set_many, hit": get_or_set_many,
        "aget_or_set_many, hit": lambda: asyncio.run(aget_or_set_many()),
        "add": lambda: cache.add("there", 1),
        "delete": lambda: cache.delete("gone"),
        "incr": lambda: cache.incr("number"),
        "touch": lambda: cache.touch("there", 60),
        "has_key": lambda: cache.has_key("there"),
        "ttl": lambda: cache.ttl("there"),
        "expire": lambda: cache.expire("there", 60),
        "get_many": lambda: cache.get_many(["a", "b"]),
        "set_many": lambda: cache.set_many({"a": 1, "b": 1}),
        "delete_many": lambda: cache.delete_many(["gone", "gone too"]),
        "aadd": lambda: asyncio.run(cache.aadd("there", 1)),
        "adelete": lambda: asyncio.run(cache.adelete("gone")),
        "aincr": lambda: asyncio.run(cache.aincr("number")),
        "atouch": lambda: asyncio.run(cache.atouch("there", 60)),
        "ahas_key": lambda: asyncio.run(cache.ahas_key("there")),
        "aget_many": lambda: asyncio.run(cache.aget_many(["a", "b"])),
        "aset_many": lambda: asyncio.run(cache.aset_many({"a": 1, "b": 1})),
        "adelete_many": lambda: asyncio.run(cache.adelete_many(["gone", "gone too"])),
        "lock, free": lock,
        "lock, taken": wait,
    }


def main(tool: str) -> None:
    cache, recording = TOOLS[tool]()
    seen: dict[str, list[str]] = {}
    for round_ in ("the scripts are sent to the server", "recorded"):
        cache.clear()
        cache.set_many({"there": 1, "number": 1, "a": 1, "b": 2})
        for key in ("fresh", "stale"):
            cache.get_or_set(key, 1, **TERMS)
        cache.client.get_client().pexpire(cache.make_key("stale"), 3_500_000)
        for name, operate in operations(cache).items():
            with recording() as found:
                operate()
            if round_ == "recorded":
                seen[name] = found
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])

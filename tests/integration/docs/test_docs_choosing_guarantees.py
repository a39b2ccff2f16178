"""What docs/choosing_guarantees.md shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.core.cache import caches

from django_redis_lock import Redlock, locked
from django_redis_lock.cache import RedisCache
from tests.redis_server import RedisServer

TEXT = (Path(__file__).parents[3] / "docs" / "choosing_guarantees.md").read_text()
FENCED, POLICIES, SEVERAL = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
OURS = "django_redis_lock.cache.RedisCache"


def line(code: str, beginning: str) -> str:
    (found,) = (line for line in code.splitlines() if line.startswith(beginning))
    return found.partition("  #")[0].rstrip()


def test_storage_that_looks_at_fences(redis_server: RedisServer) -> None:
    written: list[dict[str, Any]] = []

    class Rows:
        def filter(self, **wanted: Any) -> Rows:
            written.append(wanted)
            return self

        def update(self, **values: Any) -> None:
            written.append(values)

    names = {
        "cache": RedisCache(redis_server.url, {}),
        "compute_total": lambda: 12,
        "Ledger": SimpleNamespace(objects=Rows()),
    }
    exec(FENCED, names)
    assert written[0] == {"pk": 1, "fence__lt": written[1]["fence"]}
    assert written[1]["total"] == 12


def test_what_locks_do_without_redis(own_server: RedisServer, settings: Any) -> None:
    names: dict[str, Any] = {}
    exec(line(POLICIES, "DJANGO_REDIS_LOCK"), names)
    settings.DJANGO_REDIS_LOCK = names["DJANGO_REDIS_LOCK"]
    exec(line(POLICIES, "OPTIONS"), names)
    cache = RedisCache(own_server.url, {})
    assert cache.conf.ON_REDIS_DOWN == "raise"
    of_one = RedisCache(own_server.url, {"OPTIONS": names["OPTIONS"]})
    assert of_one.conf.ON_REDIS_DOWN == "local"
    own_server.stop()
    nightly = eval(line(POLICIES, 'cache.lock("nightly"'), {"cache": cache})
    with nightly:
        assert nightly.degraded == "run"
    with pytest.raises(redis.ConnectionError):
        eval(line(POLICIES, 'cache.lock("payments"'), {"cache": cache}).acquire()


def test_several_servers(redis_server: RedisServer, settings: Any) -> None:
    urls = [redis_server.url.replace("/0", f"/{number}") for number in (1, 2, 3)]
    for number, url in enumerate(urls, 1):
        settings.CACHES = {**settings.CACHES, f"lock{number}": {"BACKEND": OURS, "LOCATION": url}}
    lock = eval(line(SEVERAL, "cache.lock"), {"cache": caches["lock1"]})
    with lock:
        assert isinstance(lock, Redlock)
        assert len(lock.redis) == 3
    names: dict[str, Any] = {"locked": locked}
    decorator = line(SEVERAL, "@locked")
    exec(decorator + "\ndef work(): return 'done'", names)
    assert names["work"]() == "done"
    clients = {f"client{n}": redis.Redis.from_url(url) for n, url in enumerate(urls, 1)}
    with eval(line(SEVERAL, "Redlock"), {"Redlock": Redlock, **clients}) as bare:
        assert bare.fence
    for client in clients.values():
        client.close()

"""The settings in docs/topologies.md work as they stand there, but for the addresses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from django_redis_lock.cache import RedisCache
from tests.redis_topologies import ClusterServers, SentinelServers

TEXT = (Path(__file__).parents[3] / "docs" / "topologies.md").read_text()


def caches() -> list[dict[str, Any]]:
    found = []
    for code in re.findall(r"```python\n((?:from .*?)?CACHES.*?)```", TEXT, re.DOTALL):
        names: dict[str, Any] = {}
        exec(code, names)
        found.append(names["CACHES"]["default"])
    return found


def use(settings: dict[str, Any]) -> None:
    assert settings["BACKEND"] == "django_redis_lock.cache.RedisCache"
    cache = RedisCache(settings["LOCATION"], {"OPTIONS": settings["OPTIONS"]})
    assert cache.get_or_set("report", lambda: "the report", 60) == "the report"
    assert cache.get_many(["report", "other"]) in ({"report": "the report"}, {})  # A replica's.
    with cache.lock("nightly") as lock:
        assert [held.name for held in cache.held_locks().locks] == ["nightly"]
        cache.clear()
        assert lock.owned()
    names: dict[str, Any] = {"cache": cache, "pay": lambda: None}
    (confirmed,) = re.findall(r"```python\n(with cache.lock.*?)```", TEXT, re.DOTALL)
    exec(confirmed, names)


def test_sentinel(sentinel_servers: SentinelServers) -> None:
    settings, _ = caches()
    settings["OPTIONS"]["SENTINELS"] = sentinel_servers.addresses
    use(settings)


def test_cluster(cluster_servers: ClusterServers) -> None:
    _, settings = caches()
    settings["LOCATION"] = [node.url for node in cluster_servers.nodes[:2]]
    use(settings)

"""``manage.py locks`` and its doctor on a cluster, and behind sentinels."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.core.cache import cache

from tests.processes import until
from tests.redis_topologies import ClusterServers, SentinelServers, cluster
from tests.support.commands import Run, run

__all__ = ["run"]

#: The doctor reports mistakes in declared locks, too; other tests declare some.
pytestmark = pytest.mark.usefixtures("nothing_is_declared")


@pytest.fixture(params=["cluster", "sentinel"])
def topology(request: pytest.FixtureRequest, settings: Any) -> str:
    if request.param == "cluster":
        settings.CACHES = on_cluster(request.getfixturevalue("cluster_servers"))
    else:
        settings.CACHES = behind_sentinels(request.getfixturevalue("sentinel_servers"))
    return request.param


def on_cluster(servers: ClusterServers) -> dict[str, Any]:
    client_class = "django_redis_lock.clients.ClusterClient"
    return caches_at([server.url for server in servers.servers], CLIENT_CLASS=client_class)


def behind_sentinels(servers: SentinelServers) -> dict[str, Any]:
    return caches_at(
        [f"redis://{servers.name}/0"],
        CLIENT_CLASS="django_redis.client.SentinelClient",
        CONNECTION_FACTORY="django_redis.pool.SentinelConnectionFactory",
        SENTINELS=servers.addresses,
    )


def caches_at(location: list[str], **options: Any) -> dict[str, Any]:
    backend = "django_redis_lock.cache.RedisCache"
    options = {"SOCKET_TIMEOUT": 5, **options}
    return {"default": {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}}


def test_a_lock_is_listed_shown_and_released(topology: str, run: Run) -> None:
    with cache.lock("import") as lock, cache.lock("export"):
        until(lambda: len(json.loads(run("--json")[1])["locks"]) == 2)
        _, out, _ = run("show", "import")
        assert "at the key :lock:1:import" in out
        code, out, _ = run("release", "import", "--yes")
        assert (code, out.splitlines()[-1]) == (0, "import is released.")
        lock.raise_on_release_error = False


def test_the_doctor(topology: str, run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)["caches"]["default"]["findings"]
    assert code == 0, [f for f in found if f["level"] != "ok"]
    by_topic = {finding["topic"]: finding for finding in found}
    assert by_topic["trial"]["level"] == "ok"
    assert by_topic["rights"]["level"] == "ok"
    words = {"cluster": "cluster, primary", "sentinel": "standalone, primary"}
    assert words[topology] in by_topic["server"]["text"]
    address = {"cluster": "the cluster of 127.0.0.1:", "sentinel": "the sentinels' service"}
    assert run("doctor")[1].startswith(f"default  {address[topology]}")


@pytest.mark.parametrize("topology", ["cluster"], indirect=True)
def test_the_doctor_names_the_user_of_a_cluster(
    topology: str, cluster_servers: ClusterServers, settings: Any, run: Run
) -> None:
    rights = ("on", ">secret", "~*", "&*", "+@all", "-blpop")
    clients = [server.client() for server in cluster_servers.servers]
    default = settings.CACHES["default"]
    options = {**default["OPTIONS"], "USERNAME": "app", "PASSWORD": "secret"}
    settings.CACHES = {"default": {**default, "OPTIONS": options}}
    try:
        for client in clients:
            client.execute_command("ACL SETUSER", "app", "reset", *rights)
        code, out, _ = run("doctor")
    finally:
        for client in clients:
            client.execute_command("ACL DELUSER", "app")
            client.close()
    assert code == 1
    assert 'the user "app" may not run blpop' in out
    assert "ACL SETUSER app +blpop" in out


def test_the_doctor_examines_the_primaries_of_now(settings: Any, run: Run) -> None:
    """Not those that redis-py found at first."""
    with cluster() as servers:
        settings.CACHES = on_cluster(servers)
        cache.get("import")
        before = servers.primary_of(":1:import")
        servers.fail_over(":1:import")
        code, out, _ = run("doctor")
    assert code == 0, out
    assert f":{before.port}" not in out.partition("\n")[2]

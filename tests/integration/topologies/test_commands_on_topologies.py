"""``manage.py locks`` and its doctor on a cluster, and behind sentinels."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.core.cache import cache

from django_redis_lock.management.commands.locks import Command
from tests.processes import until
from tests.redis_topologies import ClusterServers, SentinelServers

#: The doctor reports mistakes in declared locks, too; other tests declare some.
pytestmark = pytest.mark.usefixtures("nothing_is_declared")


@pytest.fixture(params=["cluster", "sentinel"])
def topology(request: pytest.FixtureRequest, settings: Any) -> str:
    backend = "django_redis_lock.cache.RedisCache"
    if request.param == "cluster":
        cluster: ClusterServers = request.getfixturevalue("cluster_servers")
        options: dict[str, Any] = {"CLIENT_CLASS": "django_redis_lock.clients.ClusterClient"}
        location = [server.url for server in cluster.servers]
    else:
        servers: SentinelServers = request.getfixturevalue("sentinel_servers")
        options = {
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
            "SENTINELS": [("127.0.0.1", sentinel.port) for sentinel in servers.sentinels],
        }
        location = [f"redis://{servers.name}/0"]
    options["SOCKET_TIMEOUT"] = 5
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}}
    return request.param


def run(capfd: Any, *words: str) -> tuple[int, str]:
    code: Any = 0
    try:
        Command().run_from_argv(["manage.py", "locks", *words])
    except SystemExit as end:
        code = end.code
    return code, capfd.readouterr().out


def test_a_lock_is_listed_shown_and_released(topology: str, capfd: Any) -> None:
    with cache.lock("import") as lock, cache.lock("export"):
        until(lambda: len(json.loads(run(capfd, "--json")[1])["locks"]) == 2)
        _, out = run(capfd, "show", "import")
        assert "at the key :1:lock:import" in out
        code, out = run(capfd, "release", "import", "--yes")
        assert (code, out.splitlines()[-1]) == (0, "import is released.")
        lock.raise_on_release_error = False


def test_the_doctor(topology: str, capfd: Any) -> None:
    code, out = run(capfd, "doctor", "--json")
    found = json.loads(out)["caches"]["default"]["findings"]
    assert code == 0, [f for f in found if f["level"] != "ok"]
    by_topic = {finding["topic"]: finding for finding in found}
    assert by_topic["trial"]["level"] == "ok"
    assert by_topic["rights"]["level"] == "ok"
    words = {"cluster": "cluster, primary", "sentinel": "standalone, primary"}
    assert words[topology] in by_topic["server"]["text"]
    address = {"cluster": "the cluster of 127.0.0.1:", "sentinel": "the sentinels' service"}
    assert run(capfd, "doctor")[1].startswith(f"default  {address[topology]}")


@pytest.mark.parametrize("topology", ["cluster"], indirect=True)
def test_the_doctor_names_the_user_of_a_cluster(
    topology: str, cluster_servers: ClusterServers, settings: Any, capfd: Any
) -> None:
    rights = ("on", ">secret", "~*", "&*", "+@all", "-blpop")
    clients = [server.client() for server in cluster_servers.servers]
    default = settings.CACHES["default"]
    options = {**default["OPTIONS"], "USERNAME": "app", "PASSWORD": "secret"}
    settings.CACHES = {"default": {**default, "OPTIONS": options}}
    try:
        for client in clients:
            client.execute_command("ACL SETUSER", "app", "reset", *rights)
        code, out = run(capfd, "doctor")
    finally:
        for client in clients:
            client.execute_command("ACL DELUSER", "app")
            client.close()
    assert code == 1
    assert 'the user "app" may not run blpop' in out
    assert "ACL SETUSER app +blpop" in out

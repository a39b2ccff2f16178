"""The settings of connections of our own."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.asyncio.connection import Connection as AsyncConnection
from redis.connection import Connection

from django_redis_lock.cache import RedisCache
from django_redis_lock.transport.address import _driver, own_settings

driver_info = pytest.importorskip(
    "redis.driver_info", reason="redis-py before 7.2 tells Redis no driver"
)


@pytest.mark.parametrize("kind", [Connection, AsyncConnection])
def test_redis_is_told_whose_they_are(kind: Any) -> None:
    connection = kind(**own_settings(kind, {"host": "localhost"}, 1.0))
    assert "django-redis-lock" in connection.driver_info.formatted_name


def test_no_version_is_looked_up_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes longer than all else that a process does for its first value."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: pytest.fail("looked up"))
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: pytest.fail("looked up"))
    _driver.cache_clear()
    own = Connection(**own_settings(Connection, {}, 1.0))
    cache = RedisCache("redis://127.0.0.1:1/1", {})
    of_pool = cache.client.get_client().connection_pool.make_connection()
    assert own.driver_info.lib_version == of_pool.driver_info.lib_version == redis.__version__
    assert of_pool.driver_info.formatted_name == "redis-py"


@pytest.mark.parametrize("given", [{"driver_info": None}, {"lib_name": "mine"}])
def test_what_the_pool_says_of_itself_is_kept(given: dict[str, Any]) -> None:
    settings = own_settings(Connection, given, 1.0)
    assert given.items() <= settings.items()
    assert settings.keys() & {"driver_info", "lib_name"} == given.keys()


@pytest.mark.parametrize(("protocol", "user"), [(2, None), (3, "default"), ("3", "default")])
def test_a_user_is_named_where_redis_py_names_one(protocol: Any, user: str | None) -> None:
    """A proxy may take a password only alone."""
    settings = {"password": "secret", "protocol": protocol}
    assert own_settings(Connection, settings, 1.0).get("username") == user
    own = own_settings(Connection, {**settings, "username": "app"}, 1.0)
    assert own["username"] == "app"

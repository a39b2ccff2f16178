"""The settings of connections of our own."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio.connection import Connection as AsyncConnection
from redis.connection import Connection

from django_redis_lock.transport.address import own_settings

driver_info = pytest.importorskip(
    "redis.driver_info", reason="redis-py before 7.2 tells Redis no driver"
)


@pytest.mark.parametrize("kind", [Connection, AsyncConnection])
def test_redis_is_told_whose_they_are(kind: Any) -> None:
    connection = kind(**own_settings(kind, {"host": "localhost"}, 1.0))
    assert "django-redis-lock" in connection.driver_info.formatted_name


def test_redis_py_does_not_look_its_version_up_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    Connection(**own_settings(Connection, {}, 1.0))
    monkeypatch.setattr("redis.utils.get_lib_version", lambda: pytest.fail("looked up again"))
    Connection(**own_settings(Connection, {}, 1.0))


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

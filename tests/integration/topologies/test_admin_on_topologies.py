"""The page "Held locks" on a cluster, and behind sentinels."""

from __future__ import annotations

import pytest
from django.core.cache import cache
from django.test import Client

from tests.holding import hurry
from tests.processes import until
from tests.support.admin import PAGE, state_of

from .test_commands_on_topologies import topology  # noqa: F401  # a fixture


@pytest.mark.django_db
@pytest.mark.usefixtures("topology")
def test_locks_are_listed_and_described(admin_client: Client) -> None:
    with cache.lock("import", label="The prices") as lock, cache.lock("export"):
        hurry()
        until(lambda: "The prices" in admin_client.get(PAGE).content.decode())
        page = admin_client.get(PAGE).content.decode()
        assert "export" in page
        assert "How locks behave" in page
        rows = state_of(admin_client)["rows"]
        assert {row["name"] for row in rows} == {"import", "export"}
        link = next(row["url"] for row in rows if row["name"] == "import")
        assert "The prices" in admin_client.get(link).content.decode()
        assert lock.owned()

"""Locks on fakeredis, each night. By ``any_client``, the suites of the scripts run on it, too."""

from __future__ import annotations

import pytest
import redis

from tests.lock_contract import LockContract
from tests.support.backends import Backend, OnRedis

pytestmark = pytest.mark.sample(0)


class TestLockOnFakeredis(LockContract):
    @pytest.fixture
    def backend(self, fakeredis_client: redis.Redis) -> Backend:
        fakeredis_client.flushall()
        return OnRedis(fakeredis_client)

"""A process ends while a value is refreshed in the background: at once, and without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATIENCE, WHOLE_END
from tests.redis_server import RedisServer

PROGRAM = """
import sys, time
import django
django.setup()
from django_redis_lock.cache import RedisCache
cache = RedisCache(sys.argv[1], {})
cache.set("report", "old", 10)
def refresh():
    time.sleep(float(sys.argv[2]))
    return "new"
print(cache.get_or_set("report", refresh, 1, stale=100, background=True))
time.sleep(0.02)
"""


@pytest.mark.sample(3, 2)
@pytest.mark.parametrize("takes", [0.0, 0.02, 600])
def test_the_refresh_is_finished_or_abandoned(redis_server: RedisServer, takes: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, redis_server.url, str(takes)],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, **WHOLE_END},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "old\n", "")

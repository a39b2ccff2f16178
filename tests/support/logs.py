"""What a test reads in the log. Threads of earlier tests may still write there, too."""

from __future__ import annotations

import pytest


def logged(caplog: pytest.LogCaptureFixture, name: str, about: str = "") -> list[str]:
    """What the logger ``django_redis_lock.NAME`` has said ``about`` a lock, a value or a server;
    of an empty ``name``, all of them."""
    logger = f"django_redis_lock.{name}".rstrip(".")
    found = (r.getMessage() for r in caplog.records if f"{r.name}.".startswith(f"{logger}."))
    return [message for message in found if about in message]

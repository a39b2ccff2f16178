"""Each way to write a value, and what is there afterwards."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django_redis_lock.cache import RedisCache

Write = Callable[[RedisCache], Any]

#: What is done during the computation, and what the cache holds after it; None: nothing.
WRITES: dict[str, tuple[Write, Any]] = {
    "set": (lambda c: c.set("report", "newer"), "newer"),
    "set for a time": (lambda c: c.set("report", "newer", 60), "newer"),
    "set for ever": (lambda c: c.set("report", "newer", None), "newer"),
    "set nx": (lambda c: c.set("report", "newer", nx=True), "newer"),
    "set for 0": (lambda c: c.set("report", "newer", timeout=0), None),
    "add": (lambda c: c.add("report", "newer"), "newer"),
    "delete": (lambda c: c.delete("report"), None),
    "set_many": (lambda c: c.set_many({"a": 1, "report": "newer", "b": 2}), "newer"),
    "set_many for 0": (lambda c: c.set_many({"report": "newer"}, 0), None),
    "delete_many": (lambda c: c.delete_many(["a", "report", "b"]), None),
    "delete_pattern": (lambda c: c.delete_pattern("rep*"), None),
    "delete_pattern of all": (lambda c: c.delete_pattern("*", itersize=1), None),
    "incr_version": (
        lambda c: (c.set("report", "newer", version=0), c.incr_version("report", version=0)),
        "newer",
    ),
    "decr_version": (
        lambda c: (c.set("report", "newer", version=2), c.decr_version("report", version=2)),
        "newer",
    ),
    "clear": (lambda c: c.clear(), None),
    "expire in the past": (lambda c: c.expire_at("report", datetime(2020, 1, 1)), None),
    "pexpire in the past": (lambda c: c.pexpire_at("report", 1), None),
    "set, then delete": (lambda c: (c.set("report", "newer"), c.delete("report")), None),
    "delete, then set": (lambda c: (c.delete("report"), c.set("report", "newer")), "newer"),
}


#: The same, of what only django-redis has.
REDIS_WRITES: dict[str, tuple[Write, Any]] = {
    "incr": (lambda c: c.incr("report", 3, ignore_key_check=True), 3),
}


#: The same, where there was an old value, the number 5.
STALE_WRITES: dict[str, tuple[Write, Any]] = {
    **WRITES,
    "set nx": (lambda c: c.set("report", "newer", nx=True), "older"),
    "set xx": (lambda c: c.set("report", "newer", xx=True), "newer"),
    "add": (lambda c: c.add("report", "newer"), "older"),
    "incr": (lambda c: c.incr("report", 3), 8),
    "incr beyond": (lambda c: c.incr("report", 2**63), 2**63 + 5),
    "decr": (lambda c: c.decr("report"), 4),
    "touch for 0": (lambda c: c.touch("report", 0), None),
    "expire at once": (lambda c: c.expire("report", 0), None),
    "expire a day ago": (lambda c: c.expire("report", timedelta(days=-1)), None),
    "pexpire at once": (lambda c: c.pexpire("report", -1), None),
    "expire": (lambda c: c.expire("report", timedelta(hours=1)), "older"),
    "expire in the future": (lambda c: c.expire_at("report", datetime(2200, 1, 1)), "older"),
    "touch": (lambda c: c.touch("report", 100), "older"),
    "reading": (lambda c: c.get("report"), "older"),
}

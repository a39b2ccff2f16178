"""How much of the package one call passes through: ``python -m benchmarks.files_per_call``.

For each kind of call it counts the package's own files and functions that run in the caller's
thread, after a first call that has loaded scripts and made connections. The fewer, the sooner a
reader has followed the call from end to end.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import django

from .server import private_redis

__all__ = ["count", "main"]

PACKAGE = f"{os.sep}django_redis_lock{os.sep}"


def count(call: Callable[[], Any]) -> tuple[int, int]:
    """Files and functions of the package that run in this thread during ``call``."""
    entered: set[CodeType] = set()

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered.add(frame.f_code)

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    own = {code for code in entered if PACKAGE in code.co_filename}
    return len({Path(code.co_filename) for code in own}), len(own)


def _calls() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """What is counted: a call, and what to do before it."""
    from django.core.cache import cache
    from django.http import HttpResponse
    from django.test import RequestFactory

    from django_redis_lock import locked

    calls: Any = cache
    lock = calls.lock("report")
    view = locked("view")(lambda request: HttpResponse())
    request = RequestFactory().get("/")
    timer: list[threading.Thread] = []

    def free() -> None:
        if lock.owned():
            lock.release()
        for thread in timer:
            thread.join()
        timer.clear()

    def taken() -> None:
        """Held by another, who releases it as soon as somebody waits."""
        free()
        holder = calls.lock("report", thread_local=False)
        acquiring = threading.Thread(target=holder.acquire)
        acquiring.start()
        acquiring.join()

        def release() -> None:
            while not calls.client.get_client().zcard(holder.keys.waiters):
                pass
            holder.release()

        timer.append(threading.Thread(target=release))
        timer[0].start()

    def nothing() -> None: ...

    return {
        "acquire, free": (lock.acquire, free),
        "acquire, after a wait": (lock.acquire, taken),
        "release": (lock.release, lambda: lock.owned() or lock.acquire()),
        "get_or_set, hit": (
            lambda: calls.get_or_set("value", "there", 60),
            lambda: calls.set("value", "there"),
        ),
        "get_or_set, miss": (
            lambda: calls.get_or_set("value", lambda: "made", 60),
            lambda: calls.delete("value"),
        ),
        "view with @locked": (lambda: view(request), nothing),
    }


def main() -> int:
    with private_redis() as (url, _):
        os.environ["REDIS_URL"] = url
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
        django.setup()
        print("| call | files | functions |\n|---|---|---|")
        for name, (call, prepare) in _calls().items():
            prepare()
            call()
            prepare()
            files, functions = count(call)
            print(f"| {name} | {files} | {functions} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

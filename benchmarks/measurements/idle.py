"""What waiting costs while nothing happens: the commands sent for a lock that stays held."""

from __future__ import annotations

import threading
import time

import redis

from ..bench import Bench
from ..contenders import LOCKS, make_lock
from ..results import OURS, Result, Target
from ..server import Ear
from ..workers import Crew, Seat

__all__ = ["measure"]

WAITERS = 8
PROCESSES, THREADS = f"{WAITERS} processes: commands/s", f"{WAITERS} threads: commands/s"
MOST, MOST_THREADS = 5.0, 0.7
#: Seconds the locks are held, at most.
LIFETIME = 60


def measure(bench: Bench) -> Result:
    result = Result(
        "A lock that stays held: what its waiters send",
        (PROCESSES, THREADS),
        note="Commands sent by clients, all waiters together; what scripts do inside not counted.",
    )
    bench.empty()
    seconds = bench.pick(quick=4.0, full=20.0)
    held = []
    for kind in ("processes", "threads"):
        for name in LOCKS:
            lock = make_lock(name, bench.client, _key(kind, name), LIFETIME)
            lock.acquire()
            held.append(lock)
    heard: list[bytes] = []

    def subscribe() -> None:
        time.sleep(bench.pick(quick=1.5, full=3.0))  # Until all wait.
        with Ear(bench.client) as ear:
            time.sleep(seconds)
            heard.extend(ear.heard)
        for lock in held:
            lock.release()

    with Crew(WAITERS + 1) as crew:
        crew.run(prepare, bench.url)
        crew.run(wait, bench.url, meanwhile=subscribe)
    for name in LOCKS:
        keys = (_key(kind, name).encode() for kind in ("processes", "threads"))
        result.rows[name] = tuple(sum(key in line for line in heard) / seconds for key in keys)
    ours = result.rows[OURS]
    result.targets = [
        Target.at_most(f"{WAITERS} processes: at most {MOST:g} commands/s", ours[0], MOST),
        Target.at_most(
            f"{WAITERS} threads: at most {MOST_THREADS} commands/s", ours[1], MOST_THREADS
        ),
    ]
    return result


def _key(kind: str, contender: str) -> str:
    return f"bench:idle:{kind}:{contender}"


def prepare(seat: Seat, url: str) -> None:
    """Import all that waiting needs."""
    with redis.Redis.from_url(url) as client:
        for name in LOCKS:
            make_lock(name, client, _key("nothing", name))


def wait(seat: Seat, url: str) -> None:
    """One thread for each contender in most processes, eight in the last; all wait at once, which
    changes nothing about what each of them sends."""
    last = seat.number == WAITERS
    # A blocked connection must not time out: then python-redis-lock would raise.
    with redis.Redis.from_url(url, socket_timeout=None) as client:

        def take(contender: str) -> None:
            key = _key("threads" if last else "processes", contender)
            lock = make_lock(contender, client, key, LIFETIME)
            lock.acquire()
            lock.release()

        threads = [
            threading.Thread(target=take, args=(name,), daemon=True)
            for name in LOCKS
            for _ in range(WAITERS if last else 1)
        ]
        seat.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

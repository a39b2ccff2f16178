"""The servers of a soak run, and what happens to them."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import redis

from tests.faults.proxy import Proxy
from tests.redis_server import RedisServer
from tests.redis_topologies import cluster, sentinels, slot_of

__all__ = ["Clustered", "Proxied", "Replicated", "Servers", "SteppedClock"]

#: Values of 20 kB; all of them are more than a server with a limit has room for.
FILLERS = 400
#: Replies come so much later at least, and twice as much at most; workers wait for a second.
LATE_SECONDS = 0.8


class Servers(AbstractContextManager["Servers"]):
    """Servers that run until its end; ``faults`` are what may happen to them, one call each."""

    #: How a worker reaches them; see ``workers.Work.client``.
    topology = "single"
    #: Seconds before the end of a run in which nothing happens to them any more: then all must have
    #: recovered.
    calm = 4.0

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.faults: list[Callable[[], None]] = []
        self._stack = ExitStack()

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def urls(self) -> list[str]:
        """For the workers."""
        raise NotImplementedError

    def recover(self) -> None:
        """After the last fault."""

    def clients(self) -> list[Any]:
        """Of all that hold keys of their own."""
        raise NotImplementedError


class Proxied(Servers):
    """Independent servers, each behind a network of its own.

    Args:
        number: of servers.
        persistent: what has been acknowledged survives a crash.
        policy: what becomes of it when its memory is full: then nothing else happens to it.
    """

    def __init__(
        self,
        chance: random.Random,
        number: int = 1,
        *,
        persistent: bool = True,
        policy: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(chance)
        config = {"maxmemory": "4mb", "maxmemory-policy": policy} if policy else {}
        for_all: dict[str, Any] = {"config": config, "environment": environment}
        enter = self._stack.enter_context
        self.servers = [enter(RedisServer(persistent=persistent, **for_all)) for _ in range(number)]
        self.proxies = [enter(Proxy(server)) for server in self.servers]
        self.faults = [self.network_cut, self.network_away, self.server_frozen]
        self.faults += [self.server_restarted, self.server_crashed]
        self.faults += [self.connections_forgotten, self.requests_reset, self.replies_late]
        if policy:
            self.faults = [self.memory_full]

    @property
    def urls(self) -> list[str]:
        return [f"redis://127.0.0.1:{proxy.port}/0" for proxy in self.proxies]

    def clients(self) -> list[redis.Redis]:
        return [server.client() for server in self.servers]

    def network_cut(self) -> None:
        self.chance.choice(self.proxies).cut()

    def network_away(self) -> None:
        with self.chance.choice(self.proxies).away():
            time.sleep(self.chance.random())

    def connections_forgotten(self) -> None:
        """Nobody hears of it."""
        self.chance.choice(self.proxies).forget()

    def requests_reset(self) -> None:
        """Some connections are reset, each once the server has got a request and before it has
        replied."""
        self.chance.choice(self.proxies).reset_after_request(times=self.chance.randint(1, 5))

    def replies_late(self) -> None:
        """Some replies come when their callers have given up, or just before."""
        late = LATE_SECONDS * (1 + self.chance.random())
        self.chance.choice(self.proxies).delay_reply(late, times=self.chance.randint(1, 3))

    def server_frozen(self) -> None:
        server = self.chance.choice(self.servers)
        server.pause()
        time.sleep(self.chance.random())
        server.resume()

    def server_restarted(self) -> None:
        self.chance.choice(self.servers).restart()

    def server_crashed(self) -> None:
        server = self.chance.choice(self.servers)
        server.kill()
        server.start()

    def memory_full(self) -> None:
        """For a while."""
        with self.servers[0].client() as client:
            try:
                for number in range(FILLERS):
                    client.set(f"filler-{number}", b"x" * 20_000, px=20_000)
            except redis.ResponseError:
                pass
            time.sleep(self.chance.random() * 3)
            client.delete(*(f"filler-{number}" for number in range(FILLERS)))


#: Adds to the clock of the process the microseconds in the file CLOCK_OFFSET. Lifetimes and fences
#: of Redis come from this clock; what it measures by the monotonic clock is left alone.
CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *offset;

__attribute__((constructor)) static void begin(void) {
    offset = mmap(0, 8, PROT_READ, MAP_SHARED, open(getenv("CLOCK_OFFSET"), O_RDONLY), 0);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        long long ns = now->tv_sec * 1000000000LL + now->tv_nsec + *offset * 1000;
        now->tv_sec = ns / 1000000000, now->tv_nsec = ns % 1000000000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (at) *at = exact.tv_sec;
    return exact.tv_sec;
}
"""


class SteppedClock(Proxied):
    """One server whose clock is set forward and back."""

    #: Seconds by which its clock is off at most.
    MAX_SECONDS = 3.0

    def __init__(self, chance: random.Random) -> None:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clock-")))
            self._offset = folder / "offset"
            self._set_clock(0.0)
            library, source = folder / "clock.so", folder / "clock.c"
            source.write_text(CLOCK)
            compile_it = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
            subprocess.run(compile_it, check=True, capture_output=True)
            environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._offset)}
            super().__init__(chance, environment=environment)
            self._stack.callback(stack.pop_all().close)
        self.faults += [self.clock_stepped] * 5

    @staticmethod
    def can_run() -> bool:
        return sys.platform == "linux" and shutil.which("cc") is not None

    def clock_stepped(self) -> None:
        self._set_clock((self.chance.random() * 2 - 1) * self.MAX_SECONDS)

    def recover(self) -> None:
        self._set_clock(0.0)

    def _set_clock(self, seconds: float) -> None:
        # Written over, not replaced: the server has mapped the file.
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(int(seconds * 1e6).to_bytes(8, sys.byteorder, signed=True))


class Grouped(Servers):
    """Servers that take over from each other."""

    def __init__(self, chance: random.Random, group: AbstractContextManager[Any]) -> None:
        super().__init__(chance)
        self._group = self._stack.enter_context(group)

    def recover(self) -> None:
        """All of them run and agree. On a busy machine it takes long."""
        for patience in range(5, -1, -1):
            try:
                return self._group.settle()
            except AssertionError:
                if not patience:
                    raise


class Replicated(Grouped):
    """A primary with two replicas and three sentinels."""

    topology = "sentinel"
    calm = 20.0

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance, sentinels(down_after=1.0))
        self.faults = [self.failed_over, self.primary_died, self.replica_died]
        self.faults += [self.primary_frozen, self.connections_cut]

    @property
    def urls(self) -> list[str]:
        return [f"redis://{host}:{port}" for host, port in self._group.addresses]

    def clients(self) -> list[redis.Redis]:
        return [self._group.primary.client()]

    def failed_over(self) -> None:
        with suppress(AssertionError):  # The sentinels took too long.
            self._group.fail_over()
        self.recover()

    def primary_died(self) -> None:
        before = self._group.primary
        before.kill()
        with suppress(AssertionError):
            self._group.until_replaced(before)
        self.recover()

    def primary_frozen(self) -> None:
        """Until another one has replaced it, or not for as long."""
        before, seconds = self._group.primary, self.chance.random() * 4
        before.pause()
        time.sleep(seconds)
        self.recover()

    def connections_cut(self) -> None:
        """Those of clients, to one of the servers."""
        server = self.chance.choice([self._group.primary, *self._group.replicas])
        with server.client() as client:
            client.client_kill_filter(_type="normal")

    def replica_died(self) -> None:
        self.chance.choice(self._group.replicas).kill()
        time.sleep(self.chance.random())
        self.recover()


class Clustered(Grouped):
    """Three primaries with a replica each, among which the slots of ``names`` move."""

    topology = "cluster"
    calm = 10.0

    def __init__(self, chance: random.Random, names: list[str]) -> None:
        super().__init__(chance, cluster())
        self._names = names
        self.faults = [self.slot_moved, self.slot_moved, self.slot_moved_slowly, self.failed_over]

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self._group.nodes]

    def clients(self) -> list[redis.Redis]:
        return [node.client() for node in self._group.primaries]

    def slot_moved(self) -> None:
        self._group.move(slot_of(self.chance.choice(self._names)))

    def slot_moved_slowly(self) -> None:
        slot = slot_of(self.chance.choice(self._names))
        for step in self._steps_of_a_move(slot):
            step()
            time.sleep(self.chance.random() * 0.5)

    def _steps_of_a_move(self, slot: int) -> Iterator[Callable[[], None]]:
        old, new = self._group.begin_to_move(slot)
        yield lambda: None
        yield lambda: self._group.move_keys(slot, old, new)
        # What was made there after it.
        yield lambda: self._group.move_keys(slot, old, new)
        yield lambda: self._group.end_moving(slot, old, new)

    def failed_over(self) -> None:
        """A primary hands over to its replica, and loses nothing."""
        with suppress(AssertionError):
            self._group.fail_over(self.chance.choice(self._names))
        self.recover()

"""``Lock`` and ``AsyncLock`` in the place of redis-py's: signatures, clients of all kinds, and both
kinds of lock on one name."""

from __future__ import annotations

import asyncio
import inspect
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.lock
import redis.lock

from django_redis_lock import AsyncLock, Lock, LockError
from django_redis_lock.locking.waiting import queues
from tests.holding import hurry
from tests.processes import PATIENCE, in_threads, until
from tests.redis_server import RedisServer
from tests.support.backends import places
from tests.support.background import Background

METHODS = ("__init__", "acquire", "extend", "locked", "owned", "reacquire", "release")
PAIRS = [(Lock, redis.lock.Lock), (AsyncLock, redis.asyncio.lock.Lock)]


class TestInterface:
    @pytest.mark.parametrize(("ours", "theirs"), PAIRS)
    @pytest.mark.parametrize("method", METHODS)
    def test_every_argument_has_its_place_and_its_default(
        self, ours: Any, theirs: Any, method: str
    ) -> None:
        wanted = inspect.signature(getattr(theirs, method)).parameters.values()
        given = list(inspect.signature(getattr(ours, method)).parameters.values())
        for position, parameter in enumerate(wanted):
            found = given[position]
            assert (found.name, found.kind) == (parameter.name, parameter.kind)
            assert found.default == parameter.default
        assert given[-1].name != "unknown" or given.pop().kind is inspect.Parameter.VAR_KEYWORD
        for added in given[len(wanted) :]:
            assert added.default is not inspect.Parameter.empty
            # Older versions of redis-py know one argument less.
            assert added.kind is added.KEYWORD_ONLY or added.name == "raise_on_release_error"

    @pytest.mark.parametrize(("ours", "theirs"), PAIRS)
    def test_what_is_awaited_is_awaited(self, ours: Any, theirs: Any) -> None:
        for method in METHODS[1:-1]:
            found, wanted = (
                asyncio.iscoroutinefunction(getattr(c, method)) for c in (ours, theirs)
            )
            # redis-py's extend and reacquire return what is to be awaited.
            assert found or not wanted
        assert asyncio.iscoroutinefunction(ours.release) == (ours is AsyncLock)

    @pytest.mark.parametrize(("ours", "theirs"), PAIRS)
    def test_a_handle_has_the_same_attributes(self, ours: Any, theirs: Any) -> None:
        client: Any = redis.Redis() if ours is Lock else redis.asyncio.Redis()
        arguments = ("name", 10, 0.2, False, 3, False)
        found, wanted = ours(client, *arguments), theirs(client, *arguments)
        for name, value in vars(wanted).items():
            if name != "local":
                assert getattr(found, name) == value
        assert found.local.token is wanted.local.token is None

    def test_the_clients_make_ours(self, client: redis.Redis) -> None:
        lock = client.lock("name", 10, 0.2, False, 3, Lock, False)
        assert isinstance(lock, Lock)
        assert (lock.name, lock.timeout, lock.sleep, lock.blocking) == ("name", 10, 0.2, False)
        assert (lock.blocking_timeout, lock.thread_local) == (3, False)
        with client.lock("name", timeout=10, lock_class=Lock) as held:
            assert held.owned()

    def test_the_asyncio_clients_make_ours(self, redis_server: RedisServer) -> None:
        async def main() -> None:
            async with redis.asyncio.Redis.from_url(redis_server.url) as client:
                async with client.lock("name", timeout=10, lock_class=AsyncLock) as held:
                    assert isinstance(held, AsyncLock)
                    assert await held.owned()
                lock = client.lock("name", timeout=10, lock_class=AsyncLock)
                await lock.acquire()
                assert await client.lock("name", lock_class=AsyncLock).acquire(False) is False
                assert await lock.acquire(True, 0.01, "token") is False

        asyncio.run(main())


class TestBothKinds:
    """Ours and redis-py's on one name, as in a deployment that goes from one to the other."""

    def test_they_exclude_each_other(self, client: redis.Redis) -> None:
        ours, theirs = Lock(client, "name", timeout=30), client.lock("name", timeout=30)
        assert ours.acquire()
        assert not theirs.acquire(blocking=False)
        assert theirs.locked()
        ours.release()
        assert not theirs.locked()
        assert theirs.acquire(blocking=False)
        assert not ours.acquire(blocking=False)
        assert not ours.acquire(blocking_timeout=0.05)
        assert ours.locked()
        assert not ours.owned()
        with pytest.raises(LockError):
            ours.release()
        theirs.release()
        assert ours.acquire(blocking=False)
        with pytest.raises(redis.exceptions.LockError):
            theirs.release()

    def test_they_act_for_each_others_tokens(self, client: redis.Redis) -> None:
        ours, theirs = Lock(client, "name", timeout=30), client.lock("name", timeout=30)
        ours.acquire()
        theirs.local.token = ours.local.token
        assert theirs.owned()
        theirs.release()
        assert not ours.owned()
        theirs.acquire()
        ours = Lock(client, "name", timeout=30)
        ours.local.token = theirs.local.token
        assert ours.extend(100)
        assert ours.ttl() > 100
        ours.release()
        assert not theirs.owned()

    def test_the_holder_of_theirs_has_no_name(self, client: redis.Redis) -> None:
        client.lock("name", timeout=30).acquire()
        holder = Lock(client, "name").holder()
        assert holder is not None
        assert "unnamed" in str(holder)

    def test_our_waiter_notices_their_release(self, client: redis.Redis) -> None:
        theirs = client.lock("name", timeout=60)
        theirs.acquire()
        waiter = Background(lambda: Lock(client, "name", timeout=30).acquire())
        until(lambda: client.info("clients")["blocked_clients"])
        theirs.release()
        hurry()
        assert waiter.result() is True

    def test_they_take_turns(self, client: redis.Redis) -> None:
        """Nobody is shut out for good, and nobody gets in beside another."""
        inside: list[int] = []

        def work(number: int) -> int:
            turns = 0
            for _ in range(5):
                mine: Any = Lock if number % 2 else redis.lock.Lock
                with mine(client, "name", timeout=30, sleep=0.001, blocking_timeout=PATIENCE):
                    inside.append(number)
                    assert len(inside) == 1
                    inside.pop()
                    turns += 1
            return turns

        numbers = iter(range(4))
        assert in_threads(4, lambda: work(next(numbers))) == [5] * 4


def works(client: redis.Redis) -> None:
    """Every verb of a lock, with a waiter and with the keeper, over ``client``."""
    holder = client.lock("name", timeout=30, lock_class=Lock)
    assert holder.acquire()
    assert holder.owned()
    assert holder.locked()
    assert holder.extend(5)
    assert holder.reacquire()

    def wait() -> tuple[bool, int]:
        with client.lock("name", timeout=30, lock_class=Lock) as lock:
            return lock.owned(), lock.fence

    waiter = Background(wait)
    until(lambda: places("name"))
    assert not client.lock("name", timeout=30, lock_class=Lock).acquire(blocking_timeout=0.05)
    fence = holder.fence
    holder.release()
    owned, later = waiter.result()
    assert owned
    assert later > fence
    renewed = Lock(client, "name", timeout=30, renew=True, label="über")
    with renewed:
        hurry()
        until(lambda: (found := renewed.holder()) and found.label == "über")
        assert renewed.owned()
    assert renewed.reset() is False
    assert Lock(client, "name", timeout=30, id="token").acquire(blocking=False)
    assert Lock(client, "name").reset() is True


def works_in_tasks(client: redis.asyncio.Redis) -> None:
    """The same over an asyncio client, which is closed then."""

    async def wait() -> tuple[bool, int | None]:
        async with client.lock("name", timeout=30, lock_class=AsyncLock) as lock:
            return await lock.owned(), lock.fence

    async def main() -> None:
        async with client:
            holder = client.lock("name", timeout=30, lock_class=AsyncLock)
            assert await holder.acquire()
            assert await holder.owned()
            assert await holder.extend(5)
            waiter = asyncio.create_task(wait())
            while not places("name"):
                await asyncio.sleep(0.001)
            other = client.lock("name", timeout=30, lock_class=AsyncLock)
            assert not await other.acquire(blocking_timeout=0.05)
            fence = holder.fence
            await holder.release()
            owned, later = await waiter
            assert owned
            assert later > fence
            async with AsyncLock(client, "name", timeout=30, renew=True, label="über") as lock:
                hurry()
                deadline = time.monotonic() + PATIENCE
                while (await lock.holder()).label != "über":
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.01)

    asyncio.run(main())


PROTOCOLS = [{"protocol": 2}, {"protocol": 3}]
OPTIONS = [
    *PROTOCOLS,
    {"decode_responses": True},
    {"decode_responses": True, "protocol": 3},
    {"encoding": "latin-1"},
    {"socket_timeout": 1.0},
    {"socket_timeout": None},
    {"single_connection_client": True},
    {"health_check_interval": 1},
]


class TestClients:
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_options(self, client: redis.Redis, redis_server: RedisServer, options: Any) -> None:
        with redis_server.client(**options) as other:
            works(other)
        works_in_tasks(redis.asyncio.Redis.from_url(redis_server.url, **options))

    def test_a_unix_socket(self, client: redis.Redis, redis_server: Any) -> None:
        if not isinstance(redis_server, RedisServer):
            pytest.skip("the server in REDIS_URL has no socket we know of")
        with redis.Redis.from_url(redis_server.unix_url) as other:
            works(other)
        works_in_tasks(redis.asyncio.Redis.from_url(redis_server.unix_url))

    def test_a_password(self, own_server: RedisServer) -> None:
        with own_server.client() as admin:
            admin.config_set("requirepass", "secret phrase")
            options: dict[str, Any] = {"port": own_server.port, "password": "secret phrase"}
            with redis.Redis(**options) as other:
                works(other)
            works_in_tasks(redis.asyncio.Redis(**options))

    @pytest.mark.parametrize("may_block", [True, False])
    def test_a_user_with_few_rights(self, own_server: RedisServer, may_block: bool) -> None:
        """Who may not block polls, every ``sleep`` seconds."""
        commands = RIGHTS if may_block else tuple(c for c in RIGHTS if c != "blpop")
        keys = ("~name", "~{name}:*", "~django_redis_lock:*")
        channels = ("resetchannels", "&django_redis_lock:process:*", "&__redis__:invalidate")
        options: dict[str, Any] = {"username": "locker", "password": "secret"}
        with own_server.client() as admin:
            rights = (*keys, *channels, *(f"+{command}" for command in commands))
            admin.execute_command("ACL SETUSER", "locker", "reset", "on", ">secret", *rights)
            with own_server.client(**options) as other:
                works(other)
                renewed = Lock(other, "name", grant_timeout=60)
                assert renewed.acquire(token="chosen")
                waiter = Background(lambda: Lock(other, "name").acquire(token="another"))
                until(lambda: places("name"))
                renewed.release()
                assert waiter.result()
                assert Lock(other, "name").reset()
            works_in_tasks(redis.asyncio.Redis(port=own_server.port, **options))
            # The latter checks a connection that was idle: a refusal is an answer, too.
            unneeded = {"client", "client|setinfo", "ping"}
            refused = {entry["object"] for entry in admin.acl_log()} - unneeded
            assert refused == (set() if may_block else {"blpop"})

    def test_tls(self, client: redis.Redis, redis_server: Any, tmp_path: Path) -> None:
        """The server in the wheel knows no TLS, so something in front of it does."""
        if not isinstance(redis_server, RedisServer):
            pytest.skip("only with a server of our own")
        with TLS(redis_server.port, tmp_path) as front:
            options: dict[str, Any] = {"ssl": True, "ssl_ca_certs": front.certificate}
            options |= {"host": "127.0.0.1", "port": front.port}
            with redis.Redis(**options) as other:
                works(other)
                # A blocking pop that the keeper ends, because it has died without a word.
                holder = Lock(client, "name", timeout=60)
                holder.acquire()
                waiter = Background(lambda: Lock(other, "name", timeout=30).acquire())
                for _ in range(2):
                    until(lambda: client.info("clients")["blocked_clients"])
                    for queue in list(queues.values()):  # Also what other tests have left.
                        queue.cut_pop()
                    until(lambda: not client.info("clients")["blocked_clients"])
                holder.release()
                assert waiter.result() is True
                assert Lock(client, "name").reset()
            works_in_tasks(redis.asyncio.Redis(**options))


#: What a Redis user needs for locks, beside the keys ``NAME``, ``{NAME}:*`` and
#: ``django_redis_lock:locks``, and the channels of processes. Without BLPOP waiters poll.
RIGHTS = (
    *("eval", "evalsha", "blpop", "time"),
    *("get", "set", "del", "exists", "pttl", "pexpire", "persist"),
    *("hset", "hget", "hgetall", "rpush", "lindex", "llen"),
    *("zadd", "zrem", "zremrangebyscore", "zscore", "zcount", "zrangebyscore"),
    *("publish", "subscribe", "client|id", "client|tracking"),
)


class TLS:
    """Takes TLS connections for a server that knows only plain ones."""

    def __init__(self, port: int, folder: Path) -> None:
        self._there = ("127.0.0.1", port)
        self.certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        make = ["openssl", "req", "-x509", *curve, "-nodes", "-days", "2"]
        make += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        try:
            subprocess.run(
                [*make, "-keyout", key, "-out", self.certificate], check=True, capture_output=True
            )
        except FileNotFoundError:
            pytest.skip("there is no openssl to make a certificate with")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> TLS:
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        # OpenSSL writes to the number of a socket, which may be another file's after the close: all
        # threads end first.
        for end in (self._listening, *self._open):
            self._shut(end)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "a thread of the TLS forwarder does not end"
        for end in (self._listening, *self._open):
            end.close()

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listening.accept()
                plain.settimeout(5)  # For a handshake that never ends.
                self._start(self._serve, plain)

    def _serve(self, plain: socket.socket) -> None:
        with suppress(OSError):
            here = self._context.wrap_socket(plain, server_side=True)
            here.settimeout(None)
            there = socket.create_connection(self._there)
            self._open += [here, there]
            for ends in ((here, there), (there, here)):
                self._start(self._carry, *ends)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while data := source.recv(65536):
                target.sendall(data)
        for end in (source, target):
            self._shut(end)

    @staticmethod
    def _shut(end: socket.socket) -> None:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

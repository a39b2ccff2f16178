"""``on_redis_down="local"`` on a host that cannot lock files: each fault, for each caller.

While Redis answers, the lock of this host is an extra, and costs no caller the lock in Redis. In an
outage, the call fails, and is not taken for one whose lock another holds.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.core.management.base import BaseCommand
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from django_redis_lock import AsyncLock, Lock, MultiLock, Redlock, locked
from django_redis_lock.contrib.fallback import file_lock, held_locally, problem_of
from django_redis_lock.contrib.fallback.host import _logged_at
from django_redis_lock.exceptions import LocalLockUnavailable
from django_redis_lock.transport.aio_client import asyncio_client
from tests.lanes import some
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer, closed_port
from tests.support.background import Background

NAME = "nightly"

# -- the faults --------------------------------------------------------------------------------

Fault = Callable[[pytest.MonkeyPatch, Path], None]


def flock_fails(number: int) -> Fault:
    def fault(patch: pytest.MonkeyPatch, folder: Path) -> None:
        def flock(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        patch.setattr(fcntl, "flock", flock)

    return fault


def open_fails(number: int, *, creating: bool = False) -> Fault:
    def fault(patch: pytest.MonkeyPatch, folder: Path) -> None:
        really = os.open

        def fails(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if str(path).endswith(".lock") and (not creating or flags & os.O_CREAT):
                raise OSError(number, os.strerror(number), path)
            return really(path, flags, *args, **options)

        patch.setattr(os, "open", fails)

    return fault


def in_place_of_the_file(make: Callable[[Path], object]) -> Fault:
    def fault(patch: pytest.MonkeyPatch, folder: Path) -> None:
        really = file_lock._open

        def planted(path: str, flags: int) -> int:
            with suppress(FileExistsError):
                make(Path(path))
            return really(path, flags)

        patch.setattr(file_lock, "_open", planted)

    return fault


def hard_link(path: Path) -> None:
    target = path.with_suffix(".other")
    target.touch()
    path.hardlink_to(target)


def dangling(path: Path) -> None:
    path.symlink_to(path.with_suffix(".nowhere"))


def symlink(path: Path) -> None:
    target = path.with_suffix(".other")
    target.touch()
    path.symlink_to(target)


def server_socket(path: Path) -> None:
    if not path.exists():
        with socket.socket(socket.AF_UNIX) as bound:
            before = os.getcwd()
            os.chdir(path.parent)  # Paths of sockets must be short.
            try:
                bound.bind(path.name)
            finally:
                os.chdir(before)


def no_folder(patch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.rmdir()
    folder.touch()


def no_temporary_folder(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    patch.setattr(tempfile, "gettempdir", nowhere)


FLOCK = ("ENOLCK", "ENOSYS", "EOPNOTSUPP", "EACCES", "EIO")
OPEN = ("EACCES", "EROFS", "EMFILE", "EIO")
CREATE = ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "ENOENT")

FAULTS: dict[str, Fault] = {
    **{f"flock {name}": flock_fails(getattr(errno, name)) for name in FLOCK},
    **{f"open {name}": open_fails(getattr(errno, name)) for name in OPEN},
    **{f"create {name}": open_fails(getattr(errno, name), creating=True) for name in CREATE},
    "a pipe": in_place_of_the_file(os.mkfifo),
    "a directory": in_place_of_the_file(Path.mkdir),
    "a symbolic link": in_place_of_the_file(symlink),
    "a symbolic link to nothing": in_place_of_the_file(dangling),
    "a hard link": in_place_of_the_file(hard_link),
    "a socket": in_place_of_the_file(server_socket),
    "no folder": no_folder,
    "no temporary folder": no_temporary_folder,
}


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Path:
    folder = tmp_path / "locks"
    settings.DJANGO_REDIS_LOCK = {"LOCAL_LOCK_FOLDER": str(folder), "ON_REDIS_DOWN": "local"}
    return folder


@pytest.fixture
def for_each_fault(folder: Path, settings: Any) -> Callable[[Callable[[Any], None]], None]:
    """Calls a function with a folder that can have no locks (None: that of the user), once for each
    fault, and lists all failures. Without ``--all``, for a third of the faults; of each test for
    other ones."""

    def walk(test: Callable[[Any], None]) -> None:
        failures = []
        for name, fault in some(FAULTS.items(), each=3):
            if folder.is_dir():
                shutil.rmtree(folder)
            folder.unlink(missing_ok=True)
            folder.mkdir()
            _logged_at.clear()
            where = None if fault is no_temporary_folder else str(folder)
            settings.DJANGO_REDIS_LOCK = {"LOCAL_LOCK_FOLDER": where, "ON_REDIS_DOWN": "local"}
            with pytest.MonkeyPatch.context() as patch:
                fault(patch, folder)
                try:
                    test(where)
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"{name}: {error!r}")
        assert not failures, "\n".join(failures)

    return walk


# -- the callers -------------------------------------------------------------------------------

Caller = Callable[[Any, Any], Any]


def options(folder: Any, **more: Any) -> dict[str, Any]:
    return {"timeout": 30, "on_redis_down": "local", "local_folder": folder, **more}


def taken(lock: Any) -> str:
    with lock:
        assert lock.owned()
        assert not lock.lost
        assert lock.degraded is None
        assert lock.extend(20)
    return "ran"


def a_thread(client: Any, folder: Any) -> str:
    return taken(Lock(client, NAME, **options(folder)))


def a_single_attempt(client: Any, folder: Any) -> str:
    lock = Lock(client, NAME, **options(folder, blocking=False, renew=True))
    if not lock.acquire():
        return "held by another"
    lock.release()
    return "ran"


def a_task(client: Any, folder: Any) -> str:
    async def main() -> str:
        lock = AsyncLock(asyncio_client(client), NAME, **options(folder))
        async with lock:
            assert await lock.owned()
        return "ran"

    return asyncio.run(main())


def with_a_limit(client: Any, folder: Any) -> str:
    with Lock(client, NAME, **options(folder, limit=2)):
        return taken(Lock(client, NAME, **options(folder, limit=2)))


def several_names(client: Any, folder: Any) -> str:
    of_members = options(folder, lock_class=Lock)
    with MultiLock(client, ["one", "two"], of_members.pop("timeout"), **of_members) as lock:
        assert lock.owned()
    return "ran"


def several_servers(client: Any, folder: Any) -> str:
    port = client.connection_pool.connection_kwargs["port"]
    clients = [redis.Redis(port=port, db=db) for db in (1, 2, 3)]
    return taken(Redlock(clients, NAME, **options(folder)))


def entered_again(client: Any, folder: Any) -> str:
    lock = Lock(client, NAME, **options(folder, reentrant=True))
    with lock:
        return taken(Lock(client, NAME, **options(folder, reentrant=True)))


def a_view(client: Any, folder: Any) -> str:
    @locked(NAME)
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse("ran")

    response = view(RequestFactory().get("/"))
    if response.status_code == 503:
        raise LocalLockUnavailable("503")
    return str(response.content.decode())


def a_view_for_tasks(client: Any, folder: Any) -> str:
    @locked(NAME)
    async def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse("ran")

    response = asyncio.run(view(RequestFactory().get("/")))
    if response.status_code == 503:
        raise LocalLockUnavailable("503")
    return str(response.content.decode())


@locked(NAME)
class Nightly(BaseCommand):
    def handle(self, *args: Any, **options: Any) -> str:
        return "ran"


def a_command(client: Any, folder: Any) -> str:
    with unavailable():
        return str(call_command(Nightly(stdout=StringIO())) or "held by another")


def run_locked(client: Any, folder: Any) -> str:
    with unavailable():
        call_command("run_locked", NAME, "--", "check", "--list-tags", stdout=StringIO())
    return "ran"


@contextmanager
def unavailable() -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        raise (error.__cause__ if error.returncode else None) or error from None


CALLERS: list[Caller] = [
    *(a_thread, a_single_attempt, a_task, with_a_limit, several_names, several_servers),
    *(entered_again, a_view, a_view_for_tasks, a_command, run_locked),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("caller", CALLERS)
def test_while_redis_answers_the_lock_in_redis_is_enough(
    client: redis.Redis, for_each_fault: Any, caller: Caller, caplog: Any
) -> None:
    def test(where: Any) -> None:
        caplog.clear()
        for _ in range(2):
            assert caller(client, where) == "ran"
            until(lambda: not client.keys("*nightly"))  # It was released.
        (warning,) = [r.getMessage() for r in caplog.records if r.name == "django_redis_lock.lock"]
        assert "is in Redis only, and fails in an outage: No lock of this host" in warning

    for_each_fault(test)


@pytest.mark.sample(3)
@pytest.mark.parametrize("caller", CALLERS)
def test_in_an_outage_it_fails_and_is_not_held_by_another(
    for_each_fault: Any, caller: Caller, settings: Any
) -> None:
    with closed_port() as port:
        backend = "django_redis_lock.cache.RedisCache"
        location = f"redis://127.0.0.1:{port}/0"
        settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": location}}

        def test(where: Any) -> None:
            with pytest.raises(redis.ConnectionError) as caught:
                caller(redis.Redis(port=port), where)
            assert isinstance(caught.value, LocalLockUnavailable), caught.value

        for_each_fault(test)


def test_a_lock_that_is_taken_is_taken(client: redis.Redis, for_each_fault: Any) -> None:
    def test(where: Any) -> None:
        first, second = (Lock(client, NAME, **options(where)) for _ in range(2))
        with first:
            assert not second.acquire(blocking=False)
            assert second.locked()
            waiter = Background(lambda: second.acquire(blocking_timeout=PATIENCE))
            until(lambda: client.info("clients")["blocked_clients"])
        assert waiter.result() is True
        client.delete(NAME)

    for_each_fault(test)


def test_a_file_that_cannot_be_removed_costs_no_release(
    client: redis.Redis, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that was remounted read-only, or fails, after the file was locked."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    lock = Lock(client, NAME, **options(folder))
    for name in ("unlink", "lstat"):
        with monkeypatch.context() as patch, lock:
            patch.setattr(os, name, fails)
            lock.release()
            assert not client.exists(NAME)
            patch.undo()
            assert lock.acquire(blocking=False)


# -- who looks ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_is_declared")
def test_the_check_and_the_doctor_report_it(for_each_fault: Any) -> None:
    def test(where: Any) -> None:
        (message,) = run_checks(tags=["redis_lock"])
        assert message.id == "django_redis_lock.W015"
        assert message.msg.startswith("The cache 'default' uses \"local\" while Redis is down. No")
        with pytest.raises(CommandError) as caught:
            call_command("locks", "doctor", stdout=(out := StringIO()))
        assert caught.value.returncode == 1
        assert "W015" in out.getvalue()

    for_each_fault(test)


@pytest.mark.usefixtures("nothing_is_declared")
def test_the_check_is_about_those_that_use_it(folder: Path, settings: Any) -> None:
    assert run_checks(tags=["redis_lock"]) == []
    folder.rmdir()  # The check has made it.
    folder.touch()
    settings.DJANGO_REDIS_LOCK["ON_REDIS_DOWN"] = "raise"
    assert run_checks(tags=["redis_lock"]) == []

    @locked("report", on_redis_down="local")
    def report() -> None: ...

    (message,) = run_checks(tags=["redis_lock"])
    assert message.id == "django_redis_lock.W015"
    assert "report uses" in message.msg


def test_the_check_tries_whether_two_exclude_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems accept flock(), and do nothing."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert "two got one" in str(problem_of(folder))


def test_the_list_of_locks_works(client: redis.Redis, for_each_fault: Any) -> None:
    def test(where: Any) -> None:
        with Lock(client, ":1:lock:report", **options(where)):
            call_command("locks", "list", stdout=(out := StringIO()))
        assert "1 lock is held" in out.getvalue()

    for_each_fault(test)


def test_a_pipe_does_not_stop_the_list(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / f"{'0' * 40}.lock")
    assert held_locally(folder) == []


# -- real file systems -------------------------------------------------------------------------

ON_A_DISK = """
import os, subprocess, sys
from pathlib import Path
from redis import Redis
from django_redis_lock import Lock
from django_redis_lock.contrib.fallback import held_locally

client, folder = Redis(port=int(sys.argv[1])), Path(sys.argv[2])

def lock(**options):
    options = {"timeout": 30, "on_redis_down": "local", "local_folder": folder, **options}
    return Lock(client, "disk", **options)

def mount(*words):
    subprocess.run(["mount", *words, "none", str(folder)], check=True)

mount("-t", "tmpfs", "-o", "size=8k,nr_inodes=6")
case = sys.argv[3]
if case == "no inodes":
    try:
        for number in range(10):
            (folder / str(number)).touch()
    except OSError as error:
        assert error.errno == 28, error
if case == "read-only":
    mount("-o", "remount,ro")
if case == "full":
    (folder / "file").open("wb", buffering=0).write(bytes(8192))
with lock() as held:
    assert held.owned()
    assert bool(list(folder.glob("*.lock"))) is (case == "full")
    if case == "full":
        client.delete("disk")  # The holder has lost the lock in Redis, and holds its file.
        with lock() as other:
            assert other.owned()
        client.set("disk", held.local.token)
print("ran", flush=True)
"""


@pytest.mark.parametrize("case", ["no inodes", "read-only", "full"])
def test_on_a_file_system_that_takes_nothing_more(
    client: redis.Redis, redis_server: RedisServer, folder: Path, case: str
) -> None:
    folder.mkdir()
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system lets no user mount a file system")
    words = [sys.executable, "-c", ON_A_DISK, str(redis_server.port), str(folder), case]
    done = subprocess.run([*namespace, *words], check=False, capture_output=True, text=True)
    assert done.stdout == "ran\n", done.stderr

"""A lock of ``locked()`` is kept until the database transaction it was used in has ended."""

# What fails in an atomic block fails at its end.
# ruff: noqa: PT012

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.core.cache import caches
from django.core.handlers.base import BaseHandler
from django.db import DatabaseError, connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory, TestCase

from django_redis_lock import LockError, LockNotAcquired, current_lock, locked
from django_redis_lock.decorators import transactions
from tests.holding import hurry_until, renew
from tests.processes import PATIENCE, Link, processes, until
from tests.support.databases import accounts, balance, execute, in_test_case, use

KEY = ":lock:1:account"


def _lost(name: str) -> bool:
    return transactions._here.pending["default", name].lock.lost


@pytest.fixture
def folder(tmp_path: Path, django_db_blocker: Any) -> Iterator[Path]:
    """Two databases in which an account holds nothing."""
    with django_db_blocker.unblock(), accounts(tmp_path):
        yield tmp_path


pytestmark = pytest.mark.usefixtures("folder")


def held() -> bool:
    return caches["default"].lock("account").locked()


@locked("account")
def deposit(amount: int = 1, using: str = "shop") -> None:
    execute(f"UPDATE account SET balance = balance + {amount}", using)


@locked("account", release="now")
def deposit_and_let_go(amount: int = 1) -> None:
    deposit.__wrapped__(amount)


# -- the lost update ---------------------------------------------------------------------------


def deposit_before_committing(link: Link, folder: Path, release: Any) -> None:
    use(folder)

    @locked("account", release=release)
    def add() -> None:
        execute(f"UPDATE account SET balance = {balance() + 1}")

    with transaction.atomic("shop"):
        add()
        link.say("done, not committed")
        link.hear()


def deposit_meanwhile(link: Link, folder: Path, release: Any) -> None:
    use(folder)

    @locked("account", release=release, blocking=True)
    def add() -> None:
        found = balance()
        link.say("read")
        link.hear()
        execute(f"UPDATE account SET balance = {found + 1}")

    add()


@pytest.mark.parametrize(("release", "wanted"), [("now", 1), ("transaction", 2)])
def test_no_update_is_lost(folder: Path, client: redis.Redis, release: str, wanted: int) -> None:
    """With the lock released before the commit, the second reads what the first has not yet written
    and overwrites it: of two deposits one is lost."""
    with (
        processes(deposit_before_committing, folder, release) as (first,),
        processes(deposit_meanwhile, folder, release) as (second,),
    ):
        first.go()
        assert first.hear() == "done, not committed"
        second.go()
        until(lambda: second.speaks() or client.info("clients")["blocked_clients"])
        assert second.speaks() == (release == "now")
        first.say("commit")
        first.result()
        assert second.hear() == "read"
        second.say("write")
        second.result()
    assert balance() == wanted
    assert not held()


# -- when it is released -----------------------------------------------------------------------


def test_it_is_released_after_the_commit_and_what_waits_for_that() -> None:
    order: list[Any] = []
    with transaction.atomic("shop"):
        transaction.on_commit(lambda: order.append(held()), using="shop")
        deposit()
        transaction.on_commit(lambda: order.append(held()), using="shop")
        assert held()
    assert order == [True, True]
    assert not held()
    assert balance() == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("end", "wanted"), [("raises", 0), ("rollback", 0), ("close", 0), ("commit", 0), ("after", 1)]
)
def test_it_is_released_however_the_transaction_ends(end: str, wanted: int) -> None:
    """By an exception, as asked for, as the connection closes, or as its commit fails, or what
    waits for that."""

    def fail() -> None:
        raise LookupError

    execute("CREATE TABLE parent (id integer primary key)")
    execute("CREATE TABLE child (p integer REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    with suppress(LookupError, DatabaseError), transaction.atomic("shop"):
        if end == "after":
            transaction.on_commit(fail, using="shop")
        deposit()
        assert held()
        if end == "rollback":
            transaction.set_rollback(True, using="shop")
        elif end == "commit":
            execute("INSERT INTO child VALUES (7)")
        elif end == "close":
            connections["shop"].close()
            assert not held()  # The server has rolled back.
        if end in ("raises", "close"):
            fail()
    assert not held()
    assert balance() == wanted


def test_an_inner_block_is_not_the_end() -> None:
    with transaction.atomic("shop"):
        with transaction.atomic("shop"):
            deposit()
        assert held()
        with pytest.raises(LookupError), transaction.atomic("shop"):
            deposit()
            raise LookupError
        assert held()
        with transaction.atomic("shop", savepoint=False):
            deposit()
        assert held()
        connections["shop"].savepoint_commit(connections["shop"].savepoint())
        assert held()
    assert not held()
    assert balance() == 2


def test_a_failure_that_is_caught_in_the_transaction_does_not_end_it() -> None:
    locks: list[Any] = []

    @locked("account")
    def fail() -> None:
        locks.append(current_lock())
        raise LookupError

    with transaction.atomic("shop"):
        with pytest.raises(LookupError):
            fail()
        assert locks[0].owned()
    assert not held()


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_of_several_databases_counts(fails: bool) -> None:
    with transaction.atomic("till"):
        with suppress(LookupError), transaction.atomic("shop"):
            deposit()
            if fails:
                raise LookupError
        assert held()
    assert not held()


@pytest.mark.parametrize(("end", "wanted"), [("commit", 1), ("rollback", 0), ("close", 0)])
def test_autocommit_off(end: str, wanted: int) -> None:
    transaction.set_autocommit(False, using="shop")
    deposit()
    assert held()
    with transaction.atomic("shop"):
        deposit()
    assert held()
    deposit()
    getattr(connections["shop"], end)()
    assert not held()
    if end != "close":
        transaction.set_autocommit(True, using="shop")
    assert balance() == 3 * wanted


def test_a_thread_that_ends_in_a_transaction() -> None:
    def begin() -> None:
        transaction.set_autocommit(False, using="shop")
        deposit()

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join(PATIENCE)
    gc.collect()
    assert not held()


def test_a_lock_that_is_lost_in_the_transaction(
    client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with transaction.atomic("shop"):
        deposit()
        client.delete(KEY)
        assert caches["default"].lock("account").acquire(blocking=False)
    assert held()  # By the other.
    assert "The lock account ended before the locked code did" in caplog.text


def test_an_outage_after_the_commit_is_logged(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with transaction.atomic("shop"):
        deposit()
        lock = caches["default"].lock("account")
        monkeypatch.setattr(
            type(lock), "release", lambda self: (_ for _ in ()).throw(redis.ConnectionError("gone"))
        )
    assert balance() == 1
    assert "its lock account is not released yet: gone" in caplog.text


def test_a_lock_that_waits_for_a_transaction_is_renewed(client: redis.Redis) -> None:
    @locked("account", timeout=60)
    def work() -> None: ...

    with transaction.atomic("shop"):
        work()
        for _ in range(2):
            renew(client, KEY)
        assert held()
    assert not held()


# -- used again in the same transaction --------------------------------------------------------


def test_who_uses_it_again_in_the_transaction_goes_on_with_it() -> None:
    fences = []

    @locked("account")
    def work() -> None:
        fences.append(current_lock().fence)

    with transaction.atomic("shop"):
        deposit_and_let_go()
        assert not held()
        for _ in range(3):
            work()
            deposit()
            deposit_and_let_go()
            assert held()
        with locked("account") as lock:
            assert lock.fence == fences[0]
        assert held()
    assert not held()
    assert len(set(fences)) == 1
    assert balance() == 7


def test_another_thread_does_not_share_it() -> None:
    found: list[Any] = []

    def ask() -> None:
        try:
            with locked("account"):
                found.append("had it")
        except LockNotAcquired as error:
            found.append(error)

    with transaction.atomic("shop"):
        deposit()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(PATIENCE)
    assert isinstance(found[0], LockNotAcquired)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_call_does_not_wait_for_the_end_of_the_same_transaction(asynchronous: bool) -> None:
    @locked(["account", "another"], blocking=True, blocking_timeout=PATIENCE)
    def transfer() -> None: ...

    @locked(["account", "another"], blocking=True, blocking_timeout=PATIENCE)
    async def atransfer() -> None: ...

    call: Any = async_to_sync(atransfer) if asynchronous else transfer
    with pytest.raises(LockError, match="would wait for itself"), transaction.atomic("shop"):
        deposit()
        call()
    assert not held()
    call()


# -- Django around it --------------------------------------------------------------------------


@locked("account")
def view(request: HttpRequest, fails: bool = False) -> HttpResponse:
    deposit.__wrapped__()
    if fails:
        raise LookupError
    return HttpResponse()


@pytest.mark.parametrize("fails", [False, True])
def test_atomic_requests(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The lock is held when the database commits or rolls back."""
    seen: list[bool] = []
    wrapper, name = type(connections["shop"]), "_rollback" if fails else "_commit"
    end: Callable[[Any], None] = getattr(wrapper, name)

    def look(self: Any) -> None:
        if self.alias == "shop":
            seen.append(held())
        end(self)

    monkeypatch.setattr(wrapper, name, look)
    monkeypatch.setitem(connections.settings["shop"], "ATOMIC_REQUESTS", True)
    atomic_view = BaseHandler().make_view_atomic(view)
    with suppress(LookupError):
        assert atomic_view(RequestFactory().get("/"), fails).status_code == 200
    assert seen == [True]
    assert not held()
    assert balance() == (0 if fails else 1)


def test_djangos_test_case_is_no_transaction_of_the_project() -> None:
    """It wraps each test into transactions that never end well: nothing must wait for them."""
    seen: list[bool] = []

    def body(case: TestCase) -> None:
        deposit()
        seen.append(held())
        with transaction.atomic("shop"):
            deposit()
            seen.append(held())
            with transaction.atomic("shop"):
                deposit()
            seen.append(held())
        seen.append(held())
        with pytest.raises(LookupError), transaction.atomic("shop"):
            deposit()
            seen.append(held())
            raise LookupError
        seen.append(held())
        with transaction.atomic("shop", savepoint=False):
            deposit()
            seen.append(held())  # Its end could not be noticed.

    in_test_case(body)
    assert seen == [False, True, True, False, True, False, False]


def test_a_coroutine_that_is_called_in_a_transaction() -> None:
    @locked("account")
    async def work() -> int | None:
        return current_lock().fence

    with transaction.atomic("shop"):
        fence = async_to_sync(work)()
        assert held()
        assert async_to_sync(work)() == fence is not None
        deposit()
        assert held()
    assert not held()
    async_to_sync(work)()
    assert not held()


def test_several_names() -> None:
    """Of a thread, and of a coroutine, whose lock another takes the place of."""

    @locked(["account", "another"])
    def transfer() -> dict[str, int | None]:
        return current_lock().fences

    @locked(["another", "account"])
    async def work() -> dict[str, int | None]:
        return current_lock().fences

    for call in (transfer, async_to_sync(work)):
        with transaction.atomic("shop"):
            fences = call()
            assert held()
            assert call() == fences
        assert not held()
        assert not caches["default"].lock("another").locked()


def test_going_in_again() -> None:
    @locked("account", reentrant=True)
    def inner() -> None:
        deposit.__wrapped__()

    @locked("account", reentrant=True)
    def outer() -> None:
        with transaction.atomic("shop"):
            inner()
        assert held()
        inner()

    outer()
    assert not held()
    with transaction.atomic("shop"):
        outer()
        assert held()
    assert not held()
    assert balance() == 4


def test_a_lock_lost_in_between_is_acquired_again(client: redis.Redis) -> None:
    fences = []

    @locked("account")
    def work() -> None:
        fences.append(current_lock().fence)

    with transaction.atomic("shop"):
        work()
        lock = caches["default"].lock("account")
        lock.reset()
        hurry_until(lambda: _lost("account"))
        work()
        assert held()
    assert not held()
    assert fences[0] < fences[1]

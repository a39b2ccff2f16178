"""``unique_task()``: what is queued already is not queued again; with real workers of Celery, whose
broker is the test's server, and with tasks of Django."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from datetime import datetime, timedelta, timezone
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, chain, chord, shared_task
from celery.beat import ScheduleEntry, Scheduler
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Reject
from celery.schedules import schedule
from celery.signals import setup_logging
from django.core.cache import caches
from django.core.management import call_command
from django.db import connections, transaction
from django.test import override_settings
from kombu import Connection
from kombu.exceptions import OperationalError

from django_redis_lock import locked, unique_task
from django_redis_lock.contrib.unique_tasks import AlreadyQueued, TaskNotQueued
from django_redis_lock.contrib.unique_tasks.celery import UniqueTask
from django_redis_lock.ops.admin.rows import row
from django_redis_lock.ops.held_locks import held_locks
from tests.holding import hurry
from tests.processes import Link, processes, until
from tests.redis_server import RedisServer

app = Celery(
    "shop",
    broker="memory://",
    backend="cache+memory://",
    task_cls="celery.contrib.django.task:DjangoTask",
)
app.conf.update(task_publish_retry=False, broker_connection_retry_on_startup=False)
# A worker that is to end does so when its poll has ended.
app.conf.broker_transport_options = {"polling_interval": 0.05}


@setup_logging.connect
def leave_logging_alone(**_: Any) -> None:
    """Else Celery writes each line to standard error, also those of the tests to come."""


#: What the body of a task does, and what has run.
act: list[Callable[[Any], Any]] = []
runs: list[Any] = []


def work(shop: Any, task: Any = None) -> Any:
    runs.append(shop)
    return act[-1](task) if act else shop


@unique_task("sync-{shop}", timeout=60)
@app.task
def plain(shop: Any) -> Any:
    return work(shop)


@unique_task("sync-{shop}", timeout=60)
@app.task(bind=True, lazy=False, max_retries=2)
def bound(self: Any, shop: Any) -> Any:
    return work(shop, self)


@unique_task("sync-{shop}", timeout=60)
@shared_task
def shared(shop: Any) -> Any:
    return work(shop)


@unique_task(lambda shop: f"sync-{shop}", timeout=60, until="done")
@shared_task(bind=True, max_retries=2, acks_late=True)
def done(self: Any, shop: Any) -> Any:
    return work(shop, self)


@unique_task("sync-{shop}", timeout=60, until="done")
@locked("sync-{shop}")
@app.task(
    bind=True,
    name="over-locked",
    autoretry_for=(KeyError,),
    retry_backoff=False,
    max_retries=1,
    default_retry_delay=0,
)
def over_locked(self: Any, shop: Any) -> Any:
    return work(shop, self)


@shared_task(base=UniqueTask, unique="sync-{shop}", unique_timeout=60)
def of_class(shop: Any) -> Any:
    return work(shop)


class Base(app.Task):
    """A class of the project, whose code runs around each run."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class UniqueBase(UniqueTask, Base):
    abstract = True
    unique = staticmethod(lambda shop: f"sync-{shop}")
    unique_timeout = 60
    unique_until = "done"


@locked("sync-{shop}")
@app.task(base=UniqueBase, bind=True, lazy=False, max_retries=2, acks_late=True)
def of_own_class(self: Any, shop: Any) -> Any:
    assert self.request.id or self.request.called_directly
    return work(shop, self)


@unique_task("sync-{shop}", timeout=60, on_duplicate="raise")
@app.task
def raising(shop: Any) -> Any:
    return work(shop)


@unique_task("sync-{shop}", timeout=60, on_duplicate=lambda duplicate, shop: (duplicate, shop))
@app.task
def answering(shop: Any) -> Any:
    return work(shop)


@app.task
def step(*_: Any) -> Any:
    runs.append("step")
    return "step"


TASKS = (plain, bound, shared, done, over_locked, of_class, of_own_class)


def of_each_kind(test: Any) -> Any:
    table = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
    return pytest.mark.sample(len(TASKS))(table(test))


@pytest.fixture(autouse=True)
def queued(redis_server: RedisServer, client: redis.Redis) -> Iterator[Callable[[], int]]:
    """How many are queued in Celery's queue, on the server of the test."""
    app.conf.broker_url = redis_server.url
    app.set_current()
    runs.clear()
    act.clear()
    yield lambda: client.llen("celery")
    act.clear()


@contextmanager
def worker() -> Iterator[None]:
    with start_worker(app, perform_ping_check=False, pool="solo", loglevel="CRITICAL"):
        yield


def name(shop: Any = 7) -> Any:
    return caches["default"].lock(f"queued:sync-{shop}")


# -- a duplicate ---------------------------------------------------------------------------------


@of_each_kind
def test_it_is_queued_once(task: Any, queued: Callable[[], int]) -> None:
    first = task.delay(7)
    again = [
        task.delay(7),
        task.apply_async((7,)),
        task.apply_async(kwargs={"shop": 7}),
        task.s(7).delay(),
    ]
    assert [each.id for each in again] == [first.id] * 4
    assert queued() == 1
    assert task.delay(8).id != first.id
    assert queued() == 2
    with worker():
        until(lambda: len(runs) == 2)
        assert first.get(timeout=30) == 7
        until(lambda: not name().locked())
        assert task.delay(7).get(timeout=30) == 7
    assert runs == [7, 8, 7]


def test_a_duplicate_may_raise_or_be_answered(queued: Callable[[], int]) -> None:
    first = raising.delay(7)
    with pytest.raises(AlreadyQueued, match="raising is queued already") as caught:
        raising.delay(7)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.task_id == caught.value.task_id == first.id
    for duplicate, shop in (answering.delay(7), answering.delay(shop=7)):
        assert (duplicate.task_id, shop) == (first.id, 7)
    assert queued() == 1


def send_many(link: Link, url: str) -> None:
    app.conf.broker_url = url
    link.say([shared.delay(7).id for _ in range(50)])


def test_of_200_at_once_from_four_processes_one_is_queued(
    queued: Callable[[], int], redis_server: RedisServer
) -> None:
    with processes(send_many, redis_server.url, count=4) as crew:
        crew.go()
        ids = {id for each in crew for id in each.hear()}
    assert queued() == 1
    assert len(ids) == 1


def test_beat_does_not_pile_up(queued: Callable[[], int]) -> None:
    entry = ScheduleEntry("sync", plain.name, schedule=schedule(1), args=(7,), app=app)
    beat = Scheduler(app=app, lazy=True)
    assert len({beat.apply_async(entry).id for _ in range(3)}) == 1
    assert queued() == 1


# -- until -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [plain, done], ids=["start", "done"])
def test_a_change_during_the_run(task: Any, queued: Callable[[], int]) -> None:
    """It is queued if the name is free from the start of the run on."""
    answers: list[Any] = []
    act.append(lambda _: answers.append(task.delay(7)) if not answers else None)
    first = task.delay(7)
    with worker():
        first.get(timeout=30)
        if task is plain:
            until(lambda: len(runs) == 2)
            assert answers[0].id != first.id
        else:
            assert answers[0].id == first.id
    assert not queued()
    assert not name().locked()


def test_a_run_that_lasts_longer_than_the_timeout_keeps_its_name(client: redis.Redis) -> None:
    seen: list[Any] = []

    def last(_: Any) -> None:
        for _ in range(3):
            client.pexpire(name().keys.lock, 30_000)
            until(lambda: (hurry(), name().ttl() > 40)[1])
            seen.append(name().held())

    act.append(last)
    done.delay(7)
    with worker():
        until(lambda: len(seen) == 3)
        until(lambda: not name().locked())
    assert seen[-1].owner.label.startswith("running: ")


def test_a_name_that_has_expired_in_the_queue_is_taken_by_the_run(client: redis.Redis) -> None:
    seen: list[bool] = []
    act.append(lambda _: seen.append(name().locked()))
    first = done.delay(7)
    client.delete(name().keys.lock)  # As when its lifetime is over.
    with worker():
        first.get(timeout=30)
    assert seen == [True]


@of_each_kind
def test_a_failure_frees_the_name(task: Any) -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError

    act.append(fail)
    first = task.delay(7)
    with worker():
        with pytest.raises(ZeroDivisionError):
            first.get(timeout=30)
        until(lambda: not name().locked())


of_each_that_retries = pytest.mark.parametrize(
    "task", [bound, done, over_locked, of_own_class], ids=lambda task: task.__name__
)


@pytest.mark.sample(4)
@of_each_that_retries
def test_a_retry_keeps_the_name(task: Any, queued: Callable[[], int]) -> None:
    """And has its lifetime from then on, after the time it waits for."""
    retried: list[Any] = []

    def retry(self: Any) -> Any:
        if not self.request.retries:
            try:
                self.retry(countdown=200)
            finally:
                retried.append(name().ttl())
        return "at last"

    act.append(retry)
    first = task.delay(7)
    with worker():
        until(lambda: retried)
        until(lambda: first.state == "RETRY")
        assert 200 < retried[0] <= 260
        assert name().ttl() > 200
        assert task.delay(7).id == first.id


@pytest.mark.sample(4)
@of_each_that_retries
def test_a_retry_runs_and_frees_the_name(task: Any) -> None:
    def retry(self: Any) -> Any:
        if not self.request.retries:
            raise KeyError if task is over_locked else self.retry(countdown=0)
        return "at last"

    act.append(retry)
    first = task.delay(7)
    with worker():
        assert first.get(timeout=30) == "at last"
        until(lambda: not name().locked())
    assert runs == [7, 7]


def test_a_start_that_is_planned_is_waited_for() -> None:
    """The lifetime of the name begins with it."""
    start = datetime.now(timezone.utc) + timedelta(hours=1)
    late = {"countdown": 3600}, {"eta": start}, {"eta": start.replace(tzinfo=None)}
    for shop, when in enumerate((*late, {"eta": start.isoformat()})):
        plain.apply_async((shop,), **when)
        assert 3000 < name(shop).ttl() <= 3660
    for over in ({"countdown": -3600}, {"eta": start - timedelta(hours=2)}):
        plain.apply_async((7,), **over)
        assert 0 < name().ttl() <= 60


def test_a_retry_is_never_refused(queued: Callable[[], int]) -> None:
    """Another one was queued during the run: both are sent, since the retry is awaited."""

    def retry(self: Any) -> Any:
        if len(runs) == 1:
            bound.delay(7)
            raise self.retry(countdown=0)
        return self.request.retries

    act.append(retry)
    first = bound.delay(7)
    with worker():
        assert first.get(timeout=30) == 1
        until(lambda: len(runs) == 3)
    assert not name().locked()


# -- what is lost ----------------------------------------------------------------------------------


def test_what_is_revoked_frees_the_name(pace: int) -> None:
    with worker():
        first = plain.apply_async((7,), countdown=pace)
        until(lambda: app.control.revoke(first.id, reply=True, timeout=1))
        until(lambda: not name().locked())
    assert first.state == "REVOKED"
    assert not runs


# -- what cannot be sent ---------------------------------------------------------------------------


@of_each_kind
def test_if_sending_fails_the_name_is_free(task: Any) -> None:
    tries = {"max_retries": 1, "interval_start": 0.01}
    nowhere = Connection("amqp://127.0.0.1:1//", transport_options=tries)
    with pytest.raises(OperationalError):
        task.apply_async((7,), connection=nowhere, retry=False)
    assert not name().locked()


NOWHERE = {"BACKEND": "django_redis_lock.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}


@of_each_kind
@pytest.mark.parametrize("policy", ["raise", "run", "local"])
def test_redis_is_down(task: Any, policy: str, queued: Callable[[], int], caplog: Any) -> None:
    with override_settings(
        CACHES={"default": NOWHERE}, DJANGO_REDIS_LOCK={"ON_REDIS_DOWN": policy}
    ):
        if policy == "raise":
            with pytest.raises(TaskNotQueued, match=r"was not queued.*refused"):
                task.delay(7)
            assert not queued()
        else:
            assert task.delay(7).id != task.delay(7).id
            assert queued() == 2
            assert "may be queued or run more than once" in caplog.text


@pytest.mark.parametrize("policy", ["raise", "run"])
@pytest.mark.parametrize("task", [plain, done], ids=["start", "done"])
def test_redis_is_down_when_the_task_starts(task: Any, policy: str, monkeypatch: Any) -> None:
    """A change that was not queued because this one is must not be lost."""
    monkeypatch.setattr("django_redis_lock.contrib.unique_tasks.messages.PATIENCE", 0.5)
    first = task.delay(7)
    with (
        override_settings(CACHES={"default": NOWHERE}, DJANGO_REDIS_LOCK={"ON_REDIS_DOWN": policy}),
        worker(),
    ):
        if policy == "run":
            assert first.get(timeout=30) == 7
        else:
            with pytest.raises(redis.ConnectionError):
                first.get(timeout=30)
    assert len(runs) == (policy == "run")


# -- ways to send ----------------------------------------------------------------------------------


@of_each_kind
def test_eager(task: Any) -> None:
    app.conf.task_always_eager = True
    try:
        assert [task.delay(7).get() for _ in range(2)] == [7, 7]
        assert task.apply((7,)).get() == task(7) == 7
    finally:
        app.conf.task_always_eager = False
    assert runs == [7] * 4
    assert not name().locked()


@of_each_kind
def test_chain(task: Any) -> None:
    result = chain(step.si(), task.si(7), step.si(), task.si(8)).delay()
    with worker():
        assert result.get(timeout=30) == 8
        until(lambda: not name(8).locked())
    assert runs == ["step", 7, "step", 8]
    assert not name(7).locked()


@of_each_kind
def test_what_others_wait_for_is_not_skipped(task: Any, queued: Callable[[], int]) -> None:
    """The last step of a chain is, and who waits for its result learns of it."""
    task.delay(7)
    results = [
        chain(step.si(), task.si(7), step.si()).delay(),
        chord([task.si(7), step.si()])(step.s()),
        task.apply_async((7,), link=step.s()),
    ]
    with worker():
        for result in results:
            result.get(timeout=30)
        until(lambda: len(runs) == 9)


def test_the_last_step_of_a_chain_is_skipped() -> None:
    plain.apply_async((7,), countdown=300)
    result = chain(step.si(), plain.si(7)).delay()
    with worker():
        until(lambda: result.state == "REVOKED")
    assert runs == ["step"]


@pytest.mark.django_db(transaction=True)
@of_each_kind
def test_on_commit(task: Any, queued: Callable[[], int]) -> None:
    with transaction.atomic():
        if task is not of_class:  # Its class is not Celery's for Django.
            task.delay_on_commit(7)
        transaction.on_commit(partial(task.delay, 7))
        assert not name().locked()
    assert name().locked()
    assert queued() == 1


def test_a_message_that_is_delivered_twice_frees_only_its_own_name(
    queued: Callable[[], int], client: redis.Redis
) -> None:
    plain.delay(7)
    message = client.lindex("celery", 0)
    with worker():
        until(lambda: runs)
        until(lambda: not name().locked())
    plain.apply_async((7,), countdown=300)
    client.delete("unacked", "unacked_index", "celery")
    client.lpush("celery", message)
    with worker():
        until(lambda: len(runs) == 2)
    assert name().locked()


# -- people ----------------------------------------------------------------------------------------


@of_each_kind
def test_it_is_shown_as_queued_and_can_be_released(task: Any) -> None:
    first = task.delay(7)
    out = StringIO()
    call_command("locks", "list", "--wide", stdout=out)
    assert f"queued: {task.name} ({first.id})" in out.getvalue()
    assert out.getvalue().splitlines()[1].split()[-1] == "queued"
    [held] = held_locks().found
    shown = row(held, lambda _: "")
    assert (shown["state"], shown["said"], shown["kill"]) == ("queued", "queued", "")
    assert "no process runs yet" in str(shown["verdict"])
    call_command("locks", "release", "queued:sync-7", "--yes", stdout=out)
    assert task.delay(7).id != first.id


# -- Django's --------------------------------------------------------------------------------------

SOURCE = """
from {module} import task
from django_redis_lock import locked, unique_task
runs = []

@unique_task("sync-{{shop}}", timeout=60)
@task
def start(shop):
    runs.append(shop)
    return shop

@unique_task("sync-{{shop}}", timeout=60, until="done")
@locked("sync-{{shop}}")
@task
def done(shop):
    return start.func(shop)

@locked("sync-{{shop}}")
@unique_task("sync-{{shop}}", timeout=60, until="done")
@task
def below(shop):
    return start.func(shop)

@unique_task("sync-{{shop}}", timeout=60)
@task(takes_context=True)
async def awaited(context, shop):
    return start.func(shop)

@unique_task("sync-{{shop}}", timeout=60, until="done", on_duplicate="raise")
@task(takes_context=True)
async def raising(context, shop):
    from asgiref.sync import sync_to_async
    from django.core.cache import caches
    assert await sync_to_async(caches["default"].lock("queued:sync-7").locked)()
    return start.func(shop)
"""
NAMES = ["start", "done", "below", "awaited", "raising"]


def of_each_django(test: Any) -> Any:
    return pytest.mark.sample(len(NAMES))(pytest.mark.parametrize("kind", NAMES)(test))


@pytest.fixture
def module(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with Django's tasks, or those of its backport for older versions."""
    package = "django.tasks" if importlib.util.find_spec("django.tasks") else "django_tasks"
    settings.TASKS = {"default": {"BACKEND": f"{package}.backends.dummy.DummyBackend"}}
    (tmp_path / "shop_tasks.py").write_text(SOURCE.format(module=package))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("shop_tasks")
    del sys.modules["shop_tasks"]


def execute(result: Any) -> Any:
    """As the workers of Django's backends do."""
    arguments = result.args
    if result.task.takes_context:
        tasks = importlib.import_module(type(result.task).__mro__[1].__module__)
        arguments = [tasks.TaskContext(task_result=result), *arguments]
    return result.task.call(*arguments, **result.kwargs)


@of_each_django
@pytest.mark.parametrize("how", ["enqueue", "aenqueue", "using"])
def test_djangos_task_is_queued_once(module: Any, kind: str, how: str) -> None:
    task = getattr(module, kind)
    if how == "using":
        task = task.using(priority=5)
    send = (
        (lambda *a, **k: asyncio.run(task.aenqueue(*a, **k))) if how == "aenqueue" else task.enqueue
    )
    first = send(7)
    if kind == "raising":
        with pytest.raises(AlreadyQueued) as caught:
            send(shop=7)
        assert caught.value.task_id == first.id
    else:
        assert send(shop=7).id == send(7).id == first.id
    assert send(8).id != first.id
    assert task.get_backend().results[0].id == first.id
    assert len(task.get_backend().results) == 2
    out = StringIO()
    call_command("locks", "list", "--wide", stdout=out)
    assert f"queued: shop_tasks.{kind} ({first.id})" in out.getvalue()
    assert execute(first) == 7
    assert not name().locked()
    assert send(7).id != first.id


@of_each_django
def test_djangos_task_stays_one(module: Any, kind: str) -> None:
    task = getattr(module, kind)
    shown = (task.func, task.module_path, type(task))
    for same in (deepcopy(task), pickle.loads(pickle.dumps(task)), task.using(priority=0)):
        assert (same.func, same.module_path, type(same)) == shown
    assert module.start.func(7) == 7


@of_each_django
def test_djangos_task_that_is_not_queued(module: Any, kind: str, monkeypatch: Any) -> None:
    task = getattr(module, kind)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no queue")

    monkeypatch.setattr(task.get_backend(), "enqueue", fail)
    monkeypatch.setattr(task.get_backend(), "aenqueue", fail)
    with pytest.raises(OSError, match="no queue"):
        task.enqueue(7)
    with pytest.raises(OSError, match="no queue"):
        asyncio.run(task.aenqueue(7))
    assert not name().locked()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("rolled_back", [False, True])
def test_djangos_task_in_a_transaction(module: Any, rolled_back: bool) -> None:
    """A backend that keeps its tasks in the database takes this one back."""
    with transaction.atomic():
        module.start.enqueue(7)
        assert name().locked()
        transaction.set_rollback(rolled_back)
    assert name().locked() is not rolled_back
    assert not vars(connections["default"]).get("_django_redis_lock_watch")


# -- it is used wrongly ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": None}, "timeout must be"),
        ({"timeout": 0}, "timeout must be"),
        ({"timeout": float("inf")}, "timeout must be"),
        ({"until": "end"}, "until must be"),
        ({"on_duplicate": "ignore"}, "on_duplicate must be"),
        ({"on_redis_down": "never"}, "on_redis_down must be"),
        ({"using": 5}, "using must be"),
        ({"key": ""}, "key must be"),
        ({"key": 5}, "key must be"),
        ({"key": "sync-{store}"}, "no argument 'store'"),
        ({"key": "sync-{0}"}, "name the argument"),
    ],
)
@pytest.mark.parametrize("decorator", [shared_task, app.task])
def test_bad_arguments_are_refused(decorator: Any, options: Any, message: str) -> None:
    options = {"key": "sync-{shop}", "timeout": 60, **options}

    def sync(shop: Any) -> None: ...

    sync.__name__ = sync.__qualname__ = f"sync_{len(app.tasks)}"
    with pytest.raises((TypeError, ValueError), match=message):
        unique_task(options.pop("key"), **options)(decorator(sync))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unique": None}, "key must be"),
        ({"unique_timeout": None}, "timeout must be"),
        ({"unique_until": "end"}, "until must be"),
        ({"unique": "sync-{store}"}, "no argument 'store'"),
    ],
)
def test_bad_options_are_refused(options: Any, message: str) -> None:
    options = {"unique": "sync-{shop}", "unique_timeout": 60, **options}
    other = Celery("other", broker="memory://", set_as_current=False)
    with pytest.raises((TypeError, ValueError), match=message):

        @other.task(base=UniqueTask, lazy=False, shared=False, **options)
        def sync(shop: Any) -> None: ...


TWO_APPS = """
from celery import Celery, shared_task
from django.conf import settings
settings.configure(CACHES={"default": {"BACKEND": "django_redis_lock.cache.LocMemCache"}})
from django_redis_lock import unique_task

@unique_task("sync-{store}", timeout=60)
@shared_task(name="wrong")
def wrong(shop): ...

@unique_task("sync-{shop}", timeout=60)
@shared_task(name="right")
def right(shop): ...

for number in range(2):
    app = Celery("shop", broker="memory://", set_as_current=not number)
    try:
        app.tasks["wrong"].delay(7)
    except ValueError as error:
        print(error)
    print(len({app.tasks["right"].delay(number).id for _ in range(2)}))
"""


def test_each_app_has_the_shared_task_and_refuses_a_name_that_does_not_fit() -> None:
    """Also an app that is made after the task."""
    done = subprocess.run(
        [sys.executable, "-c", TWO_APPS], capture_output=True, text=True, check=True
    )
    refused, queued = "'sync-{store}': wrong has no argument 'store' (it has: shop)", "1"
    assert done.stdout.splitlines() == [refused, queued] * 2


@pytest.mark.parametrize("requeue", [False, True])
@pytest.mark.parametrize("task", [done, of_own_class], ids=["done", "of_own_class"])
def test_what_is_rejected(task: Any, requeue: bool) -> None:
    seen: list[bool] = []

    def reject(_: Any) -> Any:
        if len(runs) == 1:
            raise Reject("not now", requeue=requeue)
        seen.append(name().locked())
        return "at last"

    act.append(reject)
    first = task.delay(7)
    with worker():
        until(lambda: len(runs) >= 1 + requeue)
        until(lambda: not name().locked())
    assert seen == [True] * requeue
    assert first.id


def test_a_message_that_is_lost_frees_the_name_after_its_timeout(
    client: redis.Redis, queued: Callable[[], int]
) -> None:
    first = plain.delay(7)
    assert app.control.purge() == 1
    assert plain.delay(7).id == first.id
    client.pexpire(name().keys.lock, 1)
    until(lambda: plain.delay(7).id != first.id)
    assert queued() == 1


def test_a_fixed_id_is_no_way_around(queued: Callable[[], int]) -> None:
    """And who has chosen an id learns that it will not run."""
    assert [plain.apply_async((7,), task_id="mine").id for _ in range(2)] == ["mine"] * 2
    assert queued() == 1
    assert plain.apply_async((7,), task_id="other").id == "mine"
    assert app.AsyncResult("other").state == "REVOKED"
    assert app.AsyncResult("mine").state == "PENDING"

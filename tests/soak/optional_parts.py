"""The workloads of ``idempotent()`` and ``unique_task()``; see ``workers``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import random
import time
from types import SimpleNamespace
from typing import Any

import redis
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from django_redis_lock import current_lock, events, idempotent, unique_task
from django_redis_lock.contrib.unique_tasks import Duplicate
from django_redis_lock.locking.hold import renewals

from .checker import LIFETIME, QUEUED
from .history import History

package = "django.tasks" if importlib.util.find_spec("django.tasks") else "django_tasks"
tasks: Any = importlib.import_module(package)
BaseTaskBackend: Any = importlib.import_module(f"{package}.backends.base").BaseTaskBackend

#: The share of requests and tasks that fail.
FAILING = 0.05
NAMES = 3


class Noted(logging.Handler):
    """Whether a logger has said anything since ``said`` was set to False."""

    said = False

    def emit(self, record: logging.LogRecord) -> None:
        self.said = True


# -- idempotent() ----------------------------------------------------------------------------------


class Requests:
    """Clients that send each request several times."""

    def __init__(self, history: History, name: str, chance: random.Random) -> None:
        self.history, self.name, self.chance = history, name, chance
        self.number, self.lost = 0, False
        self.unkept = Noted()
        logging.getLogger("django_redis_lock.idempotency").addHandler(self.unkept)
        events.subscribe(self._on_event)
        options: dict[str, Any] = {"scope": "{request.user.pk}", "timeout": LIFETIME, "ttl": 300}
        self.views = [
            idempotent(**options, wait=wait)(self._view_of(wait)) for wait in (0, LIFETIME)
        ]

    def _on_event(self, event: object) -> None:
        self.lost = self.lost or isinstance(event, events.Lost)

    def _view_of(self, wait: float) -> Any:
        def view(request: HttpRequest) -> HttpResponse:
            return self._work(request)

        view.__qualname__ = f"view-{wait:g}"
        return view

    def _work(self, request: Any) -> HttpResponse:
        self.number += 1
        run, key, lock = f"{self.name} {self.number}", request.of, current_lock()
        self.lock = lock
        began = time.time()
        self.history.write("began", request=key, id=run, attempt=request.idempotency.attempt)
        time.sleep(self.chance.random() * 0.02)
        if self.chance.random() < FAILING:
            return HttpResponse(status=500)
        at = time.time()
        self.history.write("ran", request=key, id=run, began=began, at=at, held=not lock.lost)
        return HttpResponse(run, status=201)

    def send(self) -> None:
        view = self.chance.randrange(len(self.views))
        user, ago = (
            self.chance.randrange(2),
            self.chance.choice((0, 0, 0, self.chance.random() * 30)),
        )
        key = f"{int((time.time() - ago) * 4)}"
        request: Any = RequestFactory().post("/", {"a": "1"}, HTTP_IDEMPOTENCY_KEY=key)
        request.user = SimpleNamespace(pk=user, is_authenticated=True)
        request.of = f"{view} {user} {key}"
        self.lost, self.unkept.said, self.lock = False, False, None
        asked = time.time()
        response = self.views[view](request)
        values = {"request": request.of, "asked": asked}
        if "Idempotency-Replayed" in response.headers:
            self.history.write("replayed", **values, id=response.content.decode())
        elif response.status_code == 201:
            lost = self.lost or self.unkept.said or (self.lock is not None and self.lock.lost)
            self.history.write("answered", **values, id=response.content.decode(), kept=not lost)
        else:
            self.history.write("refused", **values, status=response.status_code)


# -- unique_task() ---------------------------------------------------------------------------------


class Queue(BaseTaskBackend):
    """A queue on a server that nothing happens to."""

    ledger: redis.Redis
    history: History
    sent: str | None = None

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        Queue.sent = f"{time.time():.6f} {random.random()}"
        message = {"task": task.name, "args": args, "kwargs": kwargs, "id": Queue.sent}
        self.ledger.rpush("queue", json.dumps(message))
        return SimpleNamespace(id=Queue.sent, is_finished=False)


def refused(duplicate: Duplicate, *args: Any) -> Duplicate:
    return duplicate


def run(kind: str, name: str) -> None:
    """What both tasks do."""
    history, id = Queue.history, RUNNING["id"]
    history.write("started", queue=f"{kind} {name}", id=id)
    holds = [job.hold for job in renewals.values()]
    time.sleep(random.random() * 0.02)
    if random.random() < FAILING:
        raise ArithmeticError
    at = time.time()
    if holds and not holds[0].lost:
        history.write("worked", queue=f"{kind} {name}", id=id, began=RUNNING["began"], at=at)


#: The task that runs in this process.
RUNNING: dict[str, Any] = {}


@unique_task("soak-start-{name}", timeout=QUEUED, on_duplicate=refused)
@tasks.task
def start(name: str) -> None:
    RUNNING["began"] = time.time()
    run("start", name)


@unique_task("soak-done-{name}", timeout=QUEUED, until="done", on_duplicate=refused)
@tasks.task
def done(name: str) -> None:
    RUNNING["began"] = time.time()
    run("done", name)


def enqueue(history: History, chance: random.Random) -> None:
    task, name = chance.choice((start, done)), f"{chance.randrange(NAMES)}"
    values: dict[str, Any] = {"queue": f"{task.name} {name}", "asked": time.time()}
    Queue.sent = None
    try:
        answer = task.enqueue(name)
    finally:
        if Queue.sent is not None:
            history.write("queued", **values, id=Queue.sent)
    if isinstance(answer, Duplicate):
        history.write("skipped", **values, id=answer.task_id)


def work_off(ledger: redis.Redis, history: History) -> None:
    """One task, if there is any."""
    message = ledger.lpop("queue")
    if message is None:
        return
    order = json.loads(message)
    RUNNING["id"] = order["id"]
    task = {"start": start, "done": done}[order["task"]]
    history.write("popped", queue=f"{order['task']} {order['args'][0]}", id=order["id"])
    try:
        task.func(*order["args"], **order["kwargs"])
    except ArithmeticError:
        pass

"""``locked()`` on views behind real servers: ASGI and WSGI, two processes, requests at once."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import redis
import uvicorn
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.cache import caches
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.views import View

from django_redis_lock import locked
from tests.processes import PATIENCE, Link, Worker, processes, until
from tests.redis_server import RedisServer

# -- the site, in the processes of the servers -------------------------------------------------

#: The way to the test.
the_test: Link


@locked("export-{name}")
def export(request: HttpRequest, name: str) -> HttpResponse:
    the_test.say("exporting")
    the_test.hear()
    return HttpResponse("exported")


@locked("export-{name}")
async def aexport(request: HttpRequest, name: str) -> HttpResponse:
    the_test.say("exporting")
    await asyncio.to_thread(the_test.hear)
    return HttpResponse("exported")


def visits(number: int) -> Any:
    return caches["default"].client.get_client().incr("inside", number)


@locked("patient", blocking=True, blocking_timeout=PATIENCE)
def patient(request: HttpRequest) -> HttpResponse:
    alone = visits(1) == 1
    visits(-1)
    return HttpResponse(status=200 if alone else 500)


@locked("patient", blocking=True, blocking_timeout=PATIENCE)
class Target(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        alone = visits(1) == 1
        await asyncio.sleep(0)
        visits(-1)
        return HttpResponse(status=200 if alone else 500)


async def ping(request: HttpRequest) -> HttpResponse:
    return HttpResponse("pong")


urlpatterns = [
    path("export/<name>/", export),
    path("aexport/<name>/", aexport),
    path("patient/", patient),
    path("apatient/", Target.as_view()),
    path("ping/", ping),
]


def serve(link: Link, kind: str) -> None:
    global the_test
    the_test = link
    settings.ROOT_URLCONF = __name__
    settings.MIDDLEWARE = []
    if kind == "wsgi":
        server = ThreadedWSGIServer(("127.0.0.1", 0), WSGIRequestHandler)
        server.daemon_threads = True
        server.set_app(get_wsgi_application())
        link.say(server.server_port)
        server.serve_forever()
    else:
        listening = socket.create_server(("127.0.0.1", 0))
        link.say(listening.getsockname()[1])
        config = uvicorn.Config(get_asgi_application(), lifespan="off", log_level="critical")
        uvicorn.Server(config).run(sockets=[listening])


# -- its visitors ------------------------------------------------------------------------------


class Site:
    """One of the servers."""

    def __init__(self, worker: Worker, port: int) -> None:
        self.worker = worker
        self.port = port

    def ask(self, path: str, **headers: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("GET", path, headers=headers)
        return connection

    def get(self, path: str, **headers: str) -> tuple[int, bytes, Any]:
        connection = self.ask(path, **headers)
        answer = connection.getresponse()
        found = answer.status, answer.read(), answer.headers
        connection.close()
        return found


@contextmanager
def site(kind: str, count: int = 1) -> Iterator[list[Site]]:
    """Servers of the same site, each a process."""
    with ExitStack() as stack:
        crew = stack.enter_context(processes(serve, kind, count=count))
        crew.go()
        yield [Site(worker, worker.hear()) for worker in crew]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "view"),
    [("wsgi", "export"), ("wsgi", "aexport"), ("asgi", "export"), ("asgi", "aexport")],
)
def test_of_many_requests_at_once_one_is_served(
    redis_server: RedisServer, kind: str, view: str
) -> None:
    with site(kind, 2) as sites, ThreadPoolExecutor(9) as threads:
        served = threads.submit(sites[0].get, f"/{view}/a/")
        assert sites[0].worker.hear() == "exporting"
        others = [
            threads.submit(sites[n % 2].get, f"/{view}/a/", Accept="application/json")
            for n in range(8)
        ]
        for each in others:
            status, body, headers = each.result(PATIENCE)
            assert status == 409
            assert headers["Cache-Control"] == "no-store"
            assert int(headers["Retry-After"]) == json.loads(body)["retry_after"] >= 1
        other_name = threads.submit(sites[1].get, f"/{view}/b/")
        assert sites[1].worker.hear() == "exporting"
        for each in sites:
            each.worker.say("finish")
        assert served.result(PATIENCE)[:2] == (200, b"exported")
        assert other_name.result(PATIENCE)[:2] == (200, b"exported")
        free = threads.submit(sites[1].get, f"/{view}/a/")
        assert sites[1].worker.hear() == "exporting"
        sites[1].worker.say("finish")
        assert free.result(PATIENCE)[0] == 200


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "view"), [("wsgi", "patient"), ("asgi", "patient"), ("asgi", "apatient")]
)
def test_requests_that_wait_are_served_one_after_the_other(
    redis_server: RedisServer, kind: str, view: str
) -> None:
    with site(kind, 2) as sites, ThreadPoolExecutor(12) as threads:
        found = [threads.submit(sites[n % 2].get, f"/{view}/") for n in range(24)]
        assert [each.result(PATIENCE)[0] for each in found] == [200] * 24


def test_waiting_does_not_block_the_server(client: redis.Redis) -> None:
    with site("asgi") as (server,), ThreadPoolExecutor(4) as threads:
        lock = caches["default"].lock("patient")
        assert lock.acquire(blocking=False)
        waiting = [threads.submit(server.get, "/apatient/") for _ in range(3)]
        until(lambda: client.info("clients")["blocked_clients"])
        assert server.get("/ping/")[:2] == (200, b"pong")
        assert not any(each.done() for each in waiting)
        lock.release()
        assert [each.result(PATIENCE)[0] for each in waiting] == [200] * 3


def test_a_client_that_goes_gives_its_place_up(client: redis.Redis) -> None:
    with site("asgi", 2) as (first, second), ThreadPoolExecutor(1) as threads:
        lock = caches["default"].lock("patient")
        assert lock.acquire(blocking=False)
        gone = first.ask("/apatient/")
        until(lambda: client.info("clients")["blocked_clients"] == 1)
        stays = threads.submit(second.get, "/apatient/")
        until(lambda: client.info("clients")["blocked_clients"] == 2)
        gone.close()
        until(lambda: client.info("clients")["blocked_clients"] == 1)
        lock.release()
        assert stays.result(PATIENCE)[0] == 200
        assert first.get("/ping/")[0] == 200

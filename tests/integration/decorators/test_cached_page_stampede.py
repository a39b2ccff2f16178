"""A crowd of threads in four processes asks for one page in two variants: each variant is computed
once, and everybody gets the right one."""

from __future__ import annotations

from collections import Counter

import redis
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory, override_settings
from django.utils.cache import patch_vary_headers

from django_redis_lock import cached_page
from tests.processes import Link, in_threads, processes, until
from tests.redis_server import RedisServer

THREADS, PROCESSES = 50, 4


def visit(link: Link, url: str, variants: str) -> list[tuple[str, str]]:
    """For each of the ``variants``, asked for at once, the variant that came. A computation is
    noted in the list ``computed``, and goes on when there is something in the list ``go``."""
    # With USE_I18N Django takes the active language for the key, and not this header.
    with redis.Redis.from_url(url) as client, override_settings(USE_I18N=False):

        @cached_page(600)
        def page(request: HttpRequest) -> HttpResponse:
            variant = request.headers["Accept-Language"]
            client.rpush("computed", variant)
            assert client.blpop(["go"])
            response = HttpResponse(variant)
            patch_vary_headers(response, ["Accept-Language"])
            return response

        def ask() -> tuple[str, str]:
            variant = left.pop()
            request = RequestFactory().get("/", headers={"Accept-Language": variant})
            return variant, page(request).content.decode()

        left = list(variants)
        return in_threads(len(left), ask)


def test_each_variant_is_computed_once(redis_server: RedisServer, client: redis.Redis) -> None:
    with processes(visit, redis_server.url, "ab" * (THREADS // 2), count=PROCESSES) as crew:
        crew.go()
        # All wait for the first to learn that there are variants.
        until(lambda: client.info("clients")["blocked_clients"] == PROCESSES)
        assert client.llen("computed") == 1
        client.rpush("go", "on")
        until(lambda: client.llen("computed") == 2)
        client.rpush("go", "on")
        found = Counter(answer for answers in crew.results() for answer in answers)
    assert found == {("a", "a"): 100, ("b", "b"): 100}
    assert sorted(client.lrange("computed", 0, -1)) == [b"a", b"b"]

"""``{% cached %}`` in templates."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import redis
from django.contrib import messages
from django.contrib.messages.storage.cookie import CookieStorage
from django.core.cache import cache
from django.http import HttpResponse
from django.middleware.csrf import CsrfViewMiddleware, _unmask_cipher_token, get_token
from django.template import Context, Template, TemplateSyntaxError, engines
from django.test import RequestFactory, override_settings
from django.utils.functional import SimpleLazyObject

from tests.processes import PATIENCE
from tests.support.values import Asking


def render(source: str, **context: Any) -> str:
    return Template("{% load redis_lock cache %}" + source).render(Context(context))


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __str__(self) -> str:
        self.calls += 1
        return f"<{self.calls}>"


def test_a_fragment_is_rendered_once_for_what_it_varies_on(client: redis.Redis) -> None:
    source = "{% cached 60 side user lang %}{{ user }} {{ n|safe }}{% endcached %}"
    n = Counter()
    found = [render(source, user=user, lang="en", n=n) for user in ("ann", "ann", "bob")]
    assert found == ["ann <1>", "ann <1>", "bob <2>"]
    assert n.calls == 2
    kept = [key for key in client.keys("*side*") if b"done" not in key]
    assert len(kept) == 2
    assert all(50_000 < client.pttl(key) <= 60_000 for key in kept)


def test_what_is_escaped_is_escaped_once() -> None:
    source = "{% cached 60 side %}{{ text }}{% endcached %}"
    assert [render(source, text="<b>") for _ in range(2)] == ["&lt;b&gt;"] * 2


def test_a_stale_fragment_is_served_while_one_renders(client: redis.Redis) -> None:
    source = "{% cached 60 side stale=3600 using=alias %}{{ n|safe }}{% endcached %}"
    n, begun, finish = Counter(), threading.Event(), threading.Event()
    render(source, n=n, alias="default")
    (key,) = (key for key in client.keys("*side*") if b"done" not in key)
    assert client.pttl(key) > 3_600_000
    client.pexpire(key, 3_500_000)

    class Slow:
        def __str__(self) -> str:
            begun.set()
            assert finish.wait(PATIENCE)
            return "new"

    leader = Asking(render, source, n=Slow(), alias="default")
    assert begun.wait(PATIENCE)
    assert render(source, n=n, alias="default") == "<1>"
    finish.set()
    assert leader.found() == "new"
    assert render(source, n=n, alias="default") == "new"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% cached %}{% endcached %}", "needs at least a timeout and a name"),
        ("{% cached 60 %}{% endcached %}", "needs at least a timeout and a name"),
        ("{% cached 60 side stael=5 %}{% endcached %}", "cached has no option 'stael'"),
        ("{% cached soon side %}{% endcached %}", "timeout must be a number, not 'in May'"),
        ("{% cached 60 side stale='x' %}{% endcached %}", "stale must be a number"),
        ("{% cached 60 side using='none' %}{% endcached %}", "there is no cache 'none'"),
    ],
)
def test_mistakes(source: str, words: str) -> None:
    with pytest.raises(TemplateSyntaxError, match=words):
        render(source, soon="in May")


def test_no_setting_has_a_context_rendered_in_another_thread(
    settings: Any, client: redis.Redis
) -> None:
    """By then its variables are those of another place in the page."""
    settings.DJANGO_REDIS_LOCK = {"STALE": 1000, "SOFT_TIMEOUT": 0}
    threads: set[int] = set()

    def note() -> int:
        threads.add(threading.get_ident())
        return len(threads)

    for _ in range(2):
        assert render("{% cached 60 side %}{{ note }}{% endcached %}", note=note) == "1"
        for key in client.keys("*side*"):
            client.pexpire(key, 999_000)  # It is stale now.
    assert threads == {threading.get_ident()}


def test_the_cache_for_fragments_is_used_if_there_is_one(settings: Any) -> None:
    default = settings.CACHES["default"]
    both = {"default": default, "template_fragments": {**default, "KEY_PREFIX": "fragments"}}
    with override_settings(CACHES=both):
        render("{% cached 60 side %}x{% endcached %}")
        assert cache.keys("*side*") == []


@pytest.mark.parametrize("source", ["{% csrf_token %}", "{% if a %}{{ csrf_token }}{% endif %}"])
def test_a_token_is_never_shared(source: str, caplog: pytest.LogCaptureFixture) -> None:
    name = f"form{len(source)}"
    text = (
        f"{{% load redis_lock cache %}}{{% cached 60 {name} %}}{{{{ n }}}}{source}{{% endcached %}}"
    )
    template, seen = engines["django"].from_string(text), []
    for user in "abab":
        request = RequestFactory().get("/", headers={"Cookie": f"csrftoken={user * 32}"})
        CsrfViewMiddleware(HttpResponse).process_request(request)
        n = len(seen)
        seen.append(template.render({"n": n, "a": 1, "user": user}, request))
        secret = _unmask_cipher_token(re.search(r"[a-zA-Z0-9]{64}", seen[-1][1:])[0])
        assert (seen[-1][0], secret) == (str(n), user * 32)
    said = [record for record in caplog.records if "CSRF" in record.getMessage()]
    assert [record.getMessage() for record in said] == [
        f"The fragment {name} is not cached: it has a CSRF token. Move it out of {{% cached %}}"
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize(
    ("part", "what"),
    [("messages", "messages"), ("nonce", "a nonce"), ("token", "a CSRF token"), ("key", "")],
)
def test_what_is_a_visitors_is_never_shared(
    part: str, what: str, used_before: bool, captured: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a fragment has it does not depend on who was the first to use it, nor on whether the
    page around has used it. The nonce is as django-csp makes it."""
    source = {
        "messages": "{% for message in messages %}{{ message }}{% endfor %}",
        "nonce": "{{ nonce|escapejs }}" if captured else "{{ request.csp_nonce|escapejs }}",
        "token": "{{ token }}" if captured else "{% csrf_token %}",
        "key": "{% idempotency_key %}",
    }[part]
    name = f"{part}{used_before}{captured}"
    text = f"{{% load redis_lock %}}{source * used_before}|{{% cached 60 {name} %}}{source}"
    template = engines["django"].from_string(text + "{% endcached %}")

    def seen_by(user: str) -> str:
        request: Any = RequestFactory().get("/")
        request._messages = CookieStorage(request)
        messages.info(request, f"for {user}")

        def nonce() -> str:
            request._csp_nonce = f"-{user * 12}+="
            return str(request._csp_nonce)

        request.csp_nonce = SimpleLazyObject(nonce)
        context = {"token": get_token(request), "nonce": str(request.csp_nonce)} if captured else {}
        return str(template.render(context, request)).partition("|")[2]

    first, second = seen_by("a"), seen_by("b")
    assert first
    assert first != second
    assert f"The fragment {name} is not cached: it has {what}" in caplog.text

"""``locked()`` on classes of views, on their methods, and on asynchronous views."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
import redis
from django.contrib.messages import get_messages
from django.contrib.messages.storage.cookie import CookieStorage
from django.core.cache import caches
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View
from django.views.generic import TemplateView

from django_redis_lock import current_lock, locked
from django_redis_lock.contention import raise_error, redirect_to, respond, skip
from django_redis_lock.exceptions import LockNotAcquired
from tests.holding import hold
from tests.processes import PATIENCE


def request(method: str = "get", accept: str = "", **attributes: Any) -> HttpRequest:
    headers = {"HTTP_ACCEPT": accept} if accept else {}
    made: HttpRequest = getattr(RequestFactory(), method)("/", **headers)
    vars(made).update(attributes)
    return made


def free(name: str) -> bool:
    return not caches["default"].lock(name).locked()


# -- the class ---------------------------------------------------------------------------------


@locked("report-{self.kind}-{self.kwargs[slug]}")
class Report(View):
    kind = "daily"

    def get(self, request: HttpRequest, slug: str) -> HttpResponse:
        return HttpResponse(f"{slug}, under {current_lock().name!s}")


class Weekly(Report):
    kind = "weekly"


def test_a_class() -> None:
    view = Report.as_view()
    assert view(request(), slug="a").content == b"a, under :lock:1:report-daily-a"
    assert free("report-daily-a")
    with hold("report-daily-a"):
        assert view(request(), slug="a").status_code == 409
        assert view(request(), slug="b").status_code == 200
        assert Weekly.as_view()(request(), slug="a").status_code == 200
    with hold("report-weekly-a"):
        assert Weekly.as_view()(request(), slug="a").status_code == 409


def test_arguments_of_the_url_stand_for_themselves() -> None:
    @locked("invoice-{pk}-{request.method}")
    class Invoice(View):
        def get(self, request: HttpRequest, pk: int) -> HttpResponse:
            return HttpResponse()

    with hold("invoice-7-GET"):
        assert Invoice.as_view()(request(), pk=7).status_code == 409
        assert Invoice.as_view()(request(), pk=8).status_code == 200


def test_without_a_name_each_class_has_its_own() -> None:
    @locked
    class First(View):
        def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse()

    @method_decorator(locked, name="dispatch")
    class Second(First):
        pass

    here = f"{__name__}.test_without_a_name_each_class_has_its_own.<locals>"
    with hold(f"{here}.First"):
        assert First.as_view()(request()).status_code == 409
    with hold(f"{here}.Second.dispatch"):
        assert First.as_view()(request()).status_code == 200
        assert Second.as_view()(request()).status_code == 409


def test_what_means_nothing_for_a_view_is_refused() -> None:
    for options in ({"exit_code": 3}, {"default": None}, {"lost_exit_code": 3}):
        with pytest.raises(TypeError, match="means nothing for a view"):
            locked("x", **options)(type("Page", (View,), {}))
    with pytest.raises(TypeError, match="only a management command can be ended"):
        locked("x", on_lost="terminate")(type("Page", (View,), {}))


@method_decorator(locked("page-{self.kwargs[slug]}-{request.method}"), name="dispatch")
class Page(TemplateView):
    template_name = "reports/base.html"


def test_method_decorator() -> None:
    view = Page.as_view()
    assert view(request(), slug="a").status_code == 200
    with hold("page-a-GET"):
        assert view(request(), slug="a").status_code == 409
        assert view(request("post"), slug="a").status_code == 405


# -- asynchronous ------------------------------------------------------------------------------


@locked("export-{pk}")
async def export(request: HttpRequest, pk: int) -> HttpResponse:
    return HttpResponse("exported")


@locked("export-{pk}")
class Export(View):
    async def get(self, request: HttpRequest, pk: int) -> HttpResponse:
        return HttpResponse(f"exported under {current_lock().fence}")


class ByItsMethod(View):
    @locked("export-{pk}")
    async def get(self, request: HttpRequest, pk: int) -> HttpResponse:
        return HttpResponse("exported")


class Free(View):
    async def get(self, request: HttpRequest, pk: int) -> HttpResponse:
        return HttpResponse("exported")


@method_decorator(locked("export-{pk}"), name="dispatch")
class ByMethodDecorator(Free):
    pass


@method_decorator(locked("export-{pk}"), name="get")
class GetByMethodDecorator(Free):
    pass


@pytest.mark.parametrize(
    "view",
    [
        export,
        GetByMethodDecorator.as_view(),
        Export.as_view(),
        ByItsMethod.as_view(),
        ByMethodDecorator.as_view(),
        locked("export-{pk}")(Free.as_view()),
    ],
)
@pytest.mark.parametrize("accept", ["text/html", "application/json"])
def test_asynchronous_views(view: Any, accept: str) -> None:
    async def main() -> None:
        answer = await view(request(), pk=7)
        assert answer.content.startswith(b"exported")
        assert await caches["default"].alock("export-7").locked() is False
        async with caches["default"].alock("export-7"):
            answer = await view(request(accept=accept), pk=7)
            assert (answer.status_code, answer["Cache-Control"]) == (409, "no-store")
            assert answer["Content-Type"].startswith(accept)
            assert (await view(request(), pk=8)).status_code == 200
            refused = await view(request("delete"), pk=8)
            assert refused.status_code == (200 if view is export else 405)

    asyncio.run(main())


@pytest.mark.parametrize("by_method_decorator", [False, True])
def test_a_coroutine_function_as_on_lost_of_an_asynchronous_view(
    client: redis.Redis, by_method_decorator: bool
) -> None:
    async def main() -> None:
        told = asyncio.Event()

        async def on_lost() -> None:
            told.set()

        class Losing(View):
            async def get(self, request: HttpRequest) -> HttpResponse:
                client.set(current_lock().name, "another's")
                await asyncio.wait_for(told.wait(), PATIENCE)
                return HttpResponse(f"lost: {current_lock().lost}")

        decorator: Any = locked("export", timeout=60, on_lost=on_lost)
        if by_method_decorator:
            decorator = method_decorator(decorator, name="dispatch")
        answer: Any = decorator(Losing).as_view()(request())
        assert (await answer).content == b"lost: True"

    asyncio.run(main())


def test_an_asynchronous_view_whose_mixin_answers_by_itself() -> None:
    """As ``LoginRequiredMixin`` does."""

    class Strict:
        def dispatch(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
            return HttpResponse("who are you?")

    @locked("export-{pk}")
    class Guarded(Strict, Free):
        pass

    view = Guarded()
    view.setup(request(), pk=7)
    assert asyncio.run(view.dispatch(request(), pk=7)).content == b"who are you?"


def test_a_view_stays_what_it_is() -> None:
    assert inspect.iscoroutinefunction(export)
    assert Export.view_is_async
    assert not Report.view_is_async
    view = locked("x")(Report.as_view())
    assert view.view_class is Report


# -- ready-made answers ------------------------------------------------------------------------


def answered(on_conflict: Any, made: HttpRequest) -> HttpResponse:
    @locked("export", on_conflict=on_conflict)
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    with hold("export"):
        return view(made)


def test_skip_or_raise() -> None:
    answer = answered(skip, request())
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer["Cache-Control"] == "no-store"
    with pytest.raises(LockNotAcquired):
        answered(raise_error, request())


def test_redirect_to_a_view_with_a_message_or_to_a_url() -> None:
    made = request("post")
    made._messages = CookieStorage(made)
    answer = answered(redirect_to("send-invoice", pk=7, message="It is on its way."), made)
    assert (answer.status_code, answer["Location"]) == (303, "/invoices/7/send/")
    assert answer["Cache-Control"] == "no-store"
    assert [str(message) for message in get_messages(made)] == ["It is on its way."]
    assert answered(redirect_to("/later/"), request())["Location"] == "/later/"


def test_respond_with_another_page_and_status() -> None:
    answer = answered(respond("reports/base.html", status=503), request())
    assert (answer.status_code, answer["Cache-Control"]) == (503, "no-store")
    assert b"<main>" in answer.content
    answer = answered(respond("reports/base.html"), request(accept="application/json"))
    assert answer["Content-Type"] == "application/json"

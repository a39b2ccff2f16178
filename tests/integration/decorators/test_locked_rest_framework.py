"""``locked()`` on views of Django REST framework."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.core.cache import caches
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import action, api_view
from rest_framework.exceptions import APIException
from rest_framework.permissions import IsAuthenticated
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_redis_lock import current_lock, locked
from tests.holding import hold


def call(view: Any, method: str = "post", accept: str = "", token: str = "", **kwargs: Any) -> Any:
    headers = {"HTTP_ACCEPT": accept} if accept else {}
    if token:
        headers["HTTP_AUTHORIZATION"] = token
    answer = view(getattr(RequestFactory(), method)("/", **headers), **kwargs)
    return answer.render() if hasattr(answer, "render") else answer


class User:
    is_authenticated = True

    def __init__(self, pk: str) -> None:
        self.pk = pk


class Token(BaseAuthentication):
    def authenticate(self, request: Any) -> Any:
        token = request.META.get("HTTP_AUTHORIZATION")
        return (User(token), None) if token else None

    def authenticate_header(self, request: Any) -> str:
        return "Token"


# -- functions ---------------------------------------------------------------------------------


@api_view(["POST"])
@locked("pay-{pk}")
def pay(request: Any, pk: int) -> Response:
    return Response({"paid": pk, "fence": current_lock().fence})


@locked("pay-{pk}")
@api_view(["POST"])
def pay_outside(request: Any, pk: int) -> Response:
    return Response({"paid": pk, "fence": current_lock().fence})


@pytest.mark.parametrize("view", [pay, pay_outside])
def test_in_either_order(view: Any) -> None:
    assert call(view, pk=7).data["paid"] == 7
    with hold("pay-7"):
        answer = call(view, pk=7)
        assert answer.status_code == 409
        assert answer["Content-Type"] == "application/json"
        if view is pay_outside:
            assert b"<html" in call(view, accept="text/html", pk=7).content
        assert int(answer["Retry-After"]) >= 1
        assert answer["Cache-Control"] == "no-store"
        assert json.loads(answer.content)["retry_after"] == int(answer["Retry-After"])
        assert call(view, pk=8).status_code == 200
    assert view.csrf_exempt
    assert not caches["default"].lock("pay-7").locked()


# -- classes -----------------------------------------------------------------------------------


@locked("basket-{request.user.pk}-{self.kind}")
class Basket(APIView):
    authentication_classes = (Token,)
    permission_classes = (IsAuthenticated,)
    kind = "usual"

    def post(self, request: Any) -> Response:
        return Response({"of": request.user.pk, "under": str(current_lock().name)})


class ByItsMethod(APIView):
    authentication_classes = (Token,)

    @locked("basket-{request.user.pk}-usual")
    def post(self, request: Any) -> Response:
        return Response({"of": request.user.pk})


class Free(APIView):
    authentication_classes = (Token,)

    def post(self, request: Any) -> Response:
        return Response({"of": request.user.pk})


@method_decorator(locked("basket-{request.user.pk}-usual"), name="post")
class ByMethodDecorator(Free):
    pass


@locked("order-{request.user.pk}")
@locked("basket-{request.user.pk}-{self.kind}")
class Twice(Free):
    kind = "usual"


@locked("order-{request.user.pk}")
class BelowAnother(Basket):
    pass


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Basket, ByItsMethod, ByMethodDecorator, Twice, BelowAnother])
def test_the_user_that_the_framework_has_found(kind: Any) -> None:
    view = kind.as_view()
    assert call(view, token="ann").data["of"] == "ann"
    with hold("basket-ann-usual"):
        answer = call(view, token="ann")
        assert (answer.status_code, answer["Cache-Control"]) == (409, "no-store")
        assert answer.data["detail"] == "This operation is already in progress."
        assert call(view, token="bob").status_code == 200
        assert call(view, method="options", token="ann").status_code == 200
        assert call(view, method="delete", token="ann").status_code == 405
    with hold("order-ann"):
        is_locked_twice = kind in (Twice, BelowAnother)
        assert call(view, token="ann").status_code == (409 if is_locked_twice else 200)


def test_who_may_not_takes_no_lock() -> None:
    with hold("basket-None-usual"):
        assert call(Basket.as_view()).status_code == 401


def test_on_dispatch_it_is_around_everything() -> None:
    view = method_decorator(locked("all-{self.kind}"), name="dispatch")(
        type("All", (Free,), {"kind": "usual"})
    ).as_view()
    assert call(view, token="ann").status_code == 200
    with hold("all-usual"):
        assert call(view, token="ann").status_code == 409


def test_a_handler_that_fails_gives_the_lock_back() -> None:
    @locked("broken")
    class Broken(APIView):
        def post(self, request: Any) -> Response:
            raise APIException

    for _ in range(2):
        assert call(Broken.as_view()).status_code == 500


@locked("stock-{self.action}-{pk}")
class Stock(ViewSet):
    def retrieve(self, request: Any, pk: str) -> Response:
        return Response({"pk": pk})

    @action(detail=True, methods=["post"])
    def count(self, request: Any, pk: str) -> Response:
        return Response({"counted": pk})


class StockByItsMethods(ViewSet):
    @locked("stock-retrieve-{pk}")
    def retrieve(self, request: Any, pk: str) -> Response:
        return Response({"pk": pk})

    @locked("stock-count-{pk}")
    @action(detail=True, methods=["post"])
    def count(self, request: Any, pk: str) -> Response:
        return Response({"counted": pk})

    @action(detail=True, methods=["post"])
    @locked("stock-weigh-{pk}")
    def weigh(self, request: Any, pk: str) -> Response:
        return Response({"weighed": pk})


@pytest.mark.parametrize("kind", [Stock, StockByItsMethods])
def test_view_sets(kind: Any) -> None:
    router = SimpleRouter()
    router.register("stock", kind, basename="stock")
    views = {pattern.name: pattern.callback for pattern in router.urls}
    with hold("stock-count-7"):
        assert call(views["stock-count"], pk="7").status_code == 409
        assert call(views["stock-count"], pk="8").data == {"counted": "8"}
        assert call(views["stock-detail"], "get", pk="7").data == {"pk": "7"}
    with hold("stock-retrieve-7"):
        assert call(views["stock-detail"], "get", pk="7").status_code == 409
    if kind is StockByItsMethods:
        with hold("stock-weigh-7"):
            assert call(views["stock-weigh"], pk="7").status_code == 409

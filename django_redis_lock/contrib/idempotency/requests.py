"""What a request with a key says: whose it is, and what its repeats must send, too."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl

from django.conf import settings
from django.core.exceptions import BadRequest, ImproperlyConfigured, RequestDataTooBig
from django.http import HttpRequest, RawPostDataException

from ...decorators.key_template import Args, Kwargs, Template

_JSON = re.compile(r"application/json|[^;]+\+json")


def header(name: str) -> Callable[[Any], str | None]:
    """The key is in the request's header ``name``."""
    return lambda request: request.headers.get(name)


def field(name: str = "idempotency_key") -> Callable[[Any], str | None]:
    """The key is in the field ``name`` of a form; see ``{% idempotency_key %}``."""
    return lambda request: request.POST.get(name)


class ScopeMissing(ImproperlyConfigured, BadRequest):
    """Nobody knows whose request it is. Perhaps its client does not say it: Django answers with
    400."""


class Scope:
    """Whose keys there are in a request: ``scope`` is that of ``idempotent``."""

    def __init__(self, scope: object) -> None:
        self._call = scope if callable(scope) else None
        # Users are told apart also if their texts are equal.
        self._template = Template("{scope}" if callable(scope) else str(scope or ""), typed=True)

    def of(self, request: HttpRequest, args: Args, kwargs: Kwargs) -> Sequence[str]:
        """
        Raises:
            ImproperlyConfigured: the request is authenticated, and has no scope; or its scope is
                empty, and it shows nothing else of its client.
        """
        values = {**kwargs, "request": request}
        if self._call is not None:
            values = {"scope": self._call(*args, **kwargs)}
        parts: list[object] = []
        try:
            for name in self._template.fields():
                value: Any = _formatter.get_field(name, (), values)[0]
                parts += (value or [None]) if isinstance(value, (list, tuple)) else [value]
        except (LookupError, AttributeError) as error:  # No such header, cookie or argument.
            raise ScopeMissing(f"{_UNKNOWN}: {error!r}") from error
        empty = [part for part in parts if _says_nothing(part)]
        if getattr(getattr(request, "user", None), "is_authenticated", False):
            if len(empty) == len(parts):
                raise ImproperlyConfigured(
                    "idempotent(scope=None) is for clients without accounts, and this request is "
                    'authenticated: give a scope that names its user, such as "{request.user.pk}"'
                )
            return [self._template.fill(values)]
        client = _client(request) if empty else ()
        if empty and not any(client):
            raise ScopeMissing(
                f"{_UNKNOWN}: this request has no user, and no cookie of a session or form, and no "
                "Authorization, so all such clients would share their answers"
            )
        return [self._template.fill(values), *client]


_formatter = string.Formatter()
_UNKNOWN = (
    "the scope of idempotent() must say whose each request is, such as "
    '"{request.headers[X-Api-Key]}", or be None where all clients have one space of keys'
)


def _says_nothing(part: object) -> bool:
    return part is None or part == "" or not getattr(part, "is_authenticated", True)


def _client(request: HttpRequest) -> Sequence[str]:
    """What tells clients apart that are not logged in, or whose token is read later."""
    names = (settings.CSRF_COOKIE_NAME, settings.SESSION_COOKIE_NAME)
    cookie = next(filter(None, map(request.COOKIES.get, names)), "")
    return request.headers.get("Authorization", ""), cookie


def of_django(request: HttpRequest) -> Any:
    return getattr(request, "_request", request)


def digest(parts: Iterable[bytes]) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(b"%d:" % len(part))
        hashed.update(part)
    return hashed.hexdigest()


def what_is_sent(request: Any) -> Iterator[bytes]:
    """What a repeat of ``request`` sends, too. Of a form, its fields: the boundary between its
    parts, and the CSRF token, differ each time. Of JSON and the query, what they say."""
    plain = of_django(request)
    yield plain.method.encode()
    yield plain.path.encode()
    query = parse_qsl(plain.META.get("QUERY_STRING", ""), True, encoding="latin-1")
    yield json.dumps(sorted(query, key=lambda pair: pair[0])).encode()
    if plain.content_type in ("multipart/form-data", "application/x-www-form-urlencoded"):
        request = plain
        for field in sorted(request.POST.lists()):
            if field[0] != "csrfmiddlewaretoken":
                yield json.dumps(field).encode()
    else:
        try:
            yield _content(plain.body) if _JSON.fullmatch(plain.content_type) else plain.body
            return
        except (RawPostDataException, RequestDataTooBig):
            if request is plain:
                raise
        # Django REST framework has read it, or reads more.
        yield _written(request.data)
    for name, files in sorted(request.FILES.lists()):
        for file in files:
            yield f"{name} {file.name}".encode()
            yield from file.chunks()
            file.seek(0)


def _content(body: bytes) -> bytes:
    """The same bytes for each way to write the same JSON; ``body`` itself if it is none. Keys that
    are there twice stay, and numbers are as they were written: parsers differ about them."""
    kinds = ("parse_int", "parse_float", "parse_constant")
    hooks: Any = dict.fromkeys(kinds, lambda text: {"number": text})
    hooks["object_pairs_hook"] = lambda pairs: {"pairs": sorted(pairs, key=lambda pair: pair[0])}
    try:
        return json.dumps(json.loads(body, **hooks)).encode()
    except (ValueError, RecursionError):
        return body


def _written(data: object) -> bytes:
    """``data`` that a parser has made of a body."""
    if type(data) in (dict, list):  # A form's has several values of one name.
        with suppress(TypeError, ValueError, RecursionError):
            return json.dumps(data, sort_keys=True, default=repr).encode()
    return repr(data).encode()

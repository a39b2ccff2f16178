"""What belongs to one request, or one moment, in a page or fragment that others get, too."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from django.contrib.messages import get_messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.middleware.csrf import _does_token_match  # type: ignore[attr-defined]  # private
from django.utils.cache import has_vary_header, patch_vary_headers
from django.utils.functional import LazyObject, SimpleLazyObject, empty

if TYPE_CHECKING:
    from django.contrib.sessions.backends.base import SessionBase

#: What a client makes its request depend on. A page that others get is computed without it.
_CONDITIONS = (
    *("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH", "HTTP_IF_MODIFIED_SINCE", "HTTP_IF_UNMODIFIED_SINCE"),
    *("HTTP_RANGE", "HTTP_IF_RANGE"),
)
#: Django's CSRF protection sets it when a token for this request's client is made.
_TOKEN_USED = "CSRF_COOKIE_NEEDS_UPDATE"
#: Its value if a decorator around the page has used a token, true as well.
_BY_ANOTHER = 1
#: Attributes with the user: of Django's requests, and of those of Django REST framework.
_USERS = ("user", "auser", "_user")
#: Headers by which the pages of users differ.
_BY_USER = ("Cookie", "Authorization")
#: What may be a CSRF token: a secret with its mask. No part of a longer word is one.
_LIKE_A_TOKEN = re.compile(r"(?<![a-zA-Z0-9])[a-zA-Z0-9]{64}(?![a-zA-Z0-9])")


class Conditions:
    """The conditions of a request: taken out of it while a page is computed, and put back
    afterwards.

    Attributes:
        of_client: what belongs to one client, or to one response, and was used while they were
            taken out: a CSRF token, a nonce, messages; else empty.
        session_used: whether the session was read during that time.
        user_used: whether the user was, who may have been loaded before.
        is_of_user: whether that user is logged in.
        in_background: whether another thread may use the session.
    """

    of_client = ""
    session_used = user_used = is_of_user = in_background = False
    _session_used_before = _messages_used_before = False

    def __init__(self, request: HttpRequest, names: tuple[str, ...] = _CONDITIONS) -> None:
        self._request = getattr(request, "_request", request)
        self._users = _Users(self, request, self._request)
        self._names = names
        self._taken: dict[str, object] | None = None
        self._flag: object = None
        self._session: SessionBase | None = None
        self._nonces_before: dict[str, str] = {}
        self._messages: Any = None

    def __contains__(self, name: str) -> bool:
        return name in self._request.META or name in (self._taken or ())

    def take_out(self) -> None:
        meta = self._request.META
        self._taken = {name: meta.pop(name) for name in self._names if name in meta}
        vars(self._request).pop("headers", None)  # Django computes it from META once.
        self._flag = meta.get(_TOKEN_USED)
        if self._flag is True and not self.of_client:
            meta[_TOKEN_USED] = _BY_ANOTHER
        self._nonces_before = self._nonces()
        self._messages = None if self.in_background else get_messages(self._request)
        self._messages_used_before = getattr(self._messages, "used", False)
        if self._messages_used_before:
            self._messages.used = False
        session = None if self.in_background else getattr(self._request, "session", None)
        self._session = session if hasattr(session, "accessed") else None
        if self._session is not None:
            self._session_used_before = self._session.accessed
            self._session.accessed = False
        self._users.watch()

    def put_back(self) -> None:
        if self._taken is None:
            return
        meta = self._request.META
        if meta.get(_TOKEN_USED) is True:
            self.of_client = "a CSRF token"
        elif self._flag is True and _TOKEN_USED in meta:
            meta[_TOKEN_USED] = meta[_TOKEN_USED] == _BY_ANOTHER
        if self._nonces() != self._nonces_before:
            self.of_client = "a nonce"
        stored = get_messages(self._request)
        if getattr(stored, "used", False) and len(stored):
            self.of_client = "messages"
        if self._messages_used_before:
            self._messages.used = True
        if self._session is not None:
            self.session_used |= self._session.accessed
            # The middleware sets Vary by that.
            self._session.accessed |= self._session_used_before
        self._users.put_back()
        meta.update(self._taken)
        vars(self._request).pop("headers", None)
        self._taken = None

    def _nonces(self) -> dict[str, str]:
        """The secrets that this request has made for its response: of Django, django-csp and others
        they are attributes."""
        found = {}
        for name, value in [*vars(self._request).items()]:
            if "nonce" in name:
                made = value._wrapped if isinstance(value, LazyObject) else value
                if isinstance(made, str) and made:
                    found[name] = made
        return found

    def secret_in(self, text: str) -> str:
        """Which secret of this response ``text`` has, whenever it was made; else empty."""
        for nonce in self._nonces().values():
            # What is left of it where it is quoted, as in JavaScript or a URL.
            if max(re.split("[^a-zA-Z0-9]", nonce), key=len) in text:
                return "a nonce"
        secret = self._request.META.get("CSRF_COOKIE")
        tokens = _LIKE_A_TOKEN.findall(text) if secret else ()
        return "a CSRF token" if any(_does_token_match(each, secret) for each in tokens) else ""

    def complete(self, response: HttpResponseBase) -> None:
        """Set what the session's middleware would set later: Django stores a page without it."""
        if self.session_used or (self.user_used and self._session_used_before):
            patch_vary_headers(response, ("Cookie",))
        elif self.is_of_user and not any(has_vary_header(response, name) for name in _BY_USER):
            self.of_client = self.of_client or "a user"
        if not self.of_client:
            self.of_client = self._secret_of(response)

    def _secret_of(self, response: HttpResponseBase) -> str:
        # The middleware around the page may make its header of such an attribute.
        policies = [str(value) for name, value in vars(response).items() if "csp" in name]
        headers = " ".join((*response.headers.values(), *policies))
        if "'nonce-" in headers.lower():
            return "a nonce"
        if not isinstance(response, HttpResponse):
            return ""
        if "Content-Encoding" in response.headers and self._nonces():
            return "a nonce"  # That is not known.
        return self.secret_in(f"{headers} {response.content.decode('latin-1')}")


class _Users:
    """The user of a request, and of Django REST framework's request around it: notes in
    ``conditions`` that a view reads it, also if a decorator or a middleware has loaded it, and that
    it sets another."""

    def __init__(self, conditions: Conditions, *requests: object) -> None:
        self._conditions = conditions
        self._requests: list[dict[str, object]] = [
            vars(request) for request in dict.fromkeys(requests)
        ]
        #: The attributes of a request, a name, what was there, and what notes that it is read.
        self._watched: list[tuple[dict[str, object], str, object, object]] = []

    def watch(self) -> None:
        for attributes, name in product(self._requests, _USERS):
            instead = user = attributes.get(name)
            if user is not None:
                instead = self._awaited(user) if name == "auser" else self._lazy(user)
                attributes[name] = instead
            self._watched.append((attributes, name, user, instead))

    def put_back(self) -> None:
        for attributes, name, user, instead in self._watched:
            now = attributes.get(name)
            if now is not instead:  # The view knows who the client is.
                if not (name == "auser" or (isinstance(now, LazyObject) and now._wrapped is empty)):
                    self._note(now)
            elif user is not None:
                attributes[name] = user
        self._watched.clear()

    def _lazy(self, user: object) -> object:
        return SimpleLazyObject(lambda: self._note(user))

    def _awaited(self, auser: object) -> object:
        load = cast("Callable[[], Awaitable[object]]", auser)

        async def noted() -> object:
            return self._note(await load())

        return noted

    def _note(self, user: object) -> object:
        self._conditions.user_used = True
        self._conditions.is_of_user |= bool(getattr(user, "is_authenticated", True))
        return user

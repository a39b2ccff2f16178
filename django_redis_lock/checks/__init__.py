"""System checks: mistakes in the settings and in uses of ``locked()`` that can be seen at start-up.

``manage.py check --tag redis_lock`` runs these alone. Those that must ask Redis run with
``--deploy`` only, as Django's own checks of what is good enough for production.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from django.conf import settings
from django.contrib.messages.middleware import MessageMiddleware
from django.contrib.sessions.middleware import SessionMiddleware
from django.core.checks import CheckMessage, register
from django.core.exceptions import ImproperlyConfigured
from django.middleware.csrf import CsrfViewMiddleware
from django.middleware.locale import LocaleMiddleware
from django.urls import get_resolver
from django.utils.module_loading import import_string
from django_redis.client import DefaultClient, HerdClient, ShardClient
from redis.exceptions import RedisError

from .. import exporters
from ..cache import BACKEND, LOCAL_BACKEND, BackendCannotLock, lock_cache, lock_caches
from ..conf import FOR_THE_PROCESS, Conf, given
from ..decorators import Declaration, declarations
from ..doctor import examine
from ..middleware import CachedPageMiddleware
from . import databases as databases
from .catalogue import CHECKS, TAG, check, found

__all__ = ["CHECKS", "TAG"]


# -- the settings --------------------------------------------------------------------------------


@register(TAG)
def check_dict(**kwargs: Any) -> list[CheckMessage]:
    try:
        given()
    except ImproperlyConfigured as error:
        hint = 'Write DJANGO_REDIS_LOCK = {"TIMEOUT": 30}, or leave it out.'
        return [found("E001", f"{error}.", hint)]
    return []


@check()
def check_values() -> Iterator[CheckMessage]:
    yield from _wrong_values(Conf(), Conf.names(), given())
    for _, options in _lock_options():
        own = {n.removeprefix("LOCK_"): v for n, v in options.items() if n.startswith("LOCK_")}
        yield from _wrong_values(Conf(options), own, own)


def _wrong_values(
    conf: Conf, names: Sequence[str] | Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[CheckMessage]:
    for name, sentence in conf.mistakes():
        if name not in names:
            continue
        if name == "TIMEOUT" and values[name] in (None, math.inf):
            hint = (
                "After a crash such a lock would stay taken forever. Set the lifetime of a lock "
                "between two renewals in seconds, such as 30. For a single lock that must never "
                "expire, pass timeout=None."
            )
            yield found("E003", f"{sentence}.", hint)
        else:
            yield found("E002", f"{sentence}.", "Correct it, or remove it to use the default.")


@check()
def check_names() -> Iterator[CheckMessage]:
    names = Conf.names()
    for key in given():
        if key not in names:
            hint = _did_you_mean(key, names)
            yield found("W001", f"DJANGO_REDIS_LOCK has the unknown key {key!r}.", hint)
    ours = [name for name in names if name not in FOR_THE_PROCESS]
    for alias, options in _lock_options():
        where = f"The OPTIONS of the cache {alias!r}"
        for key in options:
            if str(key).removeprefix("LOCK_") in FOR_THE_PROCESS:
                hint = "It applies to the whole process: set it in DJANGO_REDIS_LOCK."
                yield found("W002", f"{where} contain {key!r}, which has no effect there.", hint)
            elif key in names:
                hint = f"Use the name 'LOCK_{key}'."
                yield found("W002", f"{where} contain {key!r}, which has no effect.", hint)
            elif str(key).startswith("LOCK_") and key.removeprefix("LOCK_") not in ours:
                hint = _did_you_mean(key.removeprefix("LOCK_"), ours, "LOCK_")
                yield found("W002", f"{where} contain the unknown key {key!r}.", hint)


def _did_you_mean(key: Any, names: Sequence[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(str(key).upper().removeprefix("LOCK_"), names, n=1)
    if close:
        return f"Did you mean {prefix + close[0]!r}?"
    return f"The known settings are: {', '.join(prefix + name for name in names)}."


@check()
def check_backends() -> Iterator[CheckMessage]:
    aliases = list(lock_caches())
    if not aliases:
        hint = (
            f"Set the BACKEND of one of the CACHES to {BACKEND!r}, or, for development and tests "
            f"without Redis, to {LOCAL_BACKEND!r}."
        )
        yield found("W003", "None of the CACHES supports locks.", hint)
    for alias in aliases:
        given_class = _options(alias).get("CLIENT_CLASS")
        try:
            kind = import_string(given_class) if isinstance(given_class, str) else DefaultClient
        except ImportError:
            continue  # The cache raises it.
        if not isinstance(kind, type):
            continue
        if issubclass(kind, ShardClient):
            yield found(
                "E004",
                f"The cache {alias!r} does not support locks: its CLIENT_CLASS, {kind.__name__}, "
                "has no single primary server.",
                "lock(), locked() and get_or_set() raise ImproperlyConfigured. Remove "
                "CLIENT_CLASS, use SentinelClient, or give this cache django-redis's own BACKEND.",
            )
        elif issubclass(kind, HerdClient):
            yield found(
                "W004",
                f"The cache {alias!r} uses {kind.__name__}, which stores values in a special form, "
                "so get_or_set() raises ImproperlyConfigured.",
                "Remove CLIENT_CLASS: get_or_set(stale=...) does what HerdClient is for.",
            )


@check()
def check_exporters() -> Iterator[CheckMessage]:
    try:
        names = Conf().EXPORTERS
    except ImproperlyConfigured:
        return  # E002 says so.
    for name in names:
        try:
            exporters.load(name)
        except ImproperlyConfigured as error:
            yield found("E008", f"{error}.", "Install it, or remove the exporter from the setting.")


@check()
def check_middleware() -> Iterator[CheckMessage]:
    kinds = [kind for kind in map(_imported, settings.MIDDLEWARE) if isinstance(kind, type)]
    places = [n for n, kind in enumerate(kinds) if issubclass(kind, CachedPageMiddleware)]
    if not places:
        return
    setters = (SessionMiddleware, CsrfViewMiddleware, MessageMiddleware)
    for before in kinds[: places[0]]:
        if issubclass(before, setters):
            text = f"CachedPageMiddleware comes after {before.__name__} in MIDDLEWARE."
            hint = "Put it before: what that sets shows that a page is not for all users."
            yield found("E010", text, hint)
    if LocaleMiddleware in kinds[places[0] :]:
        text = "CachedPageMiddleware comes before LocaleMiddleware in MIDDLEWARE."
        yield found("E010", text, "Put it after: the language of the page must be known.")


def _imported(path: str) -> Any:
    try:
        return import_string(path)
    except ImportError:
        return None  # Django reports it.


@check()
def check_ignored_errors() -> Iterator[CheckMessage]:
    everywhere = getattr(settings, "DJANGO_REDIS_IGNORE_EXCEPTIONS", False)
    for alias in lock_caches():
        options = _options(alias)
        decided = "LOCK_ON_REDIS_DOWN" in options or "ON_REDIS_DOWN" in given()
        if options.get("IGNORE_EXCEPTIONS", everywhere) and not decided:
            yield found(
                "W005",
                f"The cache {alias!r} ignores errors (IGNORE_EXCEPTIONS), but its locks do not: "
                "while Redis is down, lock() and locked() raise.",
                "Set ON_REDIS_DOWN to what locks do then: 'raise', 'local' or 'run'. With "
                "'raise', handle redis.exceptions.RedisError where locks are taken.",
            )


@check()
def check_lifetimes() -> Iterator[CheckMessage]:
    confs = [("DJANGO_REDIS_LOCK: ", Conf(), given())]
    for alias, options in _lock_options():
        confs.append((f"The cache {alias!r}: LOCK_", Conf(options), options))
    for where, conf, values in confs:
        own = {str(name).removeprefix("LOCK_") for name in values}
        try:
            lifetime, grant = conf.TIMEOUT, conf.GRANT_TIMEOUT
        except ImproperlyConfigured:
            continue
        if "TIMEOUT" in own and not 1 <= lifetime <= 3600:
            yield found(
                "W006",
                f"{where}TIMEOUT is {lifetime:g} seconds.",
                "Locks are renewed while they are held, so this does not limit the work. With "
                "less than 1 a short pause of the process or the network loses the lock; with more "
                "than 3600 it stays taken for hours after a crash. 10 to 60 suits most projects.",
            )
        if own & {"TIMEOUT", "GRANT_TIMEOUT"} and grant > lifetime:
            yield found(
                "W007",
                f"{where}GRANT_TIMEOUT, {grant:g} seconds, is longer than TIMEOUT, "
                f"{lifetime:g} seconds.",
                "A waiter that crashes as it gets the lock would keep others waiting longer than "
                "a holder that crashes. The default of 2 suits most projects.",
            )


@check(deploy=True)
def check_servers() -> Iterator[CheckMessage]:
    for alias in lock_caches():
        where = f"The cache {alias!r}"
        try:
            findings = list(examine(alias, with_trial=False))
        except ImproperlyConfigured:
            continue  # Another check reports it.
        except (RedisError, OSError) as error:
            # No error: images are often built without a Redis.
            hint = "Run manage.py locks doctor where Redis can be reached."
            yield found("I101", f"{where}: the request to Redis failed: {error}", hint)
            continue
        for finding in findings:
            if finding.number:
                text = f"{where}: {finding.topic}: {finding.text}."
                yield found(finding.number, text, finding.hint)


def _lock_options() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for alias in lock_caches():
        yield alias, {str(name): value for name, value in _options(alias).items()}


def _options(alias: str) -> Mapping[str, Any]:
    options: Mapping[str, Any] = settings.CACHES[alias].get("OPTIONS") or {}
    return options


# -- the uses of locked() ------------------------------------------------------------------------


def _declarations() -> tuple[Declaration, ...]:
    """All uses of ``locked()``, those of views too: this imports the URLconf."""
    try:
        _ = get_resolver().url_patterns
    except Exception:  # Django's own checks report it.
        pass
    return declarations()


def _without_cache() -> Iterator[tuple[str, str, ImproperlyConfigured]]:
    """What names a cache that cannot lock: the number of its error, itself, and why."""
    places = [("E005", f"locked() of {lock.target}", lock.given_using) for lock in _declarations()]
    if "USING" in given():  # It is reported once, and not for each use.
        places = [("E007", "DJANGO_REDIS_LOCK: USING", None), *(p for p in places if p[2])]
    for number, where, alias in places:
        try:
            using = alias or Conf().USING
        except ImproperlyConfigured:
            continue  # E002 reports it.
        try:
            lock_cache(using)
        except ImproperlyConfigured as error:
            yield number, where, error


@check()
def check_caches() -> Iterator[CheckMessage]:
    unsupported: dict[str, list[str]] = {}
    for number, where, error in _without_cache():
        if isinstance(error, BackendCannotLock):
            unsupported.setdefault(str(error), []).append(where)
        else:
            yield found(number, f"{where}: {error}.", "Name another cache.")
    for sentence, places in unsupported.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        hint = "Until then each call of what is locked there raises ImproperlyConfigured."
        yield found("W012", f"{min(places)}{more}: {sentence}.", hint)


@check(deploy=True)
def check_caches_of_production() -> Iterator[CheckMessage]:
    for number, where, error in _without_cache():
        if isinstance(error, BackendCannotLock):
            hint = f"Or name a cache whose BACKEND is {BACKEND!r}."
            yield found(number, f"{where}: {error}.", hint)


@check()
def check_answers() -> Iterator[CheckMessage]:
    for lock in _declarations():
        answer = lock.options.get("on_conflict")
        if answer is None:
            continue
        if not _takes_an_argument(answer):
            yield found(
                "E006",
                f"locked() of {lock.target}: on_conflict takes no arguments.",
                "It is called with the conflict, and with the arguments of the call: "
                "def answer(conflict, *args, **kwargs).",
            )
        unused = [name for name in ("status_code", "exit_code") if name in lock.options]
        if unused:
            yield found(
                "W011",
                f"locked() of {lock.target}: {unused[0]} has no effect together with on_conflict.",
                "Remove it, or let on_conflict return that answer.",
            )


def _takes_an_argument(answer: Callable[..., Any]) -> bool:
    try:
        inspect.signature(answer).bind_partial(object())
    except TypeError:
        return False
    except ValueError:
        pass  # A built-in function without a signature.
    return True


@check()
def check_lifetimes_of_uses() -> Iterator[CheckMessage]:
    for lock in _declarations():
        if "timeout" not in lock.options:
            continue
        timeout, min_hold = lock.options["timeout"], lock.options.get("min_hold", 0)
        if timeout is None:
            yield found(
                "W008",
                f"locked() of {lock.target}: with timeout=None the lock never expires.",
                "If the process is killed, the code does not run again until somebody releases "
                "the lock by force. Remove timeout: the lock is then renewed while the code runs.",
            )
        elif min_hold > timeout:
            yield found(
                "W009",
                f"locked() of {lock.target}: min_hold, {min_hold:g} seconds, is longer than "
                f"timeout, {timeout:g} seconds.",
                "If the process is killed, the lock ends with its timeout, before min_hold is "
                "over. If the code must not run again before that, increase timeout.",
            )


@check()
def check_names_of_uses() -> Iterator[CheckMessage]:
    first: dict[str, Declaration] = {}
    for lock in _declarations():
        if lock.template is None:
            continue  # A function makes its names.
        other = first.setdefault(lock.template, lock)
        for difference in _differences(other, lock):
            yield found(
                "W010",
                f"locked() of {other.target} and of {lock.target} both name the lock "
                f"{lock.template!r}, with different settings: {difference}.",
                "If they must exclude each other, give both the same settings; if not, give them "
                "different names.",
            )


def _differences(one: Declaration, other: Declaration) -> Iterator[str]:
    if one.using != other.using:
        yield f"using is {one.using!r} and {other.using!r}, so they do not exclude each other"
    for name in ("timeout", "min_hold", "max_hold"):
        values = [lock.options.get(name, "left out") for lock in (one, other)]
        if values[0] != values[1]:
            yield f"{name} is {values[0]} and {values[1]}"

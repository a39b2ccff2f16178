"""How a check is made; the checks of the settings, and of the servers that they name."""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from django.conf import settings
from django.contrib.messages.middleware import MessageMiddleware
from django.contrib.sessions.middleware import SessionMiddleware
from django.core.checks import CheckMessage, Error, Info, Warning
from django.core.exceptions import ImproperlyConfigured
from django.middleware.csrf import CsrfViewMiddleware
from django.middleware.locale import LocaleMiddleware
from django.utils.module_loading import import_string
from django_redis.client import DefaultClient, HerdClient, ShardClient
from redis.connection import parse_url
from redis.exceptions import RedisError

from ...cache import URL_HINT, UnfitKeyFunction, lock_cache, lock_caches, starts_of_locks
from ...conf import FOR_THE_PROCESS, Conf, given
from ...extension import PartMissing, part
from ..doctor import examine

logger = logging.getLogger("django_redis_lock.checks")

#: The settings in which projects keep the URL of Celery's broker.
BROKERS = ("CELERY_BROKER_URL", "BROKER_URL")
#: django-redis's setting.
FACTORY_SETTING = "DJANGO_REDIS_CONNECTION_FACTORY"
SESSIONS_IN_CACHE = "django.contrib.sessions.backends.cache"

Database = tuple[Any, ...]


def found(number: str, text: str, hint: str) -> CheckMessage:
    """The message of the check ``number``; its letter determines the kind. ``docs/checks.md``
    lists all numbers; one is never used again."""
    kinds: dict[str, Callable[..., CheckMessage]] = {"E": Error, "W": Warning, "I": Info}
    return kinds[number[0]](text, hint=hint, id=f"django_redis_lock.{number}")


Check = Callable[[], Iterator[CheckMessage]]
#: Those of each start, and those for ``--deploy`` only.
_CHECKS: dict[bool, list[Check]] = {False: [], True: []}


def check(*, deploy: bool = False) -> Callable[[Check], Check]:
    """Add a check, for settings that are a dict; with ``deploy`` for ``--deploy`` only."""

    def decorate(look: Check) -> Check:
        _CHECKS[deploy].append(look)
        return look

    return decorate


NOT_INSTALLED = (
    "A cache uses django_redis_lock, which is not in INSTALLED_APPS: its system checks, commands, "
    "template tags, signals, figures and admin page are missing.",
    'Add "django_redis_lock" to INSTALLED_APPS.',
)


@cache
def not_installed() -> CheckMessage:
    """The message for an app that is not installed, and so registers no checks."""
    return found("W018", *NOT_INSTALLED)


@cache
def log_not_installed() -> None:
    """Log it once in a process, unless the system check has reported it."""
    if not not_installed.cache_info().currsize:
        logger.warning("%s %s", *NOT_INSTALLED)


def run(*, deploy: bool) -> list[CheckMessage]:
    """The messages of all checks; with ``deploy`` those for ``--deploy`` only."""
    try:
        given()
    except ImproperlyConfigured as error:
        hint = 'Write DJANGO_REDIS_LOCK = {"TIMEOUT": 30}, or leave it out.'
        return [] if deploy else [found("E001", f"{error}.", hint)]
    return [message for look in _CHECKS[deploy] for message in look()]


def _options(alias: str) -> dict[str, Any]:
    return {
        str(name): value for name, value in (settings.CACHES[alias].get("OPTIONS") or {}).items()
    }


def _given() -> Iterator[tuple[str, Conf, Mapping[str, Any]]]:
    """The settings of the process, then those of each cache: how a message begins that names one,
    the settings, and the values that are set there."""
    yield "DJANGO_REDIS_LOCK: ", Conf(), given()
    for alias in lock_caches():
        conf = Conf(_options(alias))
        yield f"The cache {alias!r}: LOCK_", conf, conf._own


@check()
def check_values() -> Iterator[CheckMessage]:
    forever = "Set seconds, such as 30: after a crash such a lock would stay taken forever."
    for _, conf, values in _given():
        for name in filter(values.__contains__, Conf.names()):
            try:
                getattr(conf, name)
            except ImproperlyConfigured as error:
                if name == "TIMEOUT" and values[name] in (None, math.inf):
                    yield found("E003", f"{error}.", forever)
                else:
                    yield found("E002", f"{error}.", "Correct it, or remove it to use the default.")


@check()
def check_names() -> Iterator[CheckMessage]:
    names = Conf.names()
    for key in given():
        if key not in names:
            hint = _did_you_mean(key, names)
            yield found("W001", f"DJANGO_REDIS_LOCK has the unknown key {key!r}.", hint)
    ours = [name for name in names if name not in FOR_THE_PROCESS]
    for alias in lock_caches():
        where = f"The OPTIONS of the cache {alias!r}"
        for key in _options(alias):
            if key.removeprefix("LOCK_") in FOR_THE_PROCESS:
                hint = "It applies to the whole process: set it in DJANGO_REDIS_LOCK."
                yield found("W002", f"{where} contain {key!r}, which has no effect there.", hint)
            elif key in names:
                hint = f"Use the name 'LOCK_{key}'."
                yield found("W002", f"{where} contain {key!r}, which has no effect.", hint)
            elif key.startswith("LOCK_") and key.removeprefix("LOCK_") not in ours:
                hint = _did_you_mean(key.removeprefix("LOCK_"), ours, "LOCK_")
                yield found("W002", f"{where} contain the unknown key {key!r}.", hint)


def _did_you_mean(key: object, names: Sequence[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(str(key).upper().removeprefix("LOCK_"), names, n=1)
    if close:
        return f"Did you mean {prefix + close[0]!r}?"
    return f"The known settings are: {', '.join(prefix + name for name in names)}."


@check()
def check_backends() -> Iterator[CheckMessage]:
    for alias in lock_caches():
        config = settings.CACHES[alias]
        location, in_memory = config.get("LOCATION"), _imported(config["BACKEND"]).in_memory
        if not (location or in_memory):
            hint = 'Set it to the address of Redis, such as "redis://127.0.0.1:6379/1".'
            yield found("W014", f"The cache {alias!r} has no LOCATION.", hint)
        elif not (in_memory or _is_url(alias)):
            yield found("E011", f"The LOCATION of the cache {alias!r} is no URL.", URL_HINT)
        for name in _options(alias):
            if name.lower() == "db":  # As django-environ makes it of "?db=3" in an address.
                yield found(
                    "W024",
                    f"The cache {alias!r} has the option {name!r}, which django-redis ignores: "
                    "its database is that of LOCATION, or 0.",
                    'Write it into LOCATION: "redis://host/3", or "unix:///path?db=3".',
                )
        kind = _imported(str(_options(alias).get("CLIENT_CLASS")))
        if not isinstance(kind, type):
            continue
        if issubclass(kind, ShardClient):
            yield found(
                "E004",
                f"The cache {alias!r} does not support locks: its CLIENT_CLASS, {kind.__name__}, "
                "has no single primary server.",
                "Remove CLIENT_CLASS, or use SentinelClient.",
            )
        elif issubclass(kind, HerdClient):
            yield found(
                "W004",
                f"The cache {alias!r} uses {kind.__name__}, which stores values in a special form, "
                "so get_or_set() raises ImproperlyConfigured.",
                "Remove CLIENT_CLASS: get_or_set(stale=...) does what HerdClient is for.",
            )


def _is_url(alias: str) -> bool:
    """Whether django-redis can make a client for the LOCATION; another factory may want another."""
    if "CONNECTION_FACTORY" in _options(alias) or hasattr(settings, FACTORY_SETTING):
        return True
    try:
        return bool(_parsed(alias))
    except ValueError:
        return False


def _parsed(alias: str) -> list[dict[str, Any]]:
    """The settings of connections that each URL of LOCATION has. Raises ValueError."""
    location = settings.CACHES[alias]["LOCATION"]
    urls = location.split(",") if isinstance(location, str) else location
    return [dict(parse_url(url)) for url in urls]  # type: ignore[no-untyped-call]  # redis-py


@check()
def check_replies() -> Iterator[CheckMessage]:
    for alias in lock_caches():
        with suppress(Exception):  # Another check reports it.
            client = lock_cache(alias).client
            wanted = dict(_options(alias).get("CONNECTION_POOL_KWARGS") or {})
            for of_url in _parsed(alias):
                wanted |= of_url
            if wanted.get("decode_responses") and not _reads_text(client):
                yield found(
                    "W019",
                    f"The cache {alias!r} gets its values as text (decode_responses), which its "
                    "serializer cannot read.",
                    "Remove decode_responses from its LOCATION and CONNECTION_POOL_KWARGS. For "
                    "commands of your own, make another client.",
                )


def _reads_text(client: DefaultClient) -> bool:
    """Whether ``client`` can read a value as bytes, as ``get_or_set`` gets it, and as a text."""
    stored = client.encode(["a", {"b": 1.5}])
    try:
        return all(client.decode(each) for each in (stored, stored.decode()))
    except Exception:
        return False


@check()
def check_lock_keys() -> Iterator[CheckMessage]:
    for alias in lock_caches():
        with suppress(ImproperlyConfigured):  # E002 reports it.
            if not Conf(_options(alias)).LOCK_PREFIX:
                yield found(
                    "W016",
                    f"The locks of the cache {alias!r} are not protected from its keys, as "
                    'LOCK_PREFIX is "": who chooses a cache key can take, release and read a lock.',
                    "Let no visitor choose a cache key, or remove LOCK_PREFIX.",
                )


@check()
def check_key_function() -> Iterator[CheckMessage]:
    for alias in lock_caches():
        try:
            cache: Any = lock_cache(alias)
            cache.client.make_pattern("")
            cache._lock_name("", None)
            hides = cache._keys.hides_locks()
        except (UnfitKeyFunction, ValueError) as error:
            hint = "Until then each lock of this cache, or each value, raises this."
            yield found("W026", f"The cache {alias!r}: {error}.", hint)
        except Exception:
            continue  # Another check reports it, or it needs a tenant.
        else:
            if hides:
                yield found(
                    "W017",
                    f"The KEY_FUNCTION of the cache {alias!r} hides which locks are whose.",
                    "Lists show the keys of locks that are younger than half a second, and "
                    "held_locks() and reset_all() have to wait for their holders' descriptions. "
                    "Have it leave the prefix and the name readable.",
                )


@check()
def check_prefixes() -> Iterator[CheckMessage]:
    able = set(lock_caches())
    for other, locks, _ in starts_of_locks():
        for alias, config in settings.CACHES.items():
            values = f"{config.get('KEY_PREFIX', '')}:{config.get('VERSION', 1)}:"
            near = values.startswith(locks) or locks.startswith(values)
            alike = settings.CACHES[other].get("KEY_FUNCTION") == config.get("KEY_FUNCTION")
            beside = near and alike and _databases_of(alias) & _databases_of(other)
            if beside and other in able - {alias}:
                yield found(
                    "W025",
                    f"Keys of the cache {alias!r} can be those of locks of the cache {other!r}: "
                    f"they begin with {values!r}, and its locks with {locks!r}.",
                    "Choose a KEY_PREFIX that does not begin with the other's, or another "
                    "database. Until then such keys are refused, but not by other backends.",
                )


@check()
def check_exporters() -> Iterator[CheckMessage]:
    try:
        names = Conf().EXPORTERS
    except ImproperlyConfigured:
        return  # E002 says so.
    for name in names:
        try:
            part("exporters").load(name)
        except (ImproperlyConfigured, PartMissing) as error:
            yield found("E008", f"{error}.", "Install it, or remove the exporter from the setting.")


@check()
def check_middleware() -> Iterator[CheckMessage]:
    kinds = [kind for kind in map(_imported, settings.MIDDLEWARE) if isinstance(kind, type)]
    try:
        pages = part("pages").CachedPageMiddleware
    except PartMissing:
        return  # Django says so where it is named.
    places = [n for n, kind in enumerate(kinds) if issubclass(kind, pages)]
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
                "while Redis is down, lock() raises, and views with locked() answer 503.",
                "Set ON_REDIS_DOWN to what locks do then: 'raise', 'local' or 'run'.",
            )


@check()
def check_lifetimes() -> Iterator[CheckMessage]:
    for where, conf, values in _given():
        if "TIMEOUT" not in values:
            continue
        try:
            lifetime = conf.TIMEOUT
        except ImproperlyConfigured:
            continue
        if not 1 <= lifetime <= 3600:
            yield found(
                "W006",
                f"{where}TIMEOUT is {lifetime:g} seconds.",
                "It does not limit the work, as locks are renewed: 10 to 60 suits most projects.",
            )


@check(deploy=True)
def check_servers() -> Iterator[CheckMessage]:
    for alias in lock_caches():
        where = f"The cache {alias!r}"
        try:
            findings = list(examine(alias, with_trial=False))
        except UnfitKeyFunction:
            continue  # W026 reports it.
        except ImproperlyConfigured as error:
            if not [*check_values(), *check_backends()]:  # Else they report it.
                yield found("E108", f"{where}: {error}.", "Until then each use of it raises this.")
            continue
        except RedisError as error:
            # No error: images are often built without a Redis.
            hint = "Run manage.py locks doctor where Redis can be reached."
            yield found("I101", f"{where}: the request to Redis failed: {error}", hint)
            continue
        for finding in findings:
            if finding.number:
                text = f"{where}: {finding.topic}: {finding.text}."
                yield found(finding.number, text, finding.hint)


# -- what clear() of a cache deletes --------------------------------------------------------------


@check()
def check_clear() -> Iterator[CheckMessage]:
    for alias in lock_caches():
        try:
            clear = Conf(_options(alias)).CLEAR
        except ImproperlyConfigured:
            continue  # E002 reports it.
        if clear != "prefix":
            yield from _lost_by_others(alias)
            continue
        try:
            cache: Any = lock_cache(alias)
            cache._keys.own_pattern()
        except ImproperlyConfigured as error:
            hint = "Until then clear() of this cache raises ImproperlyConfigured."
            yield found("E009", f"The cache {alias!r}: {error}.", hint)


def _lost_by_others(alias: str) -> Iterator[CheckMessage]:
    if others := ", ".join(_others(alias)):
        hint = (
            f'Set "LOCK_CLEAR": "prefix" in the OPTIONS of {alias!r}: then it deletes only keys '
            "with its own KEY_PREFIX and VERSION. Or give each another database."
        )
        if alias == settings.SESSION_CACHE_ALIAS:
            hint += " For sessions, set SESSION_CACHE_ALIAS to a cache with another KEY_PREFIX."
        text = f"clear() of the cache {alias!r} empties its database. That also contains {others}."
        yield found("W013", text, hint)


def _others(alias: str) -> Iterator[str]:
    databases = _databases_of(alias)
    for other in settings.CACHES:
        if other != alias and databases & _databases_of(other):
            yield f"the cache {other!r}"
    for name in BROKERS:
        if databases & _databases(getattr(settings, name, None)):
            yield f"Celery's messages ({name})"
    in_cache = settings.SESSION_ENGINE == SESSIONS_IN_CACHE
    if in_cache and databases & _databases_of(settings.SESSION_CACHE_ALIAS):
        yield "the sessions (SESSION_ENGINE)"


def _databases_of(alias: str) -> set[Database]:
    """The databases of a cache; none if it is not in Redis."""
    config = settings.CACHES.get(alias, {})
    options: Mapping[str, Any] = config.get("OPTIONS") or {}
    # Django's own backend has it in OPTIONS, django-redis among the arguments of the pool.
    number = options.get("db") or (options.get("CONNECTION_POOL_KWARGS") or {}).get("db") or 0
    return _databases(config.get("LOCATION"), int(number))


def _databases(location: Any, number: int = 0) -> set[Database]:
    """By host and port or path, and number: ``number`` where a URL has none."""
    urls = [location] if isinstance(location, str) else location or ()
    databases = set()
    for url in (one.strip() for each in urls for one in re.split("[,;]", str(each))):
        try:
            where = dict(parse_url(url))  # type: ignore[no-untyped-call]  # redis-py
        except ValueError:
            continue  # It does not lead to Redis.
        host = where.get("host", "localhost")
        host = "localhost" if host in ("127.0.0.1", "::1") else host
        port, db = where.get("port", 6379), where.get("db", number)
        databases.add((where.get("path"), host, port, db))
    return databases

"""System checks: mistakes in the settings and in uses of ``locked()`` that can be seen at start-up.

``manage.py check --tag redis_lock`` runs these alone. Those that must ask Redis run with
``--deploy`` only. Here are those of ``locked()``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from django.conf import settings as project_settings
from django.core.checks import ERROR, CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.urls import URLResolver, get_resolver

from ...cache import BACKEND, LOCAL_BACKEND, BackendCannotLock, lock_cache, lock_caches
from ...conf import SETTING, Conf, given
from ...decorators.section import LockedFunction, declarations
from ...decorators.targets import LOCKED, STORED, layers
from ...extension import PACKAGE, PartMissing, part
from ...protocol.validation import implausible
from .settings import check, found
from .settings import log_not_installed as log_not_installed
from .settings import not_installed as not_installed
from .settings import run as run

NO_CACHE = "None of the CACHES supports locks"
SET_BACKEND = (
    f"Set the BACKEND of one of the CACHES to {BACKEND!r}, or, for development and tests without "
    f"Redis, to {LOCAL_BACKEND!r}."
)

#: The options of ``locked()`` in seconds.
TIMES = ("timeout", "blocking_timeout", "min_hold", "max_hold", "warn_after", "retry_after")


REFUSALS = "django_redis_lock.middleware.RefusalMiddleware"


def _declarations() -> list[LockedFunction]:
    """All uses of ``locked()``, those of views too: this imports the URLconf."""
    try:
        _ = get_resolver().url_patterns
    except Exception:  # Django's own checks report it.
        pass
    return declarations()


def _views() -> Iterator[tuple[Any, bool]]:
    """The views of this site's URLs, and whether each URL has arguments."""
    try:
        yield from _callbacks(get_resolver().url_patterns)
    except Exception:  # Django's own checks report it.
        return


def _callbacks(patterns: Iterable[Any], arguments: bool = False) -> Iterator[tuple[Any, bool]]:
    for each in patterns:
        has = arguments or bool(getattr(getattr(each.pattern, "regex", None), "groups", 0))
        if isinstance(each, URLResolver):
            yield from _callbacks(each.url_patterns, has)
        else:
            yield each.callback, has


def _locks_of(view: Any) -> set[LockedFunction]:
    """The uses of ``locked()`` around a view, or around the methods of its class."""
    kind = getattr(view, "view_class", None) or getattr(view, "cls", None)
    names = ["dispatch", *getattr(kind, "http_method_names", ())]
    names += (getattr(view, "actions", None) or {}).values()  # Of a view set.
    methods = (getattr(kind, name, None) for name in names)
    found = {vars(layer).get(LOCKED) for each in (view, *methods) for layer in layers(each)}
    return found - {None}


def _without_cache() -> Iterator[tuple[str, str, ImproperlyConfigured]]:
    """What names a cache that cannot lock: the number of its error, itself, and why."""
    places = [
        ("E005", f"locked() of {lock.target}", lock.options.using) for lock in _declarations()
    ]
    tasks = getattr(sys.modules.get(f"{PACKAGE}.contrib.unique_tasks.messages"), "declared", ())
    places += [("E005", f"unique_task() of {task.title}", task.using) for task in tasks]
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


#: The messages of the last run that ``--deploy`` makes errors, with the numbers of these.
_warnings: list[tuple[str, CheckMessage]] = []


@check()
def check_caches() -> Iterator[CheckMessage]:
    unsupported: dict[str, list[tuple[str, str]]] = {}
    able = list(lock_caches())
    for number, where, error in _without_cache():
        if isinstance(error, BackendCannotLock):
            sentence = str(error) if able else NO_CACHE
            unsupported.setdefault(sentence, []).append((where, number))
        else:
            yield found(number, f"{where}: {error}.", "Name another cache.")
    _warnings.clear()
    hint = "Until then each call of what is locked there raises ImproperlyConfigured."
    for sentence, places in unsupported.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        where, number = min(places)
        message = found("W012", f"{where}{more}: {sentence}.", hint)
        if not able:
            message = found("W003", f"{NO_CACHE}, which {where}{more} needs.", SET_BACKEND)
        _warnings.append((number, message))
        yield message
    if not (able or unsupported):
        yield found("W003", f"{NO_CACHE}.", SET_BACKEND)


@check(deploy=True)
def check_caches_of_production() -> Iterator[CheckMessage]:
    """Django has run ``check_caches`` just before."""
    for number, message in _warnings:
        message.level, message.id = ERROR, f"django_redis_lock.{number}"
    yield from ()


@check()
def check_answers() -> Iterator[CheckMessage]:
    for lock in _declarations():
        answer = lock.options.on_conflict
        if answer is not None and not _takes_an_argument(answer):
            yield found(
                "E006",
                f"locked() of {lock.target}: on_conflict takes no arguments.",
                "It is called with the conflict, and with the arguments of the call: "
                "def answer(conflict, *args, **kwargs).",
            )


def _takes_an_argument(answer: Callable[..., object]) -> bool:
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
        timeout, min_hold = lock.options.timeout, lock.options.min_hold
        if timeout is SETTING:
            continue
        if timeout is None:
            yield found(
                "W008",
                f"locked() of {lock.target}: with timeout=None the lock never expires.",
                "Remove timeout: then the lock is renewed while the code runs, and ends soon after "
                "a crash.",
            )
        elif min_hold > timeout:
            yield found(
                "W009",
                f"locked() of {lock.target}: min_hold, {min_hold:g} seconds, is longer than "
                f"timeout, {timeout:g} seconds.",
                "If the process is killed, the lock ends with its timeout: increase that.",
            )


@check()
def check_units_of_uses() -> Iterator[CheckMessage]:
    for lock in _declarations():
        for name, value in lock.options.given().items():
            if name not in TIMES or not isinstance(value, (int, float)):
                continue
            if sentence := implausible(name, value):
                hint = "If the time is right, silence this check."
                yield found("W021", f"locked() of {lock.target}: {sentence}.", hint)


@check()
def check_local_locks() -> Iterator[CheckMessage]:
    uses: list[tuple[str, object, object]] = [(f"The cache {a!r}", a, None) for a in lock_caches()]
    for lock in _declarations():
        uses.append((f"locked() of {lock.target}", lock.options.using, lock.options.on_redis_down))
    folders: dict[Any, str] = {}
    for where, alias, policy in uses:
        with suppress(ImproperlyConfigured, KeyError):  # Another check reports it.
            conf = Conf(project_settings.CACHES[alias or Conf().USING].get("OPTIONS"))
            if (policy or conf.ON_REDIS_DOWN) == "local":
                folders.setdefault(conf.LOCAL_LOCK_FOLDER, where)
    for folder, where in folders.items():
        try:
            problem = part("fallback").problem_of(folder)
        except PartMissing as missing:
            problem = str(missing)
        if problem:
            yield found(
                "W015",
                f'{where} uses "local" while Redis is down. {problem}.',
                "Until then these locks fail in an outage. Set LOCAL_LOCK_FOLDER to a folder that "
                "these processes can write to, on a file system that has flock().",
            )


@check()
def check_names_of_uses() -> Iterator[CheckMessage]:
    first: dict[str, LockedFunction] = {}
    for lock in _declarations():
        if lock.template is None:
            continue  # A function makes its names.
        other = first.setdefault(lock.template, lock)
        for difference in _differences(other, lock):
            yield found(
                "W010",
                f"locked() of {other.target} and of {lock.target} both name the lock "
                f"{lock.template!r}, with different settings: {difference}.",
                "Give both the same settings, or different names.",
            )


def _differences(one: LockedFunction, other: LockedFunction) -> Iterator[str]:
    if one.using != other.using:
        yield f"using is {one.using!r} and {other.using!r}, so they do not exclude each other"
    for name in ("timeout", "min_hold", "max_hold"):
        values = [lock.options.given().get(name, "left out") for lock in (one, other)]
        if values[0] != values[1]:
            yield f"{name} is {values[0]} and {values[1]}"


@check()
def check_values_under_locks() -> Iterator[CheckMessage]:
    where = {lock.target: None for lock in _declarations() if hasattr(lock.function, STORED)}
    for view, _ in _views():
        kind = getattr(view, "view_class", None)
        methods = (getattr(kind, name, None) for name in getattr(kind, "http_method_names", ()))
        if any(map(_is_locked_above_its_values, (view, *methods))):
            named: Any = kind or view
            where[f"{named.__module__}.{named.__qualname__}"] = None
    for dotted in where:
        yield found(
            "W020",
            f"locked() of {dotted} is above cached_page() or cached(), so that who reads what is "
            "stored takes the lock, or is refused while another does.",
            "Put @locked below: then only who computes takes the lock.",
        )


def _is_locked_above_its_values(function: Any) -> bool:
    """Whether ``locked()`` is around ``cached()`` or ``cached_page()`` in ``function``."""
    while function is not None:
        within = getattr(function, "__wrapped__", None)
        # A list of decorators, for Django's method_decorator, is one layer, the innermost first.
        layer = [name for name in vars(function) if name in (LOCKED, STORED)]
        if LOCKED in layer and not hasattr(within, LOCKED):
            methods = getattr(getattr(function, "view_class", None), "http_method_names", ())
            handlers = [getattr(function.view_class, name, None) for name in methods]
            stored = any(hasattr(each, STORED) for each in (within, *handlers))
            return stored or layer == [STORED, LOCKED]
        function = within
    return False


@check()
def check_refusals() -> Iterator[CheckMessage]:
    if REFUSALS in project_settings.MIDDLEWARE:
        return
    locks = [lock for lock in _declarations() if lock.may_raise_for_a_request]
    views = set().union(*(_locks_of(view) for view, _ in _views())) if locks else ()
    for lock in locks:
        if lock not in views:
            yield found(
                "W022",
                f"locked() of {lock.target} takes a request, and no URL leads there: if its lock "
                "is taken, it raises LockNotAcquired, and a visitor gets the status 500.",
                f"Add {REFUSALS!r} to MIDDLEWARE: then the visitor gets 409. Or give on_conflict= "
                "or default=, to return something else.",
            )


@check()
def check_literal_names() -> Iterator[CheckMessage]:
    with_arguments = (_locks_of(view) for view, arguments in _views() if arguments)
    for lock in sorted(set().union(*with_arguments), key=lambda lock: lock.target):
        if lock.is_literal:
            yield found(
                "W023",
                f"locked() of {lock.target}: the name {lock.template!r} has no fields, and the URL "
                "has arguments: all calls exclude each other.",
                "Name an argument, as in {pk}, if only calls with the same one are to.",
            )

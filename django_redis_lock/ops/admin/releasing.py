"""Forced release: the page that asks for confirmation, the release, and the log of releases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.db import router, transaction
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...models import HeldLock as Model
from ...protocol import printable
from ...transport.hints import explained
from ..facts import place, shown
from ..held_locks import UNAVAILABLE, HeldLock, look_closely, name_of, release
from ..inventory import FLIGHT, LockInfo, Outcome
from .rows import Choice, Ref, UrlOf, duration, moment, row

logger = logging.getLogger("django_redis_lock.admin")

#: The most entries that the log of releases shows.
MAX_ENTRIES = 200
_WAS_FREE = gettext_lazy("“%(name)s” was free already.")
_PASSED_ON = gettext_lazy("“%(name)s” has passed to another holder and was not released.")


def parse_choices(texts: Sequence[str]) -> list[Choice]:
    """The selected locks, each once, without invalid selections. One field may have many: Django
    allows a thousand fields."""
    found = (Choice.parse(text) for field in texts for text in field.split())
    return list(dict.fromkeys(choice for choice in found if choice is not None))


def outlook(choice: Choice, url_of: UrlOf) -> dict[str, object]:
    """The effects of a release, or why there is nothing to release."""
    name = {"name": shown(name_of(*choice.ref))}
    said: dict[str, object] = {**name, "alias": choice.ref.alias}
    try:
        holding, _closely = look_closely(*choice.ref)
    except UNAVAILABLE as error:
        return {**said, "unreleased": _away(error)}
    if holding is None:
        return {**said, "unreleased": _WAS_FREE % name}
    name["name"] = said["name"] = shown(holding.name)
    if not _is_chosen(holding.lock, choice):
        return {**said, "unreleased": _PASSED_ON % name}
    return {
        **said,
        "choice": str(choice),
        "row": row(holding, url_of),
        "warning": _warning(holding.lock),
        "effects": _effects(holding.lock),
    }


def _warning(lock: LockInfo) -> str:
    """Whether the holder may still be working, and how to stop it."""
    owner = lock.owner
    if lock.silent:
        said = _("No heartbeat for %(time)s: safe to release unless the process is only frozen.")
        return said % {"time": duration(lock.seen or 0.0)}
    if lock.silent is False and owner.host and lock.kind != FLIGHT:
        return _("Still running: stop it first, on %(host)s.") % {"host": shown(owner.host)}
    return ""


def _effects(lock: LockInfo) -> list[str]:
    if lock.kind == FLIGHT:
        return [
            _("The computation continues, but its result is not stored."),
            _("Waiting callers stop waiting: one of them computes the value again."),
        ]
    if lock.resting:
        return [
            _(
                "No code runs under this lock; "
                "the next holder may start before its min_hold is over."
            )
        ]
    if lock.queued:
        return [_("The task stays in the queue. Another one with its name can be queued, too.")]
    if lock.waiters:
        waiting = ngettext(
            "The waiting process gets it at once.",
            "The first of %(number)d waiting processes gets it at once.",
            lock.waiters,
        )
        effects = [waiting % {"number": lock.waiters}]
    else:
        effects = [_("No process waits for it, so it will be free.")]
    effects.append(
        _("The holder is not stopped: if it still works, two processes work at the same time.")
    )
    if lock.renewal_interval is None:
        effects.append(_("The holder learns of it at its next request for its lock."))
    else:
        told = _(
            "The holder, if it is alive, learns of it at once, or within %(seconds)s if Redis "
            "cannot notify it."
        )
        effects.append(told % {"seconds": duration(max(1.0, lock.renewal_interval))})
    return effects


class _Result(NamedTuple):
    """``note``: for the admin's log; empty if nothing was released."""

    entry: Model
    level: int
    message: str
    note: str = ""


def release_all(
    page: ModelAdmin[Any], request: HttpRequest, choices: Sequence[Choice], reason: str
) -> None:
    """Release the chosen locks; record it in the locks' events, the logger and the admin's log, and
    tell the user. What a project has put into the latter two may fail: all locks are released
    before, and the one does not keep the other from being done."""
    by = f"{shown(str(request.user.get_username()))} (admin)"
    because = ""
    if reason:
        by += f": {shown(reason)}"
        because = " " + _("Reason: %(reason)s") % {"reason": shown(reason)}
    results = [_release(choice, by) for choice in choices]
    said = [(result.message, result.level) for result in results]
    unlogged = []
    for result in filter(lambda result: result.note, results):
        try:
            # A failure must not break the request's own transaction.
            with transaction.atomic(using=router.db_for_write(LogEntry)):
                page.log_change(request, result.entry, result.note + because)
        except Exception:
            logger.exception("The admin's log has no entry of: %s, by %s", result.message, by)
            unlogged.append(result.entry.name)
    if unlogged:
        names = ", ".join(f"“{name}”" for name in unlogged)
        failed = _("The admin's log could not be written for %(names)s; the site's log has it.")
        said.append((failed % {"names": names}, messages.WARNING))
    for message, level in said:
        try:
            page.message_user(request, message, level)
        except Exception:
            logger.exception("%s was not told: %s", by, message)


def _release(choice: Choice, by: str) -> _Result:
    alias, key, kind = choice.ref
    name = printable(key)
    holding = None
    try:
        name = shown(name_of(*choice.ref))
        holding, _closely = look_closely(*choice.ref)
        if holding is not None:
            name = shown(holding.name)
        outcome = release(alias, key, choice.owner_id, fence=choice.fence, kind=kind, by=by)
    except Exception as error:  # Also of a project's own key function.
        failed = _("“%(name)s” may not have been released: %(why)s")
        failed %= {"name": name, "why": _away(error)}
        logger.warning(
            "Lock %s may have been released by force by %s: %s",
            name,
            by,
            error,
            exc_info=not isinstance(error, UNAVAILABLE),
        )
        return _Result(entry_of(choice.ref, name), messages.ERROR, failed, failed)
    entry = entry_of(choice.ref, name)
    if outcome is Outcome.FREE:
        return _Result(entry, messages.INFO, _WAS_FREE % {"name": name})
    if outcome is Outcome.NOT_OWNER:
        return _Result(entry, messages.WARNING, _PASSED_ON % {"name": name})
    # The logger's language does not depend on the user.
    owner = choice.owner_id if holding is None else shown(str(holding.lock.owner))
    told = (printable(key), by, owner, choice.owner_id)
    logger.warning("Lock %s released by force by %s; the holder was %s (%s)", *told)
    holder = {"holder": _holder(holding, choice)}
    note = _("Released by force. The holder was %(holder)s.") % holder
    text = _("“%(name)s” is released. The holder was %(holder)s.") % {"name": name, **holder}
    return _Result(entry, messages.SUCCESS, text, note)


def entry_of(ref: Ref, name: str | None = None) -> Model:
    """The lock, for permissions and for the admin's log."""
    if name is None:
        with suppress(Exception):  # Also of a project's own key function.
            name = shown(name_of(*ref))
    return Model(pk=str(ref), name=printable(ref.key) if name is None else name)


def _holder(holding: HeldLock | None, choice: Choice) -> str:
    if holding is None or not _is_chosen(lock := holding.lock, choice):
        return choice.owner_id
    if not lock.owner.host:
        return place(lock.owner)
    named = ", ".join(filter(None, (place(lock.owner), shown(lock.owner.label))))
    return f"{named} ({lock.owner.id})"


def _is_chosen(lock: LockInfo, choice: Choice) -> bool:
    unknown = None in (lock.fence, choice.fence)  # For half a second, of a random token.
    return lock.owner.id == choice.owner_id and (unknown or lock.fence == choice.fence)


def _away(error: Exception) -> str:
    return _("Redis did not answer as it should (%(error)s)") % {"error": shown(explained(error))}


def releases(
    url_of: UrlOf, ref: Ref | None = None, may_view: Callable[[Ref], bool] | None = None
) -> list[dict[str, Any]]:
    """The releases of all locks or, with ``ref``, of one; latest first; with ``may_view``, of those
    of which it is true."""
    entries = LogEntry.objects.filter(content_type=get_content_type_for_model(Model))
    if ref is not None:
        entries = entries.filter(object_id=str(ref))
    latest = entries.select_related("user").order_by("-action_time")[:MAX_ENTRIES]
    found = [(entry, Ref.parse(entry.object_id or "")) for entry in latest]
    return [
        {
            "at": moment(entry.action_time.timestamp()),
            "user": str(entry.user),
            "name": shown(entry.object_repr),
            "url": "" if of is None else url_of(of),
            "message": entry.get_change_message(),
        }
        for entry, of in found
        if may_view is None or (of is not None and may_view(of))
    ]

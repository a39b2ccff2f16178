"""Locks by process: which locks each process holds, which it waits for, and deadlocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from django.template.loader import render_to_string
from django.utils.translation import gettext as _

from ..held_locks import UNAVAILABLE, HeldLock, held_locks, look_closely
from ..inventory import LOCK
from .listing import failure_rows
from .rows import UrlOf, as_of, duration, ref_of, short_place, shown

TEMPLATE = "admin/django_redis_lock/heldlock/process_list.html"
#: The most locks whose waiters are read: each takes a request.
MAX_CONTENDED_LOCKS = 100


class Thread(NamedTuple):
    """A thread that holds or waits for a lock."""

    host: str
    pid: int
    name: str


class Wait(NamedTuple):
    thread: Thread
    holding: HeldLock
    waited: float | None


class Chain(NamedTuple):
    """A thread waits for a lock, whose holder waits for another, and so on.

    Attributes:
        wait: the first wait.
        locks: the lock of each wait, in order.
        is_cycle: whether the last holder is a thread of the chain: a deadlock.
    """

    wait: Wait
    locks: tuple[HeldLock, ...]
    is_cycle: bool


@dataclass
class Process:
    host: str
    pid: int
    holds: list[HeldLock] = field(default_factory=list)
    waits: list[Chain] = field(default_factory=list)

    @property
    def is_blocked(self) -> bool:
        return any(chain.is_cycle for chain in self.waits)


def waits_of(found: Sequence[HeldLock]) -> list[Wait]:
    """The waits for the locks ``found``, for at most MAX_CONTENDED_LOCKS of them."""
    # Of a lock with places, one of them: its waiters wait for any.
    contended = {(h.alias, h.lock.lock_key): h for h in found if h.lock.waiters}
    waits = []
    for holding in islice(contended.values(), MAX_CONTENDED_LOCKS):
        try:
            _holding, closely = look_closely(holding.alias, holding.lock.key, LOCK)
        except UNAVAILABLE:
            continue  # The list reports the error.
        waits += [
            Wait(Thread(one.host, one.pid, one.thread), holding, one.waited)
            for one in closely.waiters
            if one.host
        ]
    return waits


def by_process(found: Sequence[HeldLock], waits: Sequence[Wait]) -> list[Process]:
    """The processes that hold or wait: first those in a deadlock, then those with most locks."""
    processes: dict[tuple[str, int], Process] = {}

    def process(host: str, pid: int) -> Process:
        return processes.setdefault((host, pid), Process(host, pid))

    for holding in found:
        owner = holding.lock.owner
        if owner.host and not holding.lock.resting:
            process(owner.host, owner.pid).holds.append(holding)
    waiting = {wait.thread: wait for wait in waits}
    for wait in waits:
        process(wait.thread.host, wait.thread.pid).waits.append(_chain(wait, waiting))
    return sorted(
        processes.values(), key=lambda p: (not p.is_blocked, -len(p.holds), p.host, p.pid)
    )


def _chain(first: Wait, waiting: dict[Thread, Wait]) -> Chain:
    locks, seen, wait = [], {first.thread}, first
    while True:
        locks.append(wait.holding)
        if (wait.holding.lock.limit or 1) > 1:  # Another of its holders may leave first.
            return Chain(first, tuple(locks), is_cycle=False)
        owner = wait.holding.lock.owner
        holder = Thread(owner.host, owner.pid, owner.thread)
        if holder in seen:
            return Chain(first, tuple(locks), is_cycle=True)
        if holder not in waiting:
            return Chain(first, tuple(locks), is_cycle=False)
        seen.add(holder)
        wait = waiting[holder]


def processes_data(url_of: UrlOf) -> dict[str, Any]:
    """The part of the page that changes while it is open."""
    held = held_locks(kinds=(LOCK,))
    processes = by_process(held.found, waits_of(held.found))
    context = {
        "processes": [_process_row(process, url_of) for process in processes],
        "blocked": any(process.is_blocked for process in processes),
    }
    return {
        "processes": "" if held.failures and not processes else render_to_string(TEMPLATE, context),
        "failures": failure_rows(held.failures),
        "as_of": as_of(),
    }


def _process_row(process: Process, url_of: UrlOf) -> dict[str, Any]:
    return {
        "name": f"{shown(process.host)}:{process.pid}",
        "is_blocked": process.is_blocked,
        "holds": [_lock_row(holding, url_of) for holding in process.holds],
        "waits": [_chain_row(chain, url_of) for chain in process.waits],
    }


def _lock_row(holding: HeldLock, url_of: UrlOf) -> dict[str, str]:
    held = holding.lock.held_for
    return {
        "name": shown(holding.name),
        "url": url_of(ref_of(holding)),
        "text": "" if held is None else _("for %(duration)s") % {"duration": duration(held)},
        "held_by": _("held by %(holder)s") % {"holder": short_place(holding.lock.owner)},
    }


def _chain_row(chain: Chain, url_of: UrlOf) -> dict[str, Any]:
    waited = chain.wait.waited
    return {
        "locks": [_lock_row(holding, url_of) for holding in chain.locks],
        "is_cycle": chain.is_cycle,
        "text": "" if waited is None else _("for %(duration)s") % {"duration": duration(waited)},
    }

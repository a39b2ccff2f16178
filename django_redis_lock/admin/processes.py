"""By process: which locks each holds, what each waits for, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..held_locks import UNAVAILABLE, HeldLock, look_closely
from ..inventory import LOCK
from ..protocol import Owner

__all__ = ["Chain", "Process", "Thread", "Wait", "by_process", "waits_of"]

#: Locks whose waiters are asked for, at most: each is a question of its own.
MOST_ASKED = 100


class Thread(NamedTuple):
    """Where a lock is held, or waited for."""

    host: str
    pid: int
    name: str

    @property
    def owner(self) -> Owner:
        return Owner("?", self.host, self.pid, self.name)


class Wait(NamedTuple):
    """A thread that waits for a lock."""

    thread: Thread
    holding: HeldLock
    waited: float | None


class Chain(NamedTuple):
    """A thread waits for a lock, whose holder waits for another, and so on.

    Attributes:
        wait: the first of them.
        locks: those that are waited for one after another, beginning with the first.
        is_cycle: whether it leads back to a thread in it: none of these can go on.
    """

    wait: Wait
    locks: tuple[HeldLock, ...]
    is_cycle: bool


@dataclass
class Process:
    """A process with all its locks."""

    host: str
    pid: int
    holds: list[HeldLock] = field(default_factory=list)
    waits: list[Chain] = field(default_factory=list)

    @property
    def is_blocked(self) -> bool:
        return any(chain.is_cycle for chain in self.waits)


def waits_of(found: Sequence[HeldLock]) -> list[Wait]:
    """Who waits for those of ``found`` that have waiters; of MOST_ASKED locks at most."""
    contended = [holding for holding in found if holding.lock.waiters][:MOST_ASKED]
    waits = []
    for holding in contended:
        try:
            _, closely = look_closely(holding.alias, holding.lock.key, LOCK)
        except UNAVAILABLE:
            continue  # It was there a moment ago; the list says what is wrong with it.
        waits += [
            Wait(Thread(one.host, one.pid, one.thread), holding, one.waited)
            for one in closely.waiters
            if one.host
        ]
    return waits


def by_process(found: Sequence[HeldLock], waits: Sequence[Wait]) -> list[Process]:
    """The processes that hold or wait: first those that wait for each other, then those that
    hold most."""
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
        owner = wait.holding.lock.owner
        holder = Thread(owner.host, owner.pid, owner.thread)
        if holder in seen:
            return Chain(first, tuple(locks), is_cycle=True)
        if holder not in waiting:
            return Chain(first, tuple(locks), is_cycle=False)
        seen.add(holder)
        wait = waiting[holder]

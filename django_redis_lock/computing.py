"""``get_or_set`` as the cache backend has it: Django's arguments in, the rule of flights behind."""

from __future__ import annotations

import time
from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.exceptions import ImproperlyConfigured
from django.utils.functional import cached_property
from django_redis.cache import CONNECTION_INTERRUPTED
from django_redis.client import HerdClient

from .conf import Conf
from .exceptions import LockNotAcquired
from .flights import TOO_LATE, CoordinationError, Flights, Producer
from .locking.arguments import check_seconds
from .locking.calls import OUTAGE

__all__ = ["Computing"]

_MISSING = object()
#: For an argument left out where None means something.
_SETTING: Any = object()


class Computing:
    """The part of ``RedisCache`` that computes missing values."""

    client: Any
    _params: dict[str, Any]
    default_timeout: float | None
    _get: Any
    _ignore_exceptions: bool
    _lock_client: Any
    _encoded_key: Any

    @cached_property
    def conf(self) -> Conf:
        return Conf(self._params.get("OPTIONS"))

    def get_or_set(
        self,
        key: str,
        default: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        wait: float = _SETTING,
        on_wait_timeout: str = "compute",
    ) -> Any:
        """The value of ``key``; if there is none, ``default`` is called for it, once.

        Whoever asks while it is being called (other threads, processes and hosts) waits for that
        one result. A ``set`` or ``delete`` of the key meanwhile wins: the result is then returned
        to its own caller but not stored. None is a value like any other.

        Args:
            default: a callable without arguments, or the value itself.
            timeout: seconds to keep the value; left out, the cache's own; None, without end.
            wait: seconds to wait at most for another's computation; left out, the setting WAIT.
            on_wait_timeout: what to do then: ``"compute"`` the value here as well, ``"raise"``
                LockNotAcquired, or return the ``"default"``: the value given as ``default``, None
                for a callable.

        Raises:
            LockNotAcquired: see ``on_wait_timeout``.
            LockError: ``default`` asked for its own key.
            redis.exceptions.RedisError: Redis is away and IGNORE_EXCEPTIONS is off.
        """
        if on_wait_timeout not in ("compute", "raise", "default"):
            raise ValueError(
                f'on_wait_timeout must be "compute", "raise" or "default", not {on_wait_timeout!r}'
            )
        if wait is not _SETTING:
            check_seconds("wait", wait, zero=True)
        value = self._get(key, _MISSING, version, None)
        alone = value is CONNECTION_INTERRUPTED
        if value is not _MISSING and not alone:
            return value
        deadline = time.monotonic() + (self.conf.WAIT if wait is _SETTING else wait)
        producer = self._producer(default, timeout)
        nkey = self._encoded_key(key, version)
        flights = Flights(self._lock_client(), self.conf.FLIGHT_TIMEOUT)
        try:
            found = flights.get_or_compute(nkey, producer, deadline, alone=alone)
        except CoordinationError as error:
            # Redis went away, or lets us read but not coordinate. Whatever goes wrong with that,
            # the caller gets its value (invariant C3), unless it wants to see outages.
            if isinstance(error.__cause__, OUTAGE) and not self._ignore_exceptions:
                raise error.__cause__ from None
            alone = True
            found = flights.get_or_compute(nkey, producer, deadline, alone=alone)
        if found is not TOO_LATE:
            return found
        if on_wait_timeout == "raise":
            raise LockNotAcquired("The value is still being computed elsewhere", key)
        if on_wait_timeout == "default":
            return None if callable(default) else default
        return flights.compute_anyway(nkey, producer, alone=alone)

    def _producer(self, default: Any, timeout: float | None) -> Producer:
        if isinstance(self.client, HerdClient):
            raise ImproperlyConfigured(
                "HerdClient keeps values in a form of its own, which get_or_set cannot share. "
                "Use django-redis's DefaultClient: get_or_set needs no herd"
            )
        seconds = self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout
        lifetime = 0 if seconds is None else int(seconds * 1000) or -1
        compute = default if callable(default) else lambda: default
        return Producer(compute, self.client.encode, self.client.decode, lifetime)

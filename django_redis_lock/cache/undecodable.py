"""Stored values that cannot be decoded count as missing. Loaded when there are such."""

from __future__ import annotations

from pickle import PickleError
from typing import TYPE_CHECKING

from .. import events
from ..protocol import printable
from ..singleflight import Runner, Undecodable
from ..steps import Steps
from ..threads import get_logger, may_log

if TYPE_CHECKING:
    from .reading import CacheReader

logger = get_logger("django_redis_lock.flights")
_logged_at: dict[str, float] = {}
#: After so many it is emptied.
MAX_LOGGED_GROUPS = 1000

#: The usual errors of decoding; any other may be a signal handler's, such as a time limit.
DECODING_ERRORS = (
    *(AttributeError, EOFError, ImportError, LookupError, TypeError, ValueError),
    PickleError,
)


def log(key: str, group: str | None, error: Exception) -> None:
    """Once a minute for each group."""
    group = group or events.group_of(str(key))
    if len(_logged_at) > MAX_LOGGED_GROUPS:
        _logged_at.clear()
    if may_log(group, _logged_at):
        logger.warning(
            "A stored value of %(group)s cannot be decoded, so it counts as missing: "
            "%(key)s (%(error)s)",
            {"group": printable(group), "key": printable(str(key)), "error": printable(str(error))},
        )


def check(
    cache: CacheReader, runner: Runner, error: Exception, key: str, version: int | None
) -> Steps[None]:
    """After ``get`` failed with ``error``. Raises that, unless the value cannot be decoded."""
    stored = yield runner.read(cache._encoded_key(key, version))
    try:
        if stored is not None:
            cache._decode(stored[0])
    except Undecodable:
        return
    if not isinstance(error, DECODING_ERRORS):  # Else another caller has stored it again.
        raise error


def read_others(
    cache: CacheReader, names: list[str], version: int | None
) -> tuple[dict[str, object], bool]:
    """The values of ``names`` that can be decoded, and whether there are others."""
    redis = cache._replica() or cache.client.get_client(write=False)
    values, failed = dict[str, object](), False
    mget = getattr(redis, "mget_nonatomic", redis.mget)
    stored_values = mget(*(cache.client.make_key(name, version=version) for name in names))
    for name, stored in zip(names, stored_values, strict=True):
        try:
            if stored is not None:
                values[name] = cache._decode(stored)
        except Undecodable:
            failed = True
    return values, failed

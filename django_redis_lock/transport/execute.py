"""How a call reaches a server: in one round trip, without redis-py's retries. With a retry hidden
in the client, an acquire would find its own key taken, and a release its own work done. Here a call
whose reply was lost is sent once more, and the answer says so (``Answer.sent_twice``): Redis may
have carried out the first. ``retry`` decides on it.
"""

from collections.abc import Sequence
from functools import lru_cache
from types import FunctionType
from typing import NamedTuple

from redis.exceptions import NoScriptError

from ..clock import time
from ..events import MAX_CACHED, MAX_CACHED_LENGTH
from ..protocol import Call, Reply, Script
from ..steps import drive
from .address import Client
from .circuit_breaker import Breaker
from .refusals import note_sent
from .registry import in_memory, server_of
from .retry import REPORTED, Answer, RetryPolicy, run_again, run_all_steps
from .server import Server

# -- how a call is written -----------------------------------------------------------------------

ASKING = b"*1\r\n$6\r\nASKING\r\n"


def pack_words(*parts: bytes) -> bytes:
    """A command as Redis reads it. Only bytes: hiredis 3.5, with which redis-py packs, crashes the
    process if a signal handler raises while it converts an int."""
    return b"*%d\r\n%b" % (len(parts), _bulks(parts))


def pack_word(part: bytes) -> bytes:
    """A part of a command, for ``joined``."""
    return b"$%d\r\n%b\r\n" % (len(part), part)


def joined(packed: Sequence[bytes]) -> bytes:
    """A command whose parts are ``packed``."""
    return b"*%d\r\n%b" % (len(packed), b"".join(packed))


def _bulks(parts: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


def pack(call: Call, *, known: bool = True) -> bytes:
    """``call`` as Redis reads it (RESP): by the script's name, or, if that may not be ``known`` to
    the server, by its source, which teaches it. Takes a fraction of the time of redis-py's."""
    script, keys, args, _ = call
    parts = [
        # A source is long and rarely sent: not to be remembered.
        (_head if known else _head.__wrapped__)(script, len(keys), len(args), known),
        _packed_keys.get(keys) or _pack_keys(keys),
    ]
    for arg in args:
        if type(arg) is bytes:
            parts.append(b"$%d\r\n%b\r\n" % (len(arg), arg))
        elif type(arg) is int or (type(arg) is str and len(arg) <= MAX_CACHED_CHARACTERS):
            parts.append(_short(arg))
        else:
            parts.append(_bulk(arg))
    return b"".join(parts)


#: Longer texts are not kept packed.
MAX_CACHED_CHARACTERS = 64


def _bulk(arg: bytes | str | int) -> bytes:
    """A text, a number, or any buffer. A label that has no encoding must not keep its lock from
    being renewed."""
    if isinstance(arg, str):
        data = arg.encode(errors="backslashreplace")
    else:
        data = b"%d" % arg if isinstance(arg, int) else bytes(arg)
    return b"$%d\r\n%b\r\n" % (len(data), data)


#: Lifetimes, modes and the like repeat. Only of exact types: True equals 1.
_short = lru_cache(maxsize=256)(_bulk)
#: So do the keys of a lock.
_packed_keys: dict[tuple[bytes, ...], bytes] = {}


def _pack_keys(keys: tuple[bytes, ...]) -> bytes:
    packed = _bulks(keys)
    if len(packed) <= 4 * MAX_CACHED_LENGTH:  # Many or long keys would only fill the memory.
        if len(_packed_keys) >= MAX_CACHED:
            _packed_keys.clear()
        _packed_keys[keys] = packed
    return packed


def pack_all(calls: Sequence[Call]) -> bytes:
    """All ``calls`` for one sending; the first of each script by its source."""
    known: set[str] = set()
    parts = []
    for call in calls:
        parts.append(pack(call, known=call.script.sha in known))
        known.add(call.script.sha)
    return b"".join(parts)


@lru_cache(maxsize=MAX_CACHED)
def _head(script: Script, keys: int, args: int, known: bool) -> bytes:
    verb, body = (b"EVALSHA", script.sha) if known else (b"EVAL", script.source)
    return b"*%d\r\n%b" % (3 + keys + args, _bulks((verb, body.encode(), b"%d" % keys)))


# -- running -------------------------------------------------------------------------------------


def run(client: Client, call: Call, *, until: float | None = None) -> Answer:
    """Run ``call``, in one round trip, on a connection of our own to ``client``'s server; once more
    if the connection broke before the reply. After an error, redis-py's, the outcome is unknown.

    Args:
        until: monotonic time when the caller gives up; None leaves that to the pool's socket
            timeout. All that is done below has the same.
    """
    server = server_of(client)
    node = None
    try:
        node = server.locate(call.keys, until)
        return Answer(_run(node, call, until), False)
    except REPORTED as error:
        return drive(run_again(_Blocking(client, server), call, until, node, error))


def run_all(client: Client, calls: Sequence[Call]) -> list[Reply]:
    """What ``calls`` return, all in one round trip. They must be safe to repeat."""
    if len(calls) == 1:
        return [run(client, calls[0]).value]
    return drive(run_all_steps(_Blocking(client, server_of(client)), calls))


class _Blocking(NamedTuple):
    """``Exchange`` for threads."""

    client: Client
    server: Server

    def run(self, node: Server, call: Call, policy: RetryPolicy) -> Reply:
        return _run(node, call, policy.until, policy.asking, policy.anew)

    def run_all(self, node: Server, calls: Sequence[Call]) -> list[Reply]:
        return _run_all(node, calls)

    def locate(self, keys: Sequence[bytes], until: float | None) -> Server:
        return self.server.locate(keys, until)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def run_at(server: Server, node: Server, call: Call) -> Reply:
    """What ``call`` returns at ``node``, one of those of ``server``, wherever its keys are."""
    try:
        return _run(node, call, None)
    except REPORTED as error:
        server.on_error(error)
        RetryPolicy(node, None).on_another(error)
        return _run(node, call, None, anew=True)


def _run(
    server: Server, call: Call, until: float | None, asking: bool = False, anew: bool = False
) -> Reply:
    if server.breaker.failing:
        until = admitted(server.breaker, until, call)
    if asking:  # By its source: NOSCRIPT would need a second ASKING.
        return server.exchange(ASKING + pack(call, known=False), 2, until, anew=anew)[1]
    try:
        return server.exchange(pack(call), None, until, anew=anew)
    except NoScriptError:
        return server.exchange(pack(call, known=False), None, until)


def _run_all(server: Server, calls: Sequence[Call]) -> list[Reply]:
    until = admitted(server.breaker, None, *calls) if server.breaker.failing else None
    answers: list[Reply] = server.exchange(pack_all(calls), len(calls), until)
    return answers


def admitted(breaker: Breaker, until: float | None, *calls: Call) -> float | None:
    """Until when ``calls`` may take; raises CircuitOpen if the breaker does not let them through,
    and none is urgent."""
    now = time.monotonic()
    left = None if until is None else until - now
    if any(call.script.urgent for call in calls):
        left = breaker.insist(left)
    else:
        try:
            left = breaker.admit(left)
        except Exception as error:
            note_sent(error, False)
            raise
    return None if left is None else now + left


# -- what values need: not on the path of a lock -------------------------------------------------


def is_observed(client: Client) -> bool:
    """Whether a tool (OpenTelemetry, Elastic APM, Sentry, Datadog, New Relic) has replaced methods
    of the class of ``client``, which leads to Redis: it sees no calls on connections of our own."""
    of = type(client)
    execute, evalsha = getattr(of, "execute_command", None), getattr(of, "evalsha", None)
    return not ((_is_of_redis_py(execute) and _is_of_redis_py(evalsha)) or in_memory(client))


def _is_of_redis_py(method: object) -> bool:
    # The wrapper of a tool may claim the module of what it wraps, but is no function.
    return method is None or (type(method) is FunctionType and method.__module__[:6] == "redis.")


def read_value(client: Client, key: bytes, *, lifetime: bool = False) -> Reply:
    """GET of ``key``; with its ``lifetime`` what ``value_with_lifetime`` returns."""
    if not lifetime:
        return exchange(client, pack_words(b"GET", key))
    value = exchange(client, value_with_lifetime(key), 2)
    return None if value[0] is None else value


def exchange(
    client: Client, command: bytes, replies: int | None = None, *, may_run_twice: bool = True
) -> Reply:
    """The reply to ``command``, or a list of so many ``replies``, on a connection of our own.

    Args:
        may_run_twice: whether it is sent once more if its reply was lost.
    """
    return exchange_with(server_of(client), command, replies, may_run_twice)


def exchange_with(
    server: Server,
    command: bytes,
    replies: int | None = None,
    may_run_twice: bool = True,
    until: float | None = None,
) -> Reply:
    """As ``exchange``, with a ``server`` that its caller knows, ``until`` a monotonic time."""
    if server.breaker.failing:
        until = admitted(server.breaker, until)
    policy, anew = None, False
    while True:
        try:
            return server.exchange(command, replies, until, may_run_twice, anew)
        except REPORTED as error:
            policy = policy or RetryPolicy(server, until, may_run_twice)
            policy.on_another(error)
            anew = policy.anew


def value_with_lifetime(key: bytes) -> bytes:
    """Asks for a value and then for its PTTL, which is that of another value, or -2, if it is
    written or deleted just in between: then the first was a value of that moment, and not stale."""
    return pack_words(b"GET", key) + pack_words(b"PTTL", key)

"""Whether, where and when a call is sent again after an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from redis.exceptions import AskError, MovedError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import time
from ..protocol import Call, Reply
from ..steps import Step, Steps
from .address import Client
from .refusals import NotReady, is_busy, is_fault_of_connection, may_have_run, note_sent
from .registry import configured_retry
from .server import Server

#: The errors about which ``RetryPolicy`` decides.
REPORTED = (RedisConnectionError, RedisTimeoutError, ResponseError)


class Answer(NamedTuple):
    """What a script returned, and whether it may have run twice; see ``RetryPolicy.after``."""

    value: Reply
    sent_twice: bool


#: Seconds for which a call is retried whose keys have moved: a slot with few keys moves faster.
REFUSED_FOR = 2.0
#: The longest pause between two of these retries, in seconds.
MAX_PAUSE_SECONDS = 0.2


class RetryPolicy:
    """What failed on a connection that had been used before, which may be its own fault, is sent
    once more on a new one; and so is a call whose connection broke before the reply. On a cluster,
    and behind sentinels, a call that was refused is sent to the server that has its keys. A call to
    a server that is busy with a script is retried for as long as its caller waits for a reply. Then
    the project's own ``retry`` decides, if it has configured one.

    Args:
        until: monotonic time when the caller gives up; None leaves that to the socket's timeout.
        may_run_twice: whether a call that may have run can be sent again.
        retry: redis-py's, of the project.

    Attributes:
        towards: the server that a refusal has named.
        sent_twice: whether the call may have run twice.
        asking: whether ASKING is to be sent first, because the slot is being migrated.
        anew: whether it is to be sent on a new connection.
    """

    def __init__(
        self, server: Server, until: float | None, may_run_twice: bool = True, retry: Any = None
    ) -> None:
        self._server, self.until, self._may_run_twice = server, until, may_run_twice
        self._retry, self._tries = retry, 0
        self._began = time.monotonic()
        self._pause = 0.0
        self._broke = False
        self.towards: Server | None = None
        self.sent_twice = self.asking = self.anew = False

    def after(self, error: Exception, node: Server | None) -> float:
        """Seconds to pause before the call that ``node`` answered with ``error`` is sent again;
        raises the error if it is not to be sent again."""
        self._server.on_error(error)
        self.towards, self.asking = None, False
        if is_busy(error):
            return self._after_refusal(error, (node or self._server).timeout)
        if self._server.refuses(error):
            return self._after_refusal(error, REFUSED_FOR)
        try:
            self.on_another(error)
        except (RedisConnectionError, RedisTimeoutError):
            if (pause := self._configured_pause(error)) is None:
                raise
            self.sent_twice = self.sent_twice or may_have_run(error)
            return pause
        return 0.0

    def _configured_pause(self, error: Exception) -> float | None:
        """Seconds before another try by the project's ``retry``; None if there is none."""
        retry, self._tries = self._retry, self._tries + 1
        if retry is None or not isinstance(error, retry._supported_errors):
            return None
        if 0 <= retry._retries < self._tries:
            return None
        pause = float(retry._backoff.compute(self._tries))
        late = self.until is not None and time.monotonic() + pause >= self.until
        return None if late else pause

    def on_another(self, error: Exception) -> None:
        """Send the call that ended with ``error`` again on another connection; raises the error if
        that is of no use."""
        has_run = self.sent_twice or may_have_run(error)
        if not self._is_worth_it(error) or (has_run and not self._may_run_twice):
            note_sent(error, has_run)
            raise error
        self.sent_twice = has_run

    def _is_worth_it(self, error: Exception) -> bool:
        if self.until is not None and time.monotonic() >= self.until:
            return False
        broke = isinstance(error, RedisConnectionError)
        if is_fault_of_connection(error) and not self.anew:
            self.anew, self._broke = True, self._broke or broke
            return True
        if self._broke or not broke:
            return False
        self._broke = True
        # Behind sentinels and on a cluster the server may have been replaced by now.
        return may_have_run(error) or self._server.must_discover()

    def _after_refusal(self, error: Exception, at_most: float) -> float:
        now = time.monotonic()
        until = self._began + at_most if self.until is None else self.until
        if now >= until:
            refused = NotReady(f"The server is not ready for this key: {error}")
            note_sent(refused, self.sent_twice)
            raise refused from error
        if isinstance(error, AskError) and not isinstance(error, MovedError):
            self.towards, self.asking = self._server.sent_to(error), True
        # The first refusal that names a server is followed at once.
        known = isinstance(error, AskError) and not self._pause
        pause, self._pause = self._pause or 0.01, min(self._pause * 2 or 0.02, MAX_PAUSE_SECONDS)
        return 0.0 if known else min(pause, until - now)


class Exchange(Protocol):
    """How calls reach the servers of a client; its methods are steps."""

    @property
    def client(self) -> Client: ...
    @property
    def server(self) -> Server: ...
    def run(self, node: Server, call: Call, policy: RetryPolicy) -> Step[Reply]: ...
    def run_all(self, node: Server, calls: Sequence[Call]) -> Step[list[Reply]]: ...
    def locate(self, keys: Sequence[bytes], until: float | None) -> Step[Server]: ...
    def sleep(self, seconds: float) -> Step[None]: ...


def note_unanswered(server: Server, call: Call, error: Exception) -> None:
    """``call`` has ended with ``error``; see ``Call``."""
    if call.unanswered is not None and may_have_run(error):
        call.unanswered.append((server, call))


def run_again(
    exchange: Exchange,
    call: Call,
    until: float | None = None,
    node: Server | None = None,
    error: Exception | None = None,
) -> Steps[Answer]:
    """Run ``call``, which may have failed with ``error`` at ``node``."""
    pool = getattr(exchange.client, "connection_pool", None)  # Not a cluster's.
    policy = RetryPolicy(exchange.server, until, retry=configured_retry(pool))
    while True:
        if error is not None:
            note_unanswered(exchange.server, call, error)
            if pause := policy.after(error, node):
                yield exchange.sleep(pause)
        node = None
        try:
            node = policy.towards or (yield exchange.locate(call.keys, until))
            assert node is not None
            answer = yield exchange.run(node, call, policy)
            return Answer(answer, policy.sent_twice)
        except REPORTED as another:
            error = another


def run_all_steps(exchange: Exchange, calls: Sequence[Call]) -> Steps[list[Reply]]:
    """In one trip for each server; what failed there, one at a time."""
    numbers_at: dict[Server, list[int]] = {}
    for number, call in enumerate(calls):
        node = yield exchange.locate(call.keys, None)
        numbers_at.setdefault(node, []).append(number)
    answers: list[Reply] = [None] * len(calls)
    for node, numbers in numbers_at.items():
        try:
            values = yield exchange.run_all(node, [calls[number] for number in numbers])
        except REPORTED as error:
            exchange.server.on_error(error)
            values = []
            for number in numbers:
                note_unanswered(exchange.server, calls[number], error)
                answer = yield from run_again(exchange, calls[number])
                values.append(answer.value)
        for number, value in zip(numbers, values, strict=True):
            answers[number] = value
    return answers

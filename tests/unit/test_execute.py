"""How calls are sent, when they are sent again, and after which pause: decisions only. The servers
do as they are told, and the clock is the test's own."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.exceptions import AskError, AuthenticationError, MovedError, NoScriptError

from django_redis_lock.protocol.lock_scripts import RELEASE
from django_redis_lock.protocol.script import Call, script
from django_redis_lock.steps import drive
from django_redis_lock.transport import circuit_breaker, execute, refusals, retry
from django_redis_lock.transport.address import may_have_run, note_sent
from django_redis_lock.transport.circuit_breaker import CircuitOpen
from django_redis_lock.transport.execute import (
    ASKING,
    admitted,
    exchange_with,
    joined,
    pack,
    pack_all,
    pack_word,
    pack_words,
    run_at,
)
from django_redis_lock.transport.hints import explained, is_from_proxy, missing_right
from django_redis_lock.transport.refusals import NotReady
from django_redis_lock.transport.retry import RetryPolicy, run_again, run_all_steps

CALL = Call(script("return redis.call('GET', KEYS[1])"), (b"key",), ())
OTHER = Call(script("return ARGV[1]"), (b"other",), (1,))
URGENT = Call(RELEASE, (b"key",), ())
BUSY = redis.ResponseError("BUSY Redis is busy running a script.")


def broken(sent: bool | None = None) -> Exception:
    error = redis.ConnectionError("broken")
    if sent is not None:
        note_sent(error, sent)
    return error


class Breaker:
    failing, connecting = False, 0.0
    first_patience = circuit_breaker.Breaker.first_patience

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def admit(self, patience: float | None) -> float | None:
        self.asked.append(("admit", patience))
        if patience == 0.123:
            raise CircuitOpen("it is tried again later")
        return 0.75

    def insist(self, patience: float | None) -> float | None:
        self.asked.append(("insist", patience))
        return 0.25


class Server:
    """Gives or raises what a test has put there, one for each exchange."""

    timeout = 5.0
    discovers = False

    def __init__(self, *outcomes: Any) -> None:
        self.breaker: Any = Breaker()
        self.outcomes = list(outcomes)
        self.calls: list[Any] = []
        self.in_all: list[bool] = []
        self.told: list[Any] = []

    def exchange(
        self, command: bytes, replies: Any = None, patience: Any = None, **how: Any
    ) -> Any:
        self.in_all.append(how.pop("in_all", False))
        self.calls.append((command, replies, patience, *how.values()))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def on_error(self, error: Exception) -> None:
        self.told.append(error)

    def close(self) -> None:
        self.told.append("closed")

    def refuses(self, error: Exception) -> bool:
        return isinstance(error, AskError)

    def must_discover(self) -> bool:
        return self.discovers

    def sent_to(self, error: Exception) -> Any:
        return "the named one"


# -- how much patience -----------------------------------------------------------------------------


def test_a_call_waits_for_as_long_as_the_breaker_says() -> None:
    breaker: Any = Breaker()
    assert admitted(breaker, 7.0, CALL) == 0.75
    assert admitted(breaker, 7.0, CALL, URGENT) == 0.25
    assert breaker.asked == [("admit", 7.0), ("insist", 7.0)]
    with pytest.raises(CircuitOpen) as refused:
        admitted(breaker, 0.123, CALL)
    assert not may_have_run(refused.value)


# -- how calls are written -------------------------------------------------------------------------


def test_a_call_is_written_once_by_its_source_and_then_by_its_name() -> None:
    sha, source = CALL.script.sha.encode(), CALL.script.source.encode()
    first, second = pack(CALL, known=False), pack(CALL)
    assert first == pack_words(b"EVAL", source, b"1", b"key")
    assert second == pack_words(b"EVALSHA", sha, b"1", b"key")
    assert pack_all([CALL, OTHER, CALL]) == first + pack(OTHER, known=False) + second
    assert joined([pack_word(b"GET"), pack_word(b"key")]) == pack_words(b"GET", b"key")
    assert pack_words(b"GET", b"key") == b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"


@pytest.mark.parametrize(
    ("arg", "kept"),
    [(7, True), ("x" * 64, True), ("x" * 65, False), (b"x", False), (True, False), ("", True)],
)
def test_which_arguments_are_kept_packed(arg: Any, kept: bool) -> None:
    """Lifetimes, modes and the like, which repeat."""
    execute._short.cache_clear()
    for _ in range(2):
        pack(Call(OTHER.script, (), (arg,)))
    assert execute._short.cache_info().hits == int(kept)


def test_keys_are_kept_packed_if_they_are_few_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "MAX_CACHED", 2)
    monkeypatch.setattr(execute, "MAX_CACHED_LENGTH", 5)
    monkeypatch.setattr(execute, "_packed_keys", kept := {})
    short = [(b"%d" % number * 13,) for number in range(3)]  # 20 bytes, packed.
    long = (b"1" * 14,)
    assert pack(Call(OTHER.script, long, ())) == pack(Call(OTHER.script, long, ()))
    assert not kept
    pack(Call(OTHER.script, short[0], ()))
    pack(Call(OTHER.script, short[1], ()))
    assert list(kept) == short[:2]
    pack(Call(OTHER.script, short[2], ()))
    assert list(kept) == short[2:]


def test_a_source_is_not_kept_packed() -> None:
    execute._head.cache_clear()
    pack(CALL, known=False)
    assert execute._head.cache_info().currsize == 0
    pack(CALL)
    assert execute._head.cache_info().currsize == 1


# -- one call --------------------------------------------------------------------------------------


def test_a_script_that_the_server_does_not_know_is_sent() -> None:
    server: Any = Server(NoScriptError(), 5)
    assert execute._run(server, CALL, 1.5) == 5
    assert server.calls == [(pack(CALL), None, 1.5), (pack(CALL, known=False), None, 1.5)]
    assert not server.breaker.asked


def test_after_asking_comes_the_source_and_the_second_reply_counts() -> None:
    server: Any = Server([b"OK", 5])
    assert execute._run(server, CALL, 1.5, asking=True) == 5
    assert server.calls == [(ASKING + pack(CALL, known=False), 2, 1.5)]


def test_several_calls_are_one_exchange() -> None:
    for failing, patience in ((False, None), (True, 0.75)):
        server: Any = Server([1, 2])
        server.breaker.failing = failing
        assert execute._run_all(server, [CALL, OTHER]) == [1, 2]
        assert server.calls == [(pack_all([CALL, OTHER]), 2, patience)]


@pytest.mark.parametrize("patience", [None, 30.0])
def test_a_call_of_a_thread(monkeypatch: pytest.MonkeyPatch, patience: float | None) -> None:
    server = Server(7, 8, [1, 2])
    server.locate = lambda keys: server
    monkeypatch.setattr(execute, "server_of", lambda client: server)
    client: Any = object()
    answer = execute.run(client, CALL, patience=patience)
    assert (answer.value, answer.sent_twice) == (7, False)
    assert execute.run_all(client, [CALL]) == [8]
    assert execute.run_all(client, [CALL, OTHER]) == [1, 2]
    one = pack(CALL), None
    several = pack_all([CALL, OTHER]), 2, None
    assert server.calls == [(*one, patience), (*one, None), several]
    assert server.in_all == [True, True, False]


def test_a_value_and_its_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(b"value", [b"value", 50], [None, -2])
    monkeypatch.setattr(execute, "server_of", lambda client: server)
    client: Any = object()
    assert execute.read_value(client, b"key") == b"value"
    assert execute.read_value(client, b"key", lifetime=True) == [b"value", 50]
    assert execute.read_value(client, b"key", lifetime=True) is None
    assert [replies for _, replies, *_ in server.calls] == [None, 2, 2]


class Wrapper:
    """That of a tool, which claims the module of what it wraps."""

    __module__ = "redis.client"

    def __call__(self) -> None:
        """It is not called."""


def replaced(client: redis.Redis) -> None:
    """What a tool puts in place of a method."""


@pytest.mark.parametrize("name", ["execute_command", "evalsha"])
@pytest.mark.parametrize("by", [replaced, Wrapper()])
def test_whether_a_tool_observes_the_calls(name: str, by: Any) -> None:
    seen = type("Seen", (redis.Redis,), {name: by, "close": lambda client: None})
    client = seen()
    assert execute.is_observed(client)
    for twin in ("asyncio_class", "thread_class"):  # Our server in memory.
        in_memory = type("InMemory", (), {twin: object})
        client.connection_pool = SimpleNamespace(connection_class=in_memory)
        assert not execute.is_observed(client)
    assert not execute.is_observed(redis.Redis())
    other: Any = object()
    assert not execute.is_observed(other)


def test_while_a_server_fails_the_breaker_decides() -> None:
    server: Any = Server(5)
    server.breaker.failing = True
    assert execute._run(server, CALL, None) == 5
    assert server.calls == [(pack(CALL), None, 0.75)]


TIMEOUT = redis.TimeoutError("no answer")


@pytest.mark.parametrize(
    ("first", "again", "failing", "calls", "closes"),
    [
        (1, True, False, 1, False),
        (broken(), True, False, 2, True),
        (broken(sent=False), False, False, 2, True),
        (broken(sent=True), False, False, 1, True),
        (TIMEOUT, True, False, 2, False),
        (TIMEOUT, True, True, 1, False),
        (TIMEOUT, False, False, 1, False),
        (BUSY, True, False, 1, False),
    ],
)
def test_a_command_whose_reply_was_lost_is_sent_once_more(
    first: Any, again: bool, failing: bool, calls: int, closes: bool
) -> None:
    server: Any = Server(first, 2)

    class Failing(Breaker):
        """It fails from the first call on."""

        @property
        def failing(self) -> bool:
            return failing and bool(server.calls)

    server.breaker = Failing()
    if calls == 2 or first == 1:
        assert exchange_with(server, b"command", 3, again) == calls
    else:
        with pytest.raises(type(first)):
            exchange_with(server, b"command", 3, again)
    assert server.calls == [(b"command", 3, None, again)] * calls
    assert server.told == ["closed"] * closes


def test_a_command_to_a_server_that_fails_is_brief() -> None:
    server: Any = Server(1)
    server.breaker.failing = True
    assert exchange_with(server, b"command") == 1
    assert server.calls == [(b"command", None, 0.75, True)]


@pytest.mark.parametrize(
    ("error", "calls"),
    [(broken(), 2), (broken(sent=True), 2), (broken(sent=False), 1), (BUSY, 1), (TIMEOUT, 2)],
)
def test_a_call_to_one_server_of_several_is_sent_once_more(error: Exception, calls: int) -> None:
    server: Any = Server()
    node: Any = Server(error, 2)
    if calls == 2:
        assert run_at(server, node, CALL) == 2
    else:
        with pytest.raises(type(error)):
            run_at(server, node, CALL)
    assert len(node.calls) == calls
    assert (server.told, node.told) == ([error], ["closed"])


# -- again, and when -------------------------------------------------------------------------------


class Now:
    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    now = Now()
    monkeypatch.setattr(retry, "time", now)
    return now


def policy_for(server: Any, patience: float | None = None) -> RetryPolicy:
    return RetryPolicy(server, patience)


PAUSES = [0.01, 0.02, 0.04, 0.08, 0.16, 0.2, 0.2]


def test_a_busy_server_is_asked_again_for_as_long_as_its_caller_waits(now: Now) -> None:
    for patience, node, seconds in ((None, None, 5.0), (None, Server(), 3.0), (0.75, None, 0.75)):
        if node is not None:
            node.timeout = 3.0
        policy = policy_for(Server(), patience)
        began = now.seconds
        pauses = []

        def retry_forever(policy: Any = policy, node: Any = node, pauses: Any = pauses) -> None:
            while True:
                pauses.append(policy.after(BUSY, node))
                now.seconds += pauses[-1]

        with pytest.raises(NotReady) as refused:
            retry_forever()
        assert pauses[:5] == PAUSES[:5]
        assert max(pauses) <= 0.2
        assert now.seconds - began == pytest.approx(seconds)
        assert not may_have_run(refused.value)
        assert policy.patience == patience


def test_a_refusal_that_names_a_server_is_followed_at_once(now: Now) -> None:
    policy = policy_for(Server())
    assert policy.after(AskError("1 host:1"), None) == 0.0
    assert (policy.towards, policy.asking) == ("the named one", True)
    assert policy.after(AskError("1 host:1"), None) == 0.02  # But not forever.
    assert policy.after(MovedError("1 host:1"), None) == 0.04
    assert (policy.towards, policy.asking) == (None, False)
    now.seconds += retry.REFUSED_FOR
    with pytest.raises(NotReady):
        policy.after(MovedError("1 host:1"), None)


@pytest.mark.parametrize("sent", [True, False])
def test_a_call_is_sent_once_more_if_its_connection_broke(now: Now, sent: bool) -> None:
    server: Any = Server()
    server.discovers = True  # By now another one may have its keys.
    node: Any = Server()
    policy = policy_for(server)
    assert not policy.sent_twice
    assert policy.after(broken(sent), node) == 0.0
    assert policy.sent_twice is sent
    assert node.told == ["closed"]
    with pytest.raises(redis.ConnectionError) as failed:
        policy.after(broken(sent=False), node)
    assert may_have_run(failed.value) is sent
    assert len(server.told) == 2


def test_what_was_not_sent_is_not_worth_another_try_to_the_same_server(now: Now) -> None:
    with pytest.raises(redis.ConnectionError) as failed:
        policy_for(Server()).after(broken(sent=False), None)
    assert not may_have_run(failed.value)


def test_an_error_of_the_data_is_raised(now: Now) -> None:
    server: Any = Server()
    error = redis.ResponseError("WRONGTYPE")
    with pytest.raises(redis.ResponseError):
        policy_for(server).after(error, None)
    assert may_have_run(error)
    assert server.told == [error]
    policy, full = policy_for(server), redis.exceptions.OutOfMemoryError("maxmemory")
    assert policy.after(broken(sent=True), None) == 0.0
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        policy.after(full, None)
    assert may_have_run(full)  # Before it was refused.


@pytest.mark.parametrize(
    ("patience", "failing", "left"),
    [
        (None, False, None),
        (None, True, None),
        (8.0, False, 4.0),
        (2.0, False, 1.0),
        (20.0, False, 15.0),
        (8.0, True, "raises"),
        (1.0, False, 0.5),
        (0.1, False, "raises"),
    ],
)
def test_a_silent_connection_is_replaced_if_there_is_time(
    now: Now, patience: float | None, failing: bool, left: Any
) -> None:
    server: Any = Server()
    server.breaker.failing = failing
    policy = policy_for(server, patience)
    if left == "raises":
        with pytest.raises(redis.TimeoutError):
            policy.after(redis.TimeoutError("silent"), None)
    else:
        assert policy.after(redis.TimeoutError("silent"), None) == 0.0
        assert policy.patience == left
        assert policy.sent_twice


class Steps:
    """An ``Exchange`` whose steps are noted."""

    def __init__(self, server: Any, *outcomes: Any) -> None:
        self.server = server
        self.node: Any = Server()
        self.outcomes = list(outcomes)
        self.done: list[Any] = []

    def _next(self) -> Any:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def run(self, node: Any, call: Call, patience: float | None, asking: bool) -> Any:
        self.done.append(("run", node, patience, asking))
        return self._next()

    def run_all(self, node: Any, calls: Any) -> Any:
        self.done.append(("run all", node, len(calls)))
        return self._next()

    def locate(self, keys: Any) -> Any:
        self.done.append("locate")
        return self.node

    def sleep(self, seconds: float) -> None:
        self.done.append(("sleep", seconds))


def test_a_call_follows_the_refusals(now: Now) -> None:
    steps: Any = Steps(Server(), BUSY, AskError("1 host:1"), 7)
    answer = drive(run_again(steps, CALL, 3.0))
    assert (answer.value, answer.sent_twice) == (7, False)
    assert steps.done == [
        *("locate", ("run", steps.node, 3.0, False)),
        *(("sleep", 0.01), "locate", ("run", steps.node, 3.0, False)),
        *(("sleep", 0.02), ("run", "the named one", 3.0, True)),
    ]


def test_after_a_first_error_a_call_is_sent_again(now: Now) -> None:
    node: Any = Server()
    steps: Any = Steps(Server(), 7)
    answer = drive(run_again(steps, CALL, None, node, broken()))
    assert (answer.value, answer.sent_twice) == (7, True)
    assert node.told == ["closed"]
    assert steps.done == ["locate", ("run", steps.node, None, False)]


def test_of_several_calls_those_that_failed_are_sent_one_at_a_time(now: Now) -> None:
    first: Any = Server()
    second: Any = Server()
    steps: Any = Steps(Server(), broken(), 10, 30, [20])
    nodes = [first, second, first]
    steps.locate = lambda keys: nodes.pop(0) if nodes else first
    assert drive(run_all_steps(steps, [CALL, OTHER, CALL])) == [10, 20, 30]
    assert [each[:3] for each in steps.done] == [
        *(("run all", first, 2), ("run", first, None), ("run", first, None)),
        ("run all", second, 1),
    ]
    assert (len(steps.server.told), first.told, second.told) == (1, ["closed"], [])


def test_a_thread_sleeps_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(execute, "time", SimpleNamespace(sleep=slept.append))
    server: Any = Server()
    execute._Blocking(server).sleep(0.5)
    assert slept == [0.5]


# -- what an error is ------------------------------------------------------------------------------

REFUSED_BY_A_REPLICA = redis.exceptions.ReadOnlyError(
    "You can't write against a read only replica."
)


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (BUSY, "outage refusal unusable busy"),
        (REFUSED_BY_A_REPLICA, "outage refusal unusable misdirected"),
        (redis.exceptions.BusyLoadingError("is loading"), "outage refusal unusable misdirected"),
        (redis.exceptions.MasterDownError("Link"), "outage refusal unusable misdirected"),
        (redis.exceptions.ClusterDownError("down"), "outage refusal unusable"),
        (redis.exceptions.OutOfMemoryError("maxmemory"), "outage refusal unusable"),
        (redis.ResponseError("Error running script: -OOM command"), "outage refusal unusable"),
        (redis.ConnectionError("max number of clients reached"), "outage refusal unusable"),
        (NotReady("The server is not ready"), "outage refusal unusable"),
        (redis.ConnectionError("refused"), "outage unusable"),
        (OSError(), "outage unusable"),
        (redis.ResponseError("upstream failure"), "outage unusable"),
        (redis.ResponseError("ERR backend connection is down"), "outage unusable"),
        (redis.ResponseError(os.strerror(errno.ECONNREFUSED)), "outage unusable"),
        (redis.ResponseError("NOPERM"), "unusable"),
        (redis.ResponseError("WRONGTYPE Operation"), ""),
        (ValueError("upstream failure"), ""),
        (redis.ConnectionError("Too many connections"), "outage unusable exhausted"),
        (redis.ConnectionError("No connection available."), "outage unusable exhausted"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_kinds_of_an_error(error: Exception, kinds: str) -> None:
    of_it = {
        "outage": refusals.is_outage(error),
        "refusal": refusals.is_refusal(error),
        "unusable": refusals.is_unusable(error),
        "misdirected": refusals.is_misdirected(error),
        "busy": refusals.is_busy(error),
        "exhausted": refusals.is_pool_exhausted(error),
    }
    assert " ".join(kind for kind, is_one in of_it.items() if is_one) == kinds
    # The script's first write meets a refusal, so nothing has run.
    assert may_have_run(error) is not bool(refusals.refusal(error))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NOPERM User app has no permissions to run the 'get' command", "run GET:"),
        ("NOPERM No permissions to access a key", "access one of the keys or channels"),
        (
            "ACL failure in script: f_0123: The user executing the script can't run this command",
            "run a command that this needs:",
        ),
    ],
)
def test_a_missing_right_is_named(text: str, words: str) -> None:
    error = redis.exceptions.NoPermissionError(text)
    if "command or" in text or "permissions to" in text or "executing the script" in text:
        refusals.name_missing_right(error)
    assert "locks doctor" in str(error)
    if "a command" not in words:
        assert words in str(error)


def test_an_error_that_is_not_about_rights_stays_as_it_is() -> None:
    error = redis.ResponseError("WRONGTYPE Operation against a key")
    refusals.name_missing_right(error)
    assert str(error) == "WRONGTYPE Operation against a key"


def test_a_right_that_a_script_lacks_is_named_by_its_line() -> None:
    """Before Redis 7 the error has only the script's hash and the line."""
    made = script("local x = 1\nredis.call('HSET', KEYS[1], 'a', 'b')\nreturn read('GET', KEYS[1])")
    pack(Call(made, (), ()), known=False)
    lines = made.source.splitlines()
    for word in ("HSET", "GET"):
        line = next(number for number, each in enumerate(lines, 1) if f"'{word}'" in each)
        text = f"NOPERM (call to f_{made.sha}): @user_script:{line}: no command or key"
        assert f"run {word}:" in missing_right(text)
    for line in (len(lines) + 1, 1_000_000):
        text = f"NOPERM (call to f_{made.sha}): @user_script:{line}: no command or key"
        assert "run a command that this needs:" in missing_right(text)
    unknown = f"NOPERM (call to f_{'0' * 40}): @user_script:1: no command or key"
    assert "run a command that this needs:" in missing_right(unknown)


def test_a_code_is_shown_once() -> None:
    assert explained(BUSY).startswith("BUSY Redis is busy")
    assert explained(REFUSED_BY_A_REPLICA).startswith("READONLY You can't write")
    assert explained(REFUSED_BY_A_REPLICA).count("READONLY") == 1
    assert explained(AuthenticationError("odd")) == "odd"


def test_only_replies_are_of_a_proxy() -> None:
    assert is_from_proxy(redis.ResponseError("no upstream host"))
    assert not is_from_proxy(redis.ConnectionError("no upstream host"))

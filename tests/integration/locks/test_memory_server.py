"""The server in memory, where the suites of the scripts and of the locks do not look: the part of
Lua that it knows, and clients that block."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import redis

import django_redis_lock
from django_redis_lock import Lock, clock
from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.contrib.locmem.memory.lua import compile_script
from django_redis_lock.protocol import Script


@pytest.fixture
def client() -> redis.Redis:
    return client_of(Database("memory"))


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_a_lock_lasts_as_long_when_the_systems_clock_is_set(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    lock = Lock(client, "a", timeout=1000)
    assert lock.acquire(blocking=False)
    monkeypatch.setattr(clock.time, "time", lambda: time.time() + seconds)
    assert 0 < lock.ttl() <= 1000
    lock.release()


def scripts_of_the_package() -> dict[str, Script]:
    found = {}
    folder = Path(django_redis_lock.__file__).parent
    for path in folder.rglob("*.py"):
        if "script(" in path.read_text():
            parts = path.relative_to(folder.parent).with_suffix("").parts
            for name, value in vars(
                import_module(".".join(parts).removesuffix(".__init__"))
            ).items():
                if isinstance(value, Script):
                    found[name] = value
    return found


@pytest.mark.parametrize("name", scripts_of_the_package())
def test_every_script_is_written_in_the_lua_that_is_known(name: str) -> None:
    assert compile_script(scripts_of_the_package()[name].source)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("return 7", 7),
        ("return 2.7", 2),
        ("return 2 ^ 3 - 10 / 4 * 2 % 4", 7),
        ("return '5' + 1", 6),
        ("return 1 .. 'a' .. 2", b"1a2"),
        ("return 0 and '' and 3 or 4", 3),
        ("return nil and 1 or false", None),
        ("return not nil", 1),
        ("return {1, 'a', {2, false}, nil, 4}", [1, b"a", [2, None]]),
        ("local a, b = 1 return {a, b == nil}", [1, 1]),
        ("local a, b = 1, 2 a, b = b, a return {a, b}", [2, 1]),
        ("local function f() return 1, 2 end return {f(), f()}", [1, 1, 2]),
        ("local function f() return 1, 2 end return {(f())}", [1]),
        ("local function f(a, ...) return {...} end return f(1, 2, 3)", [2, 3]),
        ("local function f() end return {f() == nil}", [1]),
        ("local n = 0 local function f() n = n + 1 end f() f() return n", 2),
        ("local a = 1 if a then local a = 2 end return a", 1),
        ("if nil then return 1 elseif 0 then return 2 else return 3 end", 2),
        ("local s = 0 for i = 1, 10, 3 do s = s + i end return s", 22),
        ("local t = {} for i, v in ipairs({4, 5}) do t[#t + 1] = i * v end return t", [4, 10]),
        ("local t = {1, 2} t[2] = nil return #t", 1),
        ("local t = {} t.x = 5 return t.x", 5),
        ("local s = 'abc' return s.err == nil", 1),
        ("return string.sub('abcdef', 2, -2)", b"bcde"),
        ("return string.sub('abc', -2)", b"bc"),
        ("return string.match('12 ab', '^%d+ ?(.*)$')", b"ab"),
        ("return string.find('a.b', '.', 1, true)", 2),
        ("local t = {} for w in string.gmatch('a bc', '%S+') do t[#t + 1] = w end return t", None),
        ("return string.format('%.0f', 1700000000000123)", b"1700000000000123"),
        ("return {unpack({1, 2, 3}, 2)}", [2, 3]),
        ("return redis.call('GET', KEYS[1]) == false", 1),
        ("return redis.pcall('LLEN', KEYS[2]).err ~= nil", 1),
        ("return redis.call('SET', 'n', 1700000000000) and redis.call('GET', 'n')", None),
        ("return {type(1), type('a'), type({}), type(nil)}", None),
        ("return math.max(1, '3', 2.5) + math.floor(-1.5)", 1),
        ("return {#KEYS, #ARGV, KEYS[9] == nil}", [2, 0, 1]),
        ("-- a comment\nreturn 1 -- another", 1),
    ],
)
def test_lua_means_what_it_means_to_redis(
    redis_server: Any, client: redis.Redis, body: str, value: Any
) -> None:
    answers = []
    for each in (redis_server.client(), client):
        each.delete("{k}nothing", "{k}string", "n")
        each.set("{k}string", "x")
        answers.append(each.eval(body, 2, "{k}nothing", "{k}string"))
    assert answers[0] == answers[1]
    assert value is None or answers[1] == value


@pytest.mark.parametrize(
    "source",
    [
        "while true do end",
        "return os.time()",
        "local function f() return 1",
        "return {1, 2",
        "local 1 = 2",
        "x",
        "return 1 = 2",
        "return 'open",
    ],
)
def test_other_lua_is_refused_when_it_is_compiled(source: str) -> None:
    with pytest.raises(SyntaxError):
        compile_script(source)


KEYS = [b"a", b"1", b"d", b"\\", b"]", b"^", b"-", b"[", b"a]", b"a\nb", b"[a", b"aa"]


@pytest.mark.parametrize(
    "pattern",
    [
        *("[c-a]", "[\\d]", "[a-]", "[^]", "[]", "[", "[^", "[a", "[]a]", "[^]a]", "[^-a]", "[a^]"),
        *("[\\]]", "[\\-a]", "[[a]", "[a\\", "a\\", "\\", "\\a", "\\[a", "*[^a]*", "a?b", "a|d"),
    ],
)
def test_a_pattern_matches_the_keys_that_it_matches_in_redis(
    redis_server: Any, client: redis.Redis, pattern: str
) -> None:
    found = []
    for each in (redis_server.client(), client):
        for key in KEYS:
            each.set(key, "x")
        found.append({key for key in each.keys(pattern) if key in KEYS})
    assert found[0] == found[1]


def test_blocked_clients_are_served_in_the_order_in_which_they_came(client: redis.Redis) -> None:
    pool = client.connection_pool
    first, second, closed = (pool.make_connection() for _ in range(3))
    for waiting in (closed, first, second):
        waiting.send_command("BLPOP", "list", 0)
    closed.disconnect()
    client.rpush("list", "one")
    assert first.can_read(0)
    assert not second.can_read(0)
    client.rpush("list", "two", "three")
    assert [first.read_response(), second.read_response()] == [[b"list", b"one"], [b"list", b"two"]]
    assert client.lpop("list") == b"three"


def test_a_server_that_is_away_takes_no_connections(client: redis.Redis) -> None:
    database = client.connection_pool.connection_kwargs["database"]
    waiting = client.connection_pool.make_connection()
    waiting.send_command("BLPOP", "list", 0)
    database.away = True
    database.close_all()
    with pytest.raises(redis.exceptions.ConnectionError):
        waiting.read_response()
    with pytest.raises(redis.exceptions.ConnectionError):
        client.get("key")

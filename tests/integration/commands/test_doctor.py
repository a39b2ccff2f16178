"""``manage.py locks doctor`` and the system checks that ask Redis, on servers that are not well."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.core.checks import run_checks
from django.http import HttpResponse

import django_redis_lock
from django_redis_lock import Lock, LockNotOwnedError, locked
from django_redis_lock.apps import CHECKS_TAG
from django_redis_lock.cache import RedisCache
from django_redis_lock.contrib import metrics
from django_redis_lock.management.commands.locks import Command
from django_redis_lock.ops import doctor as probes
from django_redis_lock.ops.doctor.acl import LOCKS, MORE
from tests.holding import hurry
from tests.processes import PATIENCE, Link, processes, until
from tests.redis_server import RedisServer
from tests.support.commands import Run, check, run

__all__ = ["run"]

pytestmark = pytest.mark.usefixtures("nothing_is_declared")

DOCS = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()

Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def doctor(run: Run) -> Doctor:
    """Exit code, and for each topic of the default cache what was found."""

    def examine() -> tuple[int, dict[str, Any]]:
        code, out, _ = run("doctor", "--json")
        document = json.loads(out)
        (of_cache,) = document["caches"].values()
        check("doctor", {**document, **of_cache})
        check("a finding", *of_cache["findings"])
        return code, {finding["topic"]: finding for finding in of_cache["findings"]}

    return examine


@pytest.fixture
def at(settings: Any) -> Callable[..., None]:
    """Leads the default cache, and no other, to a server."""

    def lead(location: str, **options: Any) -> None:
        backend = "django_redis_lock.cache.RedisCache"
        options = {"SOCKET_TIMEOUT": 5, **options}
        settings.CACHES = {
            "default": {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}
        }

    return lead


def deploy_numbers() -> set[str]:
    found = run_checks(tags=[CHECKS_TAG], include_deployment_checks=True)
    return {message.id.removeprefix("django_redis_lock.") for message in found}


# -- servers that are well ---------------------------------------------------------------------


def test_a_healthy_server(
    doctor: Doctor, at: Callable[..., None], own_server: RedisServer, client: redis.Redis
) -> None:
    at(own_server.url)
    code, found = doctor()
    assert code == 0
    levels = {topic: finding["level"] for topic, finding in found.items()}
    topics = ("server", "eviction", "rights", "trial")
    assert levels == dict.fromkeys(topics, "ok")
    assert "standalone, primary" in found["server"]["text"]
    assert deploy_numbers() == set()
    with own_server.client() as own:
        until(lambda: not [key for key in own.keys() if b"doctor" in key])


def test_the_trial_wants_what_the_sites_locks_want(
    doctor: Doctor, at: Callable[..., None], own_server: RedisServer, tmp_path: Path
) -> None:
    folder = {"LOCK_ON_REDIS_DOWN": "local", "LOCK_LOCAL_LOCK_FOLDER": str(tmp_path)}
    at(own_server.url, **folder, LOCK_REPLICAS=1, LOCK_TIMEOUT=1)
    code, found = doctor()
    assert (code, found["trial"]["level"]) == (3, "error")
    assert "0 of 1 replicas have confirmed" in found["trial"]["text"]


def test_what_people_see(run: Run, client: redis.Redis, settings: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"TIMOUT": 5}
    code, out, _ = run("doctor")
    assert code == 1
    assert re.search(r"^default  127\.0\.0\.1:\d+/0$", out, re.MULTILINE)
    assert re.search(r"^  ok       server       (Redis|Valkey) \d", out, re.MULTILINE)
    assert re.search(r"^  warning  settings     W001: DJANGO_REDIS_LOCK has", out, re.MULTILINE)
    assert "→ Did you mean 'TIMEOUT'?" in out
    assert out.endswith("Locks work, but can be lost or late: see the warnings.\n")
    assert max(map(len, out.splitlines())) <= 100


# -- servers that are not ----------------------------------------------------------------------


def test_a_server_that_is_away(doctor: Doctor, at: Callable[..., None]) -> None:
    at("redis://127.0.0.1:1/0")
    code, found = doctor()
    assert code == 69
    assert found["server"]["level"] == "error"
    assert deploy_numbers() == {"I101"}


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_evicts(
    doctor: Doctor, at: Callable[..., None], own_server: RedisServer, policy: str
) -> None:
    at(own_server.url)
    with own_server.client() as admin:
        admin.config_set("maxmemory-policy", policy)
        assert doctor()[1]["eviction"]["level"] == "ok"  # It has no maxmemory.
        admin.config_set("maxmemory", "100mb")
    code, found = doctor()
    assert (code, found["eviction"]["level"]) == (1, "warning")
    assert "maxmemory is 100 MB" in found["eviction"]["text"]
    assert deploy_numbers() == {"W101"}


def test_a_replica(doctor: Doctor, at: Callable[..., None], own_server: RedisServer) -> None:
    with RedisServer() as primary, own_server.client() as admin, primary.client() as its_client:
        admin.replicaof("127.0.0.1", primary.port)
        until(lambda: its_client.info()["connected_slaves"])
        at(own_server.url)
        code, found = doctor()
        assert (code, found["server"]["level"]) == (3, "error")
        assert "E102" in deploy_numbers()
        at(primary.url)
        assert doctor()[1]["rights"]["level"] == "ok"
        its_client.config_set("min-replicas-to-write", 2)
        code, found = doctor()
        assert (code, found["rights"]["level"]) == (3, "error")
        assert re.match(r"the server rejects writes.*\bNOREPLICAS", found["rights"]["text"])
        assert "NOREPLICAS" in found["trial"]["text"]
        assert deploy_numbers() == {"W102"}


def test_a_server_without_memory_left(
    doctor: Doctor, at: Callable[..., None], own_server: RedisServer
) -> None:
    at(own_server.url)
    with own_server.client() as admin:
        admin.config_set("maxmemory", "1kb")
        code, found = doctor()
        assert (code, found["eviction"]["level"]) == (3, "ok")
        assert re.match(r"the server rejects writes.*\bOOM", found["rights"]["text"])
        assert "used memory > 'maxmemory'" in found["trial"]["text"]
        assert deploy_numbers() == {"W102"}


# -- rights ------------------------------------------------------------------------------------


def documented(heading: str) -> list[str]:
    """The rights that the page gives ``for`` something, or those of its rule."""
    if heading == "locks":
        (rule,) = re.findall(r"```\nACL SETUSER app (.*?)```", DOCS, re.DOTALL)
        return [">secret", *str(rule).split()]
    (cell,) = re.findall(rf"^\| [^|]*{heading}[^|]* \| `([^`]*)`", DOCS, re.MULTILINE)
    return str(cell).split()


#: The keys of values, which those who only lock do not need.
VALUES = ("~:*", "~{:*", "~{*}|:*")


def allow(server: RedisServer, *rights: str) -> str:
    """A user ``app`` with these rights, and an address that leads to the server as this user."""
    with server.client() as admin:
        admin.execute_command("ACL SETUSER", "app", "reset", *rights)
        admin.execute_command("ACL LOG", "RESET")
    return server.url.replace("redis://", "redis://app:secret@")


def refused(server: RedisServer) -> set[str]:
    metrics.flush()
    with server.client() as admin:
        entries = {entry["object"] for entry in admin.acl_log()}
    return entries - {"client", "client|setinfo"}  # redis-py introduces itself, and does not mind.


def test_every_command_of_a_script_is_in_the_list_of_rights() -> None:
    folder = Path(django_redis_lock.__file__).parent
    texts = [path.read_text() for path in folder.rglob("*.py")]
    source = "".join(text for text in texts if re.search(r"\bscript\(", text))
    used = {name.lower() for name in re.findall(r"(?:call\(|read\([^,]+,)\s*'(\w+)'", source)}
    known = {
        right.removeprefix("+")
        for heading in ("locks", "get_or_set", "the admin", "the figures", "clear")
        for right in documented(heading)
    }
    assert used <= known
    clearing = {right.removeprefix("+") for right in documented("clear")} - {"zrange"}
    elsewhere = (*probes.TRIED_IN_FIGURES, *probes.TRIED_IN_CHANNEL)
    tried = {command.split()[0].lower() for command in (*probes.TRIED, *elsewhere)}
    assert tried | {"xread"} == used - clearing  # Tried as a follower sends it.


def use_locks() -> None:
    lock = caches["default"].lock("import", timeout=3, renew=True)
    with lock:
        other = caches["default"].lock("import", label="other", min_hold=0.01)
        waiter = threading.Thread(target=lambda: other.acquire() and other.release())
        waiter.start()
        until(lambda: lock.redis.zcount(lock.keys.waiters, "-inf", "+inf"))
        hurry()
        until(lambda: lock.redis.hgetall(lock.keys.owner))
        lock.extend(5)
        assert lock.holder() is not None
    waiter.join(PATIENCE)
    with caches["default"].lock("a}b{c}"):
        pass
    caches["default"].lock("import").reset()
    with caches["default"].lock("places", limit=2), caches["default"].lock("places", limit=2):
        pass
    for _ in range(1000):  # One in 64 cleans up.
        with caches["default"].lock("often"):
            pass
    lock.redis.ping()  # As one does that has not used its connection for a while.


def compute(link: Link, location: str) -> None:
    def slow() -> int:
        link.say("computing")
        link.hear()
        return 1

    RedisCache(location, {}).get_or_set("report", slow, 60)


def test_the_documented_rules_are_enough_foreverything_else(
    own_server: RedisServer, at: Callable[..., None], doctor: Doctor, capfd: Any, settings: Any
) -> None:
    more = [
        right
        for heading in ("get_or_set", "the admin", "the figures")
        for right in documented(heading)
    ]
    at(allow(own_server, *documented("locks"), *VALUES, *more))
    use_everything(own_server, settings, capfd)
    assert refused(own_server) == set()
    code, found = doctor()
    assert code == 0
    assert found["rights"]["level"] == "ok"
    assert "may not run INFO" in found["server"]["text"]
    assert refused(own_server) <= {"info"}
    at(allow(own_server, *documented("locks"), *VALUES, *more, *documented("clear")))
    caches["default"].clear()
    assert refused(own_server) == set()


def use_everything(own_server: RedisServer, settings: Any, capfd: Any) -> None:
    default = caches["default"]
    with processes(compute, settings.CACHES["default"]["LOCATION"]) as (leader,):
        leader.go()
        assert leader.hear() == "computing"
        follower = threading.Thread(target=default.get_or_set, args=("report", None, 60))
        follower.start()
        with own_server.client() as admin:
            until(lambda: admin.info("clients")["blocked_clients"])
        leader.say("go on")
        follower.join(PATIENCE)
    assert default.get("report") == 1
    default.get_or_set("stale", lambda: 1, 60, stale=60)
    default.get_or_set_many(["a", "b"], lambda keys: dict.fromkeys(keys, 1), 60)
    default.set_many({"a": 2})
    default.delete("a")
    with default.lock("import") as lock:
        hurry()
        until(lambda: lock.redis.hgetall(lock.keys.owner))
        for words in (["list", "--kind", "all"], ["show", "import"]):
            Command().run_from_argv(["manage.py", "locks", *words])
        assert "import" in capfd.readouterr().out
        Command().run_from_argv(["manage.py", "locks", "release", "import", "--yes"])
        capfd.readouterr()
        lock.raise_on_release_error = False


def of_a_tenant(key: str, prefix: str, version: Any) -> str:
    return f"acme:{prefix}:{version}:{key}"


@pytest.mark.parametrize(("function", "own"), [(None, "shop:"), (of_a_tenant, "acme:shop:")])
def test_rights_by_prefix_or_tenant_include_the_locks_there_and_no_others(
    own_server: RedisServer, settings: Any, function: Any, own: str
) -> None:
    shared = "~django_redis_lock:*", "~{django_redis_lock:*", "&*", "+@all"
    keys = f"~{own}*", f"~{{{own}*", f"~{{*}}|{own}*"
    config = {
        "BACKEND": "django_redis_lock.cache.RedisCache",
        "LOCATION": allow(own_server, "on", ">secret", *keys, *shared),
        "KEY_FUNCTION": function,
    }
    settings.CACHES = {
        "default": {**config, "KEY_PREFIX": "shop"},
        "other": {**config, "KEY_PREFIX": "shops"},
    }
    use_locks()
    assert caches["default"].get_or_set("value", lambda: 1) == 1
    for denied in (
        lambda: caches["other"].lock("import").acquire(),
        lambda: caches["other"].get("a"),
    ):
        with pytest.raises(redis.ResponseError, match=r"may not access|permissions"):
            denied()


# -- the printed rule --------------------------------------------------------------------------

Rules = Callable[[], list[str]]


@pytest.fixture
def printed(capfd: Any) -> Rules:
    """The rules of ``locks doctor --acl app``: for locks only, for everything."""

    def run() -> list[str]:
        Command().run_from_argv(["manage.py", "locks", "doctor", "--acl", "app"])
        lines = capfd.readouterr().out.splitlines()
        return [line for line in lines if line.startswith("ACL SETUSER app on ")]

    return run


def grant(server: RedisServer, rule: str, database: int = 0) -> str:
    """As redis-cli would; returns the address for this user. Counts anew what is called."""
    address = allow(server, ">secret")
    with server.client() as admin:
        admin.execute_command(*rule.split())
        admin.execute_command("CONFIG RESETSTAT")
    return address.rpartition("/")[0] + f"/{database}"


def called(server: RedisServer) -> set[str]:
    with server.client() as admin:
        found = admin.info("commandstats")
    return {name.removeprefix("cmdstat_").partition("|")[0] for name in found}


def granted(rule: str) -> set[str]:
    return {w[1:].partition("|")[0] for w in rule.split() if w.startswith("+")}


SITES = [
    ({}, {}, 0),
    ({"KEY_PREFIX": "shop*[1]", "VERSION": 3}, {"LOCK_PREFIX": "mutex:"}, 5),
    ({"KEY_PREFIX": "shop"}, {"LOCK_PREFIX": ""}, 0),
]


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize(("arguments", "settings_of_it", "database"), SITES)
def test_the_printed_rule_for_locks_is_enough_and_has_nothing_in_excess(
    own_server: RedisServer,
    settings: Any,
    printed: Rules,
    arguments: dict[str, Any],
    settings_of_it: dict[str, Any],
    database: int,
) -> None:
    settings.DJANGO_REDIS_LOCK = {"METRICS": False, **settings_of_it}
    backend = "django_redis_lock.cache.RedisCache"
    cache = {"BACKEND": backend, "OPTIONS": {"SOCKET_TIMEOUT": 5}, **arguments}
    url = own_server.url.rpartition("/")[0] + f"/{database}"
    settings.CACHES = {"default": {**cache, "LOCATION": url}}
    rule = printed()[0]
    settings.CACHES = {"default": {**cache, "LOCATION": grant(own_server, rule, database)}}
    use_locks()
    with suppress(LockNotOwnedError), caches["default"].lock("endless", timeout=None) as lock:
        hurry()
        until(lambda: lock.redis.hgetall(lock.keys.owner))
        caches["default"].lock("endless").reset()
    metrics.flush()
    assert refused(own_server) == set()
    assert granted(rule) <= called(own_server)
    other = "of another" if arguments else "other"
    with pytest.raises(redis.ResponseError, match="may not access one of the keys"):
        Lock(caches["default"]._lock_client(), other, timeout=3).acquire()
    if settings_of_it.get("LOCK_PREFIX") != "":
        with pytest.raises(redis.ResponseError, match="permissions"):
            caches["default"].client.get_client().get(caches["default"].make_key("value"))


def test_the_page_has_the_printed_rules(own_server: RedisServer, at: Any, printed: Rules) -> None:
    at(own_server.url)
    locks, everything = printed()
    assert locks.split() == ["ACL", "SETUSER", "app", *documented("locks")[1:]]
    assert set(LOCKS.split()) < set(locks.split())
    for for_it, rights in MORE.items():
        assert documented(re.escape(for_it)) == rights.split()
    assert set(everything.split()) >= {*VALUES, *(r for m in MORE.values() for r in m.split())}


#: A call of each method of the cache, sync; what it is called with.
CALLS: dict[str, Any] = {
    "add": ("k", 1),
    "clear": (),
    "compute": ("k", lambda: 1, 60),
    "decr": ("n",),
    "decr_version": ("v", 2),
    "delete": ("k",),
    "delete_many": (["k", "l"],),
    "delete_pattern": ("k*",),
    "expire": ("k", 60),
    "expire_at": ("k", 4_000_000_000),
    "get": ("k",),
    "get_many": (["k", "l"],),
    "get_or_set": ("k", 1, 60),
    "get_or_set_many": (["k", "l"], lambda keys: dict.fromkeys(keys, 1), 60),
    "has_key": ("k",),
    "hdel": ("h", "f"),
    "hexists": ("h", "f"),
    "hkeys": ("h",),
    "hlen": ("h",),
    "hset": ("h", "f", 1),
    "incr": ("n",),
    "incr_version": ("v",),
    "iter_keys": ("*",),
    "keys": ("*",),
    "locked_get_or_set": ("k", lambda: 1),
    "mark_stale": ("k",),
    "mark_stale_many": (["k", "l"],),
    "persist": ("k",),
    "pexpire": ("k", 60_000),
    "pexpire_at": ("k", 4_000_000_000_000),
    "pttl": ("k",),
    "reset_all": (),
    "sadd": ("s", 1, 2),
    "scard": ("s",),
    "sdiff": ("s", "t"),
    "sdiffstore": ("u", "s", "t"),
    "set": ("k", 1),
    "set_many": ({"k": 1, "l": 2},),
    "sinter": ("s", "t"),
    "sinterstore": ("u", "s", "t"),
    "sismember": ("s", 1),
    "smembers": ("s",),
    "smismember": ("s", 1),
    "smove": ("s", "t", 1),
    "spop": ("t",),
    "srandmember": ("s",),
    "srem": ("s", 1),
    "sscan": ("s",),
    "sscan_iter": ("s",),
    "sunion": ("s", "t"),
    "sunionstore": ("u", "s", "t"),
    "touch": ("k", 60),
    "ttl": ("k",),
    "zadd": ("z", {"a": 1, "b": 2}),
    "zcard": ("z",),
    "zcount": ("z", 0, 9),
    "zincrby": ("z", 1, "a"),
    "zpopmax": ("z",),
    "zpopmin": ("z",),
    "zrange": ("z", 0, 1),
    "zrangebyscore": ("z", 0, 9),
    "zrank": ("z", "a"),
    "zrem": ("z", "a"),
    "zremrangebyscore": ("z", 0, 9),
    "zrevrange": ("z", 0, 1),
    "zrevrangebyscore": ("z", 9, 0),
    "zscore": ("z", "a"),
}
#: What sends nothing, or is in ``use_locks`` and ``use_everything``.
NO_CALLS = {
    "client",
    "close",
    "get_backend_timeout",
    "lock",
    "held_locks",
    "in_memory",
    "on_commit",
}
NO_CALLS |= {"make_and_validate_key", "make_key", "own_pattern", "subject_of", "validate_key"}
NO_CALLS |= {"command_lock", "computes_once"}


def keywords(name: str) -> dict[str, Any]:
    return {"stale": 60} if name.startswith("mark_stale") else {}


def test_the_printed_rule_for_everything_is_enough_for_each_call_of_the_cache(
    own_server: RedisServer, at: Callable[..., None], printed: Rules
) -> None:
    """For threads and for tasks, on the package's connections and on redis-py's."""
    at(own_server.url)
    rule = printed()[1]
    at(grant(own_server, rule))
    cache = caches["default"]
    public = {name for name in dir(type(cache)) if not name.startswith("_")}
    plain = {*CALLS, *NO_CALLS}
    assert public - plain - {f"a{name}" for name in plain} == set()

    def prepare() -> None:
        cache.set_many({"k": 1, "n": 1, "v": 1})
        for version in (2, 3):
            cache.set("v", 1, version=version)

    async def everything() -> None:
        for name, arguments in CALLS.items():
            if hasattr(cache, f"a{name}"):
                await cache.aset("n", 1)
                await cache.aset("v", 1, version=2 if name == "decr_version" else 1)
                await getattr(cache, f"a{name}")(*arguments, **keywords(name))
        await cache.aset("x", 1, 60, nx=True)
        await cache.aget_or_set("stale", lambda: 1, 60, stale=60)

    for name, arguments in CALLS.items():
        prepare()
        result = getattr(cache, name)(*arguments, **keywords(name))
        if isinstance(result, Iterator):
            list(result)
    for options in ({"nx": True}, {"xx": True}, {"timeout": None}, {"timeout": 0.5}):
        cache.set("x", 1, **options)
    asyncio.run(everything())
    with cache.lock(["two", "names"], timeout=30), cache.lock("again", reentrant=True) as lock:
        assert lock.ttl()
        lock.reacquire()
        assert lock.locked()
    use_locks()
    assert refused(own_server) == set()


# -- errors about rights ------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["zadd", "set", "evalsha", "exists"])
def test_an_error_names_the_missing_command(
    own_server: RedisServer, at: Callable[..., None], missing: str, caplog: Any, capfd: Any
) -> None:
    at(allow(own_server, "~*", "&*", "+@all", f"-{missing}", ">secret", "on"))
    with pytest.raises(redis.ResponseError) as caught:
        caches["default"].lock("import", timeout=3).acquire()
    told = f"the Redis user may not run {missing.upper()}: see manage.py locks doctor"
    assert str(caught.value) == told
    assert not re.search("[0-9a-f]{40}", capfd.readouterr().err + caplog.text)


def test_an_error_says_that_keys_are_not_allowed(
    own_server: RedisServer, at: Callable[..., None], rf: Any
) -> None:
    at(allow(own_server, "~other:*", "&*", "+@all", ">secret", "on"))
    words = "the Redis user may not access one of the keys or channels that this needs"
    with pytest.raises(redis.ResponseError, match=words):
        caches["default"].lock("import", timeout=3).acquire()
    assert locked("import")(lambda request: HttpResponse())(rf.get("/")).status_code == 503


@pytest.mark.parametrize(
    ("without", "level", "number", "words"),
    [
        (["-zadd"], "error", "E104", "not allowed: zadd"),
        (["-xadd", "-hset"], "error", "E104", "not allowed: hset, xadd"),
        (
            ["-xadd", "-zrange"],
            "warning",
            "W107",
            "locks work, but get_or_set and the list need xadd",
        ),
        (["-hincrby"], "note", None, "figures cannot be written: hincrby is not allowed"),
        (["-publish"], "note", None, "at its next renewal, not at once: publish is not allowed"),
        (["-subscribe"], "note", None, "at its next renewal, not at once: SUBSCRIBE is not"),
        (["resetchannels"], "note", None, "at its next renewal, not at once: publish is not"),
        (["-evalsha", "-eval"], None, None, ""),
        (["-blpop"], "warning", "W103", "may not run blpop, so waiters poll"),
        (
            ["resetkeys", "~:*", "~{:*", "~{dj*"],
            "error",
            "E104",
            "list of held locks cannot be written",
        ),
        (["resetkeys", "~:2:*"], "error", "E104", "locks are not possible"),
    ],
)
def test_rights_that_are_missing(
    own_server: RedisServer,
    at: Callable[..., None],
    doctor: Doctor,
    without: list[str],
    level: str | None,
    number: str | None,
    words: str,
) -> None:
    more = ("get_or_set", "the admin", "the figures")
    most = [*VALUES, *(right for heading in more for right in documented(heading))]
    at(allow(own_server, *documented("locks"), *most, *without))
    code, found = doctor()
    if level is None:  # Not even the first question is answered.
        assert code == 69
        return
    assert found["rights"]["level"] == level
    assert words in found["rights"]["text"]
    assert found["rights"]["check"] == (f"django_redis_lock.{number}" if number else None)
    assert number is None or number in deploy_numbers()

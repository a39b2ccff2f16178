"""What docs/locks.md and docs/lock_variants.md show works as it stands there, and their tables say
what the code does."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
import threading
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from django.core.cache import cache, caches
from django.core.management import CommandError, call_command
from django.test import RequestFactory

import django_redis_lock
from django_redis_lock import (
    Lock,
    LockNotAcquired,
    Redlock,
    contention,
    locked,
)
from django_redis_lock.cache import RedisCache
from django_redis_lock.conf import SETTING
from django_redis_lock.contrib import unique_tasks
from django_redis_lock.contrib.testing import MemoryServer
from django_redis_lock.contrib.unique_tasks import django
from django_redis_lock.decorators.options import _OF_LOCKS, MISSING, Options
from tests.processes import PATIENCE
from tests.redis_server import RedisServer

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "locks.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
ANSWER, TRIED, LONG, TASKS, CANCELLED, BARE = BLOCK.findall(TEXT)
SEVERAL, LIMITED, AGAIN = BLOCK.findall((DOCS / "lock_variants.md").read_text())
TAKEN_OFF = ("using", "critical")  # By ``cache.lock`` itself.
#: Which ``cache.lock`` takes from the settings.
FROM_SETTINGS = ("grant_timeout", "local_folder")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below ``heading``, without its head."""
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_three_callers_have_the_lock_one_after_the_other(
    client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(threading.enumerate())
    exec(ANSWER.replace("sleep(1)", "sleep(0.05)"), names := {})
    for thread in set(threading.enumerate()) - before:
        if thread.name.endswith("(import_prices)"):
            thread.join()
    lines = capsys.readouterr().out.splitlines()
    holders, fences = zip(*(line.split(" has the lock, fence ") for line in lines), strict=True)
    assert sorted(holders) == ["A", "B", "C"]
    assert sorted(map(int, fences)) == [int(fence) for fence in fences]
    with names["cache"].lock("import", label="another"):
        short = "import_prices('D')"
        exec(
            ANSWER.partition("\nfor ")[0].replace("blocking_timeout=10", "blocking_timeout=0.01"),
            names,
        )
        with pytest.raises(LockNotAcquired, match="is held by"):
            exec(short, names)


def test_a_try(client: redis.Redis, capsys: pytest.CaptureFixture[str]) -> None:
    imported: list[str] = []
    names = {"cache": caches["default"], "import_prices": imported.append}
    exec(TRIED, names)
    with caches["default"].lock("import"):
        exec(TRIED, names)
    assert imported == ["D"]
    assert capsys.readouterr().out.endswith(" is importing.\n")


def test_long_work(client: redis.Redis) -> None:
    stored: list[Any] = []
    names: dict[str, Any] = {"cache": caches["default"], "rows": lambda: "ab"}
    names["store"] = lambda row, fence: stored.append(row)
    exec(LONG, names)
    assert stored == ["a", "b"]


def test_n_at_a_time(client: redis.Redis) -> None:
    cache = caches["default"]
    names: dict[str, Any] = {"cache": cache, "PROXIES": dict(enumerate("abcde", 1))}
    names["send"] = lambda request, through: (request, through)
    exec(LIMITED, names)
    with cache.lock("api", limit=5), cache.lock("api", limit=5):
        assert names["call_api"]("this") == ("this", "c")


def test_how_long_a_lock_lives(client: redis.Redis) -> None:
    found = {}
    for call, lives in rows("How long a lock lives"):
        lock = eval(call.strip("`"), {"cache": caches["default"]})
        found[lives] = (lock.timeout, lock.renew)
        assert lock.renew == ("**renewed**" in lives or "as the first" in lives or "least" in lives)
    assert list(found.values()) == [
        *((30, True), (600, False), (600, True), (30, True), (30, True), (None, False))
    ]


def test_the_options_are_those_there_are() -> None:
    listed = {name.strip("`") for name, *_ in rows("Options")}
    own = set(inspect.signature(Lock.__init__).parameters)
    assert listed - own == set(TAKEN_OFF)
    of_redis_py = {"timeout", "sleep", "blocking", "blocking_timeout", "thread_local"}
    assert own - listed - of_redis_py == {"self", "redis", "name", "unknown", *FROM_SETTINGS}


def test_what_a_lock_can_do_it_can(client: redis.Redis) -> None:
    lock = caches["default"].lock("import")
    names = re.findall(r"`(\w+)[(`]", " ".join(row[0] for row in rows("What a lock can do")))
    assert len(names) > 10
    assert [name for name in names if not hasattr(lock, name)] == []
    errors = re.findall(r"`(\w+)`", " ".join(row[0] for row in rows("Errors")))
    public = django_redis_lock.__all__
    assert [e for e in errors if e not in public] == ["ConnectionError", "TimeoutError"]


def test_tasks(client: redis.Redis) -> None:
    fences: list[int] = []

    async def fetch(fence: int) -> None:
        fences.append(fence)

    names: dict[str, Any] = {"cache": caches["default"], "fetch": fetch}
    exec(TASKS, names)
    asyncio.run(names["sync_prices"]())
    assert fences[0] > 0


def test_a_task_that_is_cancelled(client: redis.Redis, capsys: pytest.CaptureFixture[str]) -> None:
    async def fetch(fence: int) -> None:
        await caches["default"].alock("import").reset()
        await asyncio.sleep(PATIENCE)

    names: dict[str, Any] = {"cache": caches["default"], "fetch": fetch}
    exec(CANCELLED, names)
    asyncio.run(names["sync_or_stop"]())
    assert capsys.readouterr().out == "Another process has the lock now.\n"


def test_several_names(client: redis.Redis) -> None:
    moved: list[Any] = []
    cache = caches["default"]
    names: dict[str, Any] = {
        "cache": cache,
        "move": lambda amount, fences: moved.append((amount, set(fences))),
    }
    exec(SEVERAL.replace("blocking_timeout=10", "blocking_timeout=0.01"), names)
    names["transfer"](1, 7, 100)
    assert moved == [(100, {"account-1", "account-7"})]
    with cache.lock("account-7"), pytest.raises(LockNotAcquired) as conflict:
        names["transfer"](1, 7, 100)
    assert conflict.value.lock_name == "account-7"


def test_re_entry(client: redis.Redis) -> None:
    fences: list[int] = []
    names: dict[str, Any] = {
        "cache": caches["default"],
        "write": lambda amount, fence: fences.append(fence),
    }
    exec(AGAIN, names)
    names["book_all"]([1, 2])
    names["book"](3)
    assert fences[0] == fences[1] < fences[2]


def test_without_django(client: redis.Redis) -> None:
    exec(BARE, {"client": client})
    assert not client.exists("import")


ONCE = (Path(__file__).parents[3] / "docs" / "once.md").read_text()


def test_its_task(redis_locks: MemoryServer) -> None:
    app = Celery("docs", broker="memory://", backend="cache+memory://")
    app.conf.task_default_queue = "docs"
    uploaded: list[int] = []
    (code,) = re.findall(r"```python\n(.*?)```", ONCE, re.DOTALL)
    found: dict[str, Any] = {"upload": uploaded.append, "__name__": "docs_tasks"}
    exec(compile(code, "once.md", "exec"), found)
    sync = found["sync"]
    assert sync.app is app
    first = sync.delay(7)
    assert sync.delay(7).id == first.id
    assert sync.delay(8).id != first.id
    redis_locks.clock.advance(3601)
    assert sync.delay(7).id != first.id
    sync(7)
    assert uploaded == [7]


def test_its_names_are_those_of_the_code() -> None:
    assert f"`{unique_tasks.PREFIX}sync-7`" in ONCE
    assert f"`{django.TRAVELS}`" in ONCE
    assert unique_tasks.PATIENCE == 10
    for name in unique_tasks.__all__:
        assert f"`{name}`" in ONCE or name == "unique_task"


GUARANTEES = (Path(__file__).parents[3] / "docs" / "choosing_guarantees.md").read_text()
FENCED, POLICIES, ON_SEVERAL = re.findall(r"```python\n(.*?)```", GUARANTEES, re.DOTALL)
OURS = "django_redis_lock.cache.RedisCache"


def line(code: str, beginning: str) -> str:
    (found,) = (line for line in code.splitlines() if line.startswith(beginning))
    return found.partition("  #")[0].rstrip()


def test_storage_that_looks_at_fences(redis_server: RedisServer) -> None:
    written: list[dict[str, Any]] = []

    class Rows:
        def filter(self, **wanted: Any) -> Rows:
            written.append(wanted)
            return self

        def update(self, **values: Any) -> None:
            written.append(values)

    names = {
        "cache": RedisCache(redis_server.url, {}),
        "compute_total": lambda: 12,
        "Ledger": SimpleNamespace(objects=Rows()),
    }
    exec(FENCED, names)
    assert written[0] == {"pk": 1, "fence__lt": written[1]["fence"]}
    assert written[1]["total"] == 12


def test_what_locks_do_without_redis(own_server: RedisServer, settings: Any) -> None:
    names: dict[str, Any] = {}
    exec(line(POLICIES, "DJANGO_REDIS_LOCK"), names)
    settings.DJANGO_REDIS_LOCK = names["DJANGO_REDIS_LOCK"]
    exec(line(POLICIES, "OPTIONS"), names)
    cache = RedisCache(own_server.url, {})
    assert cache.conf.ON_REDIS_DOWN == "raise"
    of_one = RedisCache(own_server.url, {"OPTIONS": names["OPTIONS"]})
    assert of_one.conf.ON_REDIS_DOWN == "local"
    own_server.stop()
    nightly = eval(line(POLICIES, 'cache.lock("nightly"'), {"cache": cache})
    with nightly:
        assert nightly.degraded == "run"
    with pytest.raises(redis.ConnectionError):
        eval(line(POLICIES, 'cache.lock("payments"'), {"cache": cache}).acquire()


def test_several_servers(redis_server: RedisServer, settings: Any) -> None:
    urls = [redis_server.url.replace("/0", f"/{number}") for number in (1, 2, 3)]
    for number, url in enumerate(urls, 1):
        settings.CACHES = {**settings.CACHES, f"lock{number}": {"BACKEND": OURS, "LOCATION": url}}
    lock = eval(line(ON_SEVERAL, "cache.lock"), {"cache": caches["lock1"]})
    with lock:
        assert isinstance(lock, Redlock)
        assert len(lock.redis) == 3
    names: dict[str, Any] = {"locked": locked}
    decorator = line(ON_SEVERAL, "@locked")
    exec(decorator + "\ndef work(): return 'done'", names)
    assert names["work"]() == "done"
    clients = {f"client{n}": redis.Redis.from_url(url) for n, url in enumerate(urls, 1)}
    with eval(line(ON_SEVERAL, "Redlock"), {"Redlock": Redlock, **clients}) as bare:
        assert bare.fence
    for client in clients.values():
        client.close()


ONE_AT_A_TIME = "".join(
    (DOCS / f"{name}.md").read_text() for name in ("one_at_a_time", "answers", "transactions")
)
OF_LOCKS = (DOCS / "locks.md").read_text().partition("\n## Options\n")[2].partition("\n## ")[0]


@pytest.fixture
def names(db: None) -> dict[str, Any]:
    """What the examples define, and what they need to be defined."""
    done: list[Any] = []
    balances = {7: 0}
    names: dict[str, Any] = {
        "done": done,
        "mail": done.append,
        "build_report": lambda: done.append("the report"),
        "read_balance": balances.__getitem__,
        "write_balance": balances.__setitem__,
        "balances": balances,
        "shop": "north",
        "import_prices": lambda shop, fence: done.append((shop, fence)),
        "rows": lambda shop: ["a row"],
        "store": lambda row, fence: done.append((row, fence)),
    }
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", ONE_AT_A_TIME, re.DOTALL)):
        exec(compile(code, f"example {number}", "exec"), names)
    return names


def test_views(names: dict[str, Any]) -> None:
    request = RequestFactory().get("/")
    request.user = SimpleNamespace(pk=5)
    post = RequestFactory().post("/")
    post.user = request.user
    report, basket = names["Report"].as_view(), names["Basket"].as_view()
    assert names["send_invoice"](request, pk=7).content == b"sent"
    assert report(request, slug="a").content == b"report a"
    assert basket(post).content == b"ordered"
    assert asyncio.run(names["export"](request)).content == b"all of it"
    with cache.lock("invoice-7"), cache.lock("report-a"), cache.lock("basket-5"):
        assert names["send_invoice"](request, pk=7).status_code == 409
        assert names["send_invoice"](request, pk=8).status_code == 200
        assert report(request, slug="a").status_code == 409
        assert basket(post).status_code == 409
    answer = names["in_words"](contention.Conflict("x", retry_after=7))
    assert answer.content == b"Come again in 7 s."


def test_functions(names: dict[str, Any]) -> None:
    order = SimpleNamespace(customer_id=5)
    with cache.lock("customer-5"), pytest.raises(LockNotAcquired):
        names["ship"](order, express=True)
    with cache.lock("stock-7-all"), pytest.raises(LockNotAcquired):
        names["count"](SimpleNamespace(pk=7))
    with cache.lock("sync-7"), cache.lock("mailing-7"):
        assert names["synchronise"](7) is names["send_mailing"](7) is None
    names["import_shop"]("north")
    assert names["done"][-1][0] == "a row"
    assert any(done[0] == "north" for done in names["done"])
    assert names["balances"] == {7: 100}


def test_the_command(names: dict[str, Any]) -> None:
    errors = StringIO()
    call_command(names["Command"](stderr=errors))
    assert names["done"][-1] == "the report"
    call_command(names["Command"](stderr=errors))
    assert errors.getvalue().startswith("nightly-report was released, and its min_hold ends in ")
    shown = next(line for line in ONE_AT_A_TIME.splitlines() if line.startswith("CommandError"))
    assert shown.endswith(". More: manage.py locks show nightly-report")
    with pytest.raises(CommandError, match=r"manage\.py locks show"):
        raise contention.Conflict("nightly-report").command_error(1)


def test_every_option_and_its_default_is_there() -> None:
    for option in (field for field in dataclasses.fields(Options) if field.init):
        row = re.search(rf"\| `{option.name}` \| [^|]+ \|([^|]*)\|", ONE_AT_A_TIME)
        if row is None:
            assert_as_of_a_lock(option)
            continue
        default, written = option.default, row[1].strip()
        if option.name in ("key", "label"):
            assert written == "the dotted name"
        elif default is SETTING or default is MISSING:
            assert written in ("setting `TIMEOUT`", "")
        else:
            shown = f'"{default}"' if isinstance(default, str) else str(default)
            assert written == f"`{shown}`", option.name


def assert_as_of_a_lock(option: dataclasses.Field[Any]) -> None:
    """The page of locks has it, with the same default."""
    assert option.name in _OF_LOCKS
    (row,) = re.findall(rf"\| `{option.name}` \|.*\|([^|]*)\|[^|]*\|\n", OF_LOCKS) or [None]
    if row is None:
        assert f"`{option.name}` (`{option.default}`" in OF_LOCKS
    else:
        default = "setting" if row.strip().startswith("setting") else option.default
        assert row.strip().startswith(default if default == "setting" else f"`{default}`")


def test_every_ready_made_answer_is_there() -> None:
    answers = set(contention.__all__) - {"Conflict", "OnConflict", "request_of", "unavailable"}
    table = ONE_AT_A_TIME.partition("| `on_conflict=` | |")[2].partition("```")[0]
    assert set(re.findall(r"^\| `(\w+)", table, re.MULTILINE)) == answers

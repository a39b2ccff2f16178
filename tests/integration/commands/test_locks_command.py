"""``manage.py locks``: list, show, release and reset; for a person who was paged, and for
programs (the fields are those of docs/commands.md)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.core.cache import cache, caches
from django.core.management import call_command
from django.test import Client
from django.utils import translation

from django_redis_lock import Lock
from django_redis_lock.contrib import metrics
from django_redis_lock.history import note_call
from django_redis_lock.locking import hold as holding
from django_redis_lock.middleware import doing
from django_redis_lock.ops.held_locks import shown_id
from django_redis_lock.protocol.holders import Owner
from django_redis_lock.protocol.identity import hostname
from django_redis_lock.transport import run as run_call
from tests.holding import hurry
from tests.processes import PATIENCE, Link, ManageCommand, processes, until
from tests.support.admin import PAGE, rows_of, text_of
from tests.support.commands import Run, check, held, run, waiting

__all__ = ["run"]

ROOT = Path(__file__).parents[3]


def here() -> str:
    return f"{hostname()}:{os.getpid()}"


class Screen(StringIO):
    """A terminal of 80 columns."""

    def isatty(self) -> bool:
        return True


def without_times(text: str) -> str:
    return re.sub(r"\b\d+s\b", "Ns", text)


# -- list --------------------------------------------------------------------------------------


def test_nothing_is_held(run: Run) -> None:
    assert run() == (0, "No lock is held.\n", "")
    assert run("list", "--exit-code") == (0, "No lock is held.\n", "")
    assert run("--kind", "all")[1] == "No lock is held, 0 computations are in progress.\n"


def test_the_list(run: Run, client: redis.Redis) -> None:
    with (
        held(client, "nightly", label="report") as nightly,
        held(client, "x", timeout=None),
        waiting(client, nightly),
    ):
        code, out, err = run()
        found = json.loads(run("--json")[1])
    check("list", found)
    check("a lock", *found["locks"])
    check("a lock's holder", *(lock["holder"] for lock in found["locks"]))
    first, lock = found["locks"]
    assert (first["name"], first["holder"]["label"], first["waiters"]) == ("nightly", "report", 1)
    assert (lock["name"], lock["cache"], lock["key"]) == ("x", "default", ":lock:1:x")
    assert (lock["ttl"], lock["expires"], lock["waiters"]) == (None, False, 0)
    assert lock["held_for"] > 0
    by = f"{here()} (report)"
    assert (code, err) == (0, "")
    assert [line.split() for line in without_times(out).splitlines()] == [
        ["NAME", "HOLDER", "HELD", "LEFT", "WAITING", "NOTE"],
        ["nightly", *by.split(), "Ns", "Ns", "1"],
        ["x", here(), "Ns", "-", "-", "never", "expires"],
        [],
        ["2", "locks", "are", "held,", "1", "process", "waits."],
    ]
    assert "\x1b" not in out


def test_what_the_holder_is_doing(run: Run, client: redis.Redis) -> None:
    with doing("GET /report/"), held(client, "nightly", label="report"):
        head, line, *_ = run()[1].splitlines()
        assert "DOING" in head
        assert line.endswith("GET /report/")
        assert "doing          GET /report/" in run("show", "nightly")[1]
        (listed,) = json.loads(run("--json")[1])["locks"]
        assert listed["holder"]["doing"] == "GET /report/"


def test_locks_of_other_caches_and_of_none(run: Run, client: redis.Redis, settings: Any) -> None:
    other = {**settings.CACHES["default"], "KEY_PREFIX": "shop"}
    settings.CACHES = {**settings.CACHES, "other": other}
    with ExitStack() as stack:
        stack.enter_context(held(client, "import"))
        stack.enter_context(held(client, "import", using="other"))
        stack.enter_context(Lock(client, "bare", timeout=60))
        _, out, _ = run()
        assert "CACHE" in out
        names = {line.split()[0] for line in out.splitlines()[1:-2]}
        assert names == {"import", "bare"}
        assert run("--using", "other")[1].splitlines()[-1] == "1 lock is held."
        code, _, err = run("show", "import")
        assert code == 2
        assert "held in several caches (default, other); say which with --using" in err
        assert "at the key shop:lock:1:import" in run("show", "import", "--using", "other")[1]
        assert "at the key bare" in run("show", "bare")[1]
    with client.lock(":lock:1:nightly", timeout=60):
        code, out, _ = run("show", "nightly", "--exit-code")
    assert code == 1
    assert "its token names no process, as those of other programs" in out


def test_a_name_may_be_the_whole_key_as_log_lines_show_it(run: Run, client: redis.Redis) -> None:
    key = ":lock:1:import"
    with held(client, "import") as lock:
        assert run("show", key)[1].startswith("import\n  state          held\n")
        assert "these" not in run("reset", f"{key[:-2]}*")[1]
        assert "To release it, add --yes." in run("reset", f"{key[:-2]}*")[1]
        assert run("release", key, "--yes")[1].endswith("import is released.\n")
        assert not lock.owned()
    assert run("release", key, "--yes") == (0, "import is free.\n", "")


def test_it_can_be_searched_and_cut(run: Run, client: redis.Redis) -> None:
    with held(client, "invoice-1"), held(client, "invoice-2"), held(client, "report"):
        assert run("--search", "INVOICE")[1].splitlines()[-1] == "2 locks are held."
        last = run("--limit", "1")[1].splitlines()[-1]
        told = "Only 1 of at least 3 locks of the cache default are listed."
        assert last == f"At least 3 locks are held. {told}"
        check("one of cut", *json.loads(run("--limit", "1", "--json")[1])["cut"])
        said = "No lock matches (3 are held).\n"
        assert run("--older-than", "1h", "--exit-code") == (0, said, "")
        assert run("reset", "nothing-*") == (0, said, "")
        assert run("--search", "nothing") == (0, said, "")
        assert run("--older-than", "0", "--exit-code")[0] == 1


@pytest.mark.parametrize("action", ["doctor", "list", "show"])
def test_the_help_of_an_action_has_its_options_only(run: Run, action: str) -> None:
    code, out, _ = run(action, "--help")
    assert code == 0
    assert f"locks {action}" in out
    assert "--yes" not in out
    assert ("--exit-code" in out) is (action != "doctor")
    assert "--using" in out
    # Not what other actions take.
    assert "(list" not in out
    assert "for reset" not in out
    assert {"list", "show", "release", "reset", "stats", "doctor"} <= set(run("--help")[1].split())


def test_an_action_can_be_called_from_code(client: redis.Redis) -> None:
    out = StringIO()
    with held(client, "nightly") as lock:
        call_command("locks", "release", "nightly", yes=True, stdout=out)
        assert not lock.locked()
    assert out.getvalue().endswith("nightly is released.\n")


def test_who_reads_only_the_beginning_is_no_failure() -> None:
    """As head does."""
    command = [sys.executable, "manage.py", "locks", "doctor"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as examining:
        examining.stdout.close()
        assert examining.stderr.read() == b""
    assert examining.returncode == 141


def test_values_that_are_being_computed(run: Run, client: redis.Redis) -> None:
    compute, done = threading.Event(), threading.Event()

    def slow() -> int:
        compute.set()
        done.wait(PATIENCE)
        return 1

    thread = threading.Thread(target=cache.get_or_set, args=("slow", slow, 60))
    thread.start()
    assert compute.wait(PATIENCE)
    until(lambda: "slow" in run("--kind", "computation")[1])
    assert "computation" in run("--kind", "all")[1]
    assert json.loads(run("--kind", "computation", "--json")[1])["locks"]
    assert "being computed" in run("show", "slow", "--kind", "computation")[1]
    done.set()
    thread.join(PATIENCE)
    assert run("show", "slow", "--kind", "computation")[0] == 2


def test_a_cache_that_is_down_is_not_listed_as_empty(
    run: Run, client: redis.Redis, settings: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    options = {"LOCK_LOCAL_LOCK_FOLDER": str(tmp_path)}  # Other tests may have locks on this host.
    away = {**settings.CACHES["default"], "LOCATION": "redis://127.0.0.1:1/0", "OPTIONS": options}
    settings.CACHES = {**settings.CACHES, "away": away}
    assert run()[:2] == (69, "In the caches that answered: no lock is held.\n")
    with held(client, "nightly"):
        code, out, err = run()
        assert code == 69
        assert "nightly" in out
        assert out.endswith("\n\nIn the caches that answered: 1 lock is held.\n")
        assert "The cache away could not be read: " in err
        found = json.loads(run("--json")[1])
        check("one of failures", *found["failures"])
        assert (found["failures"][0]["alias"], found["local"]) == ("away", [])
    code, _, err = run("show", "x", "--using", "away")
    assert code == 69
    assert "the request to Redis failed: " in err
    assert "Traceback" not in err
    settings.CACHES = {"default": away}
    for words in ([], ["reset", "*"], ["reset", "*", "--yes"]):
        code, out, err = run(*words)
        assert (code, out) == (69, "")
        assert "The cache default could not be read: " in err
    # It is said once: while somebody watches, a log would be written across the table.
    assert "django_redis_lock.admin" not in {record.name for record in caplog.records}


@pytest.mark.parametrize("backend", ["LocMemCache", "RedisCache"])
def test_a_lock_of_this_host_is_not_free(
    run: Run, settings: Any, tmp_path: Path, backend: str
) -> None:
    """In memory, or while Redis is down: what ``run_locked`` takes then."""
    options = {"LOCK_LOCAL_LOCK_FOLDER": str(tmp_path)}
    memory = {"BACKEND": "django_redis_lock.cache.LocMemCache", "OPTIONS": options}
    location = "redis://127.0.0.1:1/0"
    shown = {**memory, "BACKEND": f"django_redis_lock.cache.{backend}", "LOCATION": location}
    settings.CACHES = {"default": shown, "memory": memory}
    with caches["memory"].command_lock("nightly", replicas=0, label="report"):
        holder = f"{hostname()}, process {os.getpid()}, thread MainThread (report)"
        code, out, _ = run("show", "nightly", "--exit-code", "--using", "default")
        assert code == 1
        assert f"held on this host, without Redis, by {holder}; it ends with that process" in out
        found = json.loads(run("show", "nightly", "--json")[1])
        assert (found["held"], found["local"]) == (True, holder)
        assert run("release", "nightly", "--yes")[0] == 1
        code, out, err = run("--exit-code", "--using", "memory")
        assert (code, out[:37]) == (1, "No lock is held except on this host. ")
        assert err == f"nightly is held on this host: {holder}\n"
        check("one of local", *json.loads(run("--json", "--using", "memory")[1])["local"])
    assert run("--exit-code", "--using", "memory")[0] == 0


def test_a_project_whose_caches_cannot_lock(run: Run, settings: Any) -> None:
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    for words in ([], ["show", "x"], ["reset", "*"], ["stats"]):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert "none of the CACHES supports locks" in err
    code, out, _ = run("doctor")
    assert code == 3
    assert "  error    settings     W003: None of the CACHES supports locks" in out


def test_names_that_are_not_nice(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    nasty, long = "a\x1b[31m\nb", "報告/" + "x" * 200
    screen = Screen()
    with held(client, nasty), held(client, long, label="l" * 300):
        call_command("locks", stdout=screen, no_color=True)
    lines = screen.getvalue().splitlines()
    assert any(line.startswith(r"a\x1b[31m\nb ") for line in lines)
    assert any(line.startswith("報告/xx") and "…" in line for line in lines)
    assert max(len(line) for line in lines) <= 80


# -- show --------------------------------------------------------------------------------------


def test_one_lock(run: Run, client: redis.Redis) -> None:
    with held(client, "nightly", label="report") as nightly, waiting(client, nightly):
        run_call(client, note_call(nightly.keys.lock, "lost", Owner("x"), "it expired"))
        with translation.override("de"):  # Programs and colleagues read it, too.
            code, out, _ = run("show", "nightly", "--exit-code")
        assert code == 1
        expected = (
            rf"nightly\n  state +held\n  by +{hostname()}, process {os.getpid()}, thread MainThread"
            r"\n  for +report\n  since +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}, \ds ago"
            r"\n  time left +\d+s of 30s, renewed while its holder lives.*"
            rf"\n  heartbeat +\ds ago\n  fencing token +{nightly.fence}"
            r"\n  cache +default, at the key :lock:1:nightly"
            r"\n\nWaiting processes, in this order"
            rf"\n    1  {hostname()}, process {os.getpid()}, thread next, for \ds"
            rf"\n\nLast events\n  .* lost  \? \({shown_id('x')}\): it expired\n"
        )
        assert re.fullmatch(expected, out), out
        document = json.loads(run("show", "--json", "nightly")[1])
        check("show", document)
        check("a lock", document["lock"])
        for part in ("holders", "waiters", "events"):
            check(f"one of {part}", *document[part])
        assert document["held"] is True
        assert document["lock"]["fence"] == nightly.fence
        assert [waiter["thread"] for waiter in document["waiters"]] == ["next"]
        assert [event["what"] for event in document["events"]] == ["lost"]


def test_a_free_lock(run: Run) -> None:
    code, out, _ = run("show", "nightly", "--exit-code")
    assert (code, out.split()[:3]) == (0, ["nightly", "state", "free;"])
    assert "there are no recent events of this name: check the spelling" in out
    assert json.loads(run("show", "nightly", "--json")[1])["held"] is False


def test_a_key_with_other_data_is_not_said_to_be_free(run: Run, client: redis.Redis) -> None:
    client.hset(":lock:1:nightly", "a", "1")
    words = "not a lock: the key has other data (hash), so no caller can acquire it"
    assert words in run("show", "nightly")[1]
    assert json.loads(run("show", "nightly", "--json")[1])["other_data"] == "hash"
    assert run("release", "nightly", "--yes") == (0, f"nightly is {words}.\n", "")


# -- release -----------------------------------------------------------------------------------


def test_a_release_says_who_held_it(run: Run, client: redis.Redis) -> None:
    with held(client, "nightly", label="report") as lock:
        code, out, _ = run("release", "nightly", "--yes")
        assert (code, without_times(out).splitlines()) == (
            0,
            [f"nightly is held by {here()} (report), for Ns.", "nightly is released."],
        )
        assert not lock.locked()
    _, out, _ = run("show", "nightly")
    assert "(manage.py locks)" in out
    assert run("release", "nightly", "--yes") == (0, "nightly is free.\n", "")


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("", 1)])
def test_a_release_asks_first(
    run: Run, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    monkeypatch.setattr(sys, "stdin", Screen(f"{answer}\n"))
    with held(client, "nightly") as lock:
        found, out, _ = run("release", "nightly")
        assert found == code
        assert "Release it? [y/N] " in out
        assert lock.owned() is (code == 1)


def test_a_lock_that_has_changed_hands_is_left_alone(
    run: Run, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question and the answer."""
    first = cache.lock("nightly")
    assert first.acquire()
    second = cache.lock("nightly")

    class Slow(Screen):
        def readline(self, *args: Any) -> str:
            first.release()
            assert second.acquire(blocking=False)
            return "y\n"

    monkeypatch.setattr(sys, "stdin", Slow())
    code, out, _ = run("release", "nightly")
    assert code == 1
    assert "passed to another holder" in out
    assert second.owned()
    second.release()


# -- reset -------------------------------------------------------------------------------------


def test_a_reset_is_a_dry_run_first(run: Run, client: redis.Redis) -> None:
    bare = Lock(client, "job-bare", timeout=60, raise_on_release_error=False)
    named = (held(client, name) for name in ("job-1", "job-2", "x"))
    with ExitStack() as stack:
        one, two, other = map(stack.enter_context, named)
        with bare:
            code, out, _ = run("reset", "job-*")
            assert code == 0
            assert out.endswith("Nothing was released. To release these 2, add --yes.\n")
            assert all(lock.owned() for lock in (one, two, other, bare))
            code, out, _ = run("reset", "job-*", "--yes")
            assert code == 0
            assert sorted(out.split(" is released.")[0] for out in out.splitlines()) == [
                "job-1",
                "job-2",
            ]
            assert [lock.owned() for lock in (one, two, other, bare)] == [False, False, True, True]
            assert "job-bare is released." in run("reset", "job-*", "--yes", "--foreign")[1]
    assert run("reset", "*") == (0, "No lock is held.\n", "")


# -- stats -------------------------------------------------------------------------------------


def test_figures(run: Run, client: redis.Redis) -> None:
    assert run("stats") == (0, "Nothing happened in the last hour.\n", "")
    for _ in range(2):
        with cache.lock("invoice-7"):
            assert not cache.lock("invoice-7").acquire(blocking=False)
    for _ in range(4):
        cache.get_or_set("report-1", lambda: 1, 60)
    metrics.flush()
    code, out, _ = run("stats")
    assert code == 0
    locks, values = (part.splitlines() for part in out.split("\n\n")[:2])
    assert locks[0].split()[:5] == ["LOCKS", "ACQUIRED", "WAITED", "AVG", "P95"]
    assert locks[1].split()[:3] == ["invoice-*", "2", "-"]
    assert locks[1].split()[6:] == ["2", "-", "-", "█"]
    assert values[0].split()[:4] == ["COMPUTATIONS", "READS", "HITS", "COMPUTED"]
    assert values[1].split()[:4] == ["report-*", "4", "75%", "1"]
    assert out.endswith("\nIn the last hour, in all processes.\n")
    document = json.loads(run("stats", "--json", "--period", "day")[1])
    check("stats", document)
    check("a group", *document["caches"]["default"])
    check("a distribution", *(document["caches"]["default"][0][of] for of in ("waits", "holds")))
    assert document["period"] == "day"
    figures = {summary["group"]: summary for summary in document["caches"]["default"]}
    assert figures["invoice-*"]["acquisitions"] == 2
    assert figures["invoice-*"]["rejected"] == 2
    assert figures["report-*"]["computed"] == 1
    assert figures["report-*"]["computations"]["count"] == 1
    assert figures["report-*"]["reads"] == 4
    assert figures["report-*"]["hit_ratio"] == 0.75


# -- the command line --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shw"], "invalid choice: 'shw'"),
        (["list", "x"], "unrecognized arguments: x"),
        (["show"], "arguments are required: NAME"),
        (["reset"], "arguments are required: PATTERN"),
        (["release", "", "--yes"], "a lock's name must not be empty"),
        (["release", "a", "b"], "one name, not 2; `locks reset` takes a pattern"),
        (["show", "a", "b"], "one name, not 2"),
        (["list", "--yes"], "unrecognized arguments: --yes"),
        (["release", "x", "--older-than", "3"], "unrecognized arguments: --older-than 3"),
        (["--using", "plain"], "the cache 'plain' cannot lock"),
        (["--using", "nope"], "CACHES has no 'nope'"),
        (["show", "\udcff"], "surrogates not allowed"),
        (["release", "\udcff", "--yes"], "surrogates not allowed"),
        (["stats", "--watch"], "unrecognized arguments: --watch"),
        (["list", "--period", "day"], "unrecognized arguments: --period day"),
        (["--watch", "0"], "a number of seconds greater than 0"),
        (["--limit", "0"], "a whole number greater than 0"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Run, words: list[str], message: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_it_watches_until_it_is_interrupted(client: redis.Redis) -> None:
    with closing(ManageCommand("locks", "--json", "--watch", "0.1")) as watching:
        assert json.loads(watching.stdout.readline())["locks"] == []
        with held(client, "nightly"):
            while not json.loads(watching.stdout.readline())["locks"]:
                pass
        watching.send_signal(signal.SIGINT)
        assert watching.end() == (0, "", "")


def test_a_lock_with_places(run: Run, client: redis.Redis) -> None:
    with held(client, "api", limit=5, label="first"), held(client, "other"):
        second, third = (caches["default"].lock("api", limit=5) for _ in range(2))
        assert second.acquire(blocking=False)
        assert third.acquire(blocking=False)
        hurry()
        until(lambda: client.exists(second.local.hold.keys.owner, third.local.hold.keys.owner) == 2)
        lines = [line for line in run("list")[1].splitlines() if line.startswith("api")]
        assert {line.partition("place ")[2] for line in lines} == {
            f"{number}, 3 of 5" for number in (1, 2, 3)
        }
        out = run("show", "api")[1]
        assert "; 3 of 5 are taken" in out
        places = out.partition("All holders")[2].splitlines()[1:4]
        assert [line.split()[0] for line in places] == ["1", "2", "3"]
        shown = json.loads(run("show", "api", "--json")[1])
        assert [each["place"] for each in shown["holders"]] == [1, 2, 3]
        code, _, err = run("release", "api", "--yes")
        assert code != 0
        assert "api has 3 holders, in the places 1, 2, 3; say which with --place" in err
        out = run("release", "api", "--place", "4", "--yes")[1]
        assert out == "Place 4 of api is free.\n"
        out = run("release", "apy", "--yes")[1]
        assert out == "apy is free; there are no recent events of this name: check the spelling.\n"
        code, out, _ = run("release", "api", "--place", "2", "--yes")
        assert (code, out.splitlines()[-1]) == (0, "api, place 2, is released.")
        assert [second.owned(), third.owned()] == [False, True]
        third.release()
        assert run("release", "api", "--yes")[0] == 0
        assert caches["default"].lock("api", limit=5).holders() == []


# -- who was paged ------------------------------------------------------------------------------


def by_a_thread(**options: Any) -> None:
    assert caches["default"].lock("nightly", timeout=60, **options).acquire()


def by_a_task() -> None:
    async def acquire() -> None:
        assert await caches["default"].alock("nightly", timeout=60).acquire()

    asyncio.run(acquire())


def by_several_names() -> None:
    assert caches["default"].lock(["nightly", "other"], timeout=60).acquire()


def by_place() -> None:
    by_a_thread(limit=3)


WAYS = [by_a_thread, by_a_task, by_several_names, by_place]


def die(link: Link, number: int) -> None:
    holding.DESCRIBE_AFTER = 60.0  # However busy the machine is, it dies before that.
    WAYS[number]()
    link.say("held")
    link.hear()


@pytest.mark.parametrize("number", range(len(WAYS)), ids=[way.__name__ for way in WAYS])
@pytest.mark.django_db
def test_a_process_that_died_as_soon_as_it_held_the_lock_is_named(
    run: Run, client: redis.Redis, number: int
) -> None:
    with processes(die, number) as (worker,):
        worker.go()
        assert worker.hear() == "held"
        worker.kill()
        pid = worker.pid
    here = f"{hostname()}:{pid}"
    browser = Client()
    browser.force_login(User.objects.create_superuser("operator"))
    (row,) = (r for r in rows_of(browser.get(PAGE)) if r["name"].startswith("nightly"))
    assert row["holder"] == here
    assert row["status"] == "no heartbeat yet"
    page = browser.get(PAGE).content.decode()
    address = re.search(r'href="([^"]+/change/)"[^>]*>nightly<', page)
    assert address is not None
    text = text_of(browser.get(address[1]))
    assert f"process {pid}" in text
    assert "or died so soon" in text
    # The last: a command closes the connections to the database.
    line = next(line for line in run()[1].splitlines() if line.startswith("nightly"))
    assert here in line
    assert line.endswith("no heartbeat yet")
    (listed,) = (h for h in json.loads(run("--json")[1])["locks"] if h["name"] == "nightly")
    assert listed["holder"]["pid"] == pid
    assert listed["holder"]["host"] == hostname()
    shown = run("show", "nightly")[1]
    assert f"by             {hostname()}, process {pid}, thread MainThread" in shown
    assert "none yet: acquired less than half a second ago, or its process died so soon" in shown
    assert here in run("release", "nightly", "--yes")[1]


# -- long names --------------------------------------------------------------------------------

LONG = f"reports:{'x' * 250}:2026-11"


def test_in_a_pipe_a_long_name_is_shortened_in_its_middle(run: Run, client: redis.Redis) -> None:
    with held(client, LONG, label="report"), held(client, "short"):
        out = run()[1]
        lines = out.splitlines()
        assert max(map(len, lines)) <= 120
        assert any(re.match(r"reports:x+…x+:2026-11 ", line) for line in lines)
        assert LONG in run("--wide")[1]
        assert LONG in run("reset", "*", "--wide")[1]
        assert LONG not in run("reset", "*")[1]
        assert LONG in run("--json")[1]
        assert run("stats", "--wide")[0] == 0

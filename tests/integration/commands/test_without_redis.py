"""A project without Redis, as ``startproject`` makes it: every command starts, a lock excludes, and
its tests run, in several processes too."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from tests.processes import PATIENCE, STARTUP, until

ROOT = Path(__file__).parents[3]

SETTINGS = """
INSTALLED_APPS += ["django_redis_lock", "shop"]
CACHES = {"default": {"BACKEND": "django_redis_lock.cache.LocMemCache"}}
ALLOWED_HOSTS = ["*"]
"""
URLS = """
from shop.views import report
urlpatterns.append(path("report/<int:pk>/", report))
"""
VIEWS = """
import os
import time
from django.http import HttpResponse
from django_redis_lock import locked

@locked("report-{pk}")
def report(request, pk):
    wanted = request.GET.get("until")
    while wanted and not os.path.exists(wanted):
        time.sleep(0.01)
    return HttpResponse("done")
"""
TESTS = """
import threading
import time
from django.contrib.auth.models import User
from django.core.cache import cache
from django.test import TestCase
from django_redis_lock.contrib.testing import RedisLocksMixin, override

class LockTest(TestCase):
    def test_a_second_request_is_refused(self):
        with cache.lock("report-7"):
            assert self.client.get("/report/7/").status_code == 409
        assert self.client.get("/report/7/").status_code == 200

    def test_the_page_of_held_locks(self):
        self.client.force_login(User.objects.create_superuser("admin"))
        with cache.lock("report-7"):
            page = self.client.get("/admin/django_redis_lock/heldlock/")
        self.assertContains(page, "report-7")

    def test_a_value_is_computed_once(self):
        calls = []
        def build():
            calls.append(1)
            time.sleep(0.1)
            return 5
        values = []
        ask = lambda: values.append(cache.get_or_set("report", build, 60))
        threads = [threading.Thread(target=ask) for _ in range(50)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert values == [5] * 50 and calls == [1]

class OverrideTest(RedisLocksMixin, TestCase):
    def test_time(self):
        lock = cache.lock("report-7", timeout=60)
        assert lock.acquire()
        self.redis_locks.clock.advance(61)
        assert lock.lost

@override()
def test_with_pytest():
    with cache.lock("report-7"):
        pass
"""


class Project:
    """A folder with a ``manage.py``.

    Args:
        host: a folder for what belongs to the whole host, which are its locks.
    """

    def __init__(self, folder: Path, host: Path) -> None:
        self.folder = folder
        without = ("REDIS_URL", "DJANGO_SETTINGS_MODULE")
        self.environment = {k: v for k, v in os.environ.items() if k not in without}
        self.environment["TMPDIR"] = str(host)
        self.environment["PYTHONPATH"] = f"{STARTUP}{os.pathsep}{ROOT}"
        self.environment["PYTHONWARNINGS"] = "error::DeprecationWarning:shop"

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *words: str) -> str:
        process = self.start(*words)
        said, _ = process.communicate(timeout=4 * PATIENCE)
        assert process.returncode == 0, said
        return said

    def manage(self, *words: str) -> str:
        return self.run("manage.py", *words)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("without_redis") / "site"
    folder.mkdir()
    made = Project(folder, folder.parent)
    call_command("startproject", "site_of_shop", folder)
    for name, text in (("settings.py", SETTINGS), ("urls.py", URLS)):
        path = folder / "site_of_shop" / name
        path.write_text(path.read_text() + text)
    shop = folder / "shop"
    shop.mkdir()
    for name, text in (("__init__.py", ""), ("views.py", VIEWS), ("tests.py", TESTS)):
        (shop / name).write_text(text)
    return made


COMMANDS = """
from django.core.management import call_command
for words in ("migrate --verbosity 0", "check", "locks", "locks --json", "locks doctor"):
    call_command(*words.split())
    print("END", flush=True)
"""


def test_the_commands_say_whose_locks_they_know(project: Project) -> None:
    said = project.manage("shell", "-v", "0", "-c", COMMANDS)
    migrated, checked, shown, document, found = said.split("END\n")[:5]
    assert migrated == ""
    assert checked == "System check identified no issues (0 silenced).\n"
    assert "The locks of the cache default are in the memory of each process" in shown
    assert json.loads(document)["in_memory"] == ["default"]
    assert "there is none: the locks are in the memory of each process" in " ".join(found.split())


@pytest.mark.sample(0)
def test_the_tests_of_the_project(project: Project) -> None:
    assert "OK" in project.manage("test", "--parallel", "2")


def test_the_tests_of_the_project_with_pytest(project: Project) -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--ds", "site_of_shop.settings")
    assert "5 passed" in project.run(*words, "shop/tests.py")


@pytest.fixture
def server(project: Project) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = project.start("manage.py", "runserver", "--noreload", address)
    url = f"http://{address}/report/7/"
    try:
        until(lambda: status(url) is not None)
        yield url
    finally:
        process.terminate()
        process.communicate()


def status(url: str) -> int | None:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def test_a_second_request_is_refused(server: str, tmp_path: Path) -> None:
    answers: list[Any] = []

    def ask() -> None:
        answers.append(status(f"{server}?until={tmp_path}/finish"))

    pair = [threading.Thread(target=ask) for _ in range(2)]
    for thread in pair:
        thread.start()
    until(lambda: answers == [409])
    (tmp_path / "finish").touch()
    for thread in pair:
        thread.join()
    assert answers == [409, 200]
    assert status(server) == 200


@pytest.mark.sample(0)
def test_commands_in_two_terminals_exclude_each_other(project: Project, tmp_path: Path) -> None:
    begun, finish = tmp_path / "begun", tmp_path / "finish"
    script = f"touch {begun}; while [ ! -e {finish} ]; do sleep 0.02; done"
    run = ("manage.py", "run_locked", "report", "--shell")
    first = project.start(*run, "--", script)
    until(begun.exists)
    second = project.start(*run, "--", "true")
    said, _ = second.communicate(timeout=PATIENCE)
    assert second.returncode == 75, said
    assert "report" in said
    third = project.start(*run, "--wait", "30", "--", "echo done")
    time.sleep(0.2)
    finish.touch()
    assert first.wait(PATIENCE) == 0
    assert "done" in third.communicate(timeout=PATIENCE)[0]
    assert third.returncode == 0


@pytest.mark.sample(0)
def test_another_projects_locks_are_its_own(project: Project, tmp_path: Path) -> None:
    shutil.copytree(project.folder, tmp_path / "copy")
    other = Project(tmp_path / "copy", project.folder.parent)
    begun, finish = tmp_path / "begun", tmp_path / "finish"
    script = f"touch {begun}; while [ ! -e {finish} ]; do sleep 0.02; done"
    first = project.start("manage.py", "run_locked", "report", "--shell", "--", script)
    until(begun.exists)
    assert "done" in other.manage("run_locked", "report", "--shell", "--", "echo done")
    finish.touch()
    assert first.wait(PATIENCE) == 0

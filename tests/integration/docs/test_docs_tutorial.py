"""The shop of docs/tutorial.md, built as the page says, does what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import STARTUP
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "tutorial.md").read_text()
FILES = re.findall(r"```python\n# ([^\n,]+)(?:, ([^\n]+))?\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"^((?:django-admin|python manage\.py) .+)$", TEXT, re.MULTILINE)

pytestmark = pytest.mark.slow

#: Five visitors, then two customers for the last item, at once.
VISITS = """
from concurrent.futures import ThreadPoolExecutor
from django.conf import settings
from django.test import Client
from store import views
from store.models import Product

settings.ALLOWED_HOSTS = ["testserver"]
Product.objects.create(name="Teapot", stock=1)
with ThreadPoolExecutor(5) as pool:
    pages = list(pool.map(lambda _: Client().get("/bestsellers/").json(), range(5)))
    orders = list(pool.map(lambda _: Client().post("/order/1/").json(), range(2)))
assert pages == [{"bestsellers": ["Teapot"]}] * 5, pages
assert sorted(map(str, orders)) == ["{'error': 'sold out'}", "{'left': 0}"], orders
"""


class Shop:
    """The project of the tutorial, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, line: str, *more: str) -> subprocess.CompletedProcess[str]:
        words = line.split()
        if words[0] == "django-admin":
            words = [sys.executable, "-m", "django", *words[1:]]
        else:
            words = [sys.executable, *words[1:]]
        hidden = ("DJANGO_SETTINGS_MODULE",)
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment["PYTHONPATH"] = f"{STARTUP}{os.pathsep}{ROOT}"
        inside = self.folder / "shop"
        return subprocess.run(
            [*words, *more],
            cwd=inside if inside.exists() else self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def write(self, path: str, how: str, code: str) -> None:
        file = self.folder / "shop" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a" if how else "w") as opened:
            opened.write("\n" + re.sub(r"sleep\((\d)\)", r"sleep(\1 / 10)", code))


@pytest.mark.sample(0)
def test_the_shop(tmp_path: Path, redis_server: RedisServer) -> None:
    shop = Shop(tmp_path)
    assert len(FILES) == 9
    start = [line for line in COMMANDS if "start" in line]
    for line in start:
        assert shop.run(line).returncode == 0, line
    for path, how, code in FILES:
        if "instead" not in how:
            shop.write(path, how, code)
    for line in ("makemigrations store", "migrate", "test"):
        done = shop.run(f"python manage.py {line}")
        assert done.returncode == 0, done.stderr
    assert "Ran 1 test" in done.stderr
    assert {f"python manage.py {line}" for line in ("migrate", "test", "restock")} <= {*COMMANDS}
    visits = shop.run("python manage.py shell -c", VISITS)
    assert visits.returncode == 0, visits.stderr
    assert visits.stdout.count("counting") == 1

    (redis_settings,) = (each for each in FILES if "instead" in each[1])
    local = redis_settings[2].replace("redis://127.0.0.1:6379/1", redis_server.url)
    shop.write(redis_settings[0], "instead", local)
    first, second = (shop.run("python manage.py restock") for _ in range(2))
    assert (first.returncode, first.stdout) == (0, "restocked\n"), first.stderr
    assert second.returncode == 1
    assert second.stderr.startswith("CommandError: restock was released, and its min_hold ends in")

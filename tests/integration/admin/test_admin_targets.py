"""Who reaches what on the page "Held locks": each address, set of permissions and kind of key. Only
locks can be seen and released there, whatever a form or an address names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from io import StringIO
from typing import Any, NamedTuple

import pytest
import redis
from django.contrib.admin import site
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.sessions.backends.cache import SessionStore
from django.core.cache import caches
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from django_redis_lock import Lock
from django_redis_lock.models import HeldLock
from django_redis_lock.ops.admin.rows import Choice, Ref
from django_redis_lock.ops.held_locks import shown_id
from django_redis_lock.ops.inventory import FLIGHT, LOCK
from django_redis_lock.protocol import fingerprint
from django_redis_lock.protocol.keys import INDEX, flight_key, lock_keys
from tests.holding import hurry
from tests.lanes import some
from tests.processes import until
from tests.redis_server import RedisServer
from tests.support.admin import OURS, PAGE

pytestmark = [pytest.mark.django_db, pytest.mark.invariant("U3")]

RELEASE = f"{PAGE}release/"
CODE = "271828"
TOKEN = "0123456789abcdef" * 2


class Target(NamedTuple):
    """``value``: the key of the value that must survive, or end; None if there is none."""

    ref: Ref
    value: bytes | None
    is_lock: bool = False


Make = Callable[[redis.Redis], Target]
TARGETS: dict[str, Make] = {}


def target(name: str) -> Callable[[Make], Make]:
    return lambda make: TARGETS.setdefault(name, make)


def of_lock(lock: Any) -> Target:
    key = lock.keys.lock
    assert lock.acquire(blocking=False)
    return Target(Ref("default", lock.local.hold.keys.lock or key, LOCK), key, is_lock=True)


def at(key: bytes | str, alias: str = "default", kind: str = LOCK) -> Target:
    encoded = key.encode() if isinstance(key, str) else key
    return Target(Ref(alias, encoded, kind), encoded)


# -- locks -------------------------------------------------------------------------------------


@target("a lock")
def _lock(client: redis.Redis) -> Target:
    found = of_lock(caches["default"].lock("report"))
    hurry()
    until(lambda: client.exists(lock_keys(found.ref.key).owner))
    return found


@target("a lock without owner yet")
def _new(client: redis.Redis) -> Target:
    return of_lock(caches["default"].lock("report"))


@target("a lock with a chosen token")
def _chosen(client: redis.Redis) -> Target:
    lock = caches["default"].lock("report")
    assert lock.acquire(token=CODE)
    return Target(Ref("default", lock.keys.lock, LOCK), lock.keys.lock, is_lock=True)


@target("a lock with a chosen token, described")
def _chosen_described(client: redis.Redis) -> Target:
    found = _chosen(client)
    hurry()
    until(lambda: client.hexists(lock_keys(found.ref.key).owner, "id"))
    return found


@target("a resting lock")
def _resting(client: redis.Redis) -> Target:
    lock = caches["default"].lock("report", min_hold=60)
    found = of_lock(lock)
    lock.release()
    return found


@target("a lock of another cache")
def _other_lock(client: redis.Redis) -> Target:
    lock = caches["other"].lock("report")
    assert lock.acquire(blocking=False)
    return Target(Ref("default", lock.keys.lock, LOCK), lock.keys.lock, is_lock=True)


@target("a bare lock")
def _bare(client: redis.Redis) -> Target:
    return of_lock(Lock(client, "bare", 30))


@target("a place")
def _place(client: redis.Redis) -> Target:
    first, second = (caches["default"].lock("api", limit=3) for _ in range(2))
    of_lock(first)
    assert second.acquire(blocking=False)
    key = lock_keys(second.keys.lock).at_place(2).lock
    return Target(Ref("default", key, LOCK), key, is_lock=True)


@target("one of several names")
def _member(client: redis.Redis) -> Target:
    lock = caches["default"].lock(["a", "b"])
    assert lock.acquire(blocking=False)
    key = b":lock:1:b"
    return Target(Ref("default", key, LOCK), key, is_lock=True)


@target("redis-py's lock")
def _redis_py(client: redis.Redis) -> Target:
    assert client.lock(":lock:1:report", timeout=60).acquire()
    return at(":lock:1:report")._replace(is_lock=True)


@target("a computation")
def _flight(client: redis.Redis) -> Target:
    client.set(flight_key(b":1:report"), TOKEN, px=60_000)
    found = at(":1:report", kind=FLIGHT)
    return found._replace(value=flight_key(b":1:report"), is_lock=True)


# -- other keys --------------------------------------------------------------------------------


@target("a cache value")
def _value(client: redis.Redis) -> Target:
    client.set(":1:code", CODE)
    return at(":1:code")


@target("a cache value with the form of a token")
def _token(client: redis.Redis) -> Target:
    client.set(":1:code", TOKEN)
    return at(":1:code")


@target("a value of another cache")
def _other(client: redis.Redis) -> Target:
    client.set("other:1:code", CODE)
    return at("other:1:code")


@target("a session")
def _session(client: redis.Redis) -> Target:
    session = SessionStore()
    session["code"] = CODE
    session.save()
    return at(f":1:{session.cache_key_prefix}{session.session_key}")


@target("a string among locks")
def _string(client: redis.Redis) -> Target:
    client.set(":lock:1:report", CODE)
    return at(":lock:1:report")


@target("a hash among locks")
def _hash(client: redis.Redis) -> Target:
    client.hset(":lock:1:report", "code", CODE)
    return at(":lock:1:report")


@target("a value at the key of a lock that crashed")
def _crashed(client: redis.Redis) -> Target:
    lock = Lock(client, ":1:code", 30)
    assert lock.acquire()
    hurry()
    until(lambda: client.hexists(lock_keys(b":1:code").owner, "id"))
    client.set(":1:code", CODE)
    return at(":1:code")


@target("a value where the index had a lock")
def _stale(client: redis.Redis) -> Target:
    client.set(":1:code", CODE)
    client.zadd(INDEX, {":1:code": "inf"})
    return at(":1:code")


@target("a companion key")
def _companion(client: redis.Redis) -> Target:
    client.set("{:lock:1:report}:fence", CODE)
    return at("{:lock:1:report}:fence")


@target("other data where a computation would be")
def _no_flight(client: redis.Redis) -> Target:
    client.set(flight_key(b":1:report"), CODE)
    return at(":1:report", kind=FLIGHT)._replace(value=flight_key(b":1:report"))


@target("the index")
def _index(client: redis.Redis) -> Target:
    assert caches["default"].lock("a", timeout=3600).acquire()  # No renewal changes the index.
    return at(INDEX)


@target("bytes that are no text")
def _bytes(client: redis.Redis) -> Target:
    client.set(b":1:\xff\x00\n%2F/../\x1b", CODE)
    return at(b":1:\xff\x00\n%2F/../\x1b")


@target("a missing key")
def _missing(client: redis.Redis) -> Target:
    return at(":lock:1:missing")._replace(value=None)


# -- who ---------------------------------------------------------------------------------------

VIEW, FREE = "view_heldlock", "release_heldlock"
#: Who, and which permissions they have.
PEOPLE: dict[str, tuple[str, ...] | None] = {
    "anonymous": None,
    "staff": (),
    "may look": (VIEW,),
    "may release only": (FREE,),
    "may both": (VIEW, FREE),
    "superuser": (VIEW, FREE),
}


def browser_of(name: str) -> Client:
    browser = Client()
    codenames = PEOPLE[name]
    if codenames is not None:
        user = User.objects.create_user(name, is_staff=True, is_superuser=name == "superuser")
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        browser.force_login(user)
    return browser


def stored(client: redis.Redis, key: bytes | None) -> Any:
    return client.dump(key) if key is not None else None


def forged(client: redis.Redis, found: Target) -> list[Choice]:
    """What a form could say of the holder: what anybody can compute of a value that is known, and
    what the page would show of it."""
    values = [CODE.encode(), TOKEN.encode(), b""]
    if found.value is not None and client.type(found.value) == b"string":
        values.append(client.get(found.value) or b"")
    ids = {of(fingerprint(value)) for value in values for of in (str, shown_id)}
    return [Choice(found.ref, id, fence) for id in sorted(ids) for fence in (None, 2**60)]


@pytest.fixture
def two_caches(redis_server: RedisServer, settings: Any) -> None:
    settings.CACHES = {
        "default": {"BACKEND": OURS, "LOCATION": redis_server.url},
        "other": {"BACKEND": OURS, "LOCATION": redis_server.url, "KEY_PREFIX": "other"},
    }


@pytest.mark.sample(7, 1)
@pytest.mark.usefixtures("two_caches")
@pytest.mark.parametrize("name", TARGETS)
def test_only_who_may_reaches_only_locks(client: redis.Redis, name: str) -> None:
    found = TARGETS[name](client)
    before = stored(client, found.value)
    assert (before is None) == (name == "a missing key")
    hashes = {hashlib.blake2b(v, digest_size=n).hexdigest() for v in (CODE.encode(), TOKEN.encode())
              for n in (4, 8, 16)}  # fmt: skip
    for person in {*some(PEOPLE, each=5), "may both"}:
        permissions = PEOPLE[person]
        browser = browser_of(person)
        looks = permissions is not None and VIEW in permissions
        frees = looks and FREE in (permissions or ())
        refused = 302 if permissions is None else 403  # To the form to log in.
        selected = {"selected": [*map(str, forged(client, found)), str(found.ref), found.ref.key]}
        for route in ("", f"{found.ref}/change/", f"{found.ref}/history/", "processes/"):
            for query in ({}, {"live": "1"}):
                answer = browser.get(f"{PAGE}{route}", query)
                assert answer.status_code == (200 if looks else refused), (person, route)
                text = answer.content.decode()
                assert not any(hash in text for hash in hashes), (person, route)
                if not found.is_lock and looks:
                    assert CODE not in text
                    assert shown_id(fingerprint(CODE.encode())) not in text
        for route in ("add/", f"{found.ref}/delete/"):
            assert browser.get(f"{PAGE}{route}").status_code == refused
            assert browser.post(f"{PAGE}{route}", {"post": "yes"}).status_code == refused
        ids = [str(found.ref), "1", found.ref.key]
        action = {"action": "delete_selected", "_selected_action": ids, **selected}
        for route in ("", f"{found.ref}/change/", f"{found.ref}/history/"):
            answer = browser.post(f"{PAGE}{route}", action)
            only_shows = 403 if "change" in route else 405
            assert answer.status_code == (only_shows if looks else refused), (person, route)
        if found.is_lock and frees:
            continue  # They see its holder's id, and are right.
        for confirmed, allowed in (("", 200), ("yes", 302)):
            answer = browser.post(RELEASE, {**selected, "confirmed": confirmed})
            assert answer.status_code == (allowed if frees else refused), person
        assert stored(client, found.value) == before, person
    assert not LogEntry.objects.exists()
    if found.is_lock:
        _is_released(client, found)


def _is_released(client: redis.Redis, found: Target) -> None:
    browser = Client()
    browser.force_login(User.objects.get(username="may both"))
    page = browser.get(f"{PAGE}{found.ref}/change/")
    choice = page.context["data"]["choice"]
    token = client.get(found.value)
    answer = browser.post(RELEASE, {"selected": choice, "confirmed": "yes"}, follow=True)
    assert "is released." in answer.content.decode()
    assert client.get(found.value) != token


@pytest.mark.usefixtures("two_caches")
@pytest.mark.parametrize("name", TARGETS)
def test_commands_release_only_locks(client: redis.Redis, name: str) -> None:
    """By the name in the cache, by the key, by a pattern; whatever has no name as text is left."""
    found = TARGETS[name](client)
    if found.is_lock:
        return
    before = stored(client, found.value)
    key = found.ref.key.decode(errors="backslashreplace").replace("\0", "")
    for text in (key, key.removeprefix(":1:"), key.removeprefix(":lock:1:")):
        for words in (("show",), ("show", "--json"), ("release", "--yes")):
            out = StringIO()
            try:
                call_command("locks", words[0], text, *words[1:], stdout=out)
            except CommandError as error:
                out.write(str(error))
            assert CODE not in out.getvalue().replace(text, "")
            assert fingerprint(CODE.encode()) not in out.getvalue()
            assert shown_id(fingerprint(CODE.encode())) not in out.getvalue()
    if name != "the index":
        call_command("locks", "reset", "*", "--yes", "--foreign", stdout=StringIO())
        assert caches["default"].reset_all() == 0
    assert stored(client, found.value) == before


@pytest.mark.usefixtures("two_caches")
@pytest.mark.parametrize("name", TARGETS)
def test_without_a_prefix_of_locks(client: redis.Redis, settings: Any, name: str) -> None:
    """A lock and a value may have one key; the page still does not take the value for a lock."""
    settings.DJANGO_REDIS_LOCK = {"LOCK_PREFIX": ""}
    if name in ("one of several names", "redis-py's lock"):
        return
    found = TARGETS[name](client)
    before = stored(client, found.value)
    browser = browser_of("superuser")
    page = browser.get(f"{PAGE}{found.ref}/change/")
    assert ("choice" in page.context["data"]) == found.is_lock
    if found.is_lock:
        return
    browser.post(RELEASE, {"selected": [*map(str, forged(client, found))], "confirmed": "yes"})
    text = found.ref.key.decode(errors="backslashreplace").replace("\0", "").removeprefix(":1:")
    try:
        call_command("locks", "release", text, "--yes", stdout=StringIO())
    except CommandError:
        pass
    assert stored(client, found.value) == before


def test_a_page_does_not_tell_which_other_keys_there_are(
    admin_client: Client, client: redis.Redis
) -> None:
    client.set(":1:there", CODE)
    client.hset(":1:also there", "code", CODE)
    texts = []
    for key in (":1:there", ":1:also there", ":1:not there"):
        page = admin_client.get(f"{PAGE}{at(key).ref}/change/")
        data = page.context["data"]
        texts.append({name: text for name, text in data.items() if name not in ("as_of", "group")})
    assert texts[0] == texts[1] == texts[2]


def test_a_value_that_takes_the_place_of_a_lock_is_not_released(
    admin_client: Client, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decided where it is released, not where it is shown."""
    from django_redis_lock.ops.inventory import releasing  # noqa: PLC0415  # the part is optional

    lock = caches["default"].lock("report")
    assert lock.acquire(token="chosen")
    choice = admin_client.get(PAGE).context["data"]["rows"][0]["choice"]
    send = releasing.reset_call

    def meanwhile(keys: Any, *args: Any) -> Any:
        """The lock ends, and a value of the same bytes is stored there."""
        lock.release()
        client.set(keys.lock, "chosen")
        return send(keys, *args)

    monkeypatch.setattr(releasing, "reset_call", meanwhile)
    admin_client.post(RELEASE, {"selected": choice, "confirmed": "yes"})
    assert client.get(lock.keys.lock) == b"chosen"


# -- addresses of ModelAdmin -------------------------------------------------------------------


@pytest.mark.parametrize("model", list(site._registry), ids=lambda model: model._meta.label_lower)
def test_the_addresses_of_every_admin(admin_client: Client, model: Any) -> None:
    """As projects test all their admins at once."""
    admin = site._registry[model]
    info = f"{model._meta.app_label}_{model._meta.model_name}"
    assert admin_client.get(reverse(f"admin:{info}_changelist")).status_code == 200
    may_add = admin.has_add_permission(admin_client.get("/admin/").wsgi_request)
    answer = admin_client.get(reverse(f"admin:{info}_add"))
    assert answer.status_code == (200 if may_add else 403)
    for name in ("change", "delete", "history"):
        for id in ("1", "no/such_id", "%2F", "é"):
            address = reverse(f"admin:{info}_{name}", args=[id])
            assert address == reverse(f"admin:{info}_{name}", kwargs={"object_id": id})
            assert admin_client.get(address).status_code in (200, 302, 403, 404)
    short = reverse(f"admin:{info}_change", args=["1"]).removesuffix("change/")
    assert admin_client.get(short)["Location"] == f"{short}change/"


def test_nobody_has_permission_to_add_change_or_delete_a_lock(admin_client: Client) -> None:
    admin = site._registry[HeldLock]
    request = admin_client.get("/admin/").wsgi_request
    assert admin.get_model_perms(request) == {
        "add": False,
        "change": False,
        "delete": False,
        "view": True,
    }

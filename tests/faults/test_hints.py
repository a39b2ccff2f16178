"""What commands, pages and views say of a server that cannot be used as it is configured."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from django.core.management import CommandError, call_command
from django.http import HttpResponse
from django.test import RequestFactory
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_redis_lock import locked
from django_redis_lock.cache import RedisCache
from django_redis_lock.transport.hints import explained, hint_for
from tests.redis_server import RedisServer

BACKEND = "django_redis_lock.cache.RedisCache"


def with_password(server: RedisServer, given: str) -> str:
    with server.client() as admin:
        admin.config_set("requirepass", "right")
    return server.url.replace("redis://", f"redis://{given}")


def other_database(server: RedisServer) -> str:
    return server.url.rpartition("/")[0] + "/99"


#: By kind: the address, and what to do.
KINDS: dict[str, tuple[Callable[[RedisServer], str], str]] = {
    "database": (other_database, "LOCATION names a database that the server does not have"),
    "no password": (lambda s: with_password(s, ""), "the server wants a password"),
    "wrong password": (lambda s: with_password(s, ":wrong@"), "user or password are wrong"),
    "disabled user": (lambda s: with_password(s, "nobody:right@"), "user or password are wrong"),
    "no rights": (
        lambda s: as_user(s, "~*", "&*", "+@all", "-evalsha"),
        "the Redis user may not run EVALSHA: see manage.py locks doctor",
    ),
    "no keys": (
        lambda s: as_user(s, "~other:*", "&*", "+@all"),
        "the Redis user may not access one of the keys or channels that this needs",
    ),
}


def as_user(server: RedisServer, *rights: str) -> str:
    with server.client() as admin:
        admin.execute_command("ACL SETUSER", "app", "reset", "on", ">secret", *rights)
    return server.url.replace("redis://", "redis://app:secret@")


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_answers_503_and_a_command_says_what_to_do(
    own_server: RedisServer, settings: Any, rf: RequestFactory, caplog: Any, kind: str
) -> None:
    make, hint = KINDS[kind]
    settings.CACHES = {"default": {"BACKEND": BACKEND, "LOCATION": make(own_server)}}

    @locked("report")
    def view(request: Any) -> HttpResponse:
        raise AssertionError("it has run")

    assert view(rf.get("/")).status_code == 503
    for words in (["run_locked", "job", "--", "check"], ["locks", "show", "report"]):
        with pytest.raises(CommandError) as caught:
            call_command(*words)
        assert caught.value.returncode == 69
        assert hint in str(caught.value)
    assert not re.search("[0-9a-f]{40}", caplog.text)


# -- TLS -----------------------------------------------------------------------------------------

#: To look for an RSA key takes a second.
NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: Any) -> Path:
    """With its key, for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates")
    folder = tmp_path_factory.mktemp("certificates")
    key, file = folder / "localhost.key", folder / "localhost.pem"
    command = f"openssl req -x509 {NEW_KEY} -nodes -days 2 -keyout {key} -out {file}"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    file.write_text(file.read_text() + key.read_text())
    return file


@contextmanager
def speaking_tls(certificate: Path) -> Iterator[int]:
    """A port behind which a handshake can be made, and nothing more."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def serve() -> None:
        while True:
            try:
                there, _ = listening.accept()
            except OSError:
                return
            with suppress(OSError), there, context.wrap_socket(there, server_side=True) as wrapped:
                wrapped.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def error_of(url: str, **options: Any) -> Exception:
    with redis.Redis.from_url(url, socket_timeout=5, retry=Retry(NoBackoff(), 0), **options) as one:
        try:
            one.ping()
        except (redis.RedisError, OSError) as error:
            return error
    raise AssertionError("it works")


@pytest.mark.parametrize("cluster", [False, True])
def test_a_certificate_that_is_not_trusted(certificate: Path, cluster: bool) -> None:
    with speaking_tls(certificate) as port:
        url = f"rediss://localhost:{port}/0"
        if cluster:
            options = {"CLIENT_CLASS": "django_redis_lock.clients.ClusterClient"}
            with pytest.raises(redis.RedisError) as caught:
                RedisCache(url, {"OPTIONS": options}).lock("report").acquire()
            error = caught.value
        else:
            error = error_of(url)
    assert "give the file of its authority as ssl_ca_certs" in explained(error)


def test_a_port_that_does_not_speak_tls(own_server: RedisServer) -> None:
    """Redis waits for the end of a line that never comes; other servers answer in plain text."""

    def answer() -> None:
        there, _ = listening.accept()
        with there:
            there.recv(10)
            there.sendall(b"-ERR unknown command\r\n" * 10)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        error = error_of(f"rediss://localhost:{listening.getsockname()[1]}/0")
        thread.join()
    assert "this port does not speak TLS" in explained(error)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate",
            "give the file of its authority as ssl_ca_certs",
        ),
        (
            "certificate verify failed: Hostname mismatch, certificate is not valid for 'redis-1'",
            "connect by a name that it has",
        ),
        (
            "certificate verify failed: IP address mismatch, certificate is not valid for",
            "connect by a name that it has",
        ),
        ("certificate verify failed: certificate has expired", "renew the server's certificate"),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", "this port does not speak TLS"),
        ("[SSL] record layer failure (_ssl.c:1006)", "this port does not speak TLS"),
        ("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED]", "give ssl_certfile and ssl_keyfile"),
        ("SELECT is not allowed in cluster mode", "leave the number out of LOCATION"),
        ("Client sent AUTH, but no password is set", "the server has no password"),
        ("DENIED Redis is running in protected mode because", "from its own host only"),
        ("unknown command 'EVALSHA'", "has no such command"),
        ("unknown command `HELLO`, with args beginning with: `3`, ", '"protocol": 2'),
        ("NOPROTO unsupported protocol version", '"protocol": 2'),
        ("Connection refused.", ""),
        ("Timeout connecting to server", ""),
    ],
)
def test_hints(text: str, hint: str) -> None:
    assert hint in hint_for(text)
    assert bool(hint) == bool(hint_for(text))
    assert explained(redis.ConnectionError(text)).startswith(text)

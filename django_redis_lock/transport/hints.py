"""What people can do about an error from Redis, by its kind."""

from __future__ import annotations

import re

from redis.exceptions import MovedError

from ..protocol import Script
from .refusals import FROM_PROXIES, PASSING, refusal

#: By what is in the text, the first that matches.
HINTS = (
    (
        "|".join(map(re.escape, FROM_PROXIES)),
        "the proxy or service in front of Redis answers so: look at its log, and at its limits",
    ),
    (
        r"DB index is out of range|invalid DB index",
        "LOCATION names a database that the server does not have: it has 0 to 15, unless its "
        "setting databases says otherwise",
    ),
    (
        r"SELECT is not allowed in cluster mode",
        "a cluster has only the database 0: leave the number out of LOCATION",
    ),
    (
        r"without any password configured|no password is set",
        "the server has no password: leave it out of LOCATION and OPTIONS",
    ),
    (
        r"WRONGPASS|invalid username-password pair|invalid password",
        "user or password are wrong, or the password was changed: add the new one before you "
        "remove the old one",
    ),
    (
        r"Authentication required|already authenticated|NOAUTH",
        'the server wants a password: "redis://:PASSWORD@host:6379/0" as LOCATION',
    ),
    (
        r"(Hostname|IP address) mismatch|doesn't match",
        "the server's certificate is for another name: connect by a name that it has",
    ),
    (r"certificate has expired", "renew the server's certificate"),
    (r"certificate is not yet valid", "look at the clocks of both hosts"),
    (
        r"self.signed certificate|unable to get local issuer|CERTIFICATE_VERIFY_FAILED",
        "this host does not trust the server's certificate: give the file of its authority as "
        "ssl_ca_certs",
    ),
    (
        r"certificate.required|handshake.failure",
        "the server wants a client's certificate: give ssl_certfile and ssl_keyfile",
    ),
    (
        r"WRONG_VERSION_NUMBER|wrong version number|record layer failure|packet length too long",
        "this port does not speak TLS: use redis:// instead of rediss://, or the port for TLS",
    ),
    (
        r"protected mode",
        "the server takes connections from its own host only: give it a password, or bind and "
        "protected-mode no",
    ),
    (
        r"HELLO|NOPROTO",  # redis-py 8 begins with it.
        'this service has no RESP3: add "protocol": 2 to CONNECTION_POOL_KWARGS in OPTIONS',
    ),
    (
        r"unknown command|unsupported command",
        "this service has no such command; locks need scripts, and blocking pops to wait",
    ),
)

_RUN = r"permissions to run the '([^']+)'"
#: Before Redis 7 there is only the script, as f_HASH, and the line.
_LINE = r"([0-9a-f]{40})\b.*?@user_script:(\d+)"
_COMMAND = r"redis\.p?call\('(\w+)'|(?:read|put|text)\((?:'[a-z]+', )?'([A-Z]+)'"


def explained(error: BaseException) -> str:
    """``error`` as people read it, with what to do about it, as far as that is known."""
    text = str(error)
    if isinstance(error, MovedError):  # redis-py's text is the slot and an address.
        return (
            f"MOVED {text} (the server is one of a cluster: use CLIENT_CLASS "
            '"django_redis_lock.clients.ClusterClient")'
        )
    if code := refusal(error):
        name = "" if f"{code} " in f"{text} " else f"{code} "
        return f"{name}{text} ({PASSING[code]})"
    hint = hint_for(text)
    return f"{text} ({hint})" if hint else text


def hint_for(text: str) -> str:
    """What to do about an error with this text; empty if that is not known."""
    return next((hint for kind, hint in HINTS if re.search(kind, text, re.IGNORECASE)), "")


def name_missing_right(error: BaseException) -> None:
    """Let an error about rights, or a command that was disabled, say which; in a script, Redis says
    its hash."""
    text = str(error)
    if "permissions to" in text or "user executing the script" in text:
        commands = re.findall(_RUN, text)
        if not commands and "command or" in text:
            commands = _commands_in(text)
        what = "access one of the keys or channels that this needs"
        if "run" in text.partition("permissions to")[2] or "command or" in text:
            what = f"run {' or '.join(commands).upper() or 'a command that this needs'}"
        error.args = (f"the Redis user may not {what}: see manage.py locks doctor",)
    elif "Unknown Redis command" in text and (commands := _commands_in(text)):
        error.args = (f"unknown command {' or '.join(commands)}: the server may have it disabled",)


def _commands_in(text: str) -> list[str]:
    """Those that the line of a script calls which an error with this ``text`` is about."""
    if not (line := re.search(_LINE, text)):
        return []
    script = Script.sent.get(line[1])
    lines = script.source.splitlines() if script else []
    calls = re.findall(_COMMAND, lines[int(line[2]) - 1]) if int(line[2]) <= len(lines) else []
    return list(dict.fromkeys("".join(names) for names in calls))

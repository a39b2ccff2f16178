"""The same as ``commands.OwnConnections`` through redis-py: for tools that observe its clients, on
a client that the caller gives, and for clusters. Loaded when it is used."""

from __future__ import annotations

from collections.abc import Mapping

from redis.exceptions import NoScriptError

from ..protocol import Call, Reply, Script
from ..singleflight import own_flights
from ..transport import is_cluster, run_all
from .commands import Batch, Commands, Delete, Write


class FlightEnding(Commands):
    """A redis-py client, or pipeline, whose writes end the flights of the keys they write: each is
    one script."""

    def __init__(self, client: object) -> None:
        super().__init__(client)
        #: The scripts whose source a pipeline has sent before its next command.
        self._sent: set[Script] = set()

    def eval(self, script: str, numkeys: int, name: str, *args: object) -> Reply:
        call = self._counting(script, name, args)
        return self.client.eval(call.script.source, 2, *call.keys, *call.args)

    def pipeline(self, *args: object, **kwargs: object) -> FlightEnding | Batch:
        return FlightEnding(self.client.pipeline(*args, **kwargs))

    def _keep(self, command: str, name: str, *time: object) -> Reply:
        own_flights((self._key(name),))
        return getattr(self.client, command)(name, *time)

    def _write(self, write: Write, own: Mapping[bytes, bytes]) -> Reply:
        return self._run(write.call(own))

    def _run(self, call: Call) -> Reply:
        # Named methods, because some tools see only those.
        evalsha, evaluate = self.client.evalsha, self.client.eval
        # Bytes for the same reason as in ``pack_words``.
        args = (a if isinstance(a, bytes) else str(a).encode() for a in call.args)
        parts = (b"%d" % len(call.keys), *call.keys, *args)
        stack = getattr(self.client, "command_stack", None)
        if stack is not None:  # A pipeline cannot react to NOSCRIPT: send the source first.
            if not stack:
                self._sent.clear()
            if call.script in self._sent:
                return evalsha(call.script.sha, *parts)
            self._sent.add(call.script)
            return evaluate(call.script.source, *parts)
        try:
            return evalsha(call.script.sha, *parts)
        except NoScriptError:
            return evaluate(call.script.source, *parts)


class ClusterFlightEnding(FlightEnding):
    """For a cluster: a command with several keys goes to the node of each."""

    def _write(self, write: Write, own: Mapping[bytes, bytes]) -> Reply:
        if len(write.keys) == 1:
            return super()._write(write, own)
        calls = [Delete((key,)).call(own) for key in write.keys]
        return sum(map(int, run_all(self.client, calls))) if calls else 0

    def pipeline(self, *args: object, **kwargs: object) -> Batch:
        return Batch(self.client)


def flight_ending(client: object) -> FlightEnding:
    return (ClusterFlightEnding if is_cluster(client) else FlightEnding)(client)

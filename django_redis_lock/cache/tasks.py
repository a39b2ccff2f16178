"""Django's asynchronous methods: what django-redis's methods do for threads, on the connection that
the tasks of an event loop share. Loaded when the first of them is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError

from ..protocol import Call
from ..transport import aexchange, arun, arun_all, is_observed, pack
from .commands import FlightEnding, Seen, Write, in_transaction, look_at_flights, outcomes

if TYPE_CHECKING:
    pass


class TaskCommands(FlightEnding):
    """As ``OwnConnections``, for the ``redis.asyncio`` client of a loop: while a tool observes
    that, it sends all. Other commands reach the same connection by the client itself."""

    async def eval(self, script: str, numkeys: int, name: str, *args: Any) -> Any:
        call = self._counting(script, name, args)
        if is_observed(self.client):
            return await self.client.eval(call.script.source, 2, *call.keys, *call.args)
        try:
            return await aexchange(self.client, pack(call), again=False)
        except NoScriptError:
            return await aexchange(self.client, pack(call, known=False), again=False)

    async def set_many(self, writes: Mapping[str, Any], px: int | None) -> None:
        if is_observed(self.client):
            async with self.client.pipeline() as pipeline:
                batch = FlightEnding(pipeline)
                for name, value in writes.items():
                    batch.delete(name) if _is_over(px) else batch.set(name, value, px=px)
                await pipeline.execute()
            return
        batch = Batch(self.client)
        for name, value in writes.items():
            batch.delete(name) if _is_over(px) else batch.set(name, value, px=px)
        replies = await aexchange(self.client, *in_transaction(batch.writes))
        done, tokens = outcomes(replies)
        await self._end(Seen(batch.writes, done, tokens, batch.own))

    async def _write(self, write: Write, own: Mapping[bytes, bytes]) -> Any:
        if is_observed(self.client):
            return await self._run(write.call(own))
        command, again = write.packed() + look_at_flights(write.keys), write.may_run_twice
        reply, tokens = await aexchange(self.client, command, 2, again=again)
        if tokens is not None:
            await self._end(Seen([write], [reply], tokens, own))
        return reply

    async def _end(self, seen: Seen) -> None:
        if seen and (again := seen.again(await arun_all(self.client, seen.end()))):
            await arun_all(self.client, again)

    async def _run(self, call: Call) -> Any:
        if not is_observed(self.client):
            return (await arun(self.client, call)).value
        try:
            return await super()._run(call)
        except NoScriptError:
            words = (len(call.keys), *call.keys, *call.args)
            return await self.client.eval(call.script.source, *words)

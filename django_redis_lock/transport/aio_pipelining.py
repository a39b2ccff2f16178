"""What the tasks of an event loop ask Redis for at the same time is sent together, as one pipeline:
a thousand tasks need a few connections, and a fraction of the round trips."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

#: How many pipelines of one event loop may be on their way to a server. Later requests leave with
#: the next.
MAX_PIPELINES = 4


class _Command(NamedTuple):
    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    reply: asyncio.Future[Any]


class _Queue:
    """The commands of one event loop that have not been sent, and the tasks that send them."""

    def __init__(self) -> None:
        self.commands: list[_Command] = []
        self.senders: set[asyncio.Task[None]] = set()


_queues: WeakKeyDictionary[Any, _Queue] = WeakKeyDictionary()


async def command(client: Any, method: str, *args: Any, **options: Any) -> Any:
    """The reply to a command, sent with those of other tasks.

    Args:
        client: the running loop's ``redis.asyncio.Redis``.
        method: the name of its method for that command.

    Raises:
        redis.exceptions.RedisError: as that method. A connection that breaks fails all commands
            that were sent together.
    """
    queue = _queues.get(client)
    if queue is None:
        queue = _queues[client] = _Queue()
    reply = asyncio.get_running_loop().create_future()
    queue.commands.append(_Command(method, args, options, reply))
    # The first one starts a sender, which takes what has come until it begins. If all senders are
    # busy, each looks here when it is done.
    if len(queue.commands) == 1 and len(queue.senders) < MAX_PIPELINES:
        sender = asyncio.ensure_future(_send(client, queue))
        queue.senders.add(sender)
        sender.add_done_callback(queue.senders.discard)
    return await reply


async def _send(client: Any, queue: _Queue) -> None:
    while queue.commands:
        commands, queue.commands = queue.commands, []
        try:
            replies = await _replies(client, commands)
        except Exception as error:
            replies = [error] * len(commands)
        except BaseException as error:  # The loop ends, for instance.
            unsent, queue.commands = queue.commands, []
            for each in commands + unsent:
                _answer(each.reply, error)
            raise
        for each, reply in zip(commands, replies, strict=True):
            _answer(each.reply, reply)


def _answer(future: asyncio.Future[Any], reply: Any) -> None:
    if future.done():  # Its task was cancelled.
        return
    if isinstance(reply, asyncio.CancelledError):
        future.cancel()
    elif isinstance(reply, BaseException):
        future.set_exception(reply)
    else:
        future.set_result(reply)


async def _replies(client: Any, commands: list[_Command]) -> list[Any]:
    if len(commands) == 1:
        [(method, args, options, _)] = commands
        return [await getattr(client, method)(*args, **options)]
    pipeline = client.pipeline(transaction=False)
    for method, args, options, _ in commands:
        getattr(pipeline, method)(*args, **options)
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    return replies

"""A TCP proxy in front of the server that makes the link slow, breaks it, or lets it go silent.

It runs an asyncio loop in a thread of its own; tests set its fields at any time:

* `delay_s`: time that each piece takes from the client to the server;
* `reset_share`: the share of requests (client to server, after an answer) that are answered by a reset (RST)
  instead, by turns before the server saw it and after, so that requests get lost, and answers;
* `silent`: connections stay open and carry nothing (half-open); bytes that arrive meanwhile are lost.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_PIECE_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of zero seconds: close sends RST


class Proxy:
    """Listens on a free port of 127.0.0.1 and forwards to a unix socket."""

    def __init__(self, server_socket: Path, rng: random.Random) -> None:
        self.delay_s = 0.0
        self.reset_share = 0.0
        self.silent = False
        self.resets = 0
        self.connections = 0
        self._rng = rng
        self._server_socket = server_socket
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._listener = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(20)

    @property
    def url(self) -> str:
        """Where clients connect; their calls give up after 5 s."""
        port = self._listener.sockets[0].getsockname()[1]
        return f"redis://127.0.0.1:{port}/0?socket_timeout=5"

    def draw_reset(self) -> bool:
        """Whether the next request gets a reset."""
        reset = self._rng.random() < self.reset_share
        self.resets += reset
        return reset

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        link = _Link(self, reader, writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            link.up_reader, link.up_writer = await asyncio.open_unix_connection(str(self._server_socket))
            tasks = [asyncio.ensure_future(one) for one in (link.requests(), link.deliver(), link.answers())]
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            link.up_writer.close()
        writer.close()

    def close(self) -> None:
        """Stop listening and end every connection."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _end(self) -> None:
        self._listener.close()
        own = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class _Link:
    """One client's connection and ours to the server."""

    up_reader: asyncio.StreamReader
    up_writer: asyncio.StreamWriter

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._answered = True
        self._reset_after = False

    async def requests(self) -> None:
        """Read pieces from the client; each is due after the delay."""
        proxy = self._proxy
        while data := await self._reader.read(_PIECE_BYTES):
            if proxy.silent:
                continue
            if self._answered:
                self._answered = False
                if proxy.draw_reset():
                    if proxy.resets % 2:
                        self._reset()
                        return
                    self._reset_after = True
            self._queue.put_nowait((asyncio.get_running_loop().time() + proxy.delay_s, data))

    async def deliver(self) -> None:
        """Hand pieces to the server when they are due."""
        loop = asyncio.get_running_loop()
        while True:
            due, data = await self._queue.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            self.up_writer.write(data)
            await self.up_writer.drain()

    async def answers(self) -> None:
        """Hand answers to the client, at once."""
        while data := await self.up_reader.read(_PIECE_BYTES):
            if self._reset_after:
                self._reset()
                return
            if not self._proxy.silent:
                self._answered = True
                self._writer.write(data)
                await self._writer.drain()

    def _reset(self) -> None:
        own: socket.socket = self._writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._writer.transport.abort()

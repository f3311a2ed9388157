"""The Redis functions as one library, made of `functions/*.lua`.

The library's name carries the fingerprint of its text, so that processes of two versions may share a server
and each calls what it was written for. Loading is idempotent; the server keeps the library in its own file.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import redis

from rlmq.buffer.keys import RUN_SUFFIXES, TABLE_SUFFIXES

_FOLDER = Path(__file__).parent / "functions"
_FILES = ("table", "runs", "rows", "wake", "put", "claim", "finish", "admin", "calls")  # each uses those before it
_REGISTER = """
-- Arguments come as one msgpack array: no number is parsed from text, and one argument costs less than many.
local function register(name, callback, flag)
  local function call(keys, args) return callback(keys, cmsgpack.unpack(args[1])) end
  redis.register_function{function_name = LIBRARY .. '_' .. name, callback = call, flags = {flag}}
end
"""


@functools.cache
def library_name() -> str:
    """`rlmq_` and 12 hex digits of the text's hash."""
    return f"rlmq_{hashlib.sha256(_body().encode()).hexdigest()[:12]}"


def function_name(verb: str) -> str:
    """Name under which the server knows a verb of this library."""
    return f"{library_name()}_{verb}"


def library_text() -> str:
    """What `FUNCTION LOAD` gets."""
    return f"#!lua name={library_name()}\nlocal LIBRARY = '{library_name()}'\n{_body()}"


@functools.cache
def _body() -> str:
    suffixes = ", ".join(f"{name} = '{suffix}'" for name, suffix in sorted((TABLE_SUFFIXES | RUN_SUFFIXES).items()))
    texts = [(_FOLDER / f"{name}.lua").read_text(encoding="utf-8") for name in _FILES]
    return f"local KEY = {{{suffixes}}}\n{_REGISTER}\n" + "\n".join(texts)


def load(client: redis.Redis) -> None:
    """Load the library unless the server has it. Raises redis errors as they come."""
    if client.function_list(library=library_name()):  # LOAD is refused at the memory limit, this is not
        return
    try:
        client.function_load(library_text())
    except redis.ResponseError as error:
        if "already exists" not in str(error):
            raise

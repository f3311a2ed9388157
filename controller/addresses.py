"""`addresses.json`: where the run's server and controller are, and the mark by which the server knows the run.

A server that the user runs may serve several run folders, and keep the records of a run whose folder was
removed. The mark (`home`) makes sure that records under a run's id are this folder's.
"""

from __future__ import annotations

import json
import socket
import uuid
from typing import Any

import redis

from rlmq.buffer.keys import RUN_SUFFIXES, run_prefix
from rlmq.common.errors import DecodeError, DependencyError, UsageError
from rlmq.common.private_files import write_private
from rlmq.common.recipe.schema import ControlBlock, Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.runs import unusable

_WILDCARDS = ("*", "0.0.0.0", "[::]")


def server_url(recipe: Recipe, run: RunFolder) -> str:
    """The URL of the run's server: the recipe's, else the one that `rlmq up` started.

    Raises:
        DependencyError: the run has no server. DecodeError: `addresses.json` is damaged.
    """
    return recipe.redis.url if recipe.redis.url is not None else str(_read(run)["redis"])


def control_of(recipe: Recipe, run: RunFolder) -> ControlBlock:
    """How to reach the run's controller: by the name of its machine, where it listens on every address.

    Raises:
        DependencyError: the run has no addresses. DecodeError: `addresses.json` is damaged.
    """
    control = recipe.control
    if control.place[0] not in _WILDCARDS:
        return control
    return control.model_copy(update={"address": _read(run).get("control", control.address)})


def write_addresses(run: RunFolder, url: str, control: ControlBlock | None = None) -> None:
    """Write `addresses.json`; a run keeps the mark that it has."""
    home = str(_read(run).get("home", "")) if run.addresses.is_file() else ""
    addresses = {"redis": url, "home": home or uuid.uuid4().hex}
    if control is not None and control.address is not None:
        host, port = control.place
        addresses["control"] = f"tcp://{socket.gethostname() if host in _WILDCARDS else host}:{port}"
    with unusable(run.path):
        write_private(run.addresses, json.dumps(addresses).encode() + b"\n")


def claim_home(run: RunFolder, url: str) -> None:
    """Leave the run's mark on the user's server, or find it there.

    Raises:
        UsageError: the server holds records of another run under this id.
        DependencyError: the server does not answer.
    """
    mine = str(_read(run).get("home", ""))
    key = run_prefix(run.run_id) + RUN_SUFFIXES["home"]
    try:
        with redis.Redis.from_url(url, decode_responses=True) as client:
            client.set(key, mine, nx=True)
            theirs = client.get(key)
    except redis.RedisError as error:
        raise DependencyError("redis.url", got=str(error), expected="a server that takes writes") from error
    if theirs != mine:
        raise UsageError(
            f"redis.url and run {run.run_id}",
            got="records of another run with this id on the server (from another or a removed run folder)",
            expected="an id that is free there",
            remedy="Start with --fresh, which takes the next id, or give the run another run.name",
        )


def _read(run: RunFolder) -> dict[str, Any]:
    try:
        found = json.loads(run.addresses.read_text())
    except FileNotFoundError as error:
        raise DependencyError(
            f"run {run.run_id}", got="no server address", remedy="Start it with `rlmq up`, or set redis.url"
        ) from error
    except ValueError as error:
        raise DecodeError(str(run.addresses), got=str(error), expected='{"redis": URL}') from error
    if not isinstance(found, dict) or not isinstance(found.get("redis"), str):
        raise DecodeError(str(run.addresses), got=str(found)[:80], expected='{"redis": URL}')
    return found

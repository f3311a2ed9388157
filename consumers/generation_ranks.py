"""One generation engine on several ranks: the first of them is asked, all make the same calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rlmq.common.engines.generation import Generated, GenerationEngine, Request
from rlmq.consumers.mesh import Mesh

_STEP, _END = b"step", b"end"
_Call = tuple[str, Any]


class LeadingEngine:
    """The engine of a replica's first rank: what it is asked to do, the other ranks do too (see `follow`).

    Only `submit`, `step` and `abort` and what tells of the engine's state: weights come from the training.

    Args:
        engine: this rank's part.
        ranks: of the replica; this one is the first.
    """

    def __init__(self, engine: GenerationEngine, ranks: Mesh) -> None:
        self._engine = engine
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        """State, version, pending, layout: this rank's are those of all."""
        return getattr(self._engine, name)

    def submit(self, requests: Sequence[Request]) -> None:
        """See `GenerationEngine`."""
        self._ranks.broadcast(msgspec.msgpack.encode(("submit", requests)))
        self._engine.submit(requests)

    def step(self) -> list[Generated]:
        """See `GenerationEngine`."""
        self._ranks.broadcast(_STEP)
        return self._engine.step()

    def abort(self, ids: Sequence[str]) -> list[Generated]:
        """See `GenerationEngine`."""
        self._ranks.broadcast(msgspec.msgpack.encode(("abort", ids)))
        return self._engine.abort(ids)

    def end(self) -> None:
        """The other ranks return from `follow`."""
        self._ranks.broadcast(_END)


def follow(engine: GenerationEngine, ranks: Mesh, progress: Callable[[], object]) -> None:
    """Make the calls of the replica's first rank, until it ends.

    Args:
        progress: called after each.

    Raises:
        RestartRequired: it died or was silent for too long.
    """
    while (word := ranks.broadcast(b"")) != _END:
        progress()
        if word == _STEP:
            engine.step()
            continue
        method, given = msgspec.msgpack.decode(word, type=_Call)
        if method == "submit":
            engine.submit(msgspec.convert(given, list[Request]))
        else:
            engine.abort(given)

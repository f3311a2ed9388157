"""Who acts on the buffer, and what they remember."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import redis
from model.model import Row
from model.tables import batch_of

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Claim, Facts


class Worker:
    """A store whose link can lose a reply: the call was made, and the store makes it again."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store
        self.lost = 0
        self._loses = False
        self._send = store._link._round_trip
        store._link._round_trip = self._round_trip

    def lose_next_reply(self) -> None:
        self._loses = True

    def _round_trip(self, commands: Sequence[Any]) -> list[Any]:
        replies = self._send(commands)
        if self._loses:
            self._loses = False
            self.lost += 1
            raise redis.ConnectionError("the reply was lost")
        return replies


@dataclass
class Put:
    """The arguments of a put, to be given more than once."""

    producer: str
    sequence: int
    columns: dict[str, list[int]]
    group_size: int
    facts: Facts = field(default_factory=Facts)
    closes: bool = False

    @property
    def chunk(self) -> str:
        return f"{self.producer}.{self.sequence}"

    def into(self, store: RedisStore) -> bool:
        return store.put(
            "train",
            batch_of(self.columns),
            producer=self.producer,
            sequence=self.sequence,
            group_size=self.group_size,
            facts=self.facts,
            closes=self.closes,
        )


class Held:
    """A claim as its worker remembers it, also when its lease is over."""

    def __init__(self, claim: Claim, rows: list[Row], worker: Worker) -> None:
        self.claim, self.rows, self.worker = claim, rows, worker

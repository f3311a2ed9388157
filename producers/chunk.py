"""A claimed chunk of prompts on its way: its rows' episodes, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlmq.buffer.store import Claim
from rlmq.common.engines.generation import Generated, Request
from rlmq.producers.episodes import Answers, Episode


class Chunk:
    """Which requests of which rows are with the engine.

    Args:
        claim: the rows.
        episodes: one per row, in the claim's order.
        answers: the environment's part.
        together: rows take their turns together, so that what is generated side by side does not depend on timing.
    """

    def __init__(self, claim: Claim, episodes: Sequence[Episode], answers: Answers, *, together: bool) -> None:
        self.claim = claim
        self.episodes = {episode.id: episode for episode in episodes}
        self.began = time.monotonic()
        self._answers = answers
        self._together = together
        self._written = {episode.next_request().id: episode for episode in episodes}
        self._turns: dict[str, Generated] = {}

    @property
    def requests(self) -> list[str]:
        """Ids of the requests that the engine has."""
        return [name for name in self._written if name not in self._turns]

    @property
    def done(self) -> bool:
        """Whether every response has ended."""
        return not self._written

    def first(self) -> list[Request]:
        """The first turn of each row."""
        return [episode.next_request() for episode in self._written.values()]

    def interrupt(self, parts: Sequence[Generated]) -> None:
        """Keep what there is of the turns that the engine was taken; `first` has their rest then."""
        for part in parts:
            episode = self._written.pop(part.id)
            episode.add_part(part)
            self._written[episode.next_request().id] = episode

    def take(self, turns: Sequence[Generated]) -> list[Request]:
        """Take in what the engine has finished (of any chunk); returns the requests that follow from it.

        Raises:
            UsageError: the user's environment raised, or gave no text.
        """
        self._turns.update((turn.id, turn) for turn in turns if turn.id in self._written)
        if not self._turns or (self._together and len(self._turns) < len(self._written)):
            return []
        ended, self._turns = self._turns, {}
        rows = [(self._written.pop(name), turn) for name, turn in sorted(ended.items(), key=self._place)]
        for episode, turn in rows:
            episode.add(turn)
        following = [episode for episode, turn in rows if self._answers.goes_on(episode, turn)]
        requests = [episode.next_request() for episode in following]
        self._written.update(zip((request.id for request in requests), following, strict=True))
        return requests

    def _place(self, turn: tuple[str, Generated]) -> int:
        """Place of the turn's row in the chunk, whichever turn ended first."""
        return list(self._written).index(turn[0])

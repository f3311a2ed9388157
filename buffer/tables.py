"""The two sample tables of a run and their stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rlmq.buffer.store import Stage, Table
from rlmq.common.columns import Column

TRAIN = "train"
EVAL = "eval"

_LEASE_S = 60.0


@dataclass(frozen=True, slots=True)
class StageOptions:
    """What a recipe says of a scoring stage; see `Stage`."""

    min_batch: int = 1
    max_wait_s: float | None = None
    lease_s: float = _LEASE_S
    max_deliveries: int = 3


_DEFAULT = StageOptions()


def sample_tables(
    columns: Sequence[Column],
    *,
    actor_needs: Sequence[str],
    reference: bool,
    capacity_rows: int,
    reward_options: StageOptions = _DEFAULT,
    reference_options: StageOptions = _DEFAULT,
) -> tuple[Table, Table]:
    """The `train` and the `eval` table.

    Args:
        columns: columns of a sample (`rlmq.common.columns.sample_columns`).
        actor_needs: columns without which the algorithm cannot train on a row.
        reference: whether a reference policy scores the rows of `train`.
        capacity_rows: live rows beyond which producers wait, per table.
        reward_options: of the stage `reward`, in both tables.
        reference_options: of the stage `reference`.
    """
    rollout = Stage("rollout", needs=("prompt_ids",), scope="chunk", lease_s=_LEASE_S)
    reward = Stage("reward", needs=("response_text",), **asdict(reward_options))
    scored = Stage("reference", needs=("response_ids",), **asdict(reference_options))
    actor = Stage("actor", needs=tuple(actor_needs), scope="batch", lease_s=_LEASE_S)
    recorder = Stage("recorder", needs=(), scope="row", lease_s=_LEASE_S, ended=True)
    evaluation = Stage("evaluation", needs=("reward",), scope="row", lease_s=_LEASE_S)
    train_stages = (rollout, reward, *((scored,) if reference else ()), actor, recorder)
    return (
        Table(TRAIN, tuple(columns), train_stages, capacity_rows),
        Table(EVAL, tuple(columns), (rollout, reward, evaluation), capacity_rows),
    )

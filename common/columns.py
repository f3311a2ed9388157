"""Columns of the sample tables: names, Arrow types, and who writes them.

Names are the field's usual ones. Tokens are int32, log-probs float32, rewards float64 (group statistics
in the type that a reward function happened to return are a known source of wrong advantages).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Column:
    """One typed column and the role that writes it (`prompts` columns come with the put)."""

    name: str
    type: pa.DataType
    writer: str


_TOKENS = pa.list_(pa.field("item", pa.int32()))
_FLOATS = pa.list_(pa.field("item", pa.float32()))

PROMPT_COLUMNS: tuple[Column, ...] = (
    Column("sample_id", pa.string(), "prompts"),  # "train-000012-0003-05": table, step, prompt, member
    Column("group_id", pa.string(), "prompts"),  # "train-000012-0003"
    Column("step", pa.int32(), "prompts"),
    Column("source", pa.string(), "prompts"),  # name of the data set ("train", or an evaluation set's name)
    Column("prompt_ids", _TOKENS, "prompts"),
    Column("prompt_text", pa.string(), "prompts"),  # rendered text, special tokens included
    Column("record", pa.string(), "prompts"),  # the user's row as JSON: "prompt" as given, and the other fields
)
ROLLOUT_COLUMNS: tuple[Column, ...] = (
    Column("response_ids", _TOKENS, "rollout"),
    Column("response_text", pa.string(), "rollout"),  # decoded without special tokens
    Column("rollout_logprobs", _FLOATS, "rollout"),  # of the sampled tokens, under the sampling distribution
    Column("loss_mask", pa.list_(pa.field("item", pa.bool_())), "rollout"),
    Column("policy_versions", _TOKENS, "rollout"),  # per response token
    Column("turns", _TOKENS, "rollout"),  # per response token: the number of the turn, from 0
    Column("truncated", pa.bool_(), "rollout"),  # ended by the length limit, not by EOS or a stop
)
DATA_COLUMNS: tuple[Column, ...] = (
    *PROMPT_COLUMNS,
    *(
        replace(column, writer="prompts")
        for column in ROLLOUT_COLUMNS
        if column.name in ("response_ids", "response_text", "loss_mask", "truncated")
    ),
)
"""What comes with the put where the data bring the responses."""
REFERENCE_COLUMNS: tuple[Column, ...] = (Column("ref_logprobs", _FLOATS, "reference"),)


REWARD_FIELDS = "reward_fields"


def reward_columns(names: Iterable[str], *, cost: bool = False) -> tuple[Column, ...]:
    """`reward` (the weighted sum), `cost` (that of costs), one `reward.NAME` per function; null is no verdict.

    `reward_fields`: what functions' dicts had beside their scores, JSON by function and field; null where nothing.
    """
    parts = tuple(Column(f"reward.{name}", pa.float64(), "reward") for name in names)
    sums = ("reward", "cost") if cost else ("reward",)
    return (
        *(Column(name, pa.float64(), "reward") for name in sums),
        *parts,
        Column(REWARD_FIELDS, pa.string(), "reward"),
    )


def critic_columns(names: Iterable[str], critic: str = "critic") -> tuple[Column, ...]:
    """One value per response token for each head of a critic: `values`, `cost_values`."""
    return tuple(Column(name, _FLOATS, critic) for name in names)


LEARNED = "learned_reward"
"""The score of the reward model that the run trains."""
LEARNED_COLUMNS: tuple[Column, ...] = (Column(LEARNED, pa.float64(), "reward_model"),)
GREEDY = "greedy"
"""Name, among the members of its group, of the row that is generated greedily and never trained on."""
KEPT_COLUMNS: tuple[Column, ...] = (Column("kept", pa.bool_(), "kept"),)
"""Written last, where groups are judged: without it no row is trained on."""


def is_greedy(sample_id: str) -> bool:
    """Whether this is the greedy row of its group."""
    return sample_id.endswith(f"-{GREEDY}")


def group_columns(names: Iterable[str]) -> tuple[Column, ...]:
    """What an algorithm makes of whole groups: the same number in each row."""
    return tuple(Column(name, pa.float64(), "groups") for name in names)


def actor_columns(critics: Iterable[str] = ()) -> tuple[Column, ...]:
    """`advantages`, and for each head of the critic what it shall learn: `returns`, `cost_returns`."""
    returns = tuple(Column(returns_column(name), _FLOATS, "actor") for name in critics)
    return (Column("advantages", _FLOATS, "actor"), *returns)


def returns_column(critic: str) -> str:
    """`values` -> `returns`, `cost_values` -> `cost_returns`."""
    return critic.removesuffix("values") + "returns"


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """The Arrow schema of these columns, in order."""
    return pa.schema([pa.field(c.name, c.type) for c in columns])


def fingerprint(columns: Iterable[Column]) -> str:
    """16 hex digits that change with any name, type, writer or order of the columns."""
    text = "\n".join(f"{c.name}:{c.type}:{c.writer}" for c in columns)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without(values: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    """The values of a column, none for these rows."""
    gone = set(rows)
    return [None if index in gone else value for index, value in enumerate(values)]

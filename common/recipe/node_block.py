"""The items of the recipe's `nodes` list: the user's own stages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlmq.common.layouts.layout import MeshShape
from rlmq.common.recipe.block import PositiveInt
from rlmq.common.recipe.reward_block import RewardBlock
from rlmq.common.recipe.stage_block import StageBlock

ColumnKind = Literal["bool", "int", "float", "str", "list[int]", "list[float]", "tensor"]


class NodeBlock(StageBlock):
    """A node of the dataflow, with workers of its own."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="Its stage, its role and its processes: NAME-0.")
    function: str | None = Field(
        default=None,
        description="file.py:function of rows (with a model: of model and rows), file.py:Class that is made once "
        "and called with rows, or is a whole role, or file.py:FLOW that has the node.",
    )
    scorer: RewardBlock | None = Field(
        default=None,
        description="In the place of a function: an item as in `reward`, in a role of its own; its values are the "
        "node's one column.",
    )
    reads: tuple[str, ...] = Field(
        default=("response_text",),
        min_length=1,
        description="Columns that it waits for; the function sees no other.",
    )
    writes: dict[str, ColumnKind] = Field(min_length=1, description="Columns that it returns, and their types.")
    keep: str | None = Field(
        default=None, description="A bool column that it writes: rows where it is false end here, as filtered."
    )
    reason: str = Field(default="not_kept", pattern=r"^\w+$", description="Why those rows were filtered.")
    before: tuple[str, ...] = Field(
        default=(), description="Stages that wait for it although they read none of its columns."
    )
    model: str | None = Field(
        default=None, description="Hugging Face folder or hub id, built in the node's worker."
    )
    scope: Literal["row", "group"] = Field(default="row", description="What a claim never splits.")
    workers: PositiveInt = Field(default=1, description="Processes of this node.")
    threads: PositiveInt | None = Field(
        default=None, description="Compute threads per process; none: all cores with a model, else 1."
    )
    max_rows: PositiveInt = Field(
        default=64,
        description="Most rows that the function gets at once; with `method`, in a micro-batch of a rank.",
    )
    method: str | None = Field(
        default=None,
        description="A method of the class, with @rlmq.register: the workers are ranks of one mesh that the "
        "controller calls; the transfer protocol deals the rows.",
    )
    pp: PositiveInt = Field(default=1, description="Pipeline stages of that mesh.")
    tp: PositiveInt = Field(default=1, description="Tensor ranks of each stage.")
    cuts: dict[str, int] = Field(
        default_factory=dict,
        description="Dimension along which tensor ranks hold, or want, a column of type tensor; else it is whole.",
    )

    @property
    def mesh(self) -> MeshShape:
        """The ranks, where there is a `method`."""
        return MeshShape(self.pp, self.tp, self.workers // (self.pp * self.tp))

    @model_validator(mode="after")
    def _one_kind(self) -> NodeBlock:
        if (self.function is None) == (self.scorer is None):
            raise ValueError("exactly one of function and scorer")
        if self.scorer is None:
            return self
        if list(self.writes.values()) != ["float"] or self.scorer.column is not None or self.model is not None:
            raise ValueError("one float column in writes, and no model or column, with a scorer")
        plain = RewardBlock(column="x")
        names = ("weight", "objective", "ensemble", "name")
        of_sum = [name for name in names if getattr(self.scorer, name) != getattr(plain, name)]
        if of_sum:
            raise ValueError(f"scorer: no {of_sum[0]}; the item `column` of reward has it")
        return self

    @model_validator(mode="after")
    def _ranks_of_a_mesh(self) -> NodeBlock:
        if self.method is None:
            if (self.pp, self.tp, self.cuts) != (1, 1, {}) or "tensor" in self.writes.values():
                raise ValueError("method with pp, tp, cuts or a column of type tensor")
        elif self.function is None or self.model is not None:
            raise ValueError("function file.py:Class, and no model, with method")
        if self.workers % (self.pp * self.tp):
            raise ValueError(f"workers: a multiple of pp · tp = {self.pp * self.tp}, not {self.workers}")
        return self

    @model_validator(mode="after")
    def _kept_by_bool(self) -> NodeBlock:
        if self.keep is not None and self.writes.get(self.keep) != "bool":
            raise ValueError(f"keep: a bool column of writes, not {self.keep!r}")
        return self

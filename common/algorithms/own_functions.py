"""The user's own advantage, loss and loop in the place of an algorithm's, checked for what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rlmq.common.algorithms.algorithm import Algorithm, Estimates, Floats, ScoredBatch, Steering
from rlmq.common.errors import RlmqError, UsageError
from rlmq.common.user_code import load_function, source_file, user_error

if TYPE_CHECKING:
    import torch

    from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput
    from rlmq.common.recipe.algorithm_block import AlgorithmBlock
    from rlmq.common.recipe.schema import Recipe


def with_own_functions(algorithm: Algorithm, block: AlgorithmBlock, folder: Path) -> Algorithm:
    """The algorithm, with what the recipe names in the place of its parts. A file is imported when it is needed."""
    if block.advantage is None and block.loss is None and block.loop is None:
        return algorithm
    return cast("Algorithm", OwnFunctions(algorithm, block, folder))


class OwnFunctions:
    """Everything that is not the user's is the algorithm's."""

    def __init__(self, algorithm: Algorithm, block: AlgorithmBlock, folder: Path) -> None:
        self._inner = algorithm
        self._block = block
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def estimate(self, batch: ScoredBatch) -> Estimates:
        """The algorithm's, with the user's advantages; what a critic learns stays the algorithm's."""
        if self._block.advantage is None:
            return self._inner.estimate(batch)
        made = self._advantage(batch)
        advantages = _checked_advantages(made, batch, f"algorithm.advantage ({self._block.advantage})")
        return replace(self._inner.estimate(batch), advantages=advantages)

    def loss(self, output: PolicyOutput, batch: MicroBatch, state: Mapping[str, float]) -> LossTerms:
        """The user's loss of each token [rows, R], summed as `loss_agg` says; figures are the algorithm's."""
        if self._block.loss is None:
            return self._inner.loss(output, batch, state)
        import torch

        from rlmq.common.engines.training import LossTerms

        mask = batch.response_mask > 0
        made = self._loss(output, batch)
        per_token = _checked_loss(made, mask, f"algorithm.loss ({self._block.loss})")
        with torch.no_grad():
            figures = dict(self._inner.loss(output, batch, state).metric_sums)
        loss_sum = self._inner.aggregate(torch.where(mask, per_token, 0.0), mask)
        return LossTerms(loss_sum, {**figures, "loss": loss_sum.detach()})

    def loop(self, run: Steering) -> None:
        """The user's loop, or the algorithm's."""
        if self._block.loop is None:
            self._inner.loop(run)
        else:
            self._loop(run)

    @cached_property
    def _advantage(self) -> Callable[..., Any]:
        return self._guarded("advantage", self._block.advantage, 1)

    @cached_property
    def _loss(self) -> Callable[..., Any]:
        return self._guarded("loss", self._block.loss, 2)

    @cached_property
    def _loop(self) -> Callable[..., Any]:
        assert self._block.loop is not None
        return _takes(load_function(self._block.loop, self._folder, subject="algorithm.loop"), "loop", 1)

    def _guarded(self, key: str, spec: str | None, arguments: int) -> Callable[..., Any]:
        """The function; what it raises is told with the place in the user's file."""
        assert spec is not None
        subject = f"algorithm.{key}"
        function = _takes(load_function(spec, self._folder, subject=subject), key, arguments)
        path = source_file(spec, self._folder, subject=subject)

        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except RlmqError:
                raise
            except Exception as error:  # whatever the user's function does
                raise user_error(error, path, subject=f"{subject} ({spec})") from error

        return call

    def trial(self, recipe: Recipe) -> Iterator[RlmqError]:
        """Each of the user's functions, tried on a few made-up rows; a loop is only loaded."""
        from rlmq.common.algorithms.trial import trial_batch, trial_rows

        def loaded() -> None:
            if self._block.loop is not None:
                _ = self._loop

        def estimated() -> None:
            if self._block.advantage is not None:
                self.estimate(trial_rows(self._inner, recipe))

        def lost() -> None:
            if self._block.loss is not None:
                output, batch = trial_batch(self._inner)
                self.loss(output, batch, {}).loss_sum.backward()
                _checked_gradient(output.logprobs.grad, f"algorithm.loss ({self._block.loss})")

        for part in (loaded, estimated, lost):
            try:
                part()
            except RlmqError as error:
                yield error


def _takes(function: Callable[..., Any], key: str, arguments: int) -> Callable[..., Any]:
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError as error:
        names = {"advantage": "batch", "loss": "output, batch", "loop": "run"}[key]
        raise UsageError(
            f"algorithm.{key}", got=f"a function with {error}", expected=f"{function.__name__}({names})"
        ) from error
    return function


def _checked_advantages(made: Any, batch: ScoredBatch, subject: str) -> list[Floats]:
    """Per row [tokens]; one number a row counts for each of its tokens."""
    rows = len(batch.masks)
    if not isinstance(made, Sequence | np.ndarray) or len(made) != rows:
        got = f"{len(made)} items" if hasattr(made, "__len__") else f"a {type(made).__name__}"
        raise UsageError(subject, got=got, expected=f"{rows} items, one for each row of the batch")
    found = []
    for row, (one, mask) in enumerate(zip(made, batch.masks, strict=True)):
        try:
            values = np.asarray(one, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{subject}, row {row}", got=repr(one)[:80], expected="numbers") from error
        if values.shape not in ((), mask.shape):
            expected = f"one number, or {len(mask)} numbers, one for each token of the response"
            raise UsageError(f"{subject}, row {row}", got=f"an array of shape {values.shape}", expected=expected)
        spread = np.where(mask, np.broadcast_to(values, mask.shape), 0.0)
        if not np.isfinite(spread).all():
            raise UsageError(f"{subject}, row {row}", got="NaN or infinity", expected="finite numbers")
        found.append(spread)
    return found


def _checked_loss(made: Any, mask: torch.Tensor, subject: str) -> torch.Tensor:
    import torch

    expected = f"a tensor of floats of shape {tuple(mask.shape)}, one number a token"
    if not isinstance(made, torch.Tensor):
        raise UsageError(subject, got=f"a {type(made).__name__}", expected=expected)
    if made.shape != mask.shape or not made.is_floating_point():
        raise UsageError(subject, got=f"{made.dtype} of shape {tuple(made.shape)}", expected=expected)
    if not bool(torch.isfinite(made[mask]).all()):
        raise UsageError(subject, got="NaN or infinity at a token that counts", expected="finite numbers")
    if torch.is_grad_enabled() and mask.any() and not made.requires_grad:
        raise UsageError(subject, got="a tensor without gradient", expected="a function of output.logprobs")
    return made


def _checked_gradient(gradient: torch.Tensor | None, subject: str) -> None:
    import torch

    if gradient is None or not bool(torch.isfinite(gradient).all()):
        raise UsageError(
            subject,
            got="no gradient" if gradient is None else "a gradient with NaN or infinity",
            expected="a finite gradient of output.logprobs",
            remedy="Masked places hold 0: use torch.where(mask, ..., 0.0) before a division or logarithm",
        )

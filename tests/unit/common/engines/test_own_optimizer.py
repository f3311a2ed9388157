"""`train.optimizer`: the user's own, beside a float64 run of the same one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from unit.common.engines.torch_rows import ALGORITHM, LOSS, block, micro_batches, rows_of, tiny_model

from rlmq.common.engines.own_optimizer import own_optimizer
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.errors import IntegrityError, UsageError
from rlmq.common.recipe.schema import TrainBlock

LR = 0.05


def sgd(parameters: Mapping[str, torch.nn.Parameter], train: TrainBlock) -> torch.optim.Optimizer:
    """Momentum, and norms at half the rate."""
    norms = [one for name, one in parameters.items() if "norm" in name]
    others = [one for name, one in parameters.items() if "norm" not in name]
    return torch.optim.SGD([{"params": others}, {"params": norms, "lr": train.lr / 2}], lr=train.lr, momentum=0.9)


def adagrad(parameters: Mapping[str, torch.nn.Parameter], train: TrainBlock) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters.values(), lr=train.lr)


def trained(build: object, steps: int, dtype: str = "float32") -> TorchEngine:
    engine = TorchEngine(tiny_model(), block(lr=LR, dtype=dtype), build=build)  # type: ignore[arg-type]
    step(engine, steps)
    return engine


def step(engine: TorchEngine, steps: int) -> None:
    rows = rows_of(7)
    for _ in range(steps):
        for batch in micro_batches(rows, [range(4), range(4, 7)]):
            engine.accumulate(batch, LOSS)
        engine.step(ALGORITHM.denominators([len(response) for response in rows.responses]))


def test_each_group_keeps_its_share_of_the_rate() -> None:
    # given three steps by hand in float64: v = 0.9 v + g, w -= rate v
    model, rows = copy.deepcopy(tiny_model()).double().eval(), rows_of(7)
    speed = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    counted = sum(len(response) for response in rows.responses)
    for _ in range(3):
        model.zero_grad()
        for prompt, response, advantage in zip(rows.prompts, rows.responses, rows.advantages, strict=True):
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            chosen = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(response)[:, None])
            (chosen.sum() * -advantage / counted).backward()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                speed[name] = 0.9 * speed[name] + weight.grad
                weight.sub_(LR * (0.5 if "norm" in name else 1.0) * speed[name])
    found = dict(trained(sgd, 3).shards())
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(found[name].double(), weight, atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [sgd, adagrad])
def test_training_goes_on_bit_for_bit(build: object, dtype: str) -> None:
    whole, half = trained(build, 3, dtype), trained(build, 2, dtype)
    again = trained(build, 0, dtype)
    weights, state = dict(half.shards()), {name: value.clone() for name, value in half.state().items()}
    with torch.no_grad():
        for name, weight in again.model.state_dict().items():
            weight.copy_(weights[name])
    again.load_state(state)
    step(again, 1)
    found = dict(again.shards())
    assert all(torch.equal(weight, found[name]) for name, weight in whole.shards())
    with pytest.raises(IntegrityError):
        TorchEngine(tiny_model(), block(dtype=dtype)).load_state(state)  # AdamW takes no other's state
    with pytest.raises(IntegrityError, match="got another optimizer's"):
        trained(sgd if build is adagrad else adagrad, 0, dtype).load_state(state)


def test_what_is_no_optimizer_of_all_that_is_trained_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\ndef build(parameters, train):\n    return len(parameters)\n")
    build = own_optimizer("mine.py:build", tmp_path)
    with pytest.raises(UsageError, match=r"train.optimizer: got a int, expected a torch.optim.Optimizer"):
        trained(build, 0)
    with pytest.raises(UsageError, match="each of the"):
        trained(lambda parameters, train: torch.optim.SGD([next(iter(parameters.values()))], lr=train.lr), 0)
    with pytest.raises(UsageError, match="no function"):
        own_optimizer("mine.py:other", tmp_path)

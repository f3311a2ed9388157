"""A model class and an optimizer of the user's own, in one file beside the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(300)

MINE = '''
import torch
from tiny_model import folder as plain
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from safetensors.torch import load_file
import json, shutil
from pathlib import Path


class MineConfig(LlamaConfig):
    model_type = "mine"


class Mine(LlamaForCausalLM):
    """One number more: it multiplies the logits."""

    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        self.sharpness = torch.nn.Parameter(torch.ones(()))

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * self.sharpness
        return found


AutoConfig.register("mine", MineConfig)
AutoModelForCausalLM.register(MineConfig, Mine)


def build():
    source, made = Path(plain()), Path(__file__).parent / "mine-model"
    if not made.exists():
        config = json.loads((source / "config.json").read_text())
        config = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
        model = Mine(MineConfig(**config))
        model.load_state_dict(load_file(source / "model.safetensors"), strict=False)
        model.tie_weights()
        shutil.copytree(source, made)
        model.save_pretrained(made)
    return made


def optimizer(parameters, train):
    assert "sharpness" in parameters
    return torch.optim.RMSprop(parameters.values(), lr=train.lr)
'''


def test_a_run_trains_them_and_goes_on(module_cli: Any, tmp_path: Path) -> None:
    # given a model that transformers does not know and an optimizer that rlmq does not
    cli = module_cli
    for name in ("tiny.yaml", "tiny_model.py", "tiny_task.py"):
        (tmp_path / name).write_text((Path(cli.tiny).parent / name).read_text())
    (tmp_path / "mine.py").write_text(MINE)
    own = ("model=mine.py:build", "train.optimizer=mine.py:optimizer", "data.eval=null", "run.name=mine")
    # when they train for two steps, the second in a continued run
    for steps in (1, 2):
        more = (f"train.steps={steps}", "rollout.max_response_tokens=8", "train.lr=0.001")
        done = cli.run("up", tmp_path / "tiny.yaml", *own, *more, timeout_s=140)
        assert done.code == 0, done.text
    # then the number was trained, and the checkpoint says what it is
    saved = cli.newest_run("mine") / "checkpoints" / "step-000002"
    assert json.loads((saved / "config.json").read_text())["model_type"] == "mine"
    assert float(load_file(saved / "model.safetensors")["sharpness"]) != 1.0
    state = load_file(saved / "optimizer.safetensors")
    assert "square_avg.sharpness" in state and int(state["step"]) == 2

"""TRL's part of the comparisons with it, run by the Python of TRL's own environment, which has nothing of ours.

    PYTHON -m benchmarks.trl_side losses CASES.json RESULTS.json
    PYTHON -m benchmarks.trl_side train SETTINGS.json RESULTS.json

`losses`: TRL's own methods compute the loss and its gradient, or the advantages, of given numbers; what would come
from a model is replaced by these numbers. `train`: TRL's GRPO trains a model; the results are the mean rewards by
step.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Case = Mapping[str, Any]


def main() -> None:
    what, given, results = sys.argv[1:]
    asked = json.loads(Path(given).read_text("utf-8"))
    Path(results).write_text(json.dumps({"losses": losses, "train": train}[what](asked)), "utf-8")


# -- losses ------------------------------------------------------------------------------------------------


def losses(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One result for each case: `value` and `gradient`, or `advantages`."""
    made = {kind: _trainer(kind, asked["model"]) for kind in ("grpo", "rloo", "dpo")}
    kinds: dict[str, Callable[[Any, Case], dict[str, Any]]] = {
        "loss": _policy_loss,
        "dpo": _dpo_loss,
        "advantages": _advantages,
    }
    return [kinds[case["kind"]](made[case["trainer"]], case) for case in asked["cases"]]


def _trainer(kind: str, model: str) -> Any:
    import trl  # type: ignore[import-not-found]
    from datasets import Dataset  # type: ignore[import-not-found]

    shared: dict[str, Any] = {"output_dir": tempfile.mkdtemp(), "report_to": "none", "use_cpu": True, "bf16": False}
    if kind == "dpo":
        rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4)
        config = trl.DPOConfig(precompute_ref_log_probs=False, gradient_checkpointing=False, **shared)
        return trl.DPOTrainer(model, args=config, train_dataset=rows, processing_class=_tokenizer(model))
    config_of, trainer_of = {
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
        "rloo": (trl.RLOOConfig, trl.RLOOTrainer),
    }[kind]
    if kind == "grpo":
        shared["use_bias_correction_kl"] = False  # a weight of the KL that DeepSeekMath has not
    shared |= {"per_device_train_batch_size": 8, "num_generations": 4, "beta": 0.1, "gradient_checkpointing": False}
    rows = Dataset.from_list([{"prompt": "a"}] * 8)
    functions = [lambda completions, **_: [0.0] * len(completions)]
    trainer = trainer_of(
        model,
        reward_funcs=functions,
        args=config_of(**shared),
        train_dataset=rows,
        processing_class=_tokenizer(model),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _tensor(values: Any) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.float64)


def _policy_loss(trainer: Any, case: Case) -> dict[str, Any]:
    import torch

    for name, value in case["settings"].items():
        setattr(trainer, name, value)
    logprobs = _tensor(case["logprobs"]).requires_grad_()
    mask = torch.tensor(case["mask"])
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    ids = torch.ones_like(mask)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": _tensor(case["advantages"]),
        "old_per_token_logps": _tensor(case["old"]),
        "ref_per_token_logps": _tensor(case["reference"]),
        "old_logps": (_tensor(case["old"]) * mask).sum(1),
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(None, inputs)
    loss.backward()
    return {"value": loss.item(), "gradient": logprobs.grad.tolist()}


def _dpo_loss(trainer: Any, case: Case) -> dict[str, Any]:
    import torch

    trainer.beta, trainer.label_smoothing, trainer.precompute_ref_logps = case["beta"], 0.0, True
    trainer.model.train()
    mask = torch.tensor(case["mask"])
    logprobs = _tensor(case["logprobs"]).requires_grad_()
    reference = (_tensor(case["reference"]) * mask).sum(1)
    nothing = torch.zeros_like(logprobs)

    def model(**_: Any) -> Any:
        return SimpleNamespace(log_probs=logprobs * mask, entropy=nothing, mean_logits=nothing, is_top1=mask > 0)

    ids = torch.ones(mask.shape[0], mask.shape[1] + 1, dtype=torch.int64)
    chosen, rejected = reference.chunk(2)
    inputs = {
        "input_ids": ids,
        "attention_mask": ids,
        "completion_mask": torch.cat([ids[:, :1], mask], dim=1),
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    loss = trainer._compute_loss(model, inputs, return_outputs=False)
    loss.backward()
    return {"value": loss.item(), "gradient": logprobs.grad.tolist()}


def _advantages(trainer: Any, case: Case) -> dict[str, Any]:
    import torch

    for name, value in case["settings"].items():
        setattr(trainer, name, value)
    mask, rewards = torch.tensor(case["mask"]), _tensor(case["rewards"])
    policy, reference = _tensor(case["logprobs"]), _tensor(case["reference"])
    lengths = mask.sum(1).tolist()

    def logprobs(model: Any, *_: Any, **__: Any) -> Any:
        return (reference if model is trainer.ref_model else policy), torch.zeros_like(policy), None

    def generated(prompts: list[str]) -> Any:
        prompt_ids, tokens, texts = [[1]] * len(prompts), [[1] * n for n in lengths], ["b" * n for n in lengths]
        if case["trainer"] == "rloo":
            return prompt_ids, tokens, texts
        return prompt_ids, tokens, None, texts, None, {}, None, None

    trainer._get_per_token_logps_and_entropies = logprobs
    trainer._generate = generated
    trainer._calculate_rewards = lambda *_, **__: rewards[:, None]
    found = trainer._generate_and_score_completions([{"prompt": "a"} for _ in lengths])
    return {"advantages": found["advantages"].tolist()}


# -- training ----------------------------------------------------------------------------------------------


def train(asked: Mapping[str, Any]) -> list[float]:
    """Mean reward of each step of TRL's GRPO, one optimizer step for each generated batch."""
    import torch
    import trl
    from datasets import Dataset

    torch.set_num_threads(int(asked["threads"]))
    samples = asked["prompts_per_step"] * asked["group_size"]
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=samples,
        num_generations=asked["group_size"],
        max_completion_length=asked["max_response_tokens"],
        max_steps=asked["steps"],
        learning_rate=asked["lr"],
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        seed=asked["seed"],
        disable_tqdm=True,
        **asked["settings"],
    )
    trainer = trl.GRPOTrainer(
        asked["model"],
        reward_funcs=[_function(*asked["reward"])],
        args=config,
        train_dataset=Dataset.from_list(_function(*asked["rows"])()),
        processing_class=_tokenizer(asked["model"]),
    )
    trainer.train()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def _function(file: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(file).parent))
    spec.loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    main()

"""A trainer, step by step: `python trainer.py --fresh train.steps=2`"""

import rlmq

if __name__ == "__main__":
    trainer = rlmq.PPOTrainer(
        actor="../../recipes/tiny_model.py:folder",
        critic="../../recipes/tiny_model.py:folder",
        reward_model=["../../recipes/tiny_task.py:letters"],
        config={
            "data": {"train": "../../recipes/tiny_task.py:train", "max_prompt_tokens": 32},
            "algorithm": {"group_size": 4},
            "rollout": {"max_response_tokens": 16},
            "train": {"steps": 20, "lr": 5.0e-3},
        },
    )
    for step in range(1, 21):
        metrics = trainer.step()
        print(f"step {step}: reward {metrics['reward_mean']:.3f}")

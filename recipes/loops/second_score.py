"""A second round of scores, under a column of its own, which is logged and does not count."""

import rlmq

run = rlmq.Run("loop-second-score", seed=7, deterministic=True)
actor = run.actor("../tiny_model.py:folder", lr=5e-3)
reward = run.reward(["../tiny_task.py:letters"])
second = run.reward(["../tiny_task.py:letters"], name="again", weight=0.0)
prompts = run.prompts("../tiny_task.py:train", per_step=4, max_tokens=32, samples=4)


def loop() -> None:
    """Both scores are columns of the batch."""
    for _ in run.steps(2):
        batch = actor.generate(prompts.next(), max_tokens=16)
        scored = batch.join(reward.score(batch), second.score(batch)).wait(timeout_s=60)
        run.log(actor.update(scored, loss="grpo").wait())
        actor.publish()


if __name__ == "__main__":
    run.main(loop)

"""Generate for every second update only: each batch is trained on twice."""

import rlmq

run = rlmq.Run("loop-reuse", seed=7, deterministic=True)
actor = run.actor("../tiny_model.py:folder", lr=5e-3)
reward = run.reward(["../tiny_task.py:letters"])
prompts = run.prompts("../tiny_task.py:train", per_step=4, max_tokens=32, samples=4)


def loop() -> None:
    """Two updates for each batch."""
    for _ in run.steps(2):
        batch = reward.score(actor.generate(prompts.next(), max_tokens=16))
        run.log(actor.update(batch, loss="grpo", epochs=2).wait())
        actor.publish()


if __name__ == "__main__":
    run.main(loop)

"""The actor learns in every second step only, the critic in each."""

import rlmq
from rlmq.algorithms import gae

run = rlmq.Run("loop-delayed", seed=7, deterministic=True)
actor = run.actor("../tiny_model.py:folder", lr=5e-3)
critic = run.critic("../tiny_model.py:folder", lr=1e-2)
reward = run.reward(["../tiny_task.py:letters"])
prompts = run.prompts("../tiny_task.py:train", per_step=4, max_tokens=32, samples=4)


def loop() -> None:
    """The critic is ahead of the actor."""
    for step in run.steps(3):
        batch = actor.generate(prompts.next(), max_tokens=16)
        ready = batch.join(reward.score(batch), critic.compute_values(batch)).map(gae(lam=0.95))
        updates = [critic.update(ready)]
        if step % 2 == 0:
            updates.append(actor.update(ready, loss="ppo"))
        run.log(updates[-1].wait())
        actor.publish()


if __name__ == "__main__":
    run.main(loop)

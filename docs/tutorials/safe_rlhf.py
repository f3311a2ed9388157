"""Safe-RLHF: the same critic has a second head, for a cost whose mean has a limit."""

import rlmq
from rlmq.algorithms import gae, kl_penalty

MODEL, TASK = "../../recipes/tiny_model.py:folder", "../../recipes/tiny_task.py"

run = rlmq.Run("safe-rlhf", seed=7, algorithm={"cost_limit": 0.2, "multiplier_lr": 1.0})
actor = run.actor(MODEL, lr=5e-3)
critic = run.critic(MODEL, lr=1e-2)
reference = run.reference(MODEL)
reward = run.reward([f"{TASK}:letters"])
cost = run.reward([f"{TASK}:early_letters"], objective="cost")
prompts = run.prompts(f"{TASK}:train", per_step=8, max_tokens=32, samples=4)


def loop() -> None:
    """The control loop: handles only, the rows stay where they are."""
    for _ in run.steps(20):
        batch = actor.generate(prompts.next(), max_tokens=16)
        scored = batch.join(reward.score(batch), critic.compute_values(batch), reference.logprobs(batch))
        ready = scored.join(cost.score(batch)).map(kl_penalty(coef=0.01)).map(gae(gamma=1.0, lam=0.95))
        critic_loss = critic.update(ready, loss="value", epochs=2)
        actor_loss = actor.update(ready, loss="safe_rlhf", clip=0.2, epochs=2)
        run.log(critic_loss.wait() | actor_loss.wait())
        actor.publish()


if __name__ == "__main__":
    run.main(loop)

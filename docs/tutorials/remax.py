"""ReMax: no critic; the reward of the prompt's greedy response is the baseline."""

import rlmq
from rlmq.algorithms import kl_penalty

MODEL, TASK = "../../recipes/tiny_model.py:folder", "../../recipes/tiny_task.py"

run = rlmq.Run("remax", seed=7)
actor = run.actor(MODEL, lr=5e-3)
reference = run.reference(MODEL)
reward = run.reward([f"{TASK}:letters"])
prompts = run.prompts(f"{TASK}:train", per_step=8, max_tokens=32, samples=4)


def loop() -> None:
    """The control loop: handles only, the rows stay where they are."""
    for _ in run.steps(20):
        batch = actor.generate(prompts.next(), max_tokens=16)
        scored = batch.join(reward.score(batch), reference.logprobs(batch))
        ready = scored.map(kl_penalty(coef=0.01))
        actor_loss = actor.update(ready, loss="remax", clip=0.2, epochs=2)
        run.log(actor_loss.wait())
        actor.publish()


if __name__ == "__main__":
    run.main(loop)

"""Rewards are normalised in their group before candidates are rejected; then the penalty is put in.

So does github.com/wuwowuyi/DPO-and-GRPO-implementation. The temperature of rejection is then in
standard deviations of the group, whatever the reward model says: at 2 the first 20 or so of 64
candidates give the 8 that are kept, which lie above their group's mean. A completion without a
stop token is worth `missing_eos_penalty` standard deviations. A reward model that is scaled to
mean 0 and standard deviation 1 first, as there, gives the same: its scale cancels. Give also
`--advantages none`, as this is the division, and `--normalize_globally true`.
"""

from dataclasses import replace
from typing import Any

from common.advantages import apply_missing_eos_penalty, eos_penalty
from common.grpo import rollouts
from common.objectives.kinds import Advantages

reward = rollouts.reward


def normalised(
    scorer: Any, examples: Any, drawn: Any, config: Any, step: int, total_steps: int
) -> Any:
    """As `rollouts.reward`, each group (K,) of the rewards with mean 0 and deviation 1.

    Held-out prompts are completed once, so have no group: their rewards are as they are.
    """
    plain = replace(config, penalize_missing_eos=False)
    scored = reward(scorer, examples, drawn, plain, step, total_steps)
    rewards = scored.total  # (N, K)
    if rewards.shape[1] > 1:
        rewards = Advantages.find("group")(rewards).to(rewards)
    has_stop = drawn.has_stop.view(rewards.shape)
    total = apply_missing_eos_penalty(rewards, has_stop, eos_penalty(config))
    return replace(scored, total=total)


rollouts.reward = normalised  # type: ignore[assignment]

"""What the over-optimisation experiment optimises, how far, and how it is measured."""

import math
from dataclasses import dataclass

from common.config import CommonConfig, UserError, knob, require_positive


@dataclass
class OveroptimizationConfig(CommonConfig):
    """What is optimised, how far, and how it is measured; `seed` is that of the data only.

    `dataset_name` has pairs; prompts are those of its rows unless `prompts_dataset_name` has some.
    """

    # --- stages ---
    sft_recipe: str = knob("", "recipe of train_sft.py (with model_name_or_path: none is trained)")
    reward_recipe: str = knob("", "recipe of train_reward.py for the proxy")
    rejection_recipe: str = knob("", "recipe of train_sft.py for the best of n")
    dpo_recipe: str = knob("", "recipe of train_dpo.py")
    grpo_recipe: str = knob("", "recipe of train_grpo.py; its save_steps are measured (empty: no)")
    num_processes: int = knob(1, "processes of each stage")

    # --- what is optimised ---
    seeds: list[int] = knob([0, 1, 2], "one chain each")
    gold: str = knob("gold", "judge that is not optimised: as one of reward_funcs")
    num_proxy_pairs: int = knob(400, "pairs that the proxy learns from, others for each seed")
    missing_eos_penalty: float = knob(-1.0, "proxy reward of a completion that did not stop")
    dataset_train_split: str = knob("train", "split of pairs and prompts to train on")
    prompts_dataset_name: str = knob("", "rows with prompts (empty: dataset_name)")

    # --- how far ---
    best_of: list[int] = knob([1, 2, 4, 8, 16, 32, 64], "sizes n; the largest is that of the pool")
    rejection_sizes: list[int] = knob([2, 4, 16], "train on the best of n, for each n")
    dpo_betas: list[float] = knob([1.0, 0.3, 0.1, 0.03, 0.01], "DPO's beta, for each one run")
    num_train_prompts: int = knob(800, "whose completions rejection and DPO learn from")
    num_candidates: int = knob(16, "completions of each; DPO compares neighbours, so even")

    # --- measuring ---
    num_prompts: int = knob(256, "held-out prompts")
    num_samples: int = knob(2, "completions of each, of every policy")

    def __post_init__(self) -> None:
        """Refuse values that no experiment may have."""
        super().__post_init__()
        refuse_missing_recipes(self)
        for name in ("num_processes", "num_proxy_pairs", "num_prompts", "num_samples"):
            require_positive(self, name)
        for name in ("num_train_prompts", "num_candidates"):
            require_positive(self, name)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise UserError(f"--seeds is {self.seeds}; give each seed of 0 or more once.")
        if not self.dataset_test_split:
            raise UserError("--dataset_test_split is required: the split to measure on.")
        if len(self.best_of) < 2 or min(self.best_of) < 1:
            raise UserError(f"--best_of is {self.best_of}; give two sizes or more, of 1 or more.")
        if not all(1 <= n <= self.num_candidates for n in self.rejection_sizes):
            raise UserError(
                f"--rejection_sizes is {self.rejection_sizes}; each must be from 1 to "
                f"--num_candidates, {self.num_candidates}."
            )
        if self.num_candidates % 2:
            raise UserError(f"--num_candidates is {self.num_candidates}; it must be even.")
        if not all(0 < beta < math.inf for beta in self.dpo_betas):
            raise UserError(f"--dpo_betas is {self.dpo_betas}; they must be positive and finite.")
        for name in ("best_of", "rejection_sizes", "dpo_betas"):
            setattr(self, name, sorted(set(getattr(self, name)), reverse=name == "dpo_betas"))

    @property
    def prompts_name(self) -> str:
        """The data set that prompts come from."""
        return self.prompts_dataset_name or self.dataset_name


def refuse_missing_recipes(config: OveroptimizationConfig) -> None:
    """Raise a UserError for a stage without a recipe."""
    needed = {
        "sft_recipe": not config.model_name_or_path,
        "reward_recipe": True,
        "rejection_recipe": bool(config.rejection_sizes),
        "dpo_recipe": bool(config.dpo_betas),
    }
    for name, is_needed in needed.items():
        if is_needed and not getattr(config, name):
            raise UserError(f"--{name} is empty; name the recipe of that stage.")

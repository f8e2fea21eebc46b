"""The flags of over-optimisation: what is optimised, how far, and how it is measured."""

from dataclasses import dataclass
from typing import ClassVar

from common.config.flags import flag, path_flag
from common.config.stages import SamplingConfig
from common.errors import UserError
from experiments.runs.executors import StudyFlags


@dataclass
class OveroptimizationConfig(SamplingConfig, StudyFlags):
    """Rewards, methods and measurement; `seed` is that of the data only.

    `dataset_name` has pairs; prompts are those of its rows unless `prompts_dataset_name` has some.
    """

    _stages: ClassVar = "stages"
    sft_recipe: str = flag("", "recipe of train_sft.py (with model_name_or_path: none is trained)")
    reward_recipe: str = flag("", "recipe of train_reward.py for the proxy (or give one)")
    proxy: str = flag("", "a trained reward model as proxy")
    rejection_recipe: str = flag("", "recipe of train_sft.py for the best of n (empty: not run)")
    dpo_recipe: str = flag("", "recipe of train_dpo.py (empty: not run)")
    grpo_recipe: str = flag("", "recipe of train_grpo.py; its save_steps are measured (empty: no)")
    grpo_variants: list[str] = flag(
        [], "runs of that recipe, each with flags, as 'beta=0.1 num_candidates=16' (empty: one)"
    )

    _what: ClassVar = "what is optimised"
    gold: str = flag("gold", "judge that is not optimised: as one of reward_funcs")
    num_proxy_pairs: int = flag(400, "pairs that the proxy learns from, others per seed", gt=0)
    missing_eos_penalty: float = flag(-1.0, "proxy reward of a completion that did not stop")
    dataset_train_split: str = flag("train", "split of pairs and prompts to train on")
    prompts_dataset_name: str = path_flag("", "rows with prompts (empty: dataset_name)")

    _far: ClassVar = "how far (sizes and betas from the nearest policy to the farthest)"
    best_of: list[int] = flag(
        [1, 2, 4, 8, 16, 32, 64], "sizes n; the last is that of the pool", required=True, gt=0
    )
    rejection_sizes: list[int] = flag([2, 4, 16], "train on the best of n, for each n", gt=0)
    dpo_betas: list[float] = flag([1.0, 0.3, 0.1, 0.03, 0.01], "DPO's beta, for each one run", gt=0)
    num_train_prompts: int = flag(800, "prompts that rejection and DPO learn from", gt=0)
    num_candidates: int = flag(16, "completions of each; DPO compares neighbours", gt=0)

    _measuring: ClassVar = "measuring"
    num_prompts: int = flag(256, "held-out prompts", gt=0)
    num_samples: int = flag(2, "completions of each, of every policy", gt=0)
    fluency_model: str = path_flag("", "for a study's tables: scores completions when it is kept")

    def __post_init__(self) -> None:
        """Refuse values that no experiment may have."""
        SamplingConfig.__post_init__(self)
        StudyFlags.__post_init__(self)
        if not self.sft_recipe and not self.model_name_or_path:
            raise UserError("--sft_recipe is empty; name a recipe, or give --model_name_or_path.")
        if not self.reward_recipe and not self.proxy:
            raise UserError("--reward_recipe is empty; name a recipe, or give --proxy.")
        spaced = [" ".join(variant.split()) for variant in self.grpo_variants]
        self.grpo_variants = list(dict.fromkeys(spaced))
        for variant in self.grpo_variants:
            if not all(text.find("=") > 0 for text in variant.split()):
                flags = "flags as name=value, with a space between two"
                raise UserError(f"--grpo_variants has {variant!r}; it must be {flags}.")
        largest = max(self.rejection_sizes, default=0)
        if self.rejection_recipe and largest > self.num_candidates:
            most = f"at most --num_candidates, {self.num_candidates}, each"
            raise self.refused("rejection_sizes", most)

    @property
    def prompts_name(self) -> str:
        """The data set of the prompts."""
        return self.prompts_dataset_name or self.dataset_name

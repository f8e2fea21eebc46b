"""The configuration of an evaluation."""

from dataclasses import dataclass
from typing import ClassVar

from common.config.engine import EngineConfig
from common.config.flags import AUTO, flag, path_flag
from common.errors import UserError

POLICY_SCORES = ("implicit_reward", "logp_per_token")


@dataclass
class EvaluateConfig(EngineConfig):
    """Pairs have `prompt`, `chosen`, `rejected`; prompts to sample from have `prompt`."""

    _data: ClassVar = "data"
    dataset_test_split: str = flag(
        AUTO, "the split to evaluate on; auto: validation, else test", required=True
    )
    num_eval_rows: int = flag(0, "evaluate on the first rows only (0: all)")

    is_script: ClassVar = True

    _systems: ClassVar = "what is evaluated"
    policies: list[str] = path_flag([], "folders or hub ids of causal language models")
    reward_models: list[str] = path_flag([], "folders or hub ids of reward models")
    ref_model_name_or_path: str = path_flag(
        "",
        "reference of KL and implicit rewards (empty: first policy; of a single one, where it "
        "started)",
    )
    score_pairs: bool = flag(True, "judge by the pairs of dataset_name, where it has any")
    policy_scores: list[str] = flag(
        ["implicit_reward"],
        "how policies are read, the first in the main table: implicit_reward (beta log pi / ref), "
        "logp_per_token",
        POLICY_SCORES,
        required=True,
    )

    _generations: ClassVar = "generations"
    prompts_dataset_name: str = path_flag("", "rows to sample from (empty: dataset_name)")
    num_prompts: int = flag(256, "prompts to sample from (0: no generations)")
    num_generations: int = flag(
        1,
        "completions of a prompt: means, pass@k and maj@k are of all, the first is compared",
        gt=0,
    )
    temperature: float = flag(1.0, "temperature of sampling; 0 takes the most likely token", ge=0)
    max_new_tokens: int = flag(0, "tokens of a generation (0: max_completion_length)")
    reward_funcs: list[str] = path_flag(
        [], "further judges of generations: as in train_grpo.py (a file is run as code)"
    )
    judge_funcs: list[str] = path_flag(
        [], "judges of two generations: file.py:function (your file is run as code)"
    )

    def __post_init__(self) -> None:
        """Refuse values that no evaluation may have."""
        super().__post_init__()
        if not self.policies and not self.reward_models:
            raise UserError("nothing to evaluate: give --policies, --reward_models or both.")
        if self.num_generations > 1 and self.temperature == 0:
            raise self.refused("num_generations", "1 with --temperature 0, which draws one again")
        if self.max_new_tokens > self.max_completion_length:
            most = f"at most --max_completion_length, {self.max_completion_length}"
            raise self.refused("max_new_tokens", most)
        first = (self.policies or self.reward_models)[0]
        self.model_name_or_path = self.model_name_or_path or first
        self.prompts_dataset_name = self.prompts_dataset_name or self.dataset_name

    @property
    def most_sampled_tokens(self) -> int:
        """Tokens of a sampled completion at most."""
        return self.max_new_tokens or self.max_completion_length

    @property
    def generates(self) -> bool:
        """Whether completions are sampled."""
        return bool(self.policies and self.num_prompts)

"""TRL's own code on models and rewards that a test chooses, besides that of golden cases."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed (Python 3.11 or later)")

from trl.trainer.utils import add_fused_lm_head  # noqa: E402

from assets.recipes.conformance.trl_case import GRPOTrainer, TrlCase  # noqa: E402


def by_function(weights: list[float]) -> dict[str, Any]:
    """Settings of a rollout with a weight for each reward function."""
    names = [str(i) for i in range(len(weights))]
    settings: dict[str, Any] = {"reward_funcs": [None] * len(names), "reward_func_names": names}
    settings["multi_objective_aggregation"] = "normalize_then_sum"
    return settings | {"reward_weights": torch.tensor(weights)}


def scores(lm: Any, batch: Any, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (B, C) as `GRPOTrainer` computes them of a padded batch."""
    add_fused_lm_head(lm, temperature=temperature, outputs=("log_probs", "entropy"))
    now, args = SimpleNamespace(global_step=0), SimpleNamespace(report_to=[])
    trainer = TrlCase(accelerator=MagicMock(), args=args, state=now)
    with torch.no_grad():
        token_logps, entropy, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer,
            lm,
            batch.input_ids,
            batch.attention_mask.long(),
            batch.completion_mask.shape[1],
            compute_entropy=True,
        )
    return token_logps, entropy

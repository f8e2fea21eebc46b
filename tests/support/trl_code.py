"""TRL's own code on tensors that a test chooses: no data set, no run, no trainer.

The methods of TRL's trainers are called as plain functions, on a stand-in for the trainer that has
the settings they read and on a stand-in for the model that answers with given log-probabilities.
So every number below comes out of TRL's lines, from whatever release is installed.
"""

import warnings
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed (Python 3.11 or later)")

from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.reward_trainer import RewardTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402
from trl.trainer.sft_trainer import SFTTrainer  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "APIs here are unstable"
    from trl.experimental.cpo import CPOTrainer


class OneProcess:
    """Accelerate as the methods use it, with one process."""

    num_processes, process_index, is_main_process = 1, 0, True
    parallelism_config, device = None, torch.device("cpu")

    def gather(self, values: Tensor) -> Tensor:
        return values

    gather_for_metrics = gather

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values

    def autocast(self) -> Any:
        return nullcontext()


class GivenModel(nn.Module):
    """Answers a forward with given log-probs (B, C); inputs have one prompt token before them."""

    is_gradient_checkpointing = False

    def __init__(self, token_logps: Tensor) -> None:
        super().__init__()
        self.token_logps = token_logps

    def forward(self, *, labels: Tensor, **inputs: Any) -> FusedCausalLMOutput:
        mask = labels[:, 1:] != -100
        zeros = torch.zeros_like(self.token_logps)
        return FusedCausalLMOutput(
            log_probs=self.token_logps.masked_fill(~mask, 0),
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
            label_mask=mask,
        )


def trainer(model: Any, **settings: Any) -> Any:
    """A stand-in for a trainer in its training phase, without gradient accumulation."""
    usual = {
        "accelerator": OneProcess(),
        "model": model,
        "state": SimpleNamespace(global_step=0),
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**(usual | settings))


def with_prompt(completion_mask: Tensor) -> dict[str, Tensor]:
    """Ids and masks (B, 1 + C) of completions behind one prompt token; only the masks matter."""
    attention_mask = torch.cat([torch.ones_like(completion_mask[:, :1]), completion_mask], dim=1)
    return {
        "input_ids": torch.ones_like(attention_mask).long(),
        "attention_mask": attention_mask.long(),
    }


def sft_loss(token_logps: Tensor, completion_mask: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """`SFTTrainer.compute_loss` of (B, C) log-probs."""
    inputs = with_prompt(completion_mask)
    inputs["labels"] = inputs["input_ids"].clone()
    inputs["labels"][:, 1:][~completion_mask] = -100
    inputs["labels"][:, 0] = -100
    args = SimpleNamespace(loss_type="nll", average_tokens_across_devices=False)
    stand_in = trainer(None, args=args, compute_loss_func=None, label_smoother=None)
    stand_in.model = GivenModel(token_logps)
    return SFTTrainer.compute_loss(
        stand_in, stand_in.model, inputs, num_items_in_batch=num_items_in_batch
    )


def reward_loss(rewards: Tensor, margin: Tensor | None, center_coefficient: float | None) -> Tensor:
    """`RewardTrainer.compute_loss` of rewards (2N,): those of the chosen, then the rejected."""
    inputs = {"attention_mask": torch.ones(len(rewards), 1)}
    if margin is not None:
        inputs["margin"] = margin

    def model(**inputs: Any) -> Any:
        return SimpleNamespace(logits=rewards[:, None])

    args = SimpleNamespace(center_rewards_coefficient=center_coefficient)
    stand_in = trainer(SimpleNamespace(training=True), args=args)
    return RewardTrainer.compute_loss(stand_in, model, inputs)


def dpo_loss(
    token_logps: Tensor, ref_token_logps: Tensor, completion_mask: Tensor, **settings: Any
) -> Tensor:
    """`DPOTrainer._compute_loss` of (2N, C) log-probs: the chosen rows, then the rejected."""
    usual = {
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
        "ref_model": GivenModel(ref_token_logps),
        "precompute_ref_logps": False,
        "f_divergence_type": "reverse_kl",
        "ld_alpha": None,
        "use_weighting": False,
        "label_smoothing": 0.0,
        "loss_weights": [1.0],
    }
    model = GivenModel(token_logps)
    inputs = with_prompt(completion_mask)
    no_prompt = torch.zeros_like(inputs["input_ids"][:, :1])
    inputs["completion_mask"] = torch.cat([no_prompt, completion_mask.long()], dim=1)
    return DPOTrainer._compute_loss(trainer(model, **(usual | settings)), model, inputs, False)


def cpo_losses(chosen: Tensor, rejected: Tensor, **settings: Any) -> Tensor:
    """`CPOTrainer.cpo_loss` of (N,) log-probs: losses without a reference, (N,)."""
    usual = {"alpha": 0.0, "label_smoothing": 0.0, "simpo_gamma": 0.0}
    return CPOTrainer.cpo_loss(trainer(None, **(usual | settings)), chosen, rejected)[0]


def grpo_trainer(token_logps: Tensor, **settings: Any) -> Any:
    """A stand-in whose policy has the log-probs (B, C), and no entropy."""
    entropy = torch.zeros_like(token_logps)
    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "steps_per_generation": 1,
        "report_to": [],
    }
    arguments |= settings.pop("args", {})
    usual = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "max_completion_length": token_logps.shape[1],
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
        "use_vllm": False,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "_get_per_token_logps_and_entropies": lambda *inputs, **kw: (token_logps, entropy, None),
    }
    return trainer(GivenModel(token_logps), args=SimpleNamespace(**arguments), **(usual | settings))


def grpo_loss(
    stand_in: Any, advantages: Tensor, completion_mask: Tensor, **inputs: Tensor | None
) -> Tensor:
    """`GRPOTrainer._compute_loss` of log-probs (B, C) from `grpo_trainer`, with advantages (B,).

    Inputs are those of TRL, as `old_per_token_logps`.
    """
    ids = torch.ones_like(completion_mask).long()
    usual = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": completion_mask.long(),
        "advantages": advantages,
        "num_items_in_batch": completion_mask.sum(),
    }
    return GRPOTrainer._compute_loss(stand_in, stand_in.model, usual | inputs)


def advantages(rewards: Tensor, trainer_class: type = GRPOTrainer, **settings: Any) -> Tensor:
    """Advantages (N, G) of rewards (N, G); see `rollout`."""
    return rollout(rewards, trainer_class, **settings)["advantages"].view_as(rewards)


def by_function(rewards: Tensor, weights: list[float]) -> dict:
    """Settings of a TRL trainer with rewards (F, N, G) of F functions."""
    return {
        "_calculate_rewards": lambda *inputs: rewards.flatten(1).T,
        "reward_weights": torch.tensor(weights),
        "reward_funcs": [None] * len(rewards),
        "reward_func_names": [str(i) for i in range(len(rewards))],
        "multi_objective_aggregation": "normalize_then_sum",
    }


def rollout(
    rewards: Tensor,
    trainer_class: type = GRPOTrainer,
    *,
    token_logps: Tensor | None = None,
    ref_token_logps: Tensor | None = None,
    sampling_token_logps: Tensor | None = None,
    **settings: Any,
) -> dict[str, Tensor]:
    """Outputs of GRPO's or RLOO's trainer before its updates, from rewards (N, G) of completions.

    Log-probs are (N * G, C), of the policy, the reference and the program that sampled.
    """
    num_rows, num_generations = rewards.numel(), rewards.shape[1]
    token_logps = torch.zeros(num_rows, 1) if token_logps is None else token_logps
    ref_token_logps = token_logps if ref_token_logps is None else ref_token_logps
    prompts, texts = [[1]] * num_rows, ["a"] * num_rows
    completions = [[1] * token_logps.shape[1]] * num_rows
    sampled = None if sampling_token_logps is None else sampling_token_logps.tolist()
    generated: tuple = (prompts, completions, None, texts, sampled, {}, None, None)
    if trainer_class is RLOOTrainer:
        generated = (prompts, completions, texts)
    arguments = {
        "per_device_train_batch_size": num_rows,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "gradient_checkpointing_kwargs": None,
        "report_to": [],
    }
    usual = {
        "args": SimpleNamespace(**arguments),
        "ref_model": GivenModel(ref_token_logps),
        "environment_factories": None,
        "environments": None,
        "tools": [],
        "num_generations": num_generations,
        "num_iterations": 1,
        "beta": 0.0,
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "normalize_advantages": False,
        "reward_clip_range": None,
        "reward_weights": torch.ones(1),
        "reward_funcs": [None],
        "reward_func_names": ["given"],
        "use_vllm": False,
        "mask_truncated_completions": False,
        "pad_to_multiple_of": None,
        "log_multimodal": False,
        "eos_token_ids": [1],
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_logs": defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        "_generate": lambda prompts: generated,
        "_calculate_rewards": lambda *inputs: rewards.flatten()[:, None],
        "_get_per_token_logps_and_entropies": lambda scored, *inputs, **kw: (
            scored.token_logps,
            None,
            None,
        ),
    }
    stand_in = trainer(GivenModel(token_logps), **(usual | settings))
    return trainer_class._generate_and_score_completions(stand_in, [{"prompt": "p"}] * num_rows)


def scores(lm: Any, batch: Any, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (B, C) as `GRPOTrainer` computes them of a padded batch."""
    add_fused_lm_head(lm, temperature=temperature, outputs=("log_probs", "entropy"))
    stand_in = trainer(lm, args=SimpleNamespace(report_to=[]))
    with torch.no_grad():
        token_logps, entropy, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            stand_in,
            lm,
            batch.input_ids,
            batch.attention_mask.long(),
            batch.completion_mask.shape[1],
            compute_entropy=True,
        )
    return token_logps, entropy

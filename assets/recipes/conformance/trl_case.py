"""TRL's functions on a case: methods of its trainers, on a stand-in for the trainer."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer
from trl.experimental import cpo

from assets.recipes.conformance.case import Case

DPO = {"loss_weights": [1.0], "f_divergence_type": "reverse_kl", "label_smoothing": 0.0}
GRPO = {"epsilon_low": 0.2, "epsilon_high": 0.2, "top_entropy_quantile": 1.0, "beta": 0.0}
GRPO |= {"importance_sampling_level": "token", "loss_type": "dapo"}
ROLLOUT = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}
ROLLOUT |= {"reward_weights": torch.ones(1), "reward_func_names": ["given"], "beta": 0.0}
ROLLOUT |= {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "num_iterations": 1}
ROLLOUT |= {"_pending_extra_logs": {}, "_pending_metrics": {}}


class TrlCase(Case):
    """A case as TRL computes it; it is also the trainer that TRL's methods are called on."""

    library = "TRL"
    get_off_policy_mask = staticmethod(GRPOTrainer.get_off_policy_mask)

    def train(self, logps: Tensor, mask: Tensor, **settings: Any) -> MagicMock:
        """A model with log-probs (B, C); its trainer gets the settings and is in one process."""
        zeros = torch.zeros_like(logps)
        outputs = SimpleNamespace(log_probs=logps.masked_fill(~mask, 0), label_mask=mask)
        outputs.entropy, outputs.mean_logits, outputs.is_top1 = zeros, zeros, mask
        self.model = MagicMock(return_value=outputs, is_gradient_checkpointing=False, logps=logps)
        score = "_get_per_token_logps_and_entropies"
        setattr(self, score, lambda model, *_, **__: (model.logps, zeros, None))
        process = MagicMock(num_processes=1, process_index=0, parallelism_config=None, device="cpu")
        process.gather = process.gather_for_metrics = torch.clone
        logs = {"_metrics": MagicMock(), "_logs": MagicMock(), "_total_train_tokens": 0}
        vars(self).update(settings, args=self, accelerator=process, _tp_size=1, **logs)
        return self.model

    def inputs(self) -> dict[str, Tensor]:
        mask = torch.nn.functional.pad(self.mask.long(), (1, 0))  # behind a prompt of one token
        return dict.fromkeys(("input_ids", "attention_mask", "completion_mask"), mask)

    def sft(self) -> Tensor:
        model = self.train(self.logps, self.mask, loss_type="nll")
        return SFTTrainer.compute_loss(self, model, self.inputs(), False, self.step_mask.sum())

    def bradley_terry(self, margin: float = 0.0, centering: float = 0.0) -> Tensor:
        rewards = self.rewards[:, None]
        model = self.train(rewards, rewards.isfinite(), center_rewards_coefficient=centering)
        model.return_value.logits = rewards
        inputs = {"attention_mask": torch.ones_like(rewards), "margin": margin}
        return RewardTrainer.compute_loss(self, model, inputs)

    def preference(self, **settings: Any) -> Tensor:
        self.ref_model = self.train(self.ref_logps, self.mask)
        model = self.train(self.logps, self.mask, **DPO | settings)
        if "simpo_gamma" in settings:  # of CPO's loss
            means = (self.logps * self.mask).sum(1) / self.mask.sum(1)
            return cpo.CPOTrainer.cpo_loss(self, *means.chunk(2))[0].mean()
        return DPOTrainer._compute_loss(self, model, self.inputs(), False)

    def kl(self, **settings: Any) -> Tensor:
        self.advantages = torch.zeros_like(self.logps)  # the KL term is all there is
        return self.policy(beta=1.0, **settings)

    def policy(self, num_items_in_batch: int | None = None, **settings: Any) -> Tensor:
        steps = {"current_gradient_accumulation_steps": self.num_micro_batches}
        steps["steps_per_generation"] = self.num_micro_batches
        model = self.train(self.logps, self.mask, **GRPO | steps | settings)
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        inputs = dict.fromkeys(names, self.mask.long()) | {"advantages": self.advantages}
        inputs |= {"old_per_token_logps": self.old_logps, "ref_per_token_logps": self.ref_logps}
        inputs["sampling_per_token_logps"] = self.sampled_logps
        inputs["num_items_in_batch"] = torch.as_tensor(num_items_in_batch or self.step_mask.sum())
        return GRPOTrainer._compute_loss(self, model, inputs)

    def group_advantages(self, **settings: Any) -> Tensor:
        return self.rollout(**settings)["advantages"].view_as(self.rewards)

    def rollout(self, is_rloo: bool = False, **settings: Any) -> dict[str, Tensor]:
        """Outputs before the updates, of rewards (N, G) or (F, N, G) of F functions."""
        rewards = self.rewards.float().reshape(-1, self.rewards.shape[-2:].numel())
        logps = rewards.T[:, :1] if self.logps is None else self.logps  # completions of one token
        self.train(logps, logps.isfinite(), **ROLLOUT | settings)
        self.num_generations, self._tokenizer = self.rewards.shape[-1], MagicMock(pad_token_id=0)
        ids, texts = [[1] * logps.shape[1]] * len(logps), ["a"] * len(logps)
        sampled = None if self.sampled_logps is None else self.sampled_logps.tolist()
        generated: tuple[Any, ...] = (ids, ids, None, texts, sampled, {}, None, None)
        generated = (ids, ids, texts) if is_rloo else generated
        self._generate = MagicMock(return_value=generated)
        self._calculate_rewards = MagicMock(return_value=rewards.T)
        score = (RLOOTrainer if is_rloo else GRPOTrainer)._generate_and_score_completions
        return score(self, [{"prompt": "p"}] * len(logps))

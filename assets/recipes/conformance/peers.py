"""The other libraries' functions.

TRL's are in `trl_case.py`. verl and OpenRLHF are imported with mocks of packages that their
formulas do not use.
"""

import sys
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor
from torchrl.objectives.llm import grpo

from assets.recipes.conformance.case import Case

NOT_INSTALLED = ["aiohttp", "deepspeed", "deepspeed.runtime.zero.partition_parameters", "ray"]
NOT_INSTALLED += ["ray.util.placement_group", "ray.util.scheduling_strategies", "vllm"]
NOT_INSTALLED += ["vllm.inputs", "vllm.utils", "torchdata.stateful_dataloader"]
NOT_INSTALLED += ["flash_attn.bert_padding", "flash_attn.utils.distributed"]
sys.modules |= {name: MagicMock(__spec__=ModuleSpec(name, None)) for name in NOT_INSTALLED}
core_algos = import_module("verl.trainer.ppo.core_algos")
ActorConfig = import_module("verl.workers.config").ActorConfig
verl_losses = import_module("verl.workers.utils.losses")
loss = import_module("openrlhf.models.loss")
compute_approx_kl = import_module("openrlhf.models.utils").compute_approx_kl
dpo = import_module("openrlhf.trainer.dpo_trainer")
counts_of_step = import_module("openrlhf.utils.loss_utils")._optimizer_step_loss_norm
Maker = import_module("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker


class VerlCase(Case):
    """A case as verl computes it."""

    library = "verl"

    def sft(self) -> Tensor:
        data = {"pad_mode": "right", "response_mask": self.mask, "dp_size": 1}
        data["batch_num_tokens"] = self.step_mask.sum()
        return verl_losses.sft_loss(None, {"log_probs": self.logps}, data)[0]

    def kl(self, kl_penalty: str) -> Tensor:
        per_token = core_algos.kl_penalty(self.logps, self.ref_logps, kl_penalty)
        return core_algos.agg_loss(per_token, self.mask, "token-mean")

    def policy(self, loss_mode: str = "vanilla", **settings: Any) -> Tensor:
        config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **settings)
        counts = {"dp_size": 1, "loss_scale_factor": config.loss_scale_factor}  # as `ppo_loss` does
        counts["batch_num_tokens"] = self.step_mask.sum()
        config.global_batch_info.update(counts, global_batch_size=len(self.step_mask))
        inputs = (self.old_logps, self.logps, self.advantages, self.mask)
        policy_loss = core_algos.get_policy_loss_fn(loss_mode)
        return policy_loss(*inputs, config.loss_agg_mode, config)[0]

    def group_advantages(self, estimator: str, **settings: Any) -> Tensor:
        rewards = self.rewards.float().reshape(-1, 1)  # (N * G, 1): completions of one token
        index = torch.arange(len(self.rewards)).repeat_interleave(self.rewards.shape[1]).numpy()
        estimate = core_algos.get_adv_estimator_fn(estimator)
        inputs = {"response_mask": torch.ones_like(rewards), "index": index}
        return estimate(rewards, **inputs, **settings)[0].view_as(self.rewards)


class OpenRLHFCase(Case):
    """A case as OpenRLHF computes it; DeepSpeed divides by the number of micro-batches."""

    library = "OpenRLHF"

    def counts(self) -> dict[str, Any]:
        return counts_of_step([self.step_mask], None, 1, self.num_micro_batches)

    def sft(self) -> Tensor:
        return loss.SFTLoss()(self.logps, self.mask, **self.counts()) / self.num_micro_batches

    def bradley_terry(self, margin: float = 0.0) -> Tensor:
        return loss.PairWiseLoss()(*self.rewards.chunk(2), margin)

    def preference(self, **settings: Any) -> Tensor:
        mask = torch.nn.functional.pad(self.mask, (1, 0), value=True)  # a prompt of one token
        policy, reference = (
            dpo.DPOTrainer._get_batch_logps(None, logps, mask, [1] * len(mask))[0].chunk(2)
            for logps in (self.logps, self.ref_logps)
        )
        return loss.DPOLoss(**settings)(*policy, *reference)[0]

    def kl(self, **settings: Any) -> Tensor:
        per_token = compute_approx_kl(self.logps, self.ref_logps, self.old_logps, **settings)
        return loss.aggregate_loss(per_token, self.mask)

    def policy(self, **settings: Any) -> Tensor:
        inputs = (self.logps, self.old_logps, self.advantages, self.mask)
        return loss.PolicyLoss(**settings)(*inputs, **self.counts())[0] / self.num_micro_batches

    def group_advantages(self, estimator: str) -> Tensor:
        maker = MagicMock(advantage_estimator=estimator)
        maker.kl_ctl.value = 0.0
        maker.get_cumulative_returns = partial(Maker.get_cumulative_returns, maker)
        args = maker.strategy.args
        args.rollout.n_samples_per_prompt = self.rewards.shape[1]
        args.reward = SimpleNamespace(clip_range=None)
        args.algo.advantage = SimpleNamespace(estimator=estimator, gamma=1.0, no_std_norm=False)
        ones = torch.ones(self.rewards.numel(), 1)  # completions of one token
        rollout = SimpleNamespace(action_mask=ones, kl=0 * ones, index=range(len(ones)), info={})
        rollout.rewards = self.rewards.float().flatten()
        Maker.compute_advantages_and_returns(maker, [rollout])
        return rollout.advantages.view_as(self.rewards)


class TorchrlCase(Case):
    """A case as torchrl computes it."""

    library = "torchrl"

    def kl(self) -> Tensor:
        inputs = ({"_cur_log_prob": self.logps}, None, self.ref_logps, 1.0, self.mask)
        return grpo.GRPOLoss._kl_to_ref(None, *inputs)[0]

    def policy(self, loss: str = "GRPOLoss", **settings: Any) -> Tensor:
        module = getattr(grpo, loss)(entropy_bonus=False, device="cpu", **settings)
        log_weight = (self.logps - self.old_logps)[..., None]  # (B, C, 1)
        objective, _ = module._compute_policy_objective(log_weight, self.advantages[..., None])
        return module._aggregate_loss_value(objective, self.mask).squeeze()

r"""GRPO: sample a group of completions per prompt, keep some, push up those above their group.

    A_i    = (r_i - mean r) / (std r + 1e-4)                    DeepSeekMath (2024), section 4.1.2
    rho_it = pi(y_it | x, y_i,<t) / old(y_it | x, y_i,<t)
    loss   = - mean_i mean_t min(rho A, clip(rho, 1 - e_low, 1 + e_high) A) + beta KL(pi || ref)
                                                                eq. 3; KL by k3, eq. 4

One step is one rollout: every prompt gets `num_candidates` completions, the rewards are computed,
statistical rejection sampling keeps `num_generations` of them, their advantages are optionally
normalised again over all that were kept on all ranks, and `num_iterations` updates are made.

How this differs from the paper:
1. Rejection sampling of rollouts by raw reward (RSO, Liu et al. 2023, algorithm 1; or exact draws
   without replacement by Gumbel noise). The baseline is the mean of all candidates or of the kept.
2. Global normalisation of the kept advantages over ranks (`normalize_globally`).
3. A completion that did not stop has the reward `missing_eos_penalty` (Huang et al. 2024).
4. Completions are cut at the first stop token before they are scored.
5. Sampling noise is a function of (seed, step, prompt, sample, position): the completions do not
   depend on the number of ranks.

Launch: as `train_sft.py`, with `--model_name_or_path` the SFT stage's `model` folder, for example
    torchrun --standalone --nproc_per_node 2 train_grpo.py --config assets/recipes/demo/grpo.yaml

With one update per rollout the ratio is 1, so the policy loss is minus the mean advantage, whatever
is learned: watch `reward`, `kl`, `entropy` and the samples instead.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import checkpoint, data, distributed, fsdp, models, optim, plots, self_checks
from common.advantages import (
    effective_sample_size,
    group_advantages,
    normalise_globally,
    rejection_sample,
)
from common.config import (
    TrainConfig,
    UserError,
    is_due,
    knob,
    require_finite,
    require_not_negative,
    require_positive,
)
from common.data import Example
from common.generation import Rollouts, Sampler
from common.losses import aggregate, clipped_tokens, kl_estimate, policy_loss
from common.metrics import Accumulator, RunLogger
from common.noise import derive_seed, hash_counters
from common.padding import AnyBatch
from common.profiling import StepProfiler
from common.reward_scoring import RewardScorer
from common.rewards import apply_missing_eos_penalty
from common.scoring import Policy


@dataclass
class GRPOConfig(TrainConfig):
    """Rows have the column `prompt`; any other column reaches the reward functions."""

    # --- rollouts: batch_size prompts per step ---
    num_generations: int = knob(8, "completions of a prompt that are trained on")
    num_candidates: int = knob(0, "completions sampled per prompt (0: num_generations)")
    temperature: float = knob(1.0, "of sampling and of every log-probability")
    top_k: int = knob(0, "sample from the k most likely tokens only (0: all)")
    top_p: float = knob(1.0, "sample from the most likely tokens that hold this share only")

    # --- rewards ---
    reward_funcs: list[str] = knob([], "`gold`, file.py:function, or reward-model folders")
    reward_weights: list[float] = knob([], "one per reward function (empty: 1 each)")
    missing_eos_penalty: float = knob(-1.0, "reward of a completion that did not stop")

    # --- selection and advantages ---
    rejection_method: str = knob("rso", "how candidates are kept", ["rso", "gumbel"])
    rejection_temperature: float = knob(0.5, "of rejection sampling, in units of reward")
    baseline: str = knob("all", "mean over all candidates or the kept ones", ["all", "kept"])
    normalize_globally: bool = knob(False, "normalise kept advantages again, over all ranks")

    # --- objective ---
    num_iterations: int = knob(1, "updates per rollout")
    epsilon_low: float = knob(0.2, "the ratio is clipped below 1 - epsilon_low")
    epsilon_high: float = knob(0.2, "the ratio is clipped above 1 + epsilon_high")
    beta: float = knob(0.04, "weight of the KL to the reference, per nat (0: no reference)")
    ref_model_name_or_path: str = knob("", "frozen reference (empty: model_name_or_path)")

    def __post_init__(self) -> None:
        """Refuse values that no GRPO run may have."""
        super().__post_init__()
        require_finite(self, "missing_eos_penalty")
        self.num_candidates = self.num_candidates or self.num_generations
        if self.num_generations < 2 or self.num_candidates < self.num_generations:
            raise UserError(
                f"--num_generations is {self.num_generations} of {self.num_candidates} candidates; "
                "it must be at least 2 and at most --num_candidates."
            )
        for name in ("temperature", "rejection_temperature", "num_iterations"):
            require_positive(self, name)
        for name in ("epsilon_low", "epsilon_high", "beta", "top_k"):
            require_not_negative(self, name)
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not self.reward_funcs:
            raise UserError("--reward_funcs is required: gold, file.py:function, or model folders.")
        self.ref_model_name_or_path = self.ref_model_name_or_path or self.model_name_or_path


@dataclass
class MicroBatch:
    """Kept completions that go through one forward pass."""

    batch: AnyBatch  # B completions
    advantages: Tensor  # (B,)
    sampled_logps: Tensor  # (B, C) from the sampler
    ref_logps: Tensor | None = None  # (B, C); None with beta 0
    old_logps: Tensor | None = None  # (B, C); None with one update per rollout: old = current


def main(config: GRPOConfig) -> None:  # noqa: C901 - the loop stays in sight
    """Train, show samples, export."""
    distributed.seed_everything(config.seed)
    device, output_dir = distributed.device(), Path(config.output_dir)

    # Data and rewards
    tokenizer = models.load_tokenizer(config.tokenizer_path, config)
    pad_id = tokenizer.pad_token_id
    stop_ids = models.stop_token_ids(tokenizer, config.stop_token)
    paths = (config.model_name_or_path, config.ref_model_name_or_path)
    configs = [models.read_model_config(path, "policy", tokenizer, config) for path in paths]
    scorer = RewardScorer(config.reward_funcs, config.reward_weights, tokenizer, config)
    resume_from = checkpoint.find(output_dir, config.resume_from_checkpoint)
    train_set, eval_set = data.load_splits(config, "prompts", tokenizer, stop_ids)
    scorer.check_rows([*train_set, *eval_set])
    order = data.BatchOrder.of_training(config, train_set)
    total_steps = order.total_steps(config)

    # Policy, frozen reference and reward models, FSDP, optimiser
    mesh = distributed.mesh(config.num_replicas)
    policy = Policy(models.load_policy(paths[0], configs[0], config))
    policy = fsdp.shard(policy, config, mesh)  # before the next model is read: one whole at a time
    reference = None
    if config.beta > 0:
        frozen = Policy(models.load_policy(paths[1], configs[1], config)).requires_grad_(False)
        reference = fsdp.shard(frozen, config, mesh)
        self_checks.layouts_agree(reference, config)
    scorer.load(mesh)
    optimizer = optim.build_optimizer(policy, config)
    sampler = Sampler(policy, tokenizer, stop_ids, config)

    # Self-checks, resume
    self_checks.layouts_agree(policy, config)
    if config.self_check:
        self_checks.padding_invariance(policy, train_set[0], pad_id, config.bf16)
    start_step = checkpoint.load(resume_from, policy, optimizer) if resume_from else 0
    logger = RunLogger.start(config, "GRPO", total_steps, start_step)
    metrics = Accumulator(device)
    profiler = StepProfiler.start(config, total_steps, start_step)
    clip: Any = {"epsilon_low": config.epsilon_low, "epsilon_high": config.epsilon_high}

    # Loop
    for step in range(start_step, total_steps):
        # 1. Sample K candidates for each of this rank's N prompts
        examples, real = data.prompts(train_set, order.rows(step))  # real (N,): False for filler
        with metrics.timed("sample_seconds"):
            rollouts = sampler.sample(
                examples,
                num_samples=config.num_candidates,
                temperature=config.temperature,
                top_k=config.top_k,
                top_p=config.top_p,
                step=step,
                report=logger.status,
            )
        # 2. Reward every candidate
        with metrics.timed("score_seconds"):
            rewards, by_function = reward(scorer, examples, rollouts, config)  # (N, K)
        # 3. Select G of the K
        kept = select(rewards, examples, config, step)  # (N, G)
        # 4. Advantages
        advantages = kept_advantages(rewards, kept, real, config)  # (N, G)
        # 5. Log-probabilities under the reference, and under the policy before its updates
        micro_batches = collate(examples, rollouts, kept, advantages, real, config, pad_id)
        with torch.no_grad(), metrics.timed("reference_seconds"):
            for part in micro_batches:
                if reference:
                    scores = reference(part.batch, temperature=config.temperature)
                    part.ref_logps = scores.token_logps
                if config.num_iterations > 1:
                    scores = policy(part.batch, temperature=config.temperature)
                    part.old_logps = scores.token_logps
        if config.self_check and step == 0:
            part, same = micro_batches[0], paths[0] == paths[1]
            ref_logps = part.ref_logps if same else None
            rest = (ref_logps, config, config.temperature)
            self_checks.first_rollout(policy, part.batch, part.sampled_logps, *rest)
        # 6. Update
        with metrics.timed("update_seconds"):
            real_rows = (part.batch.is_real.sum() for part in micro_batches)
            num_completions = distributed.count_all(real_rows)
            for iteration in range(config.num_iterations):
                for i, part in enumerate(micro_batches):
                    fsdp.reduce_gradients_in_next_backward(policy, i == len(micro_batches) - 1)
                    scores = policy(part.batch, temperature=config.temperature, with_entropy=True)
                    logps, mask = scores.token_logps, part.batch.completion_mask  # (B, C)
                    old_logps = logps.detach() if part.old_logps is None else part.old_logps
                    per_token = policy_loss(logps, old_logps, part.advantages, mask, **clip)
                    num_tokens, num_real = mask.sum(), part.batch.is_real.sum()
                    if part.ref_logps is not None:
                        kl = kl_estimate(logps, part.ref_logps)  # (B, C)
                        per_token = per_token + config.beta * kl
                        metrics.add("kl", (kl * mask).sum(), num_real)
                    loss = aggregate(per_token, mask, num_sequences=num_completions)
                    loss.backward()

                    metrics.add("loss", loss * num_completions, num_real)
                    metrics.add("entropy", scores.entropy.sum(), num_tokens)
                    was_clipped = clipped_tokens(logps, old_logps, part.advantages, mask, **clip)
                    metrics.add("clip_fraction", was_clipped.sum(), num_tokens)
                    if iteration == 0:
                        gap = (part.sampled_logps - logps) * mask
                        metrics.add("sampler_kl", gap.sum(), num_tokens)
                update = optim.clip_and_step(policy, optimizer, config, step, total_steps)
                metrics.add_values(**update)
        add_rollout_metrics(metrics, rewards, by_function, kept, advantages, real, rollouts, config)
        metrics.add_values(epoch=order.epochs(step + 1))
        logger.update(step + 1)
        profiler.step()

        if is_due(step + 1, config.logging_steps, total_steps):
            logger.log_training(step + 1, metrics)
        if is_due(step + 1, config.sample_steps, total_steps):
            fixed = (eval_set or train_set)[: config.num_sample_prompts]
            logger.samples(step + 1, sample_table(sampler, scorer, fixed, config))
        if config.save_steps and is_due(step + 1, config.save_steps, total_steps):
            checkpoint.save(output_dir, step + 1, policy, optimizer)

    # Export
    checkpoint.export(policy, tokenizer, output_dir / "model", stop_ids=stop_ids)
    logger.close()
    plots.plot_run(output_dir)


def reward(
    scorer: RewardScorer, examples: list[Example], rollouts: Rollouts, config: GRPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Rewards (N, K) of K completions of N prompts, and each function's own. Collective."""
    rewards, by_function = scorer(examples, rollouts)
    has_stop = torch.tensor(rollouts.has_stop).view(rewards.shape)
    return apply_missing_eos_penalty(rewards, has_stop, config.missing_eos_penalty), by_function


def select(rewards: Tensor, examples: list[Example], config: GRPOConfig, step: int) -> Tensor:
    """Which of the candidates (N, K) are kept: indices (N, G)."""
    num_prompts, num_candidates = rewards.shape
    if num_candidates == config.num_generations:
        return torch.arange(num_candidates).expand(num_prompts, -1)
    rows = torch.tensor([example.row for example in examples])
    return rejection_sample(
        rewards,
        num_keep=config.num_generations,
        temperature=config.rejection_temperature,
        method=config.rejection_method,
        seed=hash_counters(derive_seed(config.seed, "selection", step), rows),
    )


def kept_advantages(rewards: Tensor, kept: Tensor, real: Tensor, config: GRPOConfig) -> Tensor:
    """Advantages (N, G) of the kept candidates. Collective with `normalize_globally`.

    What rejection sampling keeps is better than the group it comes from: against the mean of all
    candidates the kept advantages are positive on average, against their own mean they are not.
    """
    if config.baseline == "all":
        advantages = group_advantages(rewards).gather(1, kept)
    else:
        advantages = group_advantages(rewards.gather(1, kept))
    if config.normalize_globally:
        counted = real[:, None].expand_as(advantages)
        advantages = normalise_globally(advantages, counted, distributed.all_reduce_sum)
    return advantages


def collate(
    examples: list[Example],
    rollouts: Rollouts,
    kept: Tensor,
    advantages: Tensor,
    real: Tensor,
    config: GRPOConfig,
    pad_id: int,
) -> list[MicroBatch]:
    """The kept completions, packed by length; as many micro-batches on every rank. Collective."""
    device = distributed.device()
    num_candidates = len(rollouts.has_stop) // len(examples)
    pieces = []
    for n, example in enumerate(examples):
        if real[n]:
            places = (n * num_candidates + kept[n]).tolist()  # of the N*K completions
            completions = [rollouts.completion_ids[i] for i in places]
            pieces += data.cut_group(example.prompt_ids, completions, places, config)
    all_advantages = torch.zeros(len(rollouts.has_stop)).view(len(examples), -1)
    all_advantages = all_advantages.scatter(1, kept, advantages.float()).flatten()  # (N*K,)
    micro_batches = []
    for part in data.pack(pieces, config):
        batch = data.collate(part, config.layout, pad_id)
        sampled_logps = torch.zeros(batch.completion_mask.shape)  # (B, C)
        for row, i in enumerate(batch.places[batch.is_real].tolist()):
            logps = torch.tensor(rollouts.token_logps[i])
            sampled_logps[row, : len(logps)] = logps
        part_advantages = all_advantages[batch.places].to(device)
        micro_batches.append(
            MicroBatch(batch.to(device), part_advantages, sampled_logps.to(device))
        )
    return micro_batches


def sample_table(
    sampler: Sampler, scorer: RewardScorer, examples: list[Example], config: GRPOConfig
) -> list[dict[str, object]]:
    """Some completions of fixed prompts with fixed noise, their rewards and advantages. Collective.

    Every rank samples the same prompts, so that reward models are called equally often.
    """
    if not examples:
        return []
    rollouts = sampler.sample(
        examples,
        num_samples=config.num_generations,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
    )
    rewards, _ = reward(scorer, examples, rollouts, config)  # (N, G)
    advantages = group_advantages(rewards)
    columns = {"reward": rewards.flatten().tolist(), "advantage": advantages.flatten().tolist()}
    return sampler.table(examples, rollouts, **columns)


def add_rollout_metrics(
    metrics: Accumulator,
    rewards: Tensor,
    by_function: dict[str, Tensor],
    kept: Tensor,
    advantages: Tensor,
    real: Tensor,
    rollouts: Rollouts,
    config: GRPOConfig,
) -> None:
    """Record what was sampled, as means over the completions or groups of real prompts."""
    lengths = torch.tensor([len(ids) for ids in rollouts.completion_ids]).view(rewards.shape)
    stopped = torch.tensor(rollouts.has_stop).view(rewards.shape)
    std = rewards.std(1)  # (N,)
    weights = ((rewards - rewards.amax(1, keepdim=True)) / config.rejection_temperature).exp()
    per_group = {
        "reward_std": std,
        "zero_variance_fraction": (rewards == rewards[:, :1]).all(1),
        "effective_sample_size": effective_sample_size(weights),
    }
    per_completion = {
        "reward": rewards,
        "completion_length": lengths,
        "stop_rate": stopped,
        "kept_reward": rewards.gather(1, kept),
        "advantage_mean_kept": advantages,
        **{f"reward/{name}": values for name, values in by_function.items()},
    }
    for name, values in (per_group | per_completion).items():
        counted = values[real].double()
        counted = counted[~counted.isnan()]  # a function that does not apply to a row says nan
        metrics.add(name, counted.sum(), counted.numel())


if __name__ == "__main__":
    distributed.run(main, GRPOConfig)

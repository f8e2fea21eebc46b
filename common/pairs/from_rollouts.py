"""Preference pairs from rollouts of the starting policy (RSO, Liu et al. 2023)."""

from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from common import data, distributed, self_checks
from common.advantages import apply_missing_eos_penalty, eos_penalty
from common.data import Example
from common.model import fsdp, load
from common.pairs import groups
from common.pairs.config import DPOConfig
from common.record.terminal import progress_bar, show_status
from common.rewards.scorer import RewardScorer
from common.sampling.sampler import Sampler
from common.scoring import Policy


def pairs_from_rollouts(
    config: DPOConfig,
    tokenizer: Any,
    stop_ids: list[int],
    model_config: Any,
    mesh: DeviceMesh,
) -> list[Example]:
    """Sample from the starting policy, score, and pair: the training set. Collective.

    A function of the seed, the prompts and the weights: a resumed run makes the same pairs again.
    """
    name, split = config.dataset_name, config.dataset_train_split
    prompts = data.load_examples(
        config, name, split, "prompts", tokenizer, stop_ids, config.num_train_rows
    )
    scorer = RewardScorer(config.reward_funcs, config.reward_weights, tokenizer, config)
    scorer.check_rows(prompts)
    order = data.BatchOrder.of_training(config, prompts)
    lm = load.load_policy(config.model_name_or_path, model_config, config)
    policy = fsdp.shard(Policy(lm).requires_grad_(False), config, mesh)
    self_checks.loaded_model(policy, config)
    scorer.load(mesh)
    sampler = Sampler(policy, tokenizer, stop_ids, config)
    report = groups.PairReport()
    bar = progress_bar("rollouts", order.steps_per_epoch, active=distributed.is_rank0())
    for step in range(order.steps_per_epoch):
        indices = order.rows(step)
        examples, _ = data.prompts(prompts, indices)  # N
        rollouts = sampler.sample(
            examples,
            num_samples=config.num_candidates,
            temperature=config.temperature,
            step=0,  # every prompt is sampled once, before the first step
            report=lambda text: show_status(bar, f"rollouts: {text}"),
        )
        rewards = scorer.score(examples, rollouts).total  # (N, K)
        has_stop = rollouts.has_stop.view(rewards.shape)
        penalty = eos_penalty(config)
        rewards = apply_missing_eos_penalty(rewards, has_stop, penalty)
        chosen_pairs = groups.choose_pairs(
            rewards,
            method=config.pair_method,
            num_accepted=config.num_generations,
            temperature=config.rejection_temperature,
            seeds=groups.prompt_seeds(examples, config.seed),
            texts=rollouts.numbered(len(examples)),
        )  # (N, P, 2)
        texts = rollouts.texts(tokenizer)
        groups.add_rollouts(report, indices, rollouts, texts, rewards, chosen_pairs)
        bar.update()
    bar.close()
    report = groups.merge(distributed.from_all_ranks([report]))
    distributed.print_rank0(report)
    train_set = groups.as_examples(report.pairs, prompts)
    if distributed.is_rank0():
        groups.write_jsonl(Path(config.output_dir) / "pairs.jsonl", report.pairs, prompts)
    return train_set

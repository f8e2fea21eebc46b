"""Direct preference optimisation: learn from pairs without a reward model or sampling.

    D    = (log pi(y_w|x) - log pi(y_l|x)) - (log ref(y_w|x) - log ref(y_l|x))
    loss = - (1 - e) log sigma(beta D) - e log sigma(-beta D)    (Rafailov et al. 2023, eq. 7)

with log-probabilities summed over the completion, stop token included, and label smoothing e
("conservative DPO"; 0 is the paper's loss). The reference is the starting policy, frozen. Further
losses are chosen by `loss_type`, one or a weighted sum of several: `common.losses.preference_loss`
has their formulas. Two options change any of them:

    ld_alpha < 1:   in log pi and log ref, what the longer completion has beyond the shorter one's
                    length counts alpha (LD-DPO, Liu et al. 2024)
    sft_weight > 0: loss - sft_weight log pi(y_w|x) / |y_w|    (RPO, Pang et al. 2024, eq. 1)

With `pairs_from rollouts` the pairs are made here (RSO, Liu et al. 2023): the starting policy
samples `num_candidates` completions of each prompt, `reward_funcs` score them, `pair_method`
chooses who is compared, and these pairs, also written to `pairs.jsonl`, are the training rows.

How this differs from the papers:
1. AdamW, not RMSprop. 2. Dropout is off. 3. Both completions of a pair share one forward pass.
4. RPO divides by the length of chain of thought and answer; here a completion is one text.
5. RSO labels accepted completions by a ranking model that reads two; here by the higher reward.

Launch: as `train_sft.py`, with `--model_name_or_path` the SFT stage's `model` folder, for example
    torchrun --standalone --nproc_per_node 2 train_dpo.py --config assets/recipes/demo/dpo.yaml
and on pairs of its own, judged by the gold reward, with in addition
    --pairs_from rollouts --reward_funcs gold --output_dir output/demo/dpo_rollouts

Expect the `sigmoid` loss to start at ln 2 = 0.693 exactly (a self-check) and `reward_margin` to
grow. That both `chosen_logp` and `rejected_logp` fall is usual: only their difference is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from common import (
    checkpoint,
    data,
    distributed,
    evaluation,
    fsdp,
    models,
    optim,
    pairs,
    plots,
    reference_cache,
    self_checks,
)
from common.config import (
    UserError,
    is_due,
    knob,
    require_finite,
    require_not_negative,
    require_positive,
    require_within,
)
from common.data import Example
from common.generation import Sampler
from common.lora import AdapterReference, LoraTrainConfig
from common.losses import (
    PER_TOKEN_LOSSES,
    PREFERENCE_LOSSES,
    REFERENCE_FREE_LOSSES,
    SMOOTHED_LOSSES,
    preference_loss,
    sequence_logps,
)
from common.metrics import Accumulator, RunLogger
from common.padding import AnyBatch
from common.profiling import StepProfiler
from common.reward_scoring import RewardScorer
from common.rewards import apply_missing_eos_penalty
from common.scoring import Policy
from common.terminal import progress_bar, show_status


@dataclass
class DPOConfig(LoraTrainConfig):
    """Rows have the columns `prompt`, `chosen` and `rejected`; for rollouts `prompt` will do."""

    # --- objective ---
    loss_type: list[str] = knob(["sigmoid"], "one or several losses", PREFERENCE_LOSSES)
    loss_weights: list[float] = knob([], "one per loss_type (empty: 1 each)")
    beta: float = knob(0.1, "strength of the pull to the reference, per nat; simpo: reward scale")
    label_smoothing: float = knob(0.0, "assumed share of wrongly labelled pairs")
    gamma: float = knob(0.0, "simpo: margin by which the chosen reward should be the higher")
    ld_alpha: float = knob(1.0, "weight of tokens beyond the length of the shorter completion")
    sft_weight: float = knob(0.0, "weight of the chosen completion's mean negative log-likelihood")

    # --- reference ---
    reference_free: bool = knob(False, "take every completion as equally likely in the reference")
    ref_model_name_or_path: str = knob("", "frozen reference (empty: model_name_or_path)")
    precompute_ref_log_probs: bool = knob(
        True, "score all pairs with the reference first and free it (false: beside each step)"
    )
    ref_cache_dir: str = knob(
        "", "folder where runs keep and find the reference's log-probabilities (empty: none)"
    )

    # --- pairs ---
    pairs_from: str = knob(
        "dataset", "dataset: its columns; rollouts: of the starting policy", ["dataset", "rollouts"]
    )
    pair_method: str = knob(
        "rso_tournament",
        "rso_tournament: random pairs of what rejection sampling accepts; best_worst: one pair",
        pairs.PAIR_METHODS,
    )
    num_candidates: int = knob(8, "completions sampled per prompt")
    num_generations: int = knob(4, "rso_tournament: candidates accepted, twice the pairs; even")
    rejection_temperature: float = knob(0.5, "of rejection sampling, in units of reward")
    temperature: float = knob(1.0, "of sampling")
    reward_funcs: list[str] = knob([], "`gold`, file.py:function, or reward-model folders")
    reward_weights: list[float] = knob([], "one per reward function (empty: 1 each)")
    missing_eos_penalty: float = knob(-1.0, "reward of a completion that did not stop")

    def __post_init__(self) -> None:
        """Refuse values that no DPO run may have."""
        super().__post_init__()
        require_positive(self, "beta")
        require_within(self, "label_smoothing", 0, 0.5)
        for name in ("sft_weight", "gamma"):
            require_not_negative(self, name)
        self.ref_model_name_or_path = self.ref_model_name_or_path or self.model_name_or_path
        refuse_contradictions(self)
        if self.pairs_from == "rollouts":
            refuse_impossible_rollouts(self)
        elif self.reward_funcs:
            raise UserError("--reward_funcs is for --pairs_from rollouts; pairs have their labels.")

    @property
    def weighted_losses(self) -> list[tuple[str, float]]:
        """Each loss with its weight."""
        return list(
            zip(self.loss_type, self.loss_weights or [1.0] * len(self.loss_type), strict=True)
        )

    @property
    def needs_reference(self) -> bool:
        """Whether any loss compares with the reference."""
        return not self.reference_free and not set(self.loss_type) <= set(REFERENCE_FREE_LOSSES)

    @property
    def is_per_token(self) -> bool:
        """Whether implicit rewards are per token: then the losses are, and not only some."""
        return set(self.loss_type) <= set(PER_TOKEN_LOSSES)


def refuse_contradictions(config: DPOConfig) -> None:
    """Raise a UserError for options of the objective that do not go together."""
    names = ", ".join(config.loss_type)
    unsmoothed = [name for name in config.loss_type if name not in SMOOTHED_LOSSES]
    per_token = [name for name in config.loss_type if name in PER_TOKEN_LOSSES]
    if not config.loss_type:
        raise UserError(f"--loss_type is empty; give one or several of {PREFERENCE_LOSSES}.")
    if config.loss_weights and len(config.loss_weights) != len(config.loss_type):
        raise UserError(
            f"--loss_weights has {len(config.loss_weights)} values for {len(config.loss_type)} "
            "losses; give one per --loss_type, or none."
        )
    if not all(0 < weight < float("inf") for weight in config.loss_weights):
        raise UserError(f"--loss_weights is {config.loss_weights}; they must be positive.")
    if config.label_smoothing and unsmoothed:
        raise UserError(
            f"--label_smoothing is {config.label_smoothing}; it must be 0 with --loss_type "
            f"{unsmoothed[0]}, which has no labels to smooth."
        )
    if config.gamma and "simpo" not in config.loss_type:
        raise UserError(f"--gamma is {config.gamma}; it must be 0 with --loss_type {names}.")
    if not 0 <= config.ld_alpha <= 1:
        raise UserError(f"--ld_alpha is {config.ld_alpha}; it must lie in [0, 1].")
    if config.ld_alpha < 1 and per_token:
        raise UserError(
            f"--ld_alpha is {config.ld_alpha}; it must be 1 with --loss_type {per_token[0]}, which "
            "divides by the length instead."
        )


def refuse_impossible_rollouts(config: DPOConfig) -> None:
    """Raise a UserError for rollouts that give no pairs."""
    for name in ("temperature", "rejection_temperature"):
        require_positive(config, name)
    require_finite(config, "missing_eos_penalty")
    if not config.reward_funcs:
        raise UserError("--reward_funcs is required: gold, file.py:function, or model folders.")
    num_accepted = config.num_generations if config.pair_method == "rso_tournament" else 2
    if not 2 <= num_accepted <= config.num_candidates or num_accepted % 2:
        raise UserError(
            f"--num_generations is {config.num_generations} of {config.num_candidates} candidates; "
            "it must be even, at least 2 and at most --num_candidates."
        )


def main(config: DPOConfig) -> None:  # noqa: C901 - the loop stays in sight
    """Train, evaluate, export."""
    distributed.seed_everything(config.seed)
    device, output_dir = distributed.device(), Path(config.output_dir)
    mesh = distributed.mesh(config.num_replicas)

    # Data
    tokenizer = models.load_tokenizer(config.tokenizer_path, config)
    pad_id = tokenizer.pad_token_id
    stop_ids = models.stop_token_ids(tokenizer, config.stop_token)
    paths = (config.model_name_or_path, config.ref_model_name_or_path)
    configs = [models.read_model_config(path, "policy", tokenizer, config) for path in paths]
    resume_from = checkpoint.find(output_dir, config.resume_from_checkpoint)
    if config.pairs_from == "dataset":
        train_set, eval_set = data.load_splits(config, "preference", tokenizer, stop_ids)
    else:
        eval_set = data.load_examples(
            config,
            config.dataset_name,
            config.dataset_test_split,
            "preference",
            tokenizer,
            stop_ids,
            config.num_eval_rows,
        )
        train_set = pairs_from_rollouts(config, tokenizer, stop_ids, configs[0], mesh)
    order = data.BatchOrder.of_training(config, train_set)
    total_steps = order.total_steps(config)
    shared_lengths = shorter_lengths(train_set)  # (rows,)

    # Frozen reference, which scores pairs ahead of training and can then be freed
    policy: Policy | None = None
    reference: Policy | AdapterReference | None = None
    ref_train_logps = ref_eval_logps = None
    score, rest = evaluation.score_examples, (config, pad_id, "reference")
    if config.needs_reference:
        is_policy = config.lora_r > 0 and paths[0] == paths[1]  # with its adapters off
        load = models.load_trained_policy if is_policy else models.load_policy
        lm = load(paths[1], configs[1], config)
        weights = reference_cache.weights_digest(lm) if config.ref_cache_dir else ""
        if is_policy:
            policy = fsdp.shard(Policy(lm), config, mesh)
            reference = AdapterReference(policy)
        else:
            reference = fsdp.shard(Policy(lm).requires_grad_(False), config, mesh)
        self_checks.layouts_agree(reference, config)
        ref_pair_logps = score(reference, train_set[:1], *rest)  # (1, 2), for the self-check
        score_all = partial(reference_logps, reference, weights, tokenizer, config)
        if eval_set:
            ref_eval_logps = score_all(eval_set, range(len(eval_set)))  # (rows, 2)
        if config.precompute_ref_log_probs:
            rows = order.rows_until(total_steps)
            ref_train_logps = score_all(train_set, rows, ld_alpha=config.ld_alpha)  # (rows, 2)
            # A filler has the place of row 0, which may be none of the rows.
            ref_train_logps = ref_train_logps.nan_to_num().float().to(device)
            del lm, score_all
            reference = None

    # Policy, FSDP, optimiser
    if policy is None:
        policy = Policy(models.load_trained_policy(paths[0], configs[0], config))
        policy = fsdp.shard(policy, config, mesh)
    optimizer = optim.build_optimizer(policy, config)
    sampler = Sampler(policy, tokenizer, stop_ids, config)

    # Self-checks, resume
    self_checks.layouts_agree(policy, config)
    if config.self_check:
        self_checks.padding_invariance(policy, train_set[0], pad_id, config.bf16)
        self_checks.stop_token_is_trained(train_set, stop_ids)
        if config.needs_reference and paths[0] == paths[1]:
            pair_logps = score(policy, train_set[:1], *rest)  # (1, 2)
            self_checks.dpo_starts_at_ln_2(pair_logps, ref_pair_logps)
    start_step = checkpoint.load(resume_from, policy, optimizer) if resume_from else 0
    logger = RunLogger.start(config, "DPO", total_steps, start_step)
    metrics = Accumulator(device)
    profiler = StepProfiler.start(config, total_steps, start_step)

    # Loop
    for step in range(start_step, total_steps):
        batches = data.micro_batches(train_set, order.rows(step), config, pad_id)
        num_pairs = distributed.count_all(batch.is_real[::2].sum() for batch in batches)
        for i, batch in enumerate(batches):
            fsdp.reduce_gradients_in_next_backward(policy, i == len(batches) - 1)
            batch = batch.to(device)
            real = batch.is_real[::2]  # (N,) False: filler of a short batch
            token_logps, mask = policy(batch).token_logps, batch.completion_mask  # (B, C)
            shared = shared_lengths[batch.places // 2]  # (B,)
            logps = sequence_logps(token_logps, mask, shared, ld_alpha=config.ld_alpha)
            logps = logps.view(-1, 2)  # (N, 2): chosen, rejected
            if ref_train_logps is not None:
                ref_logps = ref_train_logps[batch.places[::2] // 2]  # (N, 2)
            elif reference is not None:
                with torch.no_grad():
                    ref_logps = desensitised(reference, batch, shared_lengths, config.ld_alpha)
                    ref_logps = ref_logps.view(-1, 2)
            else:
                ref_logps = torch.zeros_like(logps)
            lengths = mask.sum(-1).clamp(min=1).view(-1, 2)  # (N, 2)
            sums = token_logps.sum(-1).view(-1, 2)  # (N, 2) nats
            losses = pair_losses(logps, ref_logps, lengths, config)  # (N,)
            losses = losses + config.sft_weight * -sums[:, 0] / lengths[:, 0]
            loss = (losses * real).sum() / num_pairs
            loss.backward()
            metrics.add("loss", loss * num_pairs, real.sum())
            metrics.add("chosen_logp", (sums[:, 0] * real).sum(), real.sum())
            metrics.add("rejected_logp", (sums[:, 1] * real).sum(), real.sum())
            implicit_rewards = config.beta * (logps - ref_logps)  # (N, 2)
            if config.is_per_token:
                implicit_rewards = implicit_rewards / lengths
            evaluation.add_pair_metrics(metrics, implicit_rewards, real)
        metrics.add_values(
            **optim.clip_and_step(policy, optimizer, config, step, total_steps),
            epoch=order.epochs(step + 1),
        )
        logger.update(step + 1)
        profiler.step()

        if is_due(step + 1, config.logging_steps, total_steps):
            logger.log_training(step + 1, metrics)
        if eval_set and is_due(step + 1, config.eval_steps, total_steps):
            accuracy, _ = evaluation.preferences(
                policy, eval_set, config, pad_id, ref_eval_logps, config.is_per_token
            )
            logger.log(step + 1, {"eval_accuracy": accuracy.accuracy})
        if is_due(step + 1, config.sample_steps, total_steps):
            logger.samples(step + 1, sampler.table(eval_set or train_set))
        if config.save_steps and is_due(step + 1, config.save_steps, total_steps):
            checkpoint.save(output_dir, step + 1, policy, optimizer)

    # Export
    checkpoint.export(policy, tokenizer, output_dir / "model", stop_ids=stop_ids)
    logger.close()
    plots.plot_run(output_dir)


def pair_losses(logps: Tensor, ref_logps: Tensor, lengths: Tensor, config: DPOConfig) -> Tensor:
    """The weighted sum of the run's losses of each pair: (N,) from (N, 2), chosen first."""
    losses = [
        weight
        * preference_loss(
            *logps.unbind(-1),
            *ref_logps.unbind(-1),
            beta=config.beta,
            loss_type=loss_type,
            label_smoothing=config.label_smoothing,
            chosen_lengths=lengths[:, 0],
            rejected_lengths=lengths[:, 1],
            gamma=config.gamma,
        )
        for loss_type, weight in config.weighted_losses
    ]
    return torch.stack(losses).sum(0)


def shorter_lengths(examples: list[Example]) -> Tensor:
    """Tokens of the shorter completion of each pair, (rows,) on the device."""
    lengths = [min(map(len, example.completions)) for example in examples]
    return torch.tensor(lengths, device=distributed.device())


def desensitised(
    model: nn.Module, batch: AnyBatch, shared_lengths: Tensor, ld_alpha: float
) -> Tensor:
    """Log-probabilities (B,) of completions whose tails count `ld_alpha`."""
    shared = shared_lengths[batch.places // 2]  # (B,)
    token_logps = model(batch).token_logps  # (B, C)
    return sequence_logps(token_logps, batch.completion_mask, shared, ld_alpha=ld_alpha)


def reference_logps(
    reference: Policy | AdapterReference,
    weights: str,
    tokenizer: Any,
    config: DPOConfig,
    examples: list[Example],
    rows: Sequence[int],
    ld_alpha: float = 1.0,
) -> Tensor:
    """Log-probabilities of pairs under the reference, from disk where they are kept. Collective.

    Args:
        reference: Frozen.
        weights: Digest of its weights; unused without a cache.
        tokenizer: Of the run.
        config: Of the run.
        examples: N pairs.
        rows: Those that are scored.
        ld_alpha: What a token beyond the shorter completion's length counts.

    Returns:
        (N, 2) float64 on the host, NaN in other rows.
    """
    shared_lengths = shorter_lengths(examples)
    file = reference_cache.file_for(
        config.ref_cache_dir, weights, examples, tokenizer, config, ld_alpha=ld_alpha
    )
    return reference_cache.complete(
        file,
        len(examples),
        rows,
        lambda missing: evaluation.score_examples(
            reference,
            examples,
            config,
            tokenizer.pad_token_id,
            "reference",
            missing,
            lambda model, batch: desensitised(model, batch, shared_lengths, ld_alpha),
        ),
    )


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
    lm = models.load_policy(config.model_name_or_path, model_config, config)
    policy = fsdp.shard(Policy(lm).requires_grad_(False), config, mesh)
    self_checks.layouts_agree(policy, config)
    scorer.load(mesh)
    sampler = Sampler(policy, tokenizer, stop_ids, config)
    report = pairs.PairReport()
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
        rewards, _ = scorer(examples, rollouts)  # (N, K)
        has_stop = torch.tensor(rollouts.has_stop).view(rewards.shape)
        rewards = apply_missing_eos_penalty(rewards, has_stop, config.missing_eos_penalty)
        chosen_pairs = pairs.choose_pairs(
            rewards,
            method=config.pair_method,
            num_accepted=config.num_generations,
            temperature=config.rejection_temperature,
            seeds=pairs.prompt_seeds(examples, config.seed),
        )  # (N, P, 2)
        texts = rollouts.texts(tokenizer)
        pairs.add_rollouts(report, indices, rollouts, texts, rewards, chosen_pairs)
        bar.update()
    bar.close()
    report = pairs.merge(distributed.from_all_ranks([report]))
    distributed.print_rank0(report)
    train_set = pairs.as_examples(report.pairs, prompts)
    if distributed.is_rank0():
        pairs.write_jsonl(Path(config.output_dir) / "pairs.jsonl", report.pairs, prompts)
    return train_set


if __name__ == "__main__":
    distributed.run(main, DPOConfig)

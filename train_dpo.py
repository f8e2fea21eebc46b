"""Direct preference optimisation: learn from pairs without a reward model or sampling.

    D    = (log pi(y_w|x) - log pi(y_l|x)) - (log ref(y_w|x) - log ref(y_l|x))
    loss = - (1 - e) log sigma(beta D) - e log sigma(-beta D)    (Rafailov et al. 2023, eq. 7)

with log-probabilities summed over the completion, stop token included, and label smoothing e
("conservative DPO"; 0 is the paper's loss). The reference is the starting policy, frozen.

How this differs from the paper:
1. AdamW, not RMSprop. 2. Dropout is off. 3. Both completions of a pair share one forward pass.

Launch: as `train_sft.py`, with `--model_name_or_path` the SFT stage's `model` folder, for example
    torchrun --standalone --nproc_per_node 2 train_dpo.py --config assets/recipes/demo/dpo.yaml

Expect `loss` to start at ln 2 = 0.693 exactly (a self-check) and `reward_margin` to grow. That both
`chosen_logp` and `rejected_logp` fall is usual: only their difference is trained.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from common import (
    checkpoint,
    data,
    distributed,
    evaluation,
    fsdp,
    models,
    optim,
    plots,
    self_checks,
)
from common.config import TrainConfig, is_due, knob, require_positive, require_within
from common.generation import Sampler
from common.losses import preference_loss
from common.metrics import Accumulator, RunLogger
from common.profiling import StepProfiler
from common.scoring import Policy, sequence_scores


@dataclass
class DPOConfig(TrainConfig):
    """Rows have the columns `prompt`, `chosen` and `rejected`."""

    beta: float = knob(0.1, "strength of the pull to the reference, per nat")
    label_smoothing: float = knob(0.0, "assumed share of wrongly labelled pairs")
    ref_model_name_or_path: str = knob("", "frozen reference (empty: model_name_or_path)")
    precompute_ref_log_probs: bool = knob(
        True, "score all pairs with the reference first and free it (false: beside each step)"
    )

    def __post_init__(self) -> None:
        """Refuse values that no DPO run may have."""
        super().__post_init__()
        require_positive(self, "beta")
        require_within(self, "label_smoothing", 0, 0.5)
        self.ref_model_name_or_path = self.ref_model_name_or_path or self.model_name_or_path


def main(config: DPOConfig) -> None:  # noqa: C901 - the loop stays in sight
    """Train, evaluate, export."""
    distributed.seed_everything(config.seed)
    device, output_dir = distributed.device(), Path(config.output_dir)

    # Data
    tokenizer = models.load_tokenizer(config.tokenizer_path, config)
    pad_id = tokenizer.pad_token_id
    stop_ids = models.stop_token_ids(tokenizer, config.stop_token)
    paths = (config.model_name_or_path, config.ref_model_name_or_path)
    configs = [models.read_model_config(path, "policy", tokenizer, config) for path in paths]
    resume_from = checkpoint.find(output_dir, config.resume_from_checkpoint)
    train_set, eval_set = data.load_splits(config, "preference", tokenizer, stop_ids)
    order = data.BatchOrder.of_training(config, train_set)
    total_steps = order.total_steps(config)

    # Frozen reference, which scores pairs ahead of training and can then be freed
    mesh = distributed.mesh(config.num_replicas)
    frozen = Policy(models.load_policy(paths[1], configs[1], config)).requires_grad_(False)
    reference: Policy | None = fsdp.shard(frozen, config, mesh)
    self_checks.layouts_agree(frozen, config)
    score, rest = evaluation.score_examples, (config, pad_id, "reference")
    ref_pair_logps = score(frozen, train_set[:1], *rest)  # (1, 2), for the self-check
    ref_eval_logps = score(frozen, eval_set, *rest) if eval_set else None  # (rows, 2)
    if config.precompute_ref_log_probs:
        rows = order.rows_until(total_steps)
        ref_train_logps = score(frozen, train_set, *rest, rows=rows).float().flatten().to(device)
        del frozen
        reference = None

    # Policy, FSDP, optimiser
    policy = Policy(models.load_policy(paths[0], configs[0], config))
    policy = fsdp.shard(policy, config, mesh)
    optimizer = optim.build_optimizer(policy, config)
    sampler = Sampler(policy, tokenizer, stop_ids, config)

    # Self-checks, resume
    self_checks.layouts_agree(policy, config)
    if config.self_check:
        self_checks.padding_invariance(policy, train_set[0], pad_id, config.bf16)
        self_checks.stop_token_is_trained(train_set, stop_ids)
        if paths[0] == paths[1]:
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
            if reference is None:
                ref_logps = ref_train_logps[batch.places].view(-1, 2)  # (N, 2)
            else:
                with torch.no_grad():
                    ref_logps = sequence_scores(reference, batch).view(-1, 2)
            logps = sequence_scores(policy, batch).view(-1, 2)  # (N, 2): chosen, rejected
            losses = preference_loss(
                *logps.unbind(-1),
                *ref_logps.unbind(-1),
                beta=config.beta,
                label_smoothing=config.label_smoothing,
            )  # (N,)
            loss = (losses * real).sum() / num_pairs
            loss.backward()
            metrics.add("loss", loss * num_pairs, real.sum())
            metrics.add("chosen_logp", (logps[:, 0] * real).sum(), real.sum())
            metrics.add("rejected_logp", (logps[:, 1] * real).sum(), real.sum())
            implicit_rewards = config.beta * (logps - ref_logps)  # (N, 2)
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
            accuracy, _ = evaluation.preferences(policy, eval_set, config, pad_id, ref_eval_logps)
            logger.log(step + 1, {"eval_accuracy": accuracy.accuracy})
        if is_due(step + 1, config.sample_steps, total_steps):
            logger.samples(step + 1, sampler.table(eval_set or train_set))
        if config.save_steps and is_due(step + 1, config.save_steps, total_steps):
            checkpoint.save(output_dir, step + 1, policy, optimizer)

    # Export
    checkpoint.export(policy, tokenizer, output_dir / "model", stop_ids=stop_ids)
    logger.close()
    plots.plot_run(output_dir)


if __name__ == "__main__":
    distributed.run(main, DPOConfig)

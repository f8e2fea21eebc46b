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

import gc
from functools import partial

import torch
from torch import Tensor

from common import data, distributed, launch, self_checks
from common.checkpoint import bad_step, export
from common.checkpoint import saver as checkpoint
from common.config import is_due, is_due_before_end
from common.evaluation import score as evaluation
from common.losses import preference_loss, sequence_logps
from common.model import fsdp, optim
from common.model import load as models
from common.model.lora import AdapterReference
from common.pairs import reference_cache
from common.pairs.config import DPOConfig
from common.pairs.from_rollouts import pairs_from_rollouts
from common.pairs.reference import desensitised, reference_logps, shorter_lengths
from common.record.metrics import Accumulator, RunLogger
from common.record.profile import StepProfiler
from common.sampling import token_records
from common.sampling.sampler import Sampler
from common.scoring import Policy


def main(config: DPOConfig) -> None:  # noqa: C901 - the loop stays in sight
    """Train, export, evaluate."""
    distributed.seed_everything(config.seed)
    device = distributed.device()
    mesh = distributed.mesh(config.num_replicas)

    # Data
    tokenizer = models.load_tokenizer(config.tokenizer_path, config)
    pad_id = tokenizer.pad_token_id
    stop_ids = models.stop_token_ids(tokenizer, config.stop_token)
    paths = (config.model_name_or_path, config.ref_model_name_or_path)
    configs = [models.read_model_config(path, "policy", tokenizer, config) for path in paths]
    resume_from = checkpoint.find(config)
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
    self_checks.stop_token_is_trained(train_set, stop_ids, config)
    order = data.BatchOrder.of_training(config, train_set)
    total_steps = order.total_steps(config)
    shared_lengths = shorter_lengths(train_set)  # (rows,)
    shown = data.one_of_each_prompt(eval_set or train_set, config.num_sample_prompts)  # in tables

    # Frozen reference, which scores pairs ahead of training and can then be freed
    policy: Policy | None = None
    reference: Policy | AdapterReference | None = None
    ref_train_logps = ref_eval_logps = ref_shown_logps = None
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
        self_checks.loaded_model(reference, config)
        ref_pair_logps = score(reference, train_set[:1], *rest)  # (1, 2), for the self-check
        ref_shown_logps = token_records.token_logps(reference, shown, config, pad_id)
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
            gc.collect()  # its last block refers to itself: it would stay beside the policy

    # Policy, FSDP, optimiser
    if policy is None:
        policy = Policy(models.load_trained_policy(paths[0], configs[0], config))
        policy = fsdp.shard(policy, config, mesh)
    optimizer = optim.build_optimizer(policy, config)
    sampler = Sampler(policy, tokenizer, stop_ids, config)

    # Self-checks, resume
    self_checks.loaded_model(policy, config)
    if config.self_check and config.needs_reference and paths[0] == paths[1]:
        pair_logps = score(policy, train_set[:1], *rest)  # (1, 2)
        self_checks.dpo_starts_at_ln_2(pair_logps, ref_pair_logps)
    metrics = Accumulator(device)
    saver = checkpoint.Checkpointer(config, policy, optimizer, metrics)
    start_step = saver.load(resume_from)
    logger = RunLogger.start(config, "DPO", total_steps, start_step)
    profiler = StepProfiler.start(config, total_steps, start_step)
    numbers = data.row_numbers(train_set)  # (rows,)

    def evaluate(step: int) -> None:
        if eval_set:
            accuracy, _ = evaluation.preferences(
                policy, eval_set, config, pad_id, ref_eval_logps, config.is_per_token
            )
            logger.log(step, {"eval_accuracy": accuracy.accuracy})

    def show_samples(step: int) -> None:
        shown_logps = token_records.token_logps(policy, shown, config, pad_id)
        columns = token_records.pair_columns(shown, shown_logps, ref_shown_logps, tokenizer)
        logger.samples(step, sampler.table(shown, **columns))

    # Loop
    for step in range(start_step, total_steps):
        batches = data.micro_batches(train_set, order.rows(step), config, pad_id)
        num_pairs = distributed.count_all(batch.is_real[::2].sum() for batch in batches)
        for i, batch in enumerate(batches):
            saver.stop_if_asked(step)
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
            losses = pair_losses(logps, ref_logps, sums, lengths, config)  # (N,)
            loss = (losses * real).sum() / num_pairs
            loss.backward()
            metrics.add("loss", loss * num_pairs, real.sum())
            metrics.add("chosen_logp", (sums[:, 0] * real).sum(), real.sum())
            metrics.add("rejected_logp", (sums[:, 1] * real).sum(), real.sum())
            implicit_rewards = config.beta * (logps - ref_logps)  # (N, 2)
            if config.is_per_token:
                implicit_rewards = implicit_rewards / lengths
            evaluation.add_pair_metrics(metrics, implicit_rewards, real)
        numbers_of = (numbers[batch.places // 2] for batch in batches)
        with bad_step.guarded(saver, batches, numbers_of, step):
            loss_sum = metrics.total("loss")
            update = optim.clip_and_step(policy, optimizer, config, step, total_steps, loss_sum)
        metrics.add_values(
            **update,
            epoch=order.epochs(step + 1),
        )
        logger.update(step + 1)
        profiler.step()

        if is_due(step + 1, config.logging_steps, total_steps):
            logger.log_training(step + 1, metrics)
        if is_due_before_end(step + 1, config.eval_steps, total_steps):
            evaluate(step + 1)
        if is_due_before_end(step + 1, config.sample_steps, total_steps):
            show_samples(step + 1)
        if config.save_steps and is_due(step + 1, config.save_steps, total_steps):
            saver.save(step + 1)

    # Export, final evaluation
    export.finish(saver, logger, tokenizer, stop_ids, looks=[evaluate, show_samples])


def pair_losses(
    logps: Tensor, ref_logps: Tensor, sums: Tensor, lengths: Tensor, config: DPOConfig
) -> Tensor:
    """The weighted sum of the run's losses of each pair, and the SFT term of its chosen one.

    Args:
        logps: (N, 2) log-probabilities under the policy, chosen first; tails count `ld_alpha`.
        ref_logps: (N, 2) the same under the reference.
        sums: (N, 2) under the policy, where every token counts 1.
        lengths: (N, 2) tokens.
        config: Of the run.

    Returns:
        (N,) nats.
    """
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
    return torch.stack(losses).sum(0) - config.sft_weight * sums[:, 0] / lengths[:, 0]


if __name__ == "__main__":
    launch.run(main, DPOConfig)

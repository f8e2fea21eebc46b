r"""GRPO: sample a group of completions per prompt, keep some, push up those above their group.

    A_i    = (r_i - mean r) / (std r + 1e-4)                    DeepSeekMath (2024), section 4.1.2
    rho_it = pi(y_it | x, y_i,<t) / old(y_it | x, y_i,<t)
    loss   = - mean_i mean_t min(rho A, clip(rho, 1 - e_low, 1 + e_high) A) + beta KL(pi || ref)
                                                                eq. 3; KL by k3, eq. 4

One step is one rollout: every prompt gets `num_candidates` completions, the rewards are computed,
statistical rejection sampling keeps `num_generations` of them, their advantages are optionally
normalised again over all that were kept on all ranks, and `num_iterations` updates are made.
Each variant of the field is one flag, defined in `common/grpo/config.py`; the formulas are in
`common/losses.py` and `common/advantages.py`. A prompt goes one way: the sampler completes it,
`rollouts` rewards and selects, `minibatches` splits, compares and collates, then come the updates
below; `monitor` only tells of it. All three are in `common/grpo`.

How this differs from the paper:
1. Rejection sampling of rollouts by raw reward (RSO, Liu et al. 2023, algorithm 1; or exact draws
   without replacement by Gumbel noise). The candidates are samples: RSO's are a set of texts, here
   only with `distinct_candidates`. The baseline is the mean of all candidates or of the kept.
2. Global normalisation of the kept advantages over ranks (`normalize_globally`).
3. A completion that did not stop has the reward `missing_eos_penalty` (Huang et al. 2024).
4. Completions are cut at the first stop token before they are scored.
5. Sampling noise is a function of (seed, step, prompt, sample, position): the completions do not
   depend on the number of ranks.

Launch: as `train_sft.py`, with `--model_name_or_path` the SFT stage's `model` folder, for example
    torchrun --standalone --nproc_per_node 2 train_grpo.py --config assets/recipes/demo/grpo.yaml

On the demo two CPU processes take half a minute: the gold reward, which is only watched, goes from
0.685 (SFT) to 0.954 of 1 at a KL of 1.35 nats per completion to the SFT policy.

With one update per rollout the ratio is 1, so the policy loss is minus the mean advantage, whatever
is learned: watch `reward`, `kl`, `entropy` and the samples instead, and with `eval_steps` the same
on held-out prompts, where a reward that is optimised too far shows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from common import data, distributed, launch, self_checks
from common.grpo import minibatches, monitor, rollouts
from common.grpo.config import GRPOConfig
from common.grpo.minibatches import MicroBatch
from common.grpo.rollouts import Groups
from common.losses import (
    clipped_tokens,
    kl_estimate,
    policy_loss,
    probability_ratio,
    sampler_weights,
)
from common.model import fsdp, load
from common.record.metrics import Accumulator
from common.run import Run, find_checkpoint
from common.sampling.sampler import Sampler
from common.scoring import Policy

if TYPE_CHECKING:
    from common.model.lora import AdapterReference
    from common.rewards.score import RewardFunctions


def main(config: GRPOConfig) -> None:
    """Train, export, evaluate."""
    from common.grpo.held_out import HeldOut
    from common.model import lora
    from common.rewards.score import RewardFunctions
    from common.sampling.vllm.sampler import new_sampler

    distributed.seed_everything(config.seed)

    # Data and rewards
    vocabulary = load.load_vocabulary(config)
    paths = (config.model_name_or_path, config.ref_model_name_or_path)
    configs = [
        load.read_model_config(path, "policy", vocabulary.tokenizer, config) for path in paths
    ]
    scorer = RewardFunctions.find(config.reward_funcs, config.reward_weights, vocabulary, config)
    resume_from = find_checkpoint(config)
    train_set, eval_set = data.load_splits(config, "prompts", vocabulary)
    name, split = config.eval_pairs_dataset_name, config.dataset_test_split
    pairs = data.load_examples(config, name, split, "preference", vocabulary, config.num_eval_rows)
    scorer.check_rows(train_set, eval_set)
    order = data.BatchOrder.of_training(config, data.num_tokens(train_set))

    # Policy, frozen reference and reward models, FSDP, optimiser
    mesh = distributed.mesh(config.num_replicas)
    lm = load.load_policy(paths[0], configs[0], config, trains=True)
    policy = fsdp.shard(Policy(lm), config, mesh)  # before the next is read: one whole at a time
    reference = load_reference(policy, paths, configs[1], config, mesh)
    scorer.load(mesh)
    sampler = new_sampler(policy, vocabulary, config)
    held_out = HeldOut(sampler, scorer, reference, eval_set, pairs, config)  # before that moves

    # Self-checks, resume
    self_checks.only_tokens_matter(policy, config, is_projected=config.has_exact_kl)
    # One that stays as it is is read again on resuming.
    moving_reference = reference if config.ref_update_steps > 0 else None
    if moving_reference is not None:
        lora.require_same_shapes(moving_reference, policy)
    run = Run(policy, order, config, resume_from, vocabulary, moving_reference)
    draw = partial(sample_and_reward, run, sampler, scorer, config)
    said: set[str] = set()  # warnings

    evaluate = partial(held_out.log, run.logger)
    fixed = (eval_set or train_set)[: config.num_sample_prompts]
    models = (sampler, scorer, reference)
    show_samples = partial(monitor.show_samples, run.logger, *models, fixed, config)

    # Loop
    if config.eval_steps and run.step == 0:
        evaluate(0)  # where curves start
    for step in run.steps():
        run.saver.stop_if_asked(step, at_once=True)
        # 1. Sample K candidates for each of this rank's N prompts, and reward every one
        groups = draw(*data.prompts(train_set, order.rows(step)))
        if config.zero_variance == "resample":
            groups, num_replaced = rollouts.replace_flat(groups, train_set, draw, config, step)
            run.metrics.add_values(replaced_groups=num_replaced)
        # 2. Select G of the K, say which of them count, and which share an update and a forward
        kept = rollouts.keep(groups, rollouts.select(groups, config, step), config)
        monitor.warn(kept, config, step, said)
        updates = minibatches.split(kept, config, vocabulary, step)
        # 3. Log-probabilities (N*G, C) under the reference, and the policy before its updates
        with torch.no_grad(), run.metrics.timed("reference_seconds"):
            before = minibatches.before_updates(policy, reference, updates, kept, config)
        # 4. Advantages (N, G), or of tokens (N, G, C), which may count the KL
        advantages = minibatches.advantages(kept, before.ref_logps, config)
        # 5. Micro-batches of every update, with all of this in them
        collated = minibatches.collate(kept, updates, before, advantages, config)
        if config.self_check and step == 0 and collated:
            first, is_same = collated[0][0], paths[0] == paths[1]
            ref_logps = first.ref_logps if is_same else None
            drawn = (first.batch, first.sampled_logps, ref_logps)
            self_checks.sampler_equals_trainer(policy, *drawn, config, config.temperature)
        # 6. Update
        weights: list[tuple[Tensor, Tensor]] = []  # of the sampler correction, with their masks
        with run.metrics.timed("update_seconds"):
            for iteration, parts in product(range(config.num_iterations), collated):
                is_new = iteration == 0  # the completions are trained on for the first time
                for part in run.micro_batches(parts, may_stop=is_new and parts is collated[0]):
                    loss = grpo_loss(policy, part, config, run.metrics, weights, is_new=is_new)
                    loss.backward()
                run.update()
        if moving_reference is not None and (step + 1) % config.ref_update_steps == 0:
            lora.mix_into(moving_reference, policy, config.ref_mixup_alpha)
        if config.sampler_correction != "none":
            run.metrics.add("sampler_weight_share", *monitor.effective_share(weights))
        monitor.add_metrics(run.metrics, kept, advantages, config, step)
        run.end_step(evaluate, show_samples)

    # Export, final evaluation
    run.finish(looks=[evaluate, show_samples])


def load_reference(
    policy: Policy, paths: Sequence[str], ref_config: Any, config: GRPOConfig, mesh: DeviceMesh
) -> "Policy | AdapterReference | None":
    """The frozen reference: the policy's base under LoRA, None where no KL is taken. Collective.

    `paths` are those of policy and reference, whose model has the `ref_config`.
    """
    if config.beta == 0:
        return None
    if config.lora_r and paths[0] == paths[1]:
        from common.model.lora import AdapterReference

        return AdapterReference(policy)
    frozen = Policy(load.load_policy(paths[1], ref_config, config)).requires_grad_(False)
    reference = fsdp.shard(frozen, config, mesh, moves=config.ref_update_steps > 0)
    self_checks.only_tokens_matter(reference, config, is_projected=config.has_exact_kl)
    return reference


def sample_and_reward(
    run: Run,
    sampler: Sampler,
    scorer: "RewardFunctions",
    config: GRPOConfig,
    examples: list[data.Example],
    real: Tensor,
) -> Groups:
    """K candidates for each of N prompts, some of which are `real`, with rewards. Collective."""
    from common.record.glossary import LOGGED_PREFIX

    with run.metrics.timed("sample_seconds"), run.kept_if_engine_fails():
        drawn = sampler.sample(
            examples,
            num_samples=config.num_candidates,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            step=run.step,
            report=run.logger.status,
        )
    with run.metrics.timed("score_seconds"):
        scored = rollouts.reward(scorer, examples, drawn, config, run.step, run.total_steps)
    for name, values in scored.log.metrics.items():
        run.metrics.add(f"{LOGGED_PREFIX}{name}", sum(values), len(values))
    return Groups(examples, real, drawn, scored.total, scored.by_function, scored.steps)


def grpo_loss(
    policy: Policy,
    part: MicroBatch,
    config: GRPOConfig,
    metrics: Accumulator,
    weights: list[tuple[Tensor, Tensor]],
    *,
    is_new: bool,
) -> Tensor:
    """A micro-batch's part of the loss of an update, a scalar; counts what is logged of it.

    Where the completions are new, not trained on before, `weights` gets those of the sampler
    correction, with the mask.
    """
    mask = part.batch.completion_mask  # (B, C)
    scores = policy(
        part.batch, temperature=config.temperature, with_entropy=True, reference=part.ref_states
    )
    logps = scores.token_logps  # (B, C)
    old_logps = logps.detach() if part.old_logps is None else part.old_logps

    def of_policy(formula: Callable[..., Tensor]) -> Tensor:  # (B, C)
        return formula(
            *(logps, old_logps, part.advantages, mask),
            objective=config.policy_objective,
            epsilon_low=config.epsilon_low,
            epsilon_high=config.epsilon_high,
            delta=config.delta or None,
            ratio_level=config.ratio_level,
        )

    per_token = of_policy(policy_loss)
    num_tokens, num_real = mask.sum(), part.batch.is_real.sum()
    if config.sampler_correction != "none":
        by, cap = config.sampler_correction, config.sampler_correction_cap
        own = sampler_weights(old_logps, part.sampled_logps, mask, correction=by, cap=cap)
        per_token = per_token * own
        if is_new:
            weights.append((own, mask))
    if config.entropy_coef > 0:
        per_token = per_token - config.entropy_coef * scores.entropy
    if part.ref_logps is not None:
        kl = scores.kl  # (B, C)
        if not config.has_exact_kl:
            kl = kl_estimate(logps, part.ref_logps, estimator=config.kl_estimator)
            if config.kl_correction:
                kl = kl * probability_ratio(logps, old_logps, mask)
        metrics.add("kl", (kl * mask).sum(), num_real)
        if config.kl_in == "loss":
            per_token = per_token + config.beta * kl
    loss = part.aggregated(per_token, config)
    metrics.add("loss", loss * part.denominators.num_sequences, num_real)
    metrics.add("entropy", scores.entropy.sum(), num_tokens)
    metrics.add("clip_fraction", of_policy(clipped_tokens).sum(), num_tokens)
    if is_new:
        metrics.add("sampler_kl", ((part.sampled_logps - old_logps) * mask).sum(), num_tokens)
    return loss


if __name__ == "__main__":
    launch.run(main, GRPOConfig)

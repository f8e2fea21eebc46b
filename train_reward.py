r"""Reward model: learn which of two summaries people prefer.

    loss = - log sigma(r(x, y_chosen) - r(x, y_rejected) - margin)
           + lambda (r(x, y_chosen) + r(x, y_rejected))^2

The first line is Stiennon et al. 2020, section 3.4, with the margin of Llama 2 (Touvron et al.
2023, eq. 2): the column that `margin_column` names, else 0. The second keeps rewards near 0
(Eisenstein et al. 2023, eq. 2); lambda is `center_rewards_coefficient`.

The trunk is the SFT model, the head is new: N(0, 1/(d+1)) in variance, float32, made before
sharding. The reward is read at the last real token: of a text the stop token, of messages the last
one that the chat template writes (ChatML: the line break behind `<|im_end|>`), as in TRL. After
training a constant is added so that the completions of `sft_dataset_name` have the mean reward 0
(Huang et al. 2024); it is saved inside the model. With `lora_r` adapters and the head are trained;
the folder `adapter` has both, without the constant.

How this differs from the papers:
1. Both completions of a pair go through one forward pass. Pairs are shuffled and count 1 each;
   InstructGPT (Ouyang et al. 2022, eq. 1) has all comparisons of a prompt in one batch, which count
   1 together.
2. The shift is folded into the bias of the final LayerNorm, so that plain transformers computes it
   too; a model without such a bias (RMSNorm) keeps it as `reward_shift` in its config.json.
3. One seed; the papers train 3-10 and select on a development part.

Launch: as `train_sft.py`, with `--model_name_or_path` the SFT stage's `model` folder, for example
    torchrun --standalone --nproc_per_node 2 train_reward.py \
        --config assets/recipes/demo/reward.yaml

The exported folder loads as `AutoModelForSequenceClassification`, and where transformers has none
for the family in this project only. On the demo it comes within about three points of the best
attainable accuracy in two minutes on two CPU cores.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common import data, distributed, launch, self_checks
from common.checkpoint.resume import find_checkpoint
from common.config.reward import RewardConfig
from common.errors import UserError
from common.evaluation import pair_scores, scoring
from common.forward import RewardModel
from common.losses import bradley_terry_loss, centering_penalty, wins
from common.model import checks, fsdp, load
from common.record import output_lock
from common.run import Run
from common.text import chat, reading
from common.text.example import Example, Vocabulary


@output_lock.given_up_on_error()
def main(config: RewardConfig) -> None:
    """Train, shift, export, evaluate."""
    distributed.start(config.ddp_timeout)
    distributed.seed_everything(config.seed)
    device = distributed.device()

    # Data
    vocabulary = load.load_vocabulary(config, has_own_pad=True)
    tokenizer = vocabulary.tokenizer
    model_config = load.read_model_config(config.model_name_or_path, "trunk", tokenizer, config)
    resume_from = find_checkpoint(config)
    train_set, eval_set, sft_set = load_data(config, vocabulary, model_config)
    margin_of_row = margins(train_set, config.margin_column).to(device)  # (rows,)
    has_margins = bool(eval_set) and config.margin_column in eval_set[0].columns
    held_out_margins = margins(eval_set, config.margin_column if has_margins else "")  # (rows,)
    order = data.BatchOrder.of_training(config, train_set)

    # Model with its head, FSDP, optimiser
    mesh = distributed.mesh(config.num_replicas)
    path = config.model_name_or_path
    lm = load.load_reward_model(
        path, model_config, tokenizer, config, config.head_init, trains=True
    )
    model = fsdp.shard(RewardModel(lm), config, mesh, float32_modules=[lm.score])

    # Self-checks, resume
    self_checks.only_tokens_matter(model, config)
    if config.self_check:
        self_checks.equal_across_ranks("the reward head", lm.score.weight)
    run = Run(model, order, config, resume_from, vocabulary)

    def evaluate(step: int) -> None:
        if eval_set:
            scores = scoring.score_examples(model, eval_set, config, vocabulary, "scoring pairs")
            losses = pair_losses(scores, held_out_margins, config)
            run.logger.log(step, pair_scores.held_out_metrics(scores, losses))
            run.logger.samples(step, pair_scores.pair_table(eval_set, scores, vocabulary, config))

    # Loop
    for step in run.steps(evaluate):
        batches = run.prefetched(
            step, lambda at: data.micro_batches(train_set, order.rows(at), config, vocabulary)
        )
        # Over all micro-batches and ranks: ranks sum their gradients (`fsdp.shard`)
        num_pairs = distributed.count_all(batch.pairs.is_real.sum() for batch in batches)
        for batch in run.micro_batches(batches):
            batch = batch.to(distributed.device())
            pairs, real = batch.pairs, batch.pairs.is_real  # real: (N,)
            rewards = pairs.of(model(batch))  # (N, 2): chosen, rejected
            losses = pair_losses(rewards, margin_of_row[pairs.indices], config)  # (N,)
            total = (losses * real).sum()
            loss = total / num_pairs
            run.backward(loss)
            run.metrics.add("loss", total, real.sum())
            longer = wins(*pairs.of(batch.completion_mask.sum(-1)).unbind(-1))  # (N,)
            pair_scores.add_pair_metrics(run.metrics, rewards, real, chosen_longer=longer)
        run.update()
        run.end_step(evaluate)

    def shift() -> float:
        if not sft_set:
            return 0.0
        with fsdp.in_float32(model):  # as the exported model computes them
            rewards = scoring.score_examples(
                model, sft_set, config, vocabulary, "scoring references"
            )
        return -float(rewards.mean())

    # Export, shifted to mean 0 over reference summaries; final evaluation
    run.finish(hooks=[evaluate], shift=shift)


def load_data(
    config: RewardConfig, vocabulary: Vocabulary, model_config: Any
) -> list[Sequence[Example]]:
    """Pairs to train on, held-out ones, and rows whose mean reward becomes 0, to their very end."""
    train_set, eval_set = reading.load_splits(config, "preference", vocabulary)
    references, split = config.sft_dataset_name, config.dataset_train_split
    sft_set = reading.load_examples(
        config, references, split, "sft", vocabulary, config.num_sft_rows
    )
    self_checks.stop_token_is_trained(train_set, vocabulary, config)
    limit = checks.max_positions(model_config)
    sets = (train_set, eval_set, sft_set)
    return [chat.to_end_of_turn(examples, vocabulary, limit) for examples in sets]


def pair_losses(rewards: Tensor, margin: Tensor, config: RewardConfig) -> Tensor:
    """Loss (N,) of pairs by their rewards (N, 2), chosen first, and margins (N,)."""
    penalties = centering_penalty(*rewards.unbind(-1))
    losses = bradley_terry_loss(*rewards.unbind(-1), margin=margin)
    return losses + config.center_rewards_coefficient * penalties


def margins(examples: Sequence[Example], column: str) -> Tensor:
    """A column of all rows, which must be finite numbers, (rows,) float32; zeros without a name."""
    if not column:
        return torch.zeros(len(examples))
    values = []
    for example in examples:
        value: Any = example.columns.get(column)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UserError(
                f"row {example.row + 1} of the pairs has {value!r} in its column {column!r}; "
                "--margin_column names one with a finite number in every row."
            )
        values.append(value)
    return torch.tensor(values, dtype=torch.float32)


if __name__ == "__main__":
    launch.run(main, RewardConfig)

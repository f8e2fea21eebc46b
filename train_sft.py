r"""Supervised fine-tuning: maximise the likelihood of the reference summaries.

    loss = - sum_t m_t log pi(y_t | x, y_<t) / sum_t m_t        (Stiennon et al. 2020, section 3.1)

over the completion tokens m, stop token included, of the whole optimiser step: the denominator is
counted over all micro-batches and ranks before the first backward.

How this differs from the paper:
1. AdamW with fused kernels, not Adam; weight decay 0 unless asked for.
2. Dropout is off (Huang et al. 2024).
3. Posts too long for the prompt are cut at a newline or sentence, never in the header or cue.

Launch (the last value of a flag wins; every field of a recipe is a flag):
    one process   python train_sft.py --config assets/recipes/demo/sft.yaml
    one GPU       python train_sft.py --config assets/recipes/tldr-gpt2/sft.yaml
    N GPUs        torchrun --standalone --nproc_per_node N train_sft.py --config ...
    M nodes       torchrun --nnodes M --nproc_per_node N --rdzv_backend c10d \
                      --rdzv_endpoint HOST:29500 train_sft.py --config ...

The exported `output_dir/model` is the next stages' `--model_name_or_path`.
"""

from dataclasses import dataclass

from common import data, distributed, launch, self_checks
from common.checkpoint import bad_step, export
from common.checkpoint import saver as checkpoint
from common.config import is_due, is_due_before_end
from common.evaluation import score
from common.losses import sft_loss
from common.model import fsdp, load, optim
from common.model.lora import LoraTrainConfig
from common.record.metrics import Accumulator, RunLogger
from common.record.profile import StepProfiler
from common.sampling.sampler import Sampler
from common.scoring import Policy


@dataclass
class SFTConfig(LoraTrainConfig):
    """Rows have the columns `prompt` and `completion`."""


def main(config: SFTConfig) -> None:  # noqa: C901 - the loop stays in sight
    """Train, export, evaluate."""
    distributed.seed_everything(config.seed)
    device = distributed.device()

    # Data
    tokenizer = load.load_tokenizer(config.tokenizer_path, config)
    pad_id = tokenizer.pad_token_id
    stop_ids = load.stop_token_ids(tokenizer, config.stop_token)
    model_config = load.read_model_config(config.model_name_or_path, "policy", tokenizer, config)
    resume_from = checkpoint.find(config)
    train_set, eval_set = data.load_splits(config, "sft", tokenizer, stop_ids)
    self_checks.stop_token_is_trained(train_set, stop_ids, config)
    order = data.BatchOrder.of_training(config, train_set)
    total_steps = order.total_steps(config)

    # Model, FSDP, optimiser
    mesh = distributed.mesh(config.num_replicas)
    lm = load.load_trained_policy(config.model_name_or_path, model_config, config)
    policy = fsdp.shard(Policy(lm), config, mesh)
    optimizer = optim.build_optimizer(policy, config)
    sampler = Sampler(policy, tokenizer, stop_ids, config)

    # Self-checks, resume
    self_checks.loaded_model(policy, config)
    metrics = Accumulator(device)
    saver = checkpoint.Checkpointer(config, policy, optimizer, metrics)
    start_step = saver.load(resume_from)
    logger = RunLogger.start(config, "SFT", total_steps, start_step)
    profiler = StepProfiler.start(config, total_steps, start_step)
    numbers = data.row_numbers(train_set)  # (rows,)

    def evaluate(step: int) -> None:
        if eval_set:
            eval_loss = score.sft_loss(policy, eval_set, config, pad_id)
            logger.log(step, {"eval_loss": eval_loss})

    def show_samples(step: int) -> None:
        logger.samples(step, sampler.table(eval_set or train_set))

    # Loop
    for step in range(start_step, total_steps):
        batches = data.micro_batches(train_set, order.rows(step), config, pad_id)
        num_tokens = distributed.count_all(batch.num_tokens for batch in batches)
        for i, batch in enumerate(batches):
            saver.stop_if_asked(step)
            fsdp.reduce_gradients_in_next_backward(policy, i == len(batches) - 1)
            batch = batch.to(device)
            token_logps = policy(batch).token_logps  # (B, C)
            loss = sft_loss(token_logps, batch.completion_mask, num_tokens=num_tokens)
            loss.backward()
            metrics.add("loss", loss * num_tokens, batch.num_tokens)
        rows = (numbers[batch.places] for batch in batches)
        with bad_step.guarded(saver, batches, rows, step):
            loss_sum = metrics.total("loss")
            update = optim.clip_and_step(policy, optimizer, config, step, total_steps, loss_sum)
        metrics.add_values(
            **update,
            tokens=num_tokens,
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


if __name__ == "__main__":
    launch.run(main, SFTConfig)

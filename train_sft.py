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

from common import data, distributed, launch, self_checks
from common.checkpoint.resume import find_checkpoint
from common.config.stages import SFTConfig
from common.evaluation import scoring
from common.forward import Policy
from common.losses import sft_loss
from common.model import fsdp, load
from common.record import output_lock
from common.run import Run
from common.sampling.sampler import Sampler
from common.text import reading


@output_lock.given_up_on_error()
def main(config: SFTConfig) -> None:
    """Train, export, evaluate."""
    distributed.start(config.ddp_timeout)
    distributed.seed_everything(config.seed)

    # Data
    vocabulary = load.load_vocabulary(config)
    model_config = load.read_model_config(
        config.model_name_or_path, "policy", vocabulary.tokenizer, config
    )
    resume_from = find_checkpoint(config)
    train_set, eval_set = reading.load_splits(config, "sft", vocabulary)
    self_checks.stop_token_is_trained(train_set, vocabulary, config)
    order = data.BatchOrder.of_training(config, train_set)

    # Model, FSDP, optimiser
    mesh = distributed.mesh(config.num_replicas)
    lm = load.load_policy(config.model_name_or_path, model_config, config, trains=True)
    policy = fsdp.shard(Policy(lm), config, mesh)
    sampler = Sampler(policy, vocabulary, config)

    # Self-checks, resume
    self_checks.only_tokens_matter(policy, config)
    run = Run(policy, order, config, resume_from, vocabulary)

    def evaluate(step: int) -> None:
        if eval_set:
            eval_loss = scoring.mean_sft_loss(policy, eval_set, config, vocabulary)
            run.logger.log(step, {"eval_loss": eval_loss})

    def show_samples(step: int) -> None:
        shown = (eval_set or train_set)[: config.num_sample_prompts]
        run.logger.samples(step, sampler.table(shown))

    # Loop
    for step in run.steps(evaluate, show_samples):
        batches = run.prefetched(
            step, lambda at: data.micro_batches(train_set, order.rows(at), config, vocabulary)
        )
        # Over all micro-batches and ranks: ranks sum their gradients (`fsdp.shard`)
        num_tokens = distributed.count_all(batch.num_tokens for batch in batches)
        for batch in run.micro_batches(batches):
            batch = batch.to(distributed.device())
            token_logps = policy(batch).token_logps  # (B, C)
            loss = sft_loss(token_logps, batch.completion_mask, num_tokens=num_tokens)
            run.backward(loss)
            run.metrics.add("loss", loss * num_tokens, batch.num_tokens)
        run.update()
        run.end_step(evaluate, show_samples, tokens=num_tokens)

    # Export, final evaluation
    run.finish(hooks=[evaluate, show_samples])


if __name__ == "__main__":
    launch.run(main, SFTConfig)

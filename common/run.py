"""Plumbing shared by all stages: optimiser, metrics, checkpoints, logging, export.

It is no Trainer: the loop, the loss and the counts of a stage are in its script.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common import distributed
from common.batch import AnyBatch
from common.checkpoint import export
from common.checkpoint.checkpointer import Checkpointer
from common.config.stages import TrainConfig
from common.data import BatchOrder
from common.errors import MAX_NAMED, UserError, gist, naming, naming_rows
from common.model import fsdp, optim
from common.objectives.implicit_reward import ImplicitReward
from common.objectives.kinds import PolicyObjective, PreferenceLoss
from common.record import flops, output_lock
from common.record.forecast import Forecast
from common.record.logger import RunLogger
from common.record.metrics import Accumulator
from common.record.run_folder import REWARD, mark_finished
from common.record.terminal import about, format_seconds
from common.report import plots
from common.text.example import Vocabulary

Hook = Callable[[int], None]  # evaluates, or shows samples, after so many steps


class Run:
    """Optimiser, metrics, checkpoints and logger of a run, from the step it starts at."""

    forecast: Forecast | None = None  # within `steps`

    def __init__(
        self,
        module: nn.Module,
        order: BatchOrder,
        config: TrainConfig,
        resume_from: Path | None,
        vocabulary: Vocabulary,
        moving_reference: nn.Module | Any | None = None,
        implicit_reward: ImplicitReward | None = None,
    ) -> None:
        """Build the optimiser, and restore the checkpoint of `find_checkpoint`, if any. Collective.

        Checkpoints and the exported model hold the vocabulary's tokenizer and stop ids. A
        `moving_reference` is saved with the sharded module. Evaluation judges the policy's pairs by
        the `implicit_reward`, which is written down.
        """
        self.config, self.module, self.order = config, module, order
        self.total_steps = order.total_steps(config)  # earlier starts of the run included
        if 0 < self.total_steps <= config.warmup_steps:
            distributed.print_rank0(
                f"warning: the learning rate never reaches {config.learning_rate:g}: the run has "
                f"{self.total_steps:,} steps and --warmup_steps is {config.warmup_steps:,}"
            )
        self.shards_gradients = config.shard_gradients
        self.optimizer = optim.build_optimizer(module, config)
        self.metrics = Accumulator(distributed.device())  # logged every `logging_steps` steps
        self.vocabulary = vocabulary
        self.model_folder = Path(config.output_dir) / "model"  # the exported model
        self.batches: Sequence[AnyBatch] = []  # of the current update
        self.batch: AnyBatch | None = None  # the current one of these
        self.losses: list[Tensor] = []  # of the batches that were passed backwards
        self.make_batches: Callable[[int], list[AnyBatch]] | None = None  # of `prefetched`
        self.made_ahead: dict[int, list[AnyBatch]] = {}  # micro-batches by step
        self.has_updated = False  # in the current step
        judged = {REWARD: asdict(implicit_reward)} if implicit_reward else {}
        settings: dict[str, bytes] = {}  # the exported folder's files but the weights, by name
        if distributed.is_rank0():
            settings = export.settings_of(module.lm, vocabulary)
        self.checkpointer = Checkpointer(
            config, module, self.optimizer, self.metrics, moving_reference, settings, **judged
        )
        # The current one, counted from 0
        self.step = self.checkpointer.load(resume_from, self.total_steps)
        lm: Any = module.lm
        commit = getattr(lm.config, "_commit_hash", None)  # of a model of the hub
        self.logger = RunLogger(config, self.total_steps, self.step, model_commit=commit, **judged)

    def steps(self, evaluate: Hook, show_samples: Hook | None = None) -> Iterator[int]:
        """The remaining steps, counted from 0; each ends with `end_step`.

        If the run was saved because a hook of `end_step` failed, that one is called first.
        What a step takes is printed: its work before the first, and time and memory in it.
        """
        self.start = self.step
        if self.start < self.total_steps:
            self.logger.note(step_work(self.module.lm, self.order, self.config))
        num_updates = self.config.num_iterations * self.config.num_minibatches
        if self.checkpointer.num_hooks is not None and self.start < self.total_steps:
            self.call_hooks(self.start, evaluate, show_samples, self.checkpointer.num_hooks)
        self.forecast = Forecast(num_updates)
        for step in range(self.start, self.total_steps):
            self.step, self.has_updated = step, False
            yield step

    def print_forecast(self, seconds: float | None) -> None:
        """Print the time of a step and the run, if it is known now, and memory."""
        if seconds is None:
            return
        is_offloaded = self.config.cpu_offload and distributed.device().type == "cuda"
        memory = distributed.process_peak_gb()
        memory += 0 if is_offloaded else optim.missing_state_gb(self.optimizer)
        times = [format_seconds(n * seconds) for n in (1, self.total_steps - self.start)]
        run = "the rest of the run" if self.start else "the run"
        each = " a process" if distributed.world_size() > 1 else ""
        gigabytes = f"{memory:.{2 if memory < 1 else 1 if memory < 10 else 0}f} GB{each}"
        self.logger.note(f"about {times[0]} a step, {times[1]} for {run}, {gigabytes}")

    @contextmanager
    def saved_on_user_error(
        self, step: int, before_hook: dict[str, Any] | None = None
    ) -> Iterator[None]:
        """Save the run, after so many steps, if a UserError is raised. Collective.

        Updates that an unfinished step has made stay, and resuming does the whole step again. For
        `before_hook` see `Checkpointer.save_before`.
        """
        try:
            with distributed.together():
                yield
        except UserError as error:
            self.optimizer.zero_grad(set_to_none=True)
            has_updates = self.has_updated and step == self.step
            among = f", which has updates of step {step + 1} already" if has_updates else ""
            try:
                if step:
                    error.add(f"; {self.checkpointer.save_before(step, before_hook)}{among}")
            except UserError as second:  # the disk is full
                error.add(f"; {second}")
            raise

    def guarded(self, objective: PolicyObjective | PreferenceLoss) -> Callable[..., Any]:
        """The objective for the steps' micro-batches: if it raises a UserError, the run is saved.

        If a function of it is a user's, every call is collective.
        """
        if objective.is_built_in:
            return objective

        def call(*values: Any) -> Any:
            assert self.batch is not None
            where = f"at step {self.step + 1}, {naming_rows(self.batch.source_rows)}"
            with self.saved_on_user_error(self.step), naming("", where, is_ours=True):
                return objective(*values)

        return call

    def prefetched(self, step: int, make: Callable[[int], list[AnyBatch]]) -> list[AnyBatch]:
        """The micro-batches that `make` makes of a step of `steps`. Collective.

        Those of the next step are made when all of a step's are given to the device, which computes
        meanwhile.
        """
        self.make_batches = make
        return self.made_ahead.pop(step, None) or make(step)

    def micro_batches(self, batches: Sequence[AnyBatch]) -> Iterator[AnyBatch]:
        """An update's micro-batches, one by one, within a step of `steps`. Collective.

        Gradients are reduced in the last one's backward, or with `shard_gradients` in every one.
        Raises Stopped if a signal asked the run to stop, and it is saved: only before the first
        update of a step, which is then dropped as a whole.
        """
        self.batches, self.losses = batches, []
        if self.forecast:
            self.forecast.begin_update()
        for i, batch in enumerate(batches):
            if not self.has_updated:
                self.checkpointer.stop_if_asked(self.step)
            is_last = i == len(batches) - 1
            fsdp.reduce_gradients_in_next_backward(self.module, is_last, self.shards_gradients)
            self.batch = batch
            yield batch
            if self.forecast and not self.forecast.is_made:
                sizes = [each.input_ids.numel() for each in batches]
                self.print_forecast(self.forecast.by_part(sizes, i + 1))
        following = self.step + 1
        if self.make_batches and following < self.total_steps:
            self.made_ahead = {following: self.make_batches(following)}

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch's share of the loss, a scalar. Collective."""
        loss.backward()
        self.losses.append(loss.detach())

    def update(self) -> None:
        """Clip and take an optimiser step, on the gradients of `micro_batches`. Collective.

        Gradients are cleared. A RuntimeError names the rows if a loss or gradient is not finite;
        nothing was changed then.
        """
        try:
            values = optim.clip_and_step(
                self.optimizer, self.config, self.step, self.total_steps, torch.stack(self.losses)
            )
        except optim.NonFiniteError as error:
            rows = non_finite_rows(self.module, self.batches)
            raise RuntimeError(f"{error} {rows}") from None
        self.has_updated = True
        self.metrics.add_values(**values)

    def end_step(self, evaluate: Hook, show_samples: Hook | None = None, **values: Any) -> None:
        """Log the metrics with `values`, and evaluate, show samples and save where due. Collective.

        After the last step `finish` evaluates and shows samples.
        """
        done, config = self.step + 1, self.config
        self.metrics.add_values(**values, epoch=done / self.order.steps_per_epoch)
        self.logger.update(done)
        if self.forecast:
            self.print_forecast(self.forecast.by_whole())
        is_last = done == self.total_steps
        if is_last or is_due(done, config.logging_steps):
            self.logger.log_training(done, self.metrics)
        if not is_last:
            self.call_hooks(done, evaluate, show_samples)
        is_wanted = self.checkpointer.is_save_due() and not is_last  # then it is exported
        if is_wanted or (config.save_steps and (is_last or is_due(done, config.save_steps))):
            self.checkpointer.save(done)

    def call_hooks(
        self, done: int, evaluate: Hook, show_samples: Hook | None, num_called: int = 0
    ) -> None:
        """Call the hooks that are due after so many steps, except the first ones. Collective.

        If one fails, the run is saved, and resuming calls it and those behind it.
        """
        hooks = ((evaluate, self.config.eval_steps), (show_samples, self.config.sample_steps))
        for number, (hook, interval) in enumerate(hooks):
            if hook and is_due(done, interval) and number >= num_called:
                before = self.checkpointer.before_hook(number)
                with self.saved_on_user_error(done, before):
                    hook(done)

    def finish(self, hooks: Sequence[Hook], shift: Callable[[], float] = lambda: 0.0) -> None:
        """Export, and only then evaluate and show samples. Collective.

        So an evaluation or a user's function that fails cannot take the trained model with it. A
        run that is killed here does all of it again. `shift` measures the `reward_shift`. A
        UserError if the model could not be written (a checkpoint of the last step is kept), a
        RuntimeError if its weights are not finite, or if it is written and a hook failed.
        """
        last = self.total_steps
        self.checkpointer.stop_if_asked(last, at_once=True)
        fsdp.reshard(self.module)
        optim.check_weights(self.module, last)
        reward_shift = shift()
        with self.saved_on_user_error(last):
            export.save_pretrained(
                self.module, self.vocabulary, self.model_folder, reward_shift=reward_shift
            )
        self.checkpointer.wait()
        try:
            for hook in hooks:
                hook(last)
        except Exception as error:
            advice = self.checkpointer.resume_advice(last) or "evaluate.py measures it"
            raise RuntimeError(
                f"the model is whole in {self.model_folder}, its last evaluation or table of "
                f"samples is not made ({advice}): {gist(error)}"
            ) from (None if type(error) is UserError else error)  # whose text says it all
        self.checkpointer.close()
        if reward_shift:
            self.logger.log(last, {"reward_shift": reward_shift})
        self.logger.close()
        output_dir = self.checkpointer.output_dir
        plots.plot_run(output_dir)
        if distributed.is_rank0():
            mark_finished(output_dir)
            output_lock.release(output_dir)  # a second run would not see that this one is finished
        curves = output_dir / "plots" / "curves.png"
        distributed.print_rank0(f"model: {self.model_folder}  curves: {curves}")


def step_work(lm: Any, order: BatchOrder, config: TrainConfig) -> str:
    """Rows, tokens and operations of a step, by the mean lengths of the rows, as text.

    Completions that are sampled count at their limit. Reward models are left out.
    """
    number = flops.num_completions(config)
    completion = order.num_completion_tokens / len(order.lengths) / number
    prompt = sum(order.lengths) / len(order.lengths) - number * completion
    is_sampled = not order.num_completion_tokens
    completion = completion or config.max_completion_length
    tokens = config.batch_size * (prompt + number * completion)
    text = f"a step has {config.batch_size:,} rows, {'at most' if is_sampled else 'about'} "
    text += f"{about(tokens, 3)} tokens"
    if policy := flops.decoder_of(lm, fsdp.blocks(lm)):
        has_reference = is_sampled and config.beta > 0
        reference = policy if has_reference else None
        work = flops.step_flops(config, policy, prompt, completion, reference)
        text += f", {about(sum(work.values()) / 1e12)} TFLOP"
    return text


def non_finite_rows(module: nn.Module, batches: Sequence[AnyBatch]) -> str:
    """A sentence that names the rows with scores of NaN or infinity. Collective."""
    module.zero_grad(set_to_none=True)
    bad: set[int] = set()
    for batch in batches:
        batch = batch.to(distributed.device())
        with torch.no_grad():
            scores = module(batch)
        scores = getattr(scores, "token_logps", scores)  # (B, C) or (B,)
        is_finite = scores.isfinite().view(len(batch.source_rows), -1).all(1)  # (B,)
        is_bad = (batch.is_real & ~is_finite).tolist()
        bad |= {
            row for row, row_is_bad in zip(batch.source_rows, is_bad, strict=True) if row_is_bad
        }
    all_bad = distributed.from_all_ranks([(row + 1, distributed.rank()) for row in sorted(bad)])
    if not all_bad:
        return "Every score of the batch is finite: look at rewards, reference and backward pass."
    named = [f"{row} (rank {rank})" for row, rank in all_bad[:MAX_NAMED]]
    named += ["..."] * (len(all_bad) > MAX_NAMED)
    return f"Scores that are not finite: those of {len(all_bad)} rows, {', '.join(named)}."


def is_due(step: int, interval: int) -> bool:
    """Whether an action of every `interval` steps (0: only at the end) is due after `step`."""
    return interval > 0 and step % interval == 0

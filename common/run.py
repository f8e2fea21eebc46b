"""What every stage does before, between and after its steps.

It is no Trainer: the loop, the loss and the counts of a stage are in its script.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from common import distributed
from common.config import TrainConfig
from common.data import BatchOrder
from common.errors import EngineError, UserError, gist
from common.model import fsdp
from common.record.metrics import Accumulator
from common.text.example import Vocabulary

Batch = TypeVar("Batch", bound=Any)  # with `to(device)`; or what holds one as its `batch`
Look = Callable[[int], None]  # evaluates, or shows samples, after so many steps
MAX_NAMED = 8  # rows in a message


def find_checkpoint(config: TrainConfig) -> Path | None:
    """The checkpoint that a run starts from, None at step 0; refuses a folder of another run."""
    from common.checkpoint import resume

    return resume.find(config)


class Run:
    """Optimiser, metrics, checkpoints, logger and profiler of a run, from the step it starts at."""

    def __init__(
        self,
        module: nn.Module,
        order: BatchOrder,
        config: TrainConfig,
        resume_from: Path | None,
        vocabulary: Vocabulary,
        moving_reference: nn.Module | Any | None = None,
    ) -> None:
        """Restore the state that `find_checkpoint` has found, if there is one. Collective.

        Checkpoints, and the exported model, hold the tokenizer and at which ids to stop generating.
        A `moving_reference` follows the sharded module and is saved with it.
        """
        from common.checkpoint import plain
        from common.checkpoint.saver import Checkpointer
        from common.model import optim
        from common.record.logger import RunLogger

        self.config, self.module, self.order = config, module, order
        self.total_steps = order.total_steps(config)  # earlier starts of the run included
        self.shards_gradients = config.shard_gradients
        self.optimizer = optim.build_optimizer(module, config)
        self.metrics = Accumulator(distributed.device())  # logged every `logging_steps` steps
        self.vocabulary = vocabulary
        self.batches: Sequence[Any] = []  # of the update that is being made
        settings = plain.settings_of(module.lm, vocabulary) if distributed.is_rank0() else {}
        self.saver = Checkpointer(
            config, module, self.optimizer, self.metrics, moving_reference, settings
        )
        self.step = self.saver.load(resume_from)  # that is being made, counted from 0
        self.logger = RunLogger(config, self.total_steps, self.step)
        self.profiler: Any = None
        if config.profile and self.step < self.total_steps and distributed.is_rank0():
            from common.record.profile import start_profiler

            self.profiler = start_profiler(config, self.total_steps - self.step, self.step)

    def steps(self) -> Iterator[int]:
        """The steps that are left, counted from 0; each ends with `end_step`."""
        for step in range(self.step, self.total_steps):
            self.step = step
            yield step

    @contextmanager
    def kept_if_engine_fails(self) -> Iterator[None]:
        """Around sampling for a step: what was trained before it is saved. Collective.

        Raises:
            UserError: the engine failed; says how to go on.
        """
        try:
            yield
        except EngineError as error:
            if not self.step:
                raise
            how_to_go_on = self.saver.keep(self.step)
            raise UserError(f"{str(error).removesuffix('.')}; {how_to_go_on}.") from None

    def micro_batches(self, batches: Sequence[Batch], *, may_stop: bool = True) -> Iterator[Batch]:
        """An update's micro-batches, on the device one by one: attention keeps masks with them.

        Gradients are reduced in the last one's backward, or in every one. Collective.

        Raises Stopped where the run was asked to, and is saved: if it `may_stop`, because no update
        of this step was made yet.
        """
        self.batches = batches
        for i, batch in enumerate(batches):
            if may_stop:
                self.saver.stop_if_asked(self.step)
            is_last = i == len(batches) - 1
            fsdp.reduce_gradients_in_next_backward(self.module, is_last, self.shards_gradients)
            yield batch.to(distributed.device())

    def update(self) -> None:
        """Clip and take an optimiser step, on the gradients of `micro_batches`. Collective.

        Raises:
            RuntimeError: a loss or gradient is not finite; nothing was changed, the rows are named.
        """
        from common.model import optim

        loss = self.metrics.total("loss")
        try:
            values = optim.clip_and_step(
                self.module, self.optimizer, self.config, self.step, self.total_steps, loss
            )
        except optim.NonFiniteError as error:
            rows = non_finite_rows(self.module, self.batches)
            raise RuntimeError(f"{error} {rows}") from None
        self.metrics.add_values(**values)

    def end_step(
        self, evaluate: Look | None = None, show_samples: Look | None = None, **values: Any
    ) -> None:
        """Log the metrics, also `values`, look and save where it is due. Collective.

        The looks that are due after the last step are `finish`'s.
        """
        done, config = self.step + 1, self.config
        self.metrics.add_values(**values, epoch=done / self.order.steps_per_epoch)
        self.logger.update(done)
        if self.profiler:
            self.profiler.step()
        is_last = done == self.total_steps
        if is_last or is_due(done, config.logging_steps):
            self.logger.log_training(done, self.metrics)
        if evaluate and not is_last and is_due(done, config.eval_steps):
            evaluate(done)
        if show_samples and not is_last and is_due(done, config.sample_steps):
            show_samples(done)
        if config.save_steps and (is_last or is_due(done, config.save_steps)):
            self.saver.save(done)

    def finish(self, looks: Sequence[Look], shift: Callable[[], float] = lambda: 0.0) -> None:
        """Export, and only then look at what was made. Collective.

        An evaluation or a user's function that fails cannot take the trained model with it. A run
        that is killed here does it again. The best checkpoint, if of another step, is exported
        after it; `shift` measures the `reward_shift` of what is exported.

        Raises:
            UserError: the model could not be written; a checkpoint of the last step is kept.
            RuntimeError: it is written, and what comes after that failed, as its upload.
        """
        from common.checkpoint import card, export, push
        from common.record.folder import mark_finished
        from common.report import plots

        saver, step, folder = self.saver, self.total_steps, self.saver.output_dir / "model"

        def save() -> None:
            added = shift()
            try:
                export.save_pretrained(self.module, self.vocabulary, folder, reward_shift=added)
            except UserError as error:  # on every rank
                try:
                    kept = f"{saver.keep(step)}."
                except UserError as second:
                    kept = str(second)
                raise UserError(f"{error}; {kept}") from None

        def describe(step_of_model: int) -> None:
            if distributed.is_rank0():
                about = (type(self.config).__name__, asdict(self.config), step_of_model)
                card.write(saver.output_dir, saver.output_dir, *about)

        saver.stop_if_asked(step, at_once=True)
        save()
        describe(step)
        saver.wait()
        try:
            for look in looks:
                look(step)
        except Exception as error:
            again = saver.how_to_go_on(step) or "evaluate.py measures it"
            raise RuntimeError(
                f"the model is whole in {folder}, its last evaluation or table of samples is not "
                f"made ({again}): {gist(error)}"
            ) from (None if isinstance(error, UserError) else error)  # whose text says it all
        if (best := saver.close() or step) != step:
            save()
        describe(best)  # with its evaluation
        self.logger.close()
        plots.plot_run(saver.output_dir)
        push.push(saver.output_dir, self.config)
        if distributed.is_rank0():
            mark_finished(saver.output_dir)
        curves = saver.output_dir / "plots" / "curves.png"
        distributed.print_rank0(f"model: {folder}  curves: {curves}")


def non_finite_rows(module: nn.Module, batches: Sequence[Any]) -> str:
    """The rows that a policy or reward model scores with NaN or infinity, named. Collective."""
    module.zero_grad(set_to_none=True)
    bad: set[int] = set()
    for part in batches:
        batch = getattr(part, "batch", part).to(distributed.device())
        with torch.no_grad():
            scores = module(batch)
        scores = getattr(scores, "token_logps", scores)  # (B, C) or (B,)
        is_finite = scores.isfinite().view(len(batch.rows), -1).all(1)  # (B,)
        is_bad = (batch.is_real & ~is_finite).tolist()
        bad |= {row for row, this_is_bad in zip(batch.rows, is_bad, strict=True) if this_is_bad}
    found = distributed.from_all_ranks([(row + 1, distributed.rank()) for row in sorted(bad)])
    if not found:
        return "Every score of the batch is finite: look at rewards, reference and backward pass."
    named = [f"{row} (rank {rank})" for row, rank in found[:MAX_NAMED]]
    named += ["..."] * (len(found) > MAX_NAMED)
    return f"Scores that are not finite: those of {len(found)} rows, {', '.join(named)}."


def is_due(step: int, interval: int) -> bool:
    """Whether something done every `interval` steps (0: only at the end) is due after `step`."""
    return interval > 0 and step % interval == 0

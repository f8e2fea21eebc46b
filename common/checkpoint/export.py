"""Plain model folders, which transformers, TRL and peft load as they are; the end of a run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from common import distributed
from common.checkpoint.files import replacing
from common.checkpoint.saver import Checkpointer, cause
from common.checkpoint.state import once_each
from common.errors import UserError, gist
from common.exits import signals
from common.model import fsdp, lora
from common.record.logger import RunLogger


def finish(
    saver: Checkpointer,
    logger: RunLogger,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int] = (),
    *,
    looks: Sequence[Callable[[int], None]],
    shift: Callable[[], float] = lambda: 0.0,
) -> None:
    """End a run: export, and only then look at what was made. Collective.

    An evaluation, a judge or a user's function that fails cannot take the trained model with it. A
    run that is killed behind its last checkpoint does all of this again. Where the best checkpoint
    was asked for, and that is not of the last step, the model is exported a second time.

    Args:
        saver: of the run.
        logger: of the run, which it closes.
        tokenizer: as for `save_pretrained`.
        stop_ids: as for `save_pretrained`.
        looks: evaluate, and show samples, after so many steps.
        shift: measures the `reward_shift` of `save_pretrained`.

    Raises:
        UserError: the model could not be written; a checkpoint of the last step is kept.
        RuntimeError: it is written, and what comes after that failed.
    """
    from common.report import plots

    step, folder = logger.total_steps, saver.output_dir / "model"

    def export() -> None:
        added = shift()
        try:
            save_pretrained(saver.model, tokenizer, folder, stop_ids=stop_ids, reward_shift=added)
        except UserError as error:  # on every rank
            try:
                kept = f"{saver.keep(step)}."
            except UserError as second:
                kept = str(second)
            raise UserError(f"{error}; {kept}") from None

    saver.stop_if_asked(step, at_once=True)
    signals.stop_no_more()
    export()
    saver.wait()
    try:
        for look in looks:
            look(step)
    except Exception as error:
        again = saver.how_to_go_on(step) or "evaluate.py measures it"
        raise RuntimeError(
            f"the model is whole in {folder}, its last evaluation or table of samples is not made "
            f"({again}): {gist(error)}"
        ) from (None if isinstance(error, UserError) else error)  # whose text says it all
    if saver.close():
        export()
    logger.close()
    plots.plot_run(saver.output_dir)


def save_pretrained(
    module: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    stop_ids: Sequence[int] = (),
    reward_shift: float = 0.0,
) -> None:
    """Write a plain `save_pretrained` folder with tokenizer, float32 safetensors. Collective.

    Adapters are merged into its weights, and also written as peft's folder `adapter` beside it.

    Args:
        module: sharded; its submodule `lm` is the Hugging Face model.
        tokenizer: saved beside the weights.
        folder: replaced whole once the new one is complete.
        stop_ids: recorded as the generation config's eos ids, so that `generate` stops there.
        reward_shift: added to every score (see `fold_reward_shift`).

    Raises:
        UserError: rank 0 could not write it; on every rank.
    """
    state = once_each(module, fsdp.full_state_dict(module))
    failure = ""
    if distributed.is_rank0():
        try:
            write(module, state, tokenizer, folder, stop_ids, reward_shift)
        except Exception as error:  # of a disk, or whatever transformers refuses
            failure = f"the model {folder} could not be written ({cause(error)})"
    if failure := distributed.from_rank0(failure):
        raise UserError(failure)


def write(
    module: Any,
    state: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    stop_ids: Sequence[int],
    reward_shift: float,
) -> None:
    """Write the folders of `save_pretrained`, given the whole state by the module's names."""
    lm = module.lm
    state = {name.removeprefix("lm."): tensor for name, tensor in state.items()}
    if lora.adapted_layers(lm):
        with replacing(folder.with_name("adapter")) as partial:
            lora.save_adapter(lm, state, partial)
            tokenizer.save_pretrained(partial)
        state = lora.merged_state(lm, state)
    if reward_shift and not fold_reward_shift(lm, state, reward_shift):
        lm.config.reward_shift = module.shift + reward_shift  # it may have come with one
    if stop_ids and getattr(lm, "generation_config", None) is not None:
        lm.generation_config.eos_token_id = list(stop_ids)
        lm.generation_config.pad_token_id = tokenizer.pad_token_id
    lm.config.use_cache = True
    with replacing(folder) as partial:
        lm.save_pretrained(partial, state_dict=state)
        lm.config.dtype = torch.float32  # not that of a base under adapters
        lm.config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def fold_reward_shift(lm: Any, state: dict[str, torch.Tensor], shift: float) -> bool:
    """Add a constant to every score by moving the bias of the final LayerNorm along the head.

    With score = w . (n + b), b + shift w / |w|^2 adds exactly `shift`. The head itself has no bias
    in transformers' classifiers, so this is how plain transformers sees the shift as well. RMSNorm
    has no bias; then nothing is changed and the result is False.
    """
    head = state["score.weight"][0]  # (D,)
    inside = fsdp.inside_blocks(lm)
    for name, part in reversed(list(lm.base_model.named_modules())):  # OPT's is in its `decoder`
        is_norm = isinstance(part, nn.LayerNorm) and part not in inside
        if is_norm and part.bias is not None and part.bias.shape == head.shape:
            key = f"{lm.base_model_prefix}.{name}.bias"
            state[key] = state[key] + shift * head / head.square().sum()
            return True
    return False

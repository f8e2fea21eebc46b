"""What all stages share, what the four training stages share, and the config of SFT.

Batch sizes are global: they do not depend on the number of ranks. Nobody writes to a config after
`common/config/parser.py` has made it.
"""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from common.config import flags
from common.config.flags import flag, free_flag, path_flag, values_of
from common.errors import UserError

MODEL_FOLDERS = ("model", "adapter")  # folders of a run; one may be a link to another disk


@dataclass
class CommonConfig(flags.ComputeFlags, flags.DataFlags, flags.ModelFlags):
    """The flags of every stage."""

    # Of stages without the flag
    gradient_checkpointing = False
    reshard_after_forward = True
    offload_frozen = False

    _what: ClassVar = "what"
    seed: int = flag(0, "row order, initialisation and sampling noise follow from it", lt=2**63)

    _model: ClassVar = "model"
    tokenizer_name_or_path: str = path_flag("", "the same or `synthetic` (empty: beside the model)")
    stop_token: str = flag("eos", "what ends a completion: `eos` or a text that is one token")

    _checks: ClassVar = "checks"
    self_check: bool = free_flag(True, "check every loaded model before it is used")

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer comes from."""
        return self.tokenizer_name_or_path or self.model_name_or_path


@dataclass
class RowsConfig(CommonConfig):
    """The flags of every command that reads a training split in batches."""

    _data: ClassVar = "data"
    dataset_train_split: str = flag("train", "split to train on", required=True)
    num_train_rows: int = flag(0, "train on the first rows only (0: all)")
    num_eval_rows: int = flag(0, "evaluate on the first rows only (0: all)")

    _optimisation: ClassVar = "optimisation"
    batch_size: int = flag(64, "prompts or pairs per optimiser step, over all processes", gt=0)


@dataclass
class TrainConfig(
    flags.LoraFlags,
    flags.CheckpointFlags,
    flags.LoggingFlags,
    flags.OptimiserFlags,
    flags.HubFlags,
    flags.BackwardFlags,
    RowsConfig,
):
    """The flags of the four training stages."""

    stage: ClassVar[str]
    eval_metrics: ClassVar[Sequence[str]]  # by which a checkpoint may be the best
    # Of stages without the flag
    sample_steps = 0
    require_stop_token = False
    ref_update_steps = 0

    def __post_init__(self) -> None:
        """Refuse values that no training run may have."""
        super().__post_init__()
        if not self.model_name_or_path:
            raise UserError("--model_name_or_path is required: hub id, folder, or config .json.")
        self.refuse_own_output()

    def refuse_own_output(self) -> None:
        """Refuse an input that this run would replace: resuming reads it again."""
        folders = (*MODEL_FOLDERS, "checkpoints")
        written = {Path(self.output_dir, name).resolve() for name in folders}
        for f in dataclasses.fields(self):
            is_read = f.metadata["is_path"] and f.name != "resume_from_checkpoint"
            for name in values_of(self, f) if is_read else []:
                # `os.path`: a pattern as reward function may be longer than any name of a file
                place = Path(os.path.realpath(name))
                if os.path.exists(name) and written & {place, *place.parents}:
                    what = f"--{f.name} is {name}, which this run would write to"
                    raise UserError(f"{what}; name another --output_dir than {self.output_dir}.")


@dataclass
class SamplingConfig(CommonConfig):
    """The flags of every stage that samples."""

    _speed: ClassVar = flags.SPEED
    generation_batch_size: int = free_flag(64, "completions decoded at once on one process", gt=0)
    generation_cache_tokens: int = free_flag(65536, "tokens in sampling's cache on a process", gt=0)
    cuda_graphs: bool = free_flag(True, "replay sampling's steps on a GPU as a captured graph")


@dataclass
class SFTConfig(flags.SampleTableFlags, flags.CompletionFlags, TrainConfig, SamplingConfig):
    """Rows have the columns `prompt` and `completion`."""

    stage: ClassVar = "SFT"
    eval_metrics: ClassVar = ("eval_loss",)

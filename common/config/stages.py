"""What all stages share, what the four training stages share, and the config of SFT.

Batch sizes are global: they do not depend on the number of ranks. Nobody writes to a config after
`common/config/parser.py` has made it.
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from common.config import flags
from common.config.flags import AUTO, flag, free_flag, path_flag, values_of
from common.errors import UserError

MODEL_FOLDERS = ("model", "adapter")  # folders of a run; one may be a link to another disk


@dataclass
class CommonConfig(flags.ModelFlags):
    """The flags of every stage."""

    # Of stages without the flag
    num_sample_prompts = 0
    gradient_checkpointing = False
    reshard_after_forward = True
    offload_frozen = False

    _data: ClassVar = "data"
    dataset_name: str = path_flag(
        "synthetic", "hub id, folder, .jsonl[.gz] / .json / .parquet, synthetic", required=True
    )
    dataset_config: str = flag("", "name of the hub data set's configuration")
    column_map: list[str] = flag(
        [], "other names for columns, as prompt=question; also in the run's further data sets"
    )
    dataset_test_split: str = flag(
        AUTO, "split to evaluate on; auto: validation, else test, else none; empty: no evaluation"
    )
    max_prompt_length: int = flag(
        512, "tokens of a prompt; longer text is truncated, messages dropped", gt=0
    )
    max_completion_length: int = flag(56, "tokens of a completion, stop token included", gt=0)
    prompt_truncation: str = flag(
        "tldr",
        "tldr: cut the post at a newline or sentence, keep header and cue; start: drop tokens",
        ["tldr", "start"],
    )
    max_dropped_fraction: float = flag(
        0.05,
        "refuse a split that loses a larger share of its rows, but for a single row (0: any)",
        ge=0,
        le=1,
    )
    chat_columns: bool = flag(
        False, "texts become turns of the chat template: prompt the user's, the others answers"
    )

    _speed: ClassVar = flags.SPEED
    layout: str = free_flag(
        "shared_prefix",
        "shared_prefix: a prompt is computed once for all its completions; padded: the plain way, "
        "one row per completion",
        ["shared_prefix", "padded"],
    )
    micro_batch_tokens: int = free_flag(
        4096, "tokens in a pass on a process; not given: by a GPU's memory", gt=0
    )
    micro_batch_size: int = free_flag(1024, "rows (GRPO, scoring: completions) in a pass", gt=0)
    bf16: bool = flag(False, "compute in bfloat16; parameters and reductions stay in float32")
    compile: str = free_flag(
        "false",
        "torch.compile every block, for batches of few shapes; a mode of it: reduce-overhead "
        "replays blocks as CUDA graphs, max-autotune chooses kernels too",
        ["false", "true", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
    )
    cpu_offload: bool = free_flag(False, "keep parameters and optimiser state in host memory")
    num_replicas: int = free_flag(1, "HSDP: groups of processes, each with all shards", gt=0)
    ddp_timeout: int = free_flag(
        1800, "seconds to wait for other processes, as for a download", gt=0
    )

    _what: ClassVar = "what"
    seed: int = flag(0, "row order, initialisation and sampling noise follow from it", lt=2**63)

    _model: ClassVar = "model"
    tokenizer_name_or_path: str = path_flag(
        "", "tokenizer: hub id, folder or `synthetic` (empty: beside the model)"
    )
    stop_token: str = flag("eos", "what ends a completion: `eos` or a text that is one token")

    _checks: ClassVar = flags.CHECKS
    self_check: bool = free_flag(True, "check every loaded model before it is used")

    def __post_init__(self) -> None:
        """Refuse incomplete and repeated names of columns."""
        super().__post_init__()
        if not all(all(pair.partition("=")) for pair in self.column_map):
            raise self.refused("column_map", "pairs NEW=OLD, as prompt=question completion=answer")
        if len(self.renamed_columns) < len(self.column_map):
            raise self.refused("column_map", "one old name for each new one")

    @property
    def renamed_columns(self) -> dict[str, str]:
        """Names of columns by those that `column_map` gives them."""
        return dict(pair.split("=", 1) for pair in self.column_map)  # type: ignore[misc]

    @property
    def candidates_per_prompt(self) -> int:
        """Completions sampled per prompt."""
        return 1

    @property
    def has_exact_kl(self) -> bool:
        """Whether the KL to a reference is computed over the vocabulary."""
        return False

    @property
    def most_sampled_tokens(self) -> int:
        """Tokens of a sampled completion at most."""
        return self.max_completion_length

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether batches are filled up, so that compiled code meets few shapes."""
        return self.compile != "false" and self.layout == "shared_prefix"

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

    _optimisation: ClassVar = flags.OPTIMISATION
    batch_size: int = flag(64, "rows per step (GRPO: per rollout), over all processes", gt=0)


@dataclass
class TrainConfig(RowsConfig):
    """The flags of the four training stages."""

    stage: ClassVar[str]
    is_script: ClassVar = True
    # Of stages without the flag
    sample_steps = 0
    beta = 0.0
    require_stop_token = False
    ref_model_name_or_path = ""
    ref_update_steps = 0
    num_iterations = 1
    num_minibatches = 1

    _speed: ClassVar = flags.SPEED
    gradient_checkpointing: bool = free_flag(False, "recompute a block's activations in backward")
    reshard_after_forward: bool = free_flag(
        True, "free a block's gathered weights between forward and backward (false: ZeRO-2)"
    )
    shard_gradients: bool = free_flag(
        False, "reduce gradients in every micro-batch: a rank holds its shard, not whole ones"
    )

    _optimisation: ClassVar = flags.OPTIMISATION
    learning_rate: float = flag(1e-5, "peak learning rate", gt=0)
    warmup_steps: int = flag(0, "steps of linear warmup")
    lr_scheduler_type: str = flag(
        "cosine", "decay of the learning rate after the warmup", ["cosine", "linear", "constant"]
    )
    min_lr: float = flag(0.0, "learning rate that the decay ends at", ge=0)
    num_train_epochs: float = flag(1.0, "passes over the rows, if max_steps is 0", ge=0, le=2**31)
    max_steps: int = flag(0, "steps of this run (0: num_train_epochs)")
    weight_decay: float = flag(0.0, "AdamW weight decay, not on biases and norms", ge=0)
    adam_beta2: float = flag(0.999, "AdamW beta 2", ge=0, lt=1)
    # with 0 a parameter without gradient becomes 0 / 0
    adam_epsilon: float = flag(1e-8, "AdamW epsilon", gt=0)
    max_grad_norm: float = flag(1.0, "clip the global gradient norm to it (0: no clipping)", ge=0)

    _logging: ClassVar = flags.WATCHING
    report_to: str = free_flag("none", "where metrics and samples go too", ["none", "wandb"])
    run_name: str = free_flag("", "name of the run in wandb; empty: the name of output_dir")
    logging_steps: int = free_flag(10, "steps between lines of metrics.jsonl", gt=0)
    eval_steps: int = free_flag(0, "steps between evaluations (0: at the end only)")
    num_sample_prompts: int = free_flag(3, "prompts in the printed table of samples (0: no table)")
    save_minutes: float = free_flag(
        30.0, "minutes of training between checkpoints, in all that a kill costs (0: none)", ge=0
    )
    save_steps: int = free_flag(0, "steps between checkpoints, and one at the end (0: none)")
    resume_from_checkpoint: str = free_flag(
        "auto",
        "auto: the newest whole checkpoint in output_dir, if it is of a run like this one; latest: "
        "of any run; none: start anew, removing those in output_dir; or a checkpoint's folder",
        is_path=True,
    )
    keep_last: int = free_flag(3, "checkpoints to keep in output_dir (0: all)")
    async_save: bool = free_flag(True, "write checkpoints while training goes on, from a host copy")

    _lora: ClassVar = flags.LORA
    lora_r: int = flag(0, "rank of LoRA adapters; all other weights are frozen (0: no LoRA)")
    lora_alpha: int = flag(32, "adapters are scaled by lora_alpha / lora_r", gt=0)
    lora_target_modules: list[str] = flag(
        [], "layers with an adapter, by the end of their name (empty: every linear of the blocks)"
    )

    def __post_init__(self) -> None:
        """Refuse values that no training run may have."""
        super().__post_init__()
        if not self.model_name_or_path:
            raise UserError("--model_name_or_path is required: hub id, folder, or config .json.")
        if self.min_lr > self.learning_rate:
            raise self.refused("min_lr", f"at most --learning_rate, {self.learning_rate:g}")
        if self.max_steps == self.num_train_epochs == 0:
            raise self.refused("num_train_epochs", "positive with --max_steps 0")
        if self.lora_target_modules and not self.lora_r:
            raise self.refused("lora_target_modules", "empty without --lora_r")
        self.refuse_own_output()

    @property
    def reference_path(self) -> str:
        """Where the frozen reference comes from."""
        return self.ref_model_name_or_path or self.model_name_or_path

    @property
    def is_reference_base(self) -> bool:
        """Whether the reference is the policy without its adapters."""
        return self.lora_r > 0 and self.reference_path == self.model_name_or_path

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
    generation_batch_size: int = free_flag(
        64, "completions sampled at once; on a GPU by its memory", gt=0
    )
    cuda_graphs: bool = free_flag(True, "replay sampling's steps on a GPU as a captured graph")


@dataclass
class SFTConfig(flags.SampleTableFlags, flags.CompletionFlags, TrainConfig, SamplingConfig):
    """Rows have the columns `prompt` and `completion`."""

    stage: ClassVar = "SFT"

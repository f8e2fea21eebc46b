"""Flags: a field with its default, its help text and the values it may take; groups of them.

A stage's config is made of the groups that it uses. A class variable with a leading underscore is
the heading in `--help` of the fields behind it. The last base of a class comes first there.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from common.errors import UserError

REPORT_TO = ("none", "wandb", "tensorboard")
AUTO = "auto"
SMALLEST_TEMPERATURE = 1e-6  # logits are divided by it
WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}  # see `operator`
SPEED = "speed, memory and sharding: none but bf16 changes a loss"
WATCHING = "logging, evaluation, checkpoints"


def flag(
    default: Any,  # a list is copied; a whole number makes the field a count: 0 or more
    description: str,  # in --help
    choices: Sequence[Any] | None = None,  # of a list, for each item
    *,
    required: bool = False,  # it must not be empty
    is_path: bool = False,  # it may name files and folders; a slash at the end is dropped
    may_change: bool = False,  # a run may be resumed with another value; else it is another run
    **bounds: float,  # `gt`, `ge`, `lt`, `le`
) -> Any:
    """A dataclass field with its help text and what `check_fields` holds its values to."""
    if type(default) is int and not bounds.keys() & {"gt", "ge"}:
        bounds = {"ge": 0, **bounds}
    about = {"default": default, "help": description, "choices": choices and list(choices)}
    about |= {"bounds": bounds, "required": required, "is_path": is_path, "may_change": may_change}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=about)
    return dataclasses.field(default=default, metadata=about)


# A field that changes how a run is watched, stored and computed, but for rounding not what.
free_flag = functools.partial(flag, may_change=True)
path_flag = functools.partial(flag, is_path=True)


def values_of(config: Any, f: dataclasses.Field) -> list[Any]:
    """A field's value, or the items of its list."""
    value = getattr(config, f.name)
    return value if isinstance(value, list) else [value]


def check_fields(config: Any) -> None:
    """Raise a UserError for a value that its field excludes by itself.

    A path loses the slash at its end: `model/` is the same folder as `model`.
    """
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.metadata["required"] and not value:
            raise UserError(f"--{f.name} is required: {f.metadata['help']}.")
        for item in values_of(config, f):
            if needed := missed(item, **f.metadata):
                raise UserError(f"--{f.name} is {item!r}; it must be {needed}.")
        if f.metadata["is_path"]:
            paths = [path.rstrip("/") or path for path in values_of(config, f)]
            setattr(config, f.name, paths if isinstance(value, list) else paths[0])


def missed(value: Any, choices: Sequence[Any] | None, bounds: Mapping[str, float], **_: Any) -> str:
    """The requirement that a value misses; empty if it meets all."""
    if choices and value not in choices:
        return f"one of {choices}"
    if not all(getattr(operator, name)(value, bound) for name, bound in bounds.items()):
        return " and ".join(f"{WORDS[name]} {bound:,}" for name, bound in bounds.items())
    return ""


# ---- groups of flags -----------------------------------------------------------------------------


@dataclass
class OutputFlags:
    """The output folder."""

    _what: ClassVar = "what"
    output_dir: str = free_flag("", "folder this run writes to", required=True, is_path=True)

    def __post_init__(self) -> None:
        """Refuse values that a field excludes by itself."""
        check_fields(self)

    def refused(self, name: str, needed: str) -> UserError:
        """The error for a value that those of other fields exclude."""
        value = getattr(self, name)
        value = str(value).lower() if isinstance(value, bool) else value
        return UserError(f"--{name} is {value}; it must be {needed}.")


@dataclass
class ModelFlags(OutputFlags):
    """The source of a model."""

    # Of commands without the flag
    seed = 0
    lora_r = 0

    _model: ClassVar = "model"
    model_name_or_path: str = path_flag("", "hub id, folder, or config .json (random weights)")
    model_revision: str = flag("main", "branch, tag or commit of model_name_or_path on the hub")
    trust_remote_code: bool = free_flag(False, "run Python code that comes with a model folder")


@dataclass
class DataFlags(OutputFlags):
    """The rows that are read, and the limits of their tokens."""

    _data: ClassVar = "data"
    dataset_name: str = path_flag(
        "synthetic", "hub id, folder, .jsonl[.gz] / .json / .parquet, synthetic", required=True
    )
    dataset_config: str = flag("", "name of the hub data set's configuration")
    dataset_revision: str = flag("", "branch, tag or commit of the hub data set")
    column_map: list[str] = flag(
        [], "other names for columns, as prompt=question; also in the run's further data sets"
    )
    dataset_test_split: str = flag(
        AUTO, "split to evaluate on; auto: validation, else test, else none; empty: no evaluation"
    )
    max_prompt_length: int = flag(512, "tokens; longer prompts are truncated", gt=0)
    max_completion_length: int = flag(56, "tokens, stop token included", gt=0)
    prompt_truncation: str = flag(
        "tldr",
        "tldr: cut the post at a newline or sentence, keep header and cue; start: drop tokens",
        ["tldr", "start"],
    )
    prompt_cue: str = flag(
        "",
        "end of every prompt, which tldr keeps as it keeps TL;DR: (empty: what follows the last "
        "blank line, up to 100 characters)",
    )
    max_dropped_fraction: float = flag(0.05, "refuse a split that loses a larger share", ge=0, le=1)

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


@dataclass
class CompletionFlags(OutputFlags):
    """A condition on the completions of a data set."""

    _data: ClassVar = "data"
    require_stop_token: bool = free_flag(
        True, "refuse completions that are all cut before their stop token (false: by design)"
    )


@dataclass
class ComputeFlags(OutputFlags):
    """Precision, micro-batches and sharding of a forward pass."""

    _speed: ClassVar = SPEED
    layout: str = free_flag(
        "shared_prefix",
        "shared_prefix: a prompt is computed once for all its completions; padded: the reference, "
        "one row per completion",
        ["shared_prefix", "padded"],
    )
    micro_batch_tokens: int = free_flag(4096, "tokens in a forward pass on a process", gt=0)
    micro_batch_size: int = free_flag(1024, "rows (GRPO, scoring: completions) in a pass", gt=0)
    bf16: bool = flag(False, "compute in bfloat16; parameters and reductions stay in float32")
    prefetch_blocks: int = free_flag(0, "gather this many blocks ahead of the one that computes")
    compile: bool = free_flag(False, "torch.compile every block")
    cpu_offload: bool = free_flag(False, "keep parameters and optimiser state in host memory")
    num_replicas: int = free_flag(1, "HSDP: groups of processes, each with all shards", gt=0)
    ddp_timeout: int = free_flag(1800, "seconds to wait for others, as for a download", gt=0)


@dataclass
class BackwardFlags(OutputFlags):
    """Recomputation and sharding of a backward pass."""

    _speed: ClassVar = SPEED
    gradient_checkpointing: bool = free_flag(False, "recompute a block's activations in backward")
    reshard_after_forward: bool = free_flag(
        True, "free a block's gathered weights between forward and backward (false: ZeRO-2)"
    )
    shard_gradients: bool = free_flag(
        False, "reduce gradients in every micro-batch: a rank holds its shard, not whole ones"
    )


@dataclass
class FrozenFlags(OutputFlags):
    """Placement of models that are not trained."""

    _speed: ClassVar = SPEED
    offload_frozen: bool = free_flag(
        False, "keep reference and reward models in host memory; plans count them on the GPU"
    )


@dataclass
class OptimiserFlags(OutputFlags):
    """Steps, learning rate and AdamW."""

    _optimisation: ClassVar = "optimisation"
    learning_rate: float = flag(1e-5, "peak learning rate", gt=0)
    warmup_steps: int = flag(0, "steps of linear warmup from 0")
    lr_scheduler_type: str = flag("cosine", "decay after it", ["cosine", "linear", "constant"])
    min_lr: float = flag(0.0, "learning rate that the decay ends at", ge=0)
    num_train_epochs: float = flag(1.0, "passes over the rows, if max_steps is 0", ge=0, le=2**31)
    max_steps: int = flag(0, "steps of this run (0: num_train_epochs)")
    weight_decay: float = flag(0.0, "AdamW weight decay, not on biases and norms", ge=0)
    adam_beta1: float = flag(0.9, "AdamW beta 1", ge=0, lt=1)
    adam_beta2: float = flag(0.999, "AdamW beta 2", ge=0, lt=1)
    # with 0 a parameter without gradient becomes 0 / 0
    adam_epsilon: float = flag(1e-8, "AdamW epsilon", gt=0)
    max_grad_norm: float = flag(1.0, "clip the global gradient norm to it (0: no clipping)", ge=0)

    def __post_init__(self) -> None:
        """Refuse schedules that make no sense."""
        super().__post_init__()
        if self.min_lr > self.learning_rate:
            raise self.refused("min_lr", f"at most --learning_rate, {self.learning_rate:g}")
        if self.max_steps == self.num_train_epochs == 0:
            raise self.refused("num_train_epochs", "positive with --max_steps 0")


@dataclass
class LoggingFlags(OutputFlags):
    """Logs, evaluations and profiles."""

    _logging: ClassVar = WATCHING
    report_to: list[str] = free_flag(["none"], "none, or one or several of these", REPORT_TO)
    run_name: str = free_flag("", "name of the run in wandb; empty: the name of output_dir")
    logging_steps: int = free_flag(10, "steps between lines of metrics.jsonl", gt=0)
    eval_steps: int = free_flag(0, "steps between evaluations (0: at the end only)")
    num_sample_prompts: int = free_flag(3, "prompts in the printed table of samples (0: no table)")
    profile: bool = free_flag(False, "record steps with torch.profiler, into output_dir/profile")
    profile_steps: int = free_flag(3, "steps that profile records, after two of warm-up", gt=0)


@dataclass
class SampleTableFlags(OutputFlags):
    """The table of samples."""

    _logging: ClassVar = WATCHING
    sample_steps: int = free_flag(0, "steps between printed samples (0: at the end only)")


@dataclass
class CheckpointFlags(OutputFlags):
    """Checkpoints: when to write, which to keep, where to resume."""

    _logging: ClassVar = WATCHING
    save_steps: int = free_flag(0, "steps between checkpoints (0: none)")
    resume_from_checkpoint: str = free_flag(
        "auto",
        "auto: the newest whole checkpoint in output_dir, if it is of a run like this one; latest: "
        "of any run; none: start anew, removing those in output_dir; or a checkpoint's folder",
        is_path=True,
    )
    keep_last: int = free_flag(3, "checkpoints to keep in output_dir, with the best one (0: all)")
    async_save: bool = free_flag(True, "write checkpoints while training goes on, from a host copy")
    metric_for_best_model: str = free_flag(
        "", "a logged metric, as eval_loss: keep the checkpoint where it was best (loss: lowest)"
    )
    load_best_model_at_end: bool = free_flag(False, "export that checkpoint and not the last step")


@dataclass
class LoraFlags(OutputFlags):
    """Low-rank adapters in place of whole weights."""

    _lora: ClassVar = "LoRA"
    lora_r: int = flag(0, "rank of LoRA adapters; all other weights are frozen (0: no LoRA)")
    lora_alpha: int = flag(32, "adapters are scaled by lora_alpha / lora_r", gt=0)
    lora_target_modules: list[str] = flag(
        [], "layers with an adapter, by the end of their name (empty: every linear of the blocks)"
    )

    def __post_init__(self) -> None:
        """Refuse layers for adapters that are not made."""
        super().__post_init__()
        if self.lora_target_modules and not self.lora_r:
            raise self.refused("lora_target_modules", "empty without --lora_r")


@dataclass
class HubFlags(OutputFlags):
    """Upload of the exported model."""

    _hub: ClassVar = "hub"
    push_to_hub: bool = free_flag(False, "upload the exported model to hub_model_id, at the end")
    hub_model_id: str = free_flag("", "repository to upload it to; made if it is not there")
    hub_private_repo: bool = free_flag(False, "make it a private one")

    def __post_init__(self) -> None:
        """Refuse an upload without a repository."""
        super().__post_init__()
        if self.push_to_hub and not self.hub_model_id:
            raise UserError("--hub_model_id is required with --push_to_hub: name/of-a-model.")

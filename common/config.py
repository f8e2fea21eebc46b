"""Typed configuration: a recipe (YAML) and the command line become one dataclass.

A recipe is turned into command-line arguments, the real command line is appended, and the whole is
parsed once: the last value wins, `1e-5` is a float whatever YAML makes of it, and a typo in either
place is refused.
"""

import argparse
import dataclasses
import difflib
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from common import errors
from common.errors import UserError as UserError
from common.errors import gist as gist
from common.errors import refuse_beyond_range, shown

Config = TypeVar("Config")
# What argparse is to read as a value and not as a flag; left to itself it takes -1e-3 for a flag
NEGATIVE_NUMBER = re.compile(r"-(\d|\.\d|inf$|nan$)", re.IGNORECASE)
NULL = re.compile(r"(~|null|Null|NULL|)\Z")  # in a recipe
# Endings of the names of fields that may hold paths
PATHS = (
    *("_path", "_dir", "dataset_name", "_from_checkpoint", "policies", "reward_models"),
    "scores_from",
)


def knob(default: Any, description: str, choices: Sequence[Any] | None = None) -> Any:
    """A dataclass field with a help text, and with the values it may take."""
    metadata: dict[str, Any] = {"help": description}
    if choices is not None:
        metadata["choices"] = list(choices)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class CommonConfig:
    """The fields that every stage shares. Batch sizes are global: they do not depend on ranks."""

    # --- what ---
    output_dir: str = knob("", "folder this run writes to (required)")
    seed: int = knob(0, "row order, initialisation and sampling noise are functions of it")

    # --- model ---
    model_name_or_path: str = knob(
        "", "hub id, folder, or a transformers config .json (random weights of that shape)"
    )
    tokenizer_name_or_path: str = knob(
        "", "hub id, folder or `synthetic`; empty: the one beside the model"
    )
    trust_remote_code: bool = knob(False, "run Python code that comes with a model folder")
    stop_token: str = knob("eos", "what ends a completion: `eos` or a text that is one token")

    # --- data ---
    dataset_name: str = knob(
        "synthetic", "hub id, folder, .jsonl[.gz] / .json / .parquet, synthetic"
    )
    dataset_config: str = knob("", "name of the hub data set's configuration")
    dataset_test_split: str = knob("validation", "split to evaluate on; empty: no evaluation")
    num_eval_rows: int = knob(0, "use the first rows only (0: all)")
    max_prompt_length: int = knob(512, "tokens; longer prompts are truncated")
    max_completion_length: int = knob(56, "tokens, stop token included")
    prompt_truncation: str = knob(
        "tldr",
        "tldr: cut the post at a newline or sentence, keep header and cue; start: drop tokens",
        ["tldr", "start"],
    )
    max_dropped_fraction: float = knob(0.05, "refuse a split that loses more rows than this")
    token_cache_dir: str = knob(
        "output/token_cache",
        "folder where runs keep and find tokenised rows; may be deleted at any time (empty: none)",
    )

    # --- speed, memory and sharding: none but bf16 changes a loss ---
    layout: str = knob(
        "shared_prefix",
        "shared_prefix: a prompt is computed once for all its completions; padded: the reference, "
        "one row per completion",
        ["shared_prefix", "padded"],
    )
    micro_batch_tokens: int = knob(4096, "tokens in one forward pass on one process")
    micro_batch_size: int = knob(
        1024, "rows (GRPO and scoring: completions) in one forward pass, at most"
    )
    generation_batch_size: int = knob(64, "completions decoded at once on one process")
    generation_cache_tokens: int = knob(
        65536, "tokens whose keys and values sampling holds at once on one process"
    )
    bf16: bool = knob(False, "compute in bfloat16; parameters and reductions stay in float32")
    gradient_checkpointing: bool = knob(False, "recompute each block's activations in backward")
    reshard_after_forward: bool = knob(
        True, "free a block's gathered weights between forward and backward (false: ZeRO-2)"
    )
    prefetch_blocks: int = knob(0, "gather this many blocks ahead of the one that computes")
    compile: bool = knob(False, "torch.compile every block")
    cpu_offload: bool = knob(False, "keep parameters and optimiser state in host memory")
    num_replicas: int = knob(1, "HSDP: number of groups of processes, each holding all shards")

    # --- processes ---
    ddp_timeout: int = knob(
        1800,
        "seconds a process waits for the others before it ends; raise it if rank 0 takes longer to "
        "download a model",
    )

    # --- checks and watching ---
    self_check: bool = knob(True, "check every loaded model before it is used")
    num_sample_prompts: int = knob(3, "prompts in the printed table of samples (0: no table)")

    def __post_init__(self) -> None:
        """Refuse values that no field may have."""
        strip_slashes(self)
        refuse_odd_texts(self)
        refuse_beyond_range(self)
        if not self.output_dir:
            raise UserError("--output_dir is required: the folder this run writes to.")
        for name in (
            "max_prompt_length",
            "max_completion_length",
            "micro_batch_tokens",
            "micro_batch_size",
            "generation_batch_size",
            "generation_cache_tokens",
        ):
            require_positive(self, name)
        for name in ("num_replicas", "ddp_timeout"):
            require_positive(self, name)
        for name in ("num_eval_rows", "num_sample_prompts", "prefetch_blocks"):
            require_not_negative(self, name)
        require_within(self, "seed", 0, 2**63)
        if Path(self.output_dir).is_file():
            raise UserError(f"--output_dir {self.output_dir} is a file; name a folder.")
        if not self.dataset_name:
            raise UserError("--dataset_name is empty: hub id, folder, file, or synthetic.")
        if not 0 <= self.max_dropped_fraction <= 1:
            raise UserError(
                f"--max_dropped_fraction is {self.max_dropped_fraction}; it must lie in [0, 1]."
            )
        check_choices(self)

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer comes from."""
        return self.tokenizer_name_or_path or self.model_name_or_path


@dataclass
class TrainConfig(CommonConfig):
    """The fields that the four training stages share."""

    # --- training rows ---
    dataset_train_split: str = knob("train", "split to train on")
    num_train_rows: int = knob(0, "use the first rows only (0: all)")
    require_stop_token: bool = knob(
        True, "refuse completions that are all cut before their stop token (false: by design)"
    )

    # --- optimisation ---
    batch_size: int = knob(64, "prompts or pairs per optimiser step, over all processes")
    learning_rate: float = knob(1e-5, "peak learning rate")
    lr_scheduler_type: str = knob(
        "cosine", "shape of the decay after warmup", ["cosine", "linear", "constant"]
    )
    warmup_steps: int = knob(0, "steps of linear warmup from 0")
    num_train_epochs: float = knob(1.0, "passes over the rows, if max_steps is 0")
    max_steps: int = knob(0, "steps of this run (0: num_train_epochs)")
    weight_decay: float = knob(0.0, "AdamW weight decay, on matrices only")
    adam_beta1: float = knob(0.9, "AdamW beta 1")
    adam_beta2: float = knob(0.999, "AdamW beta 2")
    adam_epsilon: float = knob(1e-8, "AdamW epsilon")
    max_grad_norm: float = knob(1.0, "clip the global gradient norm to this (0: measure only)")

    # --- logging, evaluation, checkpoints ---
    report_to: str = knob("none", "none or wandb", ["none", "wandb"])
    run_name: str = knob("", "name of the run in wandb; empty: the name of output_dir")
    logging_steps: int = knob(10, "steps between lines of metrics.jsonl")
    eval_steps: int = knob(0, "steps between evaluations (0: at the end only; GRPO: 0)")
    sample_steps: int = knob(
        0,
        "steps between printed samples (0: at the end only; reward models: with evaluations)",
    )
    save_steps: int = knob(0, "steps between checkpoints (0: none)")
    profile: bool = knob(False, "record some steps with torch.profiler, into output_dir/profile")
    profile_steps: int = knob(3, "steps that profile records, after two of warm-up")
    resume_from_checkpoint: str = knob(
        "auto",
        "auto: the newest whole checkpoint in output_dir, if it is of a run like this one; latest: "
        "of any run; none: start anew, removing those in output_dir; or a checkpoint's folder",
    )
    keep_last: int = knob(3, "checkpoints to keep in output_dir, with the best one (0: all)")
    async_save: bool = knob(True, "write checkpoints while training goes on, from a host copy")
    metric_for_best_model: str = knob(
        "", "a logged metric, as eval_loss: keep the checkpoint where it was best (loss: lowest)"
    )
    load_best_model_at_end: bool = knob(False, "export that checkpoint and not the last step")

    # --- planning ---
    dry_run: bool = knob(False, "print what the run takes, from the models' configs, and end")
    dry_run_ranks: list[int] = knob([], "numbers of processes to plan (empty: those launched)")
    dry_run_device: str = knob(
        "", "plan for a `cuda` or a `cpu` machine (empty: for this one)", ["", "cpu", "cuda"]
    )

    def __post_init__(self) -> None:
        """Refuse values that no training run may have."""
        super().__post_init__()
        if not self.model_name_or_path:
            raise UserError("--model_name_or_path is required: hub id, folder, or config .json.")
        for name in (
            "batch_size",
            "logging_steps",
            "learning_rate",
            "profile_steps",
            "adam_epsilon",  # with 0 a parameter without gradient becomes 0 / 0
        ):
            require_positive(self, name)
        for name in (
            "warmup_steps",
            "max_steps",
            "eval_steps",
            "sample_steps",
            "save_steps",
            "max_grad_norm",
            "weight_decay",
            "num_train_rows",
            "keep_last",
        ):
            require_not_negative(self, name)
        for name in ("adam_beta1", "adam_beta2"):
            require_within(self, name, 0, 1)
        if not self.dataset_train_split:
            raise UserError("--dataset_train_split is empty: name the split to train on.")
        if self.max_steps == 0:
            require_positive(self, "num_train_epochs")
        refuse_own_output(self)
        refuse_best(self)
        refuse_plan(self)


def refuse_own_output(config: TrainConfig) -> None:
    """Raise a UserError for an input that this run would replace: resuming reads it again."""
    written = [Path(config.output_dir, name).resolve() for name in ("model", "adapter")]
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        for path in value if isinstance(value, list) else [value]:
            is_input = f.name.endswith((*PATHS, "reward_funcs")) and isinstance(path, str)
            # `os.path`: a pattern as reward function may be longer than any name of a file
            if is_input and path and f.name != "output_dir" and os.path.exists(path):
                place = Path(path).resolve()
                if any(place == own or own in place.parents for own in written):
                    raise UserError(
                        f"--{f.name} is {path}, which this run would write to; name another "
                        f"--output_dir than {config.output_dir}."
                    )


def refuse_best(config: TrainConfig) -> None:
    """Raise a UserError if no checkpoint can be the best by the metric."""
    metric = config.metric_for_best_model
    if config.load_best_model_at_end and not metric:
        raise UserError("--load_best_model_at_end true needs --metric_for_best_model.")
    if metric and not config.save_steps:
        raise UserError(
            f"--metric_for_best_model is {metric} and --save_steps is 0; it must be positive for "
            "there to be checkpoints."
        )
    is_evaluation = metric.startswith("eval_")
    if is_evaluation and (not config.eval_steps or config.save_steps % config.eval_steps):
        raise UserError(
            f"--metric_for_best_model is {metric}; --save_steps {config.save_steps} must be a "
            f"multiple of --eval_steps {config.eval_steps}, and that positive."
        )


# Fields that a run may be resumed with other values of: they change how it is watched, stored and
# computed, but for rounding not what. All others make it another run.
MAY_CHANGE = frozenset(
    """
    output_dir token_cache_dir ref_cache_dir trust_remote_code resume_from_checkpoint
    layout micro_batch_tokens micro_batch_size generation_batch_size generation_cache_tokens
    gradient_checkpointing reshard_after_forward prefetch_blocks compile cpu_offload
    num_replicas num_sample_prompts self_check require_stop_token report_to run_name logging_steps
    eval_steps sample_steps save_steps keep_last async_save metric_for_best_model
    load_best_model_at_end profile profile_steps ddp_timeout dry_run dry_run_ranks
    dry_run_device
    """.split()  # noqa: SIM905 - one name a line is longer
)


def refuse_plan(config: TrainConfig) -> None:
    """Raise a UserError for fields of a plan that is not asked for, or of no process."""
    for name in ("dry_run_ranks", "dry_run_device"):
        value = getattr(config, name)
        if value and not config.dry_run:
            raise UserError(f"--{name} is {value}; it must be empty without --dry_run true.")
    if any(ranks < 1 for ranks in config.dry_run_ranks):
        raise UserError(f"--dry_run_ranks is {config.dry_run_ranks}; they must be positive.")


def is_due(step: int, interval: int, total_steps: int) -> bool:
    """Whether something done every `interval` steps (0: only at the end) is due after `step`."""
    return step == total_steps or is_due_before_end(step, interval, total_steps)


def is_due_before_end(step: int, interval: int, total_steps: int) -> bool:
    """The same of what is done behind the loop at the end."""
    return step < total_steps and interval > 0 and step % interval == 0


def strip_slashes(config: Any) -> None:
    """Write every path without a slash at its end: `model/` is the same folder as `model`."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name.endswith(("_path", "_dir", "dataset_name")):
            setattr(config, f.name, value.rstrip("/") or value)
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            setattr(config, f.name, [item.rstrip("/") or item for item in value])


def refuse_odd_texts(config: Any) -> None:
    """Raise a UserError for empty names, bytes of no text, and paths that cannot be looked at.

    A cache may be where nothing can be read or written: it is then warned about, and not used.
    """
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if isinstance(value, list) and "" in value:
            raise UserError(f"--{f.name} is {value}; no name in it may be empty.")
        for text in filter(is_no_unicode, value if isinstance(value, list) else [value]):
            raise UserError(f"--{f.name} is {text!r}; it must be text in UTF-8.")
        if f.name.endswith(PATHS) and not f.name.endswith("_cache_dir"):
            for path in filter(None, value if isinstance(value, list) else [value]):
                errors.refuse_unreachable(f.name, path)


def is_no_unicode(value: Any) -> bool:
    """Whether a text holds halves of surrogate pairs: Python's form of bytes that are not UTF-8."""
    return isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value)


def require_positive(config: Any, name: str) -> None:
    """Raise a UserError unless the field is above zero and finite."""
    value = getattr(config, name)
    if not 0 < value < math.inf:
        needed = "finite" if value == math.inf else "positive"
        raise UserError(f"--{name} is {value}; it must be {needed}.")


def check_choices(config: Any) -> None:
    """Raise a UserError for a field whose value is not one of its choices."""
    for f in dataclasses.fields(config):
        choices = f.metadata.get("choices")
        values = getattr(config, f.name)
        for value in values if isinstance(values, list) else [values]:
            if choices and value not in choices:
                raise UserError(f"--{f.name} is {value!r}; it must be one of {choices}.")


def require_not_negative(config: Any, name: str) -> None:
    """Raise a UserError unless the field is zero or above, and finite."""
    value = getattr(config, name)
    if not 0 <= value < math.inf:
        needed = "finite" if value == math.inf else "0 or more"
        raise UserError(f"--{name} is {value}; it must be {needed}.")


def require_finite(config: Any, name: str) -> None:
    """Raise a UserError for NaN or an infinity."""
    if not math.isfinite(getattr(config, name)):
        raise UserError(f"--{name} is {getattr(config, name)}; it must be finite.")


def require_within(config: Any, name: str, low: float, high: float) -> None:
    """Raise a UserError unless low <= field < high."""
    value = getattr(config, name)
    if not low <= value < high:
        raise UserError(f"--{name} is {value}; it must be at least {low} and below {high}.")


def parse(cls: type[Config], argv: Sequence[str] | None = None) -> Config:
    """The stage's config from `--config recipe.yaml` and `--field value` arguments; the last wins.

    Raises:
        UserError: an unknown flag or key, a value of the wrong type, or values that contradict each
            other.
    """
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise UserError(f"{message.rstrip('.')} (see --help for the flags).")

    argv = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(cls, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config", metavar="RECIPE", help="YAML file with values for these fields")
    parser._negative_number_matcher = NEGATIVE_NUMBER
    for action in parser._actions:
        action.nargs = "*" if action.nargs == "+" else action.nargs  # a list may be empty
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments, strays = parser.parse_known_args([*recipe_arguments(argv, fields), *argv])
    if strays:
        raise UserError(f"unknown argument {strays[0]!r} ({hint(strays[0], fields)}).")
    values = vars(arguments)
    values.pop("config")
    return cls(**values)


def recipe_arguments(argv: Sequence[str], fields: Mapping[str, dataclasses.Field]) -> list[str]:
    """The recipe named by `--config` in argv, as `--key value` arguments."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", nargs="?")
    path = finder.parse_known_args(list(argv))[0].config
    if path is None:
        return []
    arguments = []
    for key, value in read_recipe(path).items():
        if key not in fields:
            raise UserError(f"--config {path} has the unknown key {key!r} ({hint(key, fields)}).")
        takes_list = fields[key].default_factory is not dataclasses.MISSING
        values = value if isinstance(value, list) and takes_list else [value]
        if not all(isinstance(item, str) for item in values):
            raise UserError(
                f"--config {path} gives {shown(value)} for {key!r}; it must be one value."
            )
        if not takes_list:
            arguments.append(f"--{key}={value}")  # one argument: it may begin with a dash
            continue
        for item in values:
            if item.startswith("-") and not NEGATIVE_NUMBER.match(item):
                raise UserError(
                    f"--config {path} gives {item!r} in {key!r}; an item of a list must not begin "
                    "with a dash, as flags do."
                )
        arguments += [f"--{key}", *values]
    return arguments


def read_recipe(path: str, *, typed: bool = False) -> dict[Any, Any]:
    """What a recipe holds, by key.

    Args:
        path: Its file.
        typed: Numbers, dates and the like as YAML 1.1 reads them, for which 010 is 8, 1:30 is 90
            and `no` is false. Else every value is text but for null, as on a command line: the
            type of its field says what it is.

    Raises:
        UserError: the file cannot be read, is not YAML, or has a key twice: YAML keeps the last.
    """
    import yaml

    class Texts(yaml.SafeLoader):
        yaml_implicit_resolvers = {}  # noqa: RUF012 - as yaml has it

    Texts.add_implicit_resolver("tag:yaml.org,2002:null", NULL, None)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        loader = yaml.SafeLoader(text) if typed else Texts(text)
        nodes = loader.get_single_node()
        recipe = loader.construct_document(nodes) if nodes else None
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise UserError(f"--config {path} is not YAML: line {line}, {error.problem}.") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise UserError(f"--config {path} is not YAML: it is no text in UTF-8.") from None
    except (ValueError, RecursionError) as error:  # a 31st of February, lists in lists in lists
        raise UserError(f"--config {path} is not YAML: {gist(error)}.") from None
    if recipe is None:
        return {}
    if not isinstance(recipe, dict):
        raise UserError(f"--config {path} must hold `key: value` lines.")
    seen: set[str] = set()
    assert isinstance(nodes, yaml.MappingNode)
    for key, _ in nodes.value:
        if str(key.value) in seen:
            line = key.start_mark.line + 1
            raise UserError(f"--config {path}, line {line}: the key {key.value!r} is there twice.")
        seen.add(str(key.value))
    return recipe


def hint(word: Any, known: Iterable[str], otherwise: str = "see --help for the flags") -> str:
    """What an unknown flag or key may have been meant to be."""
    name = str(word).lstrip("-").split("=")[0].replace("-", "_")
    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]}?" if close else otherwise


def config_dict(config: Any) -> dict[str, Any]:
    """The config's fields as plain values."""
    return dataclasses.asdict(config)


def save_config(file: Path, config: Any) -> None:
    """Write the resolved values, as a recipe."""
    import yaml

    file.write_text(yaml.safe_dump(config_dict(config), sort_keys=False))


def save_run_files(output_dir: Path, config: Any, world_size: int) -> None:
    """Write `config.yaml` (resolved values) and `environment.json` (what ran them). Rank 0 only.

    Raises:
        UserError: they cannot be written.
    """
    import torch

    packages = ("torch", "transformers", "datasets", "tokenizers", "numpy", "wandb", "peft")
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # other kernels round otherwise
        "world_size": world_size,
        "git_commit": git_commit(),
        "packages": {name: package_version(name) for name in packages},
        "script": Path(sys.argv[0]).name,
        "stage": type(config).__name__,
        "started": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),  # this launch
    }
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        save_config(output_dir / "config.yaml", config)
        (output_dir / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"--output_dir {output_dir} cannot be written: {error.strerror or gist(error)}."
        ) from None


def cpu_model() -> str:
    """The name of this machine's processor, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def package_version(name: str) -> str | None:
    """The installed version, None where the package is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """The commit of this checkout, with `-dirty` where files differ; None outside a checkout."""
    root = Path(__file__).resolve().parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None

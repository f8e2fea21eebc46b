"""What a run does in a step, at the limits of its config: its models, tokens and operations.

R ranks hold S = R / num_replicas shards of a model. `common/record/flops.py` counts operations.
"""

from dataclasses import dataclass, replace
from typing import Any

from common import distributed
from common.config.dpo import DPOConfig
from common.config.grpo import GRPOConfig
from common.config.stages import TrainConfig
from common.model.checks import Kind
from common.record import flops
from common.rewards.functions import is_reward_model
from experiments.plan.footprint import Footprint, of_model

FLOAT32 = 4  # bytes
MOMENTS_OF_ADAM = 2


@dataclass(frozen=True)
class Run:
    """A run whose memory and work are planned."""

    config: TrainConfig
    policy: Footprint  # what is trained, be it a reward model
    reference: Footprint | None  # a separate model, if there is one
    reward_models: tuple[Footprint, ...]
    on_gpu: bool
    process_bytes: float  # of Python and its libraries, where they share the memory
    ranks: int = 1

    def on(self, ranks: int) -> "Run":
        """The same run on so many ranks."""
        return replace(self, ranks=ranks)

    def with_flags(self, **flags: Any) -> "Run":
        """The same run but for flags that change no model."""
        return replace(self, config=replace(self.config, **flags))

    @property
    def num_completions(self) -> int:
        """Of a prompt, that are trained on."""
        return flops.num_completions(self.config)

    @property
    def number_bytes(self) -> int:
        """Of a number that is computed with."""
        return 2 if self.config.bf16 else FLOAT32

    @property
    def is_offloaded(self) -> bool:
        """Whether shards lie in another memory than what computes."""
        return self.config.cpu_offload and self.on_gpu

    @property
    def num_shards(self) -> int:
        """Ranks that share a model."""
        return self.ranks // self.config.num_replicas

    @property
    def is_plain(self) -> bool:
        """Whether `fsdp.shard` makes no FSDP units."""
        return self.ranks == 1 and not self.config.cpu_offload

    @property
    def has_copies(self) -> bool:
        """Whether float32 parameters have copies that compute (`model.bfloat16`)."""
        return self.is_plain and self.config.bf16


def make_run(config: TrainConfig, *, on_gpu: bool) -> Run:
    """Count the models of a run, from their configurations."""
    if config.layout != "shared_prefix":
        raise config.refused("layout", "shared_prefix, whose batches a plan counts")
    path = config.model_name_or_path
    kind: Kind = "trunk" if config.stage == "reward model" else "policy"
    policy = of_model(path, kind, config, trains=True)
    reference = None
    if isinstance(config, DPOConfig | GRPOConfig) and has_reference(config):
        other = config.reference_path
        if not (config.lora_r and other == path):  # else it is inside the policy
            reference = of_model(other, "policy", config, trains=False)
    reward_models = tuple(
        of_model(name, "reward_model", config, trains=False)
        for name in getattr(config, "reward_funcs", [])
        if is_reward_model(name)
    )
    # Counting has imported all that a run imports, and holds nothing.
    process = 0.0 if on_gpu else distributed.peak_resident_gb() * 1e9
    return Run(config, policy, reference, reward_models, on_gpu, process)


@dataclass(frozen=True)
class MicroBatch:
    """The largest forward and backward pass of a rank."""

    number: int  # of them in an update
    tokens: float  # computed in one
    prompts: float  # in one, each with its completions
    completions: float  # in one


def has_reference(config: TrainConfig) -> bool:
    """Whether a reference takes part, be it the policy without its adapters."""
    if isinstance(config, DPOConfig):
        return config.find_objective().needs_reference and not config.reference_free
    return isinstance(config, GRPOConfig) and config.beta > 0


def piece_tokens(run: Run, num_completions: int) -> int:
    """Tokens that a prompt with so many completions of full length costs in a forward pass."""
    return run.config.max_prompt_length + num_completions * run.config.max_completion_length


def micro_batch(run: Run) -> MicroBatch:
    """The micro-batch that `data.pack_micro_batches` fills up to its limits; rows may be shorter.

    GRPO cuts a group where needed (`data.cut_group`), and counts completions in `micro_batch_size`;
    the other stages count rows and cut none. Its updates share the prompts of all ranks by chance
    (`minibatches.assign_minibatch`): an update's may all be on one rank.
    """
    config = run.config
    rows, size, num_pieces, weight = config.batch_size // run.ranks, run.num_completions, 1, 1
    if isinstance(config, GRPOConfig):
        rows = min(rows, -(-config.batch_size // config.num_minibatches))
        while size > 1 and (
            piece_tokens(run, size) > config.micro_batch_tokens or size > config.micro_batch_size
        ):
            num_pieces += 1
            size = -(-run.num_completions // num_pieces)
        weight = size
    tokens = piece_tokens(run, size)
    limit = max(1, config.micro_batch_size // weight)  # pieces
    fit = max(1, min(limit, config.micro_batch_tokens // tokens))
    total = rows * num_pieces
    most = max(tokens, min(config.micro_batch_tokens, min(limit, total) * tokens))
    pieces = most / tokens
    return MicroBatch(-(-total // fit), most, pieces, pieces * size)


def step_flops(run: Run) -> dict[str, float]:
    """Operations of a step on all ranks, at the limits of lengths; see `record.flops`."""
    config = run.config
    prompt, completion = config.max_prompt_length, config.max_completion_length
    reference = (run.reference or run.policy) if has_reference(config) else None
    return flops.step_flops(config, run.policy, prompt, completion, reference, run.reward_models)

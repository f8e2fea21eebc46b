"""What a run does in a step, at the limits of its config: its models, tokens and operations.

R ranks hold S = R / num_replicas shards of a model.
"""

from dataclasses import dataclass

from common.config import TrainConfig, UserError
from common.grpo.config import GRPOConfig
from common.pairs.config import DPOConfig
from common.planning import flops
from common.planning.footprint import Footprint

FLOAT32 = 4  # bytes
MOMENTS_OF_ADAM = 2


@dataclass(frozen=True)
class Run:
    """What the arithmetic is about."""

    config: TrainConfig
    policy: Footprint  # what is trained, be it a reward model
    reference: Footprint | None  # one that is a model of its own
    reward_models: tuple[Footprint, ...]
    on_gpu: bool
    process_bytes: float  # of Python and its libraries, where they share the memory

    @property
    def stage(self) -> str:
        """Of the four."""
        return self.config.stage

    @property
    def num_completions(self) -> int:
        """Of a prompt, that are trained on."""
        if isinstance(self.config, GRPOConfig):
            return self.config.num_generations
        return 1 if self.stage == "SFT" else 2

    @property
    def num_sampled(self) -> int:
        """Of a prompt, in a rollout."""
        return getattr(self.config, "num_candidates", 1)

    @property
    def has_rollouts(self) -> bool:
        """Whether it trains on what it samples."""
        if isinstance(self.config, DPOConfig):
            return self.config.pairs_from == "rollouts"
        return self.stage == "GRPO"

    @property
    def is_shared(self) -> bool:
        """Whether a prompt is computed once for all its completions."""
        return self.config.layout == "shared_prefix"

    @property
    def number_bytes(self) -> int:
        """Of a number that is computed with."""
        return 2 if self.config.bf16 else FLOAT32

    @property
    def has_entropy(self) -> bool:
        """Whether the loss asks for the entropy of each token."""
        return self.stage == "GRPO"

    @property
    def has_exact_kl(self) -> bool:
        """Whether the KL is computed over the vocabulary."""
        return isinstance(self.config, GRPOConfig) and self.config.has_exact_kl

    def num_shards(self, ranks: int) -> int:
        """Ranks that share a model."""
        return ranks // self.config.num_replicas

    def is_plain(self, ranks: int) -> bool:
        """Whether `fsdp.shard` leaves the model as it is."""
        return ranks == 1 and not self.config.bf16 and not self.config.cpu_offload

    @property
    def is_offloaded(self) -> bool:
        """Whether shards lie in another memory than what computes."""
        return self.config.cpu_offload and self.on_gpu


@dataclass(frozen=True)
class MicroBatch:
    """The largest forward and backward pass of a rank.

    Attributes:
        number: Of them in an update.
        tokens: Computed in one, padding included.
        prompts: In one, each with its completions; in the padded layout, copies of prompts.
        completions: In one.
    """

    number: int
    tokens: float
    prompts: float
    completions: float


def check_ranks(config: TrainConfig, ranks: int) -> None:
    """Raise a UserError for a number of processes on which the run would be refused."""
    if ranks % config.num_replicas != 0:
        raise UserError(
            f"--num_replicas is {config.num_replicas}; it must divide the {ranks} processes."
        )
    if config.batch_size % ranks != 0:
        raise UserError(
            f"--batch_size is {config.batch_size}, which {ranks} processes cannot share evenly; "
            f"make it a multiple of {ranks}."
        )


def piece_tokens(run: Run, num_completions: int) -> int:
    """Tokens that a prompt with so many completions of full length costs in a forward pass."""
    prompt, own = run.config.max_prompt_length, run.config.max_completion_length
    if run.is_shared:
        return prompt + num_completions * own
    return num_completions * (prompt + own)


def micro_batch(run: Run, ranks: int) -> MicroBatch:
    """The micro-batch that `data.pack` fills: up to its limits, of which the rows may be shorter.

    GRPO cuts a group into pieces (`data.cut_group`), and counts completions in `micro_batch_size`;
    the other stages count rows and cut none. Its updates share the prompts of all ranks by chance
    (`rollouts.minibatch_of`): an update's may all be on one rank.
    """
    config = run.config
    rows, size, weight = config.batch_size // ranks, run.num_completions, 1
    num_pieces = 1
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
    prompts = pieces if run.is_shared else pieces * size
    return MicroBatch(-(-total // fit), most, prompts, pieces * size)


def step_flops(run: Run) -> dict[str, float]:
    """Operations of a step on all ranks, at the limits of lengths, padding left out.

    The backward pass makes two products for each of the forward's, one of them for the weight: not
    if it is frozen. With gradient checkpointing it makes the forward's again.
    """
    config, policy = run.config, run.policy
    forward = config.batch_size * pass_flops(run, policy, run.num_completions)
    num_passes = config.num_iterations if isinstance(config, GRPOConfig) else 1
    is_frozen = policy.numbers(trained=True) < policy.numbers()
    backward = (1 if is_frozen else 2) + config.gradient_checkpointing
    found = {"forward": num_passes * forward, "backward": num_passes * backward * forward}
    if isinstance(config, GRPOConfig):
        completions = [config.max_completion_length] * config.num_candidates
        prompt = config.max_prompt_length
        sampling = flops.group_flops(policy.decoder, prompt, completions, head=True)
        found["sampling"] = config.batch_size * sampling
        if config.num_updates > 1:
            found["old log-probabilities"] = forward
    if has_reference(config):
        reference = run.reference or policy
        found["reference"] = config.batch_size * pass_flops(run, reference, run.num_completions)
    for model in run.reward_models if run.stage == "GRPO" else ():  # DPO has them before its steps
        more = config.batch_size * pass_flops(run, model, run.num_sampled)
        found["rewards"] = found.get("rewards", 0.0) + more
    return found


def pass_flops(run: Run, model: Footprint, num_completions: int) -> float:
    """A forward pass of one prompt with its completions, in the layout of the run."""
    completions = [run.config.max_completion_length] * num_completions
    count = flops.group_flops if run.is_shared else flops.copied_flops
    head = model.head_numbers > 0
    return count(model.decoder, run.config.max_prompt_length, completions, head=head)


def has_reference(config: TrainConfig) -> bool:
    """Whether a reference takes part, be it the policy without its adapters."""
    if isinstance(config, DPOConfig):
        return config.needs_reference
    return isinstance(config, GRPOConfig) and config.beta > 0

"""What one model does in every stage's functions, compared with plain transformers.

Plain transformers computes each text alone, in one row without padding. A cell is `right` with the
largest difference from it, `refused` with the sentence, `wrong`, or a `traceback`.
"""

import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from common import data, distributed, self_checks
from common.checkpoint import export
from common.config.stages import SFTConfig
from common.errors import UserError
from common.evaluation import scoring
from common.forward import Policy, ReferenceStates, RewardModel
from common.grpo import minibatches
from common.losses import sft_loss
from common.model import checks, fsdp, load, optim, text_part
from common.sampling.sampler import Sampler
from common.text.example import Example

RIGHT = 1e-3  # nats per token, or of a reward: rounding of float32, as the self-checks allow
# Tokens of the longest prompt and completion; the windows of tiny models have 32
LENGTHS = {"shared_prefix": (24, 8), "padded": (64, 12)}
MOVED = 0.05  # share by which a policy's weights differ from its reference's


class Subject:
    """A model's folder in one layout: the product's policies, plain transformers' and texts."""

    def __init__(self, folder: str, layout: str, scratch: str) -> None:
        """Draw three prompts of different lengths with two completions each."""
        self.folder, self.scratch = folder, Path(scratch)
        longest, most = LENGTHS[layout]
        self.flags: dict[str, Any] = {"model_name_or_path": folder, "layout": layout}
        self.flags |= {"max_prompt_length": longest, "max_completion_length": most}
        self.flags |= {"output_dir": str(self.scratch / "run"), "learning_rate": 1e-4}
        self.vocabulary = load.load_vocabulary(SFTConfig(**self.flags))
        self.mesh = distributed.mesh(1)
        generator, num_ids = torch.Generator().manual_seed(0), len(self.vocabulary.tokenizer)

        def ids(number: int, *stop: int) -> list[int]:
            return [*torch.randint(2, num_ids, (number,), generator=generator).tolist(), *stop]

        stop = self.vocabulary.stop_ids[0]
        lengths = [(longest, 7, 5), (3, most - 1, 2), (11, 4, 6)]
        self.pairs = [
            Example(row, "", ids(prompt), [ids(first, stop), ids(second, stop)], {})
            for row, (prompt, first, second) in enumerate(lengths)
        ]
        config = SFTConfig(**self.flags)
        (batch,) = data.micro_batches(self.pairs, range(3), config, self.vocabulary)
        self.batch = batch.to(distributed.device())

    def policy(self, *, moves: bool = False, is_projected: bool = False, **flags: Any) -> Any:
        """The product's policy, checked as in every stage; with `moves` of other weights."""
        config, tokenizer = SFTConfig(**(self.flags | flags)), self.vocabulary.tokenizer
        model_config = load.read_model_config(self.folder, "policy", tokenizer, config)
        lm = load.load_policy(self.folder, model_config, config, trains=True)
        if moves and distributed.is_rank0():
            move(lm)
        policy = fsdp.shard(Policy(lm), config, self.mesh)
        self_checks.only_tokens_matter(policy, config, is_projected=is_projected)
        return policy

    def plain(self, folder: Any, dtype: Any = torch.float32) -> Any:
        """Plain transformers' model of a folder."""
        is_whole = text_part.config_of(AutoConfig.from_pretrained(folder)) is not None
        auto_class = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
        return auto_class.from_pretrained(folder, dtype=dtype).eval().to(distributed.device())

    @cached_property
    def lm(self) -> Any:
        """Plain transformers' model of this folder."""
        return self.plain(self.folder)

    @cached_property
    def expected(self) -> list[Tensor]:
        """Plain transformers' log-probabilities of the completions."""
        return logps_of(self.lm, self.pairs)

    @cached_property
    def limit(self) -> float:
        """Largest difference that is right: `RIGHT`, or four times transformers' rounding."""
        exact = logps_of(self.plain(self.folder, torch.float64), self.pairs)
        gaps = torch.cat(exact) - torch.cat(self.expected)
        return max(RIGHT, 4 * float(gaps.abs().max()))

    def gaps(self, values: Tensor, expected: Sequence[Tensor]) -> Tensor:
        """Differences of a batch's values (B, C) from those of its completions, token by token."""
        rows = zip(values.detach(), self.batch.completion_mask, self.batch.slots, strict=True)
        return torch.cat([row[mask] - expected[slot] for row, mask, slot in rows]).abs()

    def gap(self, values: Tensor, expected: Sequence[Tensor]) -> float:
        """The largest of these."""
        return float(self.gaps(values, expected).max())


def move(lm: Any) -> None:
    """Change every weight by about the share `MOVED` of it, always in the same way."""
    generator = torch.Generator().manual_seed(1)
    for _, parameter in sorted(lm.named_parameters()):
        parameter.data *= 1 + MOVED * torch.randn(parameter.shape, generator=generator)


def per_text(compute: Callable[..., Tensor], examples: Sequence[Example]) -> list[Tensor]:
    """A result for every completion, alone behind its prompt: of ids (1, T), and the completion."""
    texts = [(each.prompt_ids, ids) for each in examples for ids in each.completions]
    device = distributed.device()
    return [compute(torch.tensor([[*x, *y]], device=device), y) for x, y in texts]


def log_softmax(lm: Any, ids: Tensor, completion: list[int]) -> Tensor:
    """Log-probabilities (C, V) that predict a completion, by transformers."""
    logits: Tensor = lm(input_ids=ids, use_cache=False).logits[0, -len(completion) - 1 : -1]
    return logits.double().log_softmax(-1)


@torch.no_grad()
def logps_of(lm: Any, examples: Sequence[Example]) -> list[Tensor]:
    """Log-probabilities (C,) of each completion's tokens, by transformers."""
    return per_text(lambda x, ids: log_softmax(lm, x, ids)[range(len(ids)), ids], examples)


# ---- cells: each returns the largest difference --------------------------------------------------


def sft(subject: Subject) -> float:
    """Log-probabilities of the loss."""
    with torch.no_grad():
        return subject.gap(subject.policy()(subject.batch).token_logps, subject.expected)


def backward(policy: Any, batch: Any) -> None:
    """Gradients of SFT's loss, on every rank of the whole batch."""
    num_tokens = batch.num_tokens * distributed.world_size()
    sft_loss(policy(batch).token_logps, batch.completion_mask, num_tokens=num_tokens).backward()


def gradient(subject: Subject) -> float:
    """Gradient of SFT's loss, relative to its norm."""
    policy, plain = subject.policy(), subject.lm
    backward(policy, subject.batch)
    logps = logps_of.__wrapped__(plain, subject.pairs)  # type: ignore[attr-defined]
    (-torch.cat(logps).mean()).backward()
    gaps = norm = torch.zeros(())
    # Of a model of text and images the plain one has further parameters, without gradients
    all_grads = [[p.grad for p in lm.parameters()] for lm in (policy.lm, plain)]
    grads = [[grad for grad in each if grad is not None] for each in all_grads]
    for grad, expected in zip(grads[0], grads[1], strict=True):
        ours = grad.full_tensor() if isinstance(grad, DTensor) else grad
        gaps, norm = gaps + (ours - expected).square().sum(), norm + expected.square().sum()
    plain.zero_grad()
    return float((gaps / norm).sqrt())


def reward(subject: Subject) -> float:
    """Rewards of a new head, against those of the exported model."""
    config = SFTConfig(**subject.flags)
    vocabulary = load.load_vocabulary(config, has_own_pad=True)
    tokenizer, folder = vocabulary.tokenizer, subject.scratch / "reward" / "model"
    model_config = load.read_model_config(subject.folder, "trunk", tokenizer, config)
    lm = load.load_reward_model(subject.folder, model_config, tokenizer, config, trains=True)
    model = fsdp.shard(RewardModel(lm), config, subject.mesh, float32_modules=[lm.score])
    self_checks.only_tokens_matter(model, config)
    export.save_pretrained(model, vocabulary, folder)
    distributed.barrier()
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    plain = plain.to(distributed.device())
    with torch.no_grad():
        rewards = model(subject.batch)
        if checks.ensure_classifier(model_config):
            expected = per_text(lambda x, _: plain(x, use_cache=False).logits[0, 0], subject.pairs)
        else:  # the generic one does not run a Mamba
            states = per_text(lambda x, _: plain.base_model(x)[0][0, -1], subject.pairs)
            expected = [plain.score(state)[0] for state in states]
    return float((rewards - torch.stack(expected)[subject.batch.slots]).abs().max())


def dpo(subject: Subject) -> float:
    """Log-probabilities of pairs, per token; the first loss is ln 2."""
    config, vocabulary = SFTConfig(**subject.flags), subject.vocabulary
    models = subject.policy(), subject.policy().requires_grad_(False)
    scores, ref_scores = (
        scoring.score_examples(model, subject.pairs, config, vocabulary, "") for model in models
    )
    self_checks.dpo_starts_at_ln_2(scores, ref_scores)
    gaps = zip(scores.flatten(), subject.expected, strict=True)
    return max(float((score - each.sum()).abs() / len(each)) for score, each in gaps)


def grpo(subject: Subject) -> float:
    """Log-probabilities that the sampler records; the sampler is checked against the trainer."""
    prompts = [replace(each, completions=[]) for each in subject.pairs]
    sampler = Sampler(subject.policy(), subject.vocabulary, SFTConfig(**subject.flags))
    rollouts = sampler.sample(prompts, num_samples=2)
    scoring.check_sampler(sampler, prompts, rollouts, 1.0)
    expected = logps_of(subject.lm, rollouts.completed(prompts))
    return float((rollouts.token_logps[rollouts.mask] - torch.cat(expected).cpu()).abs().max())


@torch.no_grad()
def exact_kl(subject: Subject) -> float:
    """`--kl_estimator full`, to a reference of other weights."""
    policy = subject.policy(moves=True, is_projected=True)
    reference = subject.policy(is_projected=True).requires_grad_(False)
    hidden = reference(subject.batch, with_hidden=True).hidden
    config: Any = SFTConfig(**subject.flags)
    num_ids = subject.lm.get_input_embeddings().num_embeddings
    head = minibatches.reference_head(reference, config, num_ids)
    kl = policy(subject.batch, reference=ReferenceStates(hidden, head)).kl
    plain, ref_plain = subject.plain(subject.folder), subject.lm
    move(plain)

    def enumerated(*text: Any) -> Tensor:
        logps, ref_logps = (log_softmax(lm, *text) for lm in (plain, ref_plain))
        return (logps.exp() * (logps - ref_logps)).sum(-1)

    return subject.gap(kl, per_text(enumerated, subject.pairs))


def exported(subject: Subject, **flags: Any) -> float:
    """The policy after two optimiser's steps, against the exported model."""
    policy, folder = subject.policy(**flags), subject.scratch / "exported" / "model"
    config = SFTConfig(**(subject.flags | flags))
    optimizer = optim.build_optimizer(policy, config)
    for _ in range(2):  # the first moves an adapter's B away from 0, the second its A
        backward(policy, subject.batch)
        optim.clip_and_step(optimizer, config, 0, 2)
    with torch.no_grad():
        token_logps = policy(subject.batch).token_logps
    assert subject.gap(token_logps, subject.expected) > RIGHT, "the steps changed nothing"
    export.save_pretrained(policy, subject.vocabulary, folder)
    distributed.barrier()
    return subject.gap(token_logps, logps_of(subject.plain(folder), subject.pairs))


def bf16(subject: Subject) -> float:
    """Mean error in bfloat16 beyond twice that of plain transformers in bfloat16."""
    with torch.no_grad():
        token_logps = subject.policy(bf16=True)(subject.batch).token_logps
    plain = logps_of(subject.plain(subject.folder, torch.bfloat16), subject.pairs)
    ours = subject.gaps(token_logps, subject.expected).mean()
    return max(0.0, float(ours - 2 * (torch.cat(plain) - torch.cat(subject.expected)).abs().mean()))


CELLS: dict[str, Callable[[Subject], float]] = {
    "SFT": sft,
    "gradient": gradient,
    "reward": reward,
    "DPO": dpo,
    "GRPO": grpo,
    "exact KL": exact_kl,
    "LoRA": lambda subject: exported(subject, lora_r=4),
    "bf16": bf16,
    "export": exported,
}


def run(folder: str, layout: str) -> Iterator[dict[str, Any]]:
    """Every cell of a model's folder in a layout. Collective."""
    subject: Subject | None = None
    with tempfile.TemporaryDirectory() as made:
        scratch = distributed.from_rank0(made)  # all ranks read what it exports
        for name, cell in CELLS.items():
            distributed.barrier()
            result = {"layout": layout, "cell": name}
            try:
                subject = subject or Subject(folder, layout, scratch)
                value = cell(subject)
                is_right = value <= RIGHT or value <= subject.limit
                yield result | {"kind": "right" if is_right else "wrong", "value": value}
            except UserError as error:
                yield result | {"kind": "refused", "text": str(error).replace(folder, "FOLDER")}
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)[:-4:-1]
                places = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames)
                text = f"{type(error).__name__}: {error} ({places})".replace(folder, "FOLDER")
                yield result | {"kind": "traceback", "text": " ".join(text.split())}
        distributed.barrier()

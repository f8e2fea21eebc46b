"""Claim: every check before the first step passes on what is right and refuses what is wrong.

Each property is broken in the way it breaks in practice, and the message names it and says how to
go on regardless. About `common.self_checks`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import ranks
import tiny
import torch
from torch import Tensor, nn

from common import batch as batching
from common import distributed, self_checks
from common.batch import PaddedBatch
from common.config.stages import TrainConfig
from common.errors import UserError
from common.evaluation import scoring
from common.forward import Policy, RewardModel
from common.model import fsdp, load
from common.sampling.sampler import Sampler
from common.text.example import Example

pytestmark = pytest.mark.usefixtures("process_group")

STOP, PAD = 0, 1
PAIRS = tiny.ragged_examples([(12, 6, 3), (5, 2, 9)], stop_id=STOP)
LENGTHS = {"max_prompt_length": 60, "max_completion_length": 8}
CONFIG = tiny.train_config(**LENGTHS)


@contextmanager
def refused(*phrases: str, kind: type[Exception] = RuntimeError) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    for phrase in ("self-check failed", *phrases, "--self_check false"):
        assert phrase in str(caught.value)


def sharded(module: nn.Module) -> nn.Module:
    return fsdp.shard(module, CONFIG, distributed.mesh())


def blind_to(lm: Any, ignored: str) -> Any:
    """The model with a forward that ignores its position ids or its attention mask."""
    module = lm if hasattr(lm, "lm_head") else lm.base_model
    forward = module.forward

    def blind(**inputs: Any) -> Any:
        # Without a mask transformers would guess one from the position ids, hence all ones.
        inputs[ignored] = (
            None if ignored == "position_ids" else torch.ones_like(inputs["attention_mask"])
        )
        return forward(**inputs)

    module.forward = blind
    return lm


def checked(model: nn.Module, **fields: Any) -> None:
    self_checks.only_tokens_matter(model, tiny.train_config(**(LENGTHS | fields)))


@pytest.mark.parametrize(
    ("family", "ignored"),
    [("gpt2", "position_ids"), ("gpt2", "attention_mask"), ("llama", "attention_mask")],
)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_a_model_that_ignores_positions_or_mask_is_refused(family, ignored, bf16, layout):
    for module in (
        Policy(blind_to(tiny.causal_lm(family), ignored)),
        RewardModel(blind_to(tiny.classifier(family), ignored)),
    ):
        with refused("padding", "position_ids or attention_mask", kind=UserError):
            checked(module, bf16=bf16, layout=layout)


def deep(family: str) -> Any:
    """A model whose scores bfloat16 rounds as it does those of a pretrained one."""
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    shape = {"vocab_size": 997, "width": 64, "initializer_range": 0.08, layers: 24}
    return tiny.like_pretrained(tiny.causal_lm(family, **shape))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_rounding_of_bfloat16_is_accepted(family):
    """Whatever tokens are looked at: twenty seeds, of which a limit of 0.22 nats refused some."""
    config = tiny.train_config(**LENGTHS, bf16=True)
    policy = fsdp.shard(Policy(deep(family)), config, distributed.mesh())
    for seed in range(20):
        self_checks.only_tokens_matter(policy, config, seed=seed)


def without_mask(batch: Any) -> None:
    batch.attention_mask = torch.ones_like(batch.attention_mask)


def columns_as_positions(batch: Any) -> None:
    columns = torch.arange(batch.input_ids.shape[1]).clamp(max=95).to(batch.input_ids.device)
    batch.position_ids = columns.expand_as(batch.input_ids).contiguous()


def one_column_early(batch: Any) -> None:
    batch.predictors = (batch.predictors - 1).clamp(min=0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(
    ("layout", "sabotage"),
    [
        ("padded", without_mask),
        ("padded", columns_as_positions),
        ("shared_prefix", columns_as_positions),
        ("shared_prefix", one_column_early),
    ],
)
def test_what_is_wrong_is_refused_under_the_rounding_of_bfloat16(family, layout, sabotage):
    if family != "gpt2" and (layout, sabotage) == ("padded", columns_as_positions):
        return  # rotary angles depend on differences of positions only

    class Sabotaged(Policy):
        def forward(self, batch: Any, **options: Any) -> Any:
            if isinstance(batch, PaddedBatch) == (layout == "padded"):
                sabotage(batch)
            return super().forward(batch, **options)

    config = tiny.train_config(**LENGTHS, bf16=True, layout=layout)
    policy = fsdp.shard(Sabotaged(deep(family)), config, distributed.mesh())
    words = "padding changes" if layout == "padded" else "computed once"
    for seed in range(2):
        with pytest.raises(UserError, match=words):
            self_checks.only_tokens_matter(policy, config, seed=seed)
    self_checks.only_tokens_matter(policy, replace(config, self_check=False))


def test_a_frozen_model_whose_states_read_the_padding_is_refused():
    """As a reference or a system to evaluate, which no training step would look at."""
    shape = {"attention_window_size": 16, "lru_width": 32, "head_dim": 8, "num_hidden_layers": 3}
    lm = tiny.causal_lm("recurrent_gemma", is_plain=True, **shape)
    config = tiny.train_config(**LENGTHS, layout="padded")
    frozen = fsdp.shard(Policy(lm).requires_grad_(False), config, distributed.mesh())
    with refused("padding", "RecurrentGemma", kind=UserError):
        self_checks.only_tokens_matter(frozen, config)


def test_what_a_long_neighbour_changes_is_refused():
    """Angles that follow the longest row, which 14 tokens do not show."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope |= {"original_max_position_embeddings": 32, "rope_theta": 1e4}
    model = Policy(tiny.causal_lm("llama", rope_parameters=rope))
    checked(model, max_prompt_length=20, layout="padded")
    with refused("padding", kind=UserError):
        checked(model, layout="padded")


NOISY = {
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.5, "dropout": 0.5},
    "mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.3},
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
}


@pytest.mark.parametrize("family", NOISY)
@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_trained_model_computes_what_transformers_evaluates(
    family, layout, is_recomputed, tmp_path
):
    """None of the noise that its config asks for in training, whatever it is called."""
    fields = LENGTHS | {"layout": layout, "gradient_checkpointing": is_recomputed}
    config = tiny.train_config(**fields)
    plain = tiny.causal_lm(family, is_plain=True, **NOISY[family])
    plain.save_pretrained(tmp_path)
    model_config = load.read_model_config(str(tmp_path), "policy", None, config)
    lm = load.load_policy(str(tmp_path), model_config, config)
    policy = fsdp.shard(Policy(lm), config, distributed.mesh())
    assert {layer.p for layer in lm.modules() if isinstance(layer, nn.Dropout)} <= {0.0}
    self_checks.only_tokens_matter(policy, config)
    make = batching.padded_batch if layout == "padded" else batching.shared_prefix_batch
    rows = ([[5, 6, 7], [8]], [[[9, 10]], [[11, 12]]])
    expected = Policy(plain.eval())(batching.padded_batch(*rows, PAD)).token_logps
    for _ in range(4):
        logps = policy(make(*rows, PAD)).token_logps
        torch.testing.assert_close(logps, expected, rtol=0, atol=tiny.rounding(plain))
    logps.sum().backward()  # through what is recomputed


@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_noise_of_a_model_s_own_is_refused(layout):
    lm = tiny.causal_lm("llama")
    lm.base_model.layers[0].mlp.register_forward_hook(
        lambda layer, inputs, output: output * (1 + 0.1 * torch.rand_like(output))
    )
    with refused("chance changes the scores of LlamaForCausalLM", "adds noise", kind=UserError):
        checked(Policy(lm), layout=layout)
    checked(Policy(lm), layout="padded", self_check=False)


def test_a_model_that_sees_later_tokens_is_refused():
    """BERT's decoder looks both ways unless its config says that it is one."""
    one_way, both_ways = (
        Policy(tiny.causal_lm("bert-generation", is_plain=True, is_decoder=is_decoder))
        for is_decoder in (True, False)
    )
    checked(one_way, layout="padded")
    with refused("a later token changes the scores of BertGenerationDecoder", kind=UserError):
        checked(both_ways, layout="padded")


def test_data_without_a_stop_token_are_refused_unless_they_are_meant_so():
    truncated = Example(0, "", [5, 6], [[7, 8, 9]], {})
    self_checks.stop_token_is_trained(PAIRS, tiny.vocabulary([STOP]), CONFIG)
    self_checks.stop_token_is_trained([truncated, *PAIRS], tiny.vocabulary([13, STOP]), CONFIG)
    words = "none of the first .* ends in a stop token.*--require_stop_token false where"
    with pytest.raises(UserError, match=words):
        self_checks.stop_token_is_trained(PAIRS, tiny.vocabulary([13]), CONFIG)
    for flag in ("require_stop_token", "self_check"):
        self_checks.stop_token_is_trained(
            PAIRS, tiny.vocabulary([13]), tiny.train_config(**{flag: False})
        )


def test_a_mask_inferred_from_the_pad_token_is_refused(monkeypatch):
    """GPT-2 pads with its eos token: `ids != pad` would take the stop token out of the loss."""

    def inferred(prompts: Any, completions: Any, pad_id: int, **options: Any) -> PaddedBatch:
        batch = batching.padded_batch(prompts, completions, pad_id, **options)
        batch.completion_mask = batch.completion_mask & (batch.completion_ids != pad_id)
        return batch

    monkeypatch.setattr(self_checks, "padded_batch", inferred)
    with refused("the stop token is outside the loss"):
        self_checks.stop_token_is_trained(PAIRS, tiny.vocabulary([STOP]), CONFIG)


def test_a_head_that_differs_between_ranks_is_refused(monkeypatch):
    """The other rank's head is played by `other`."""
    model: Any = sharded(RewardModel(tiny.classifier("llama")))
    head = model.lm.score.weight
    self_checks.equal_across_ranks("the reward head", head)
    mine = ranks.whole(head).detach()

    def pretend(other: Tensor) -> None:
        monkeypatch.setattr(
            distributed,
            "all_reduce_max",
            lambda t: torch.maximum(t, other if torch.equal(t, mine) else -other),
        )

    pretend(mine.clone())
    self_checks.equal_across_ranks("the reward head", head)
    for sign in (1, -1):
        other = mine.clone()
        other[0, 3] = torch.nextafter(other[0, 3], torch.tensor(sign * torch.inf).to(other))
        pretend(other)  # one unit in the last place
        with refused("the reward head differs between ranks"):
            self_checks.equal_across_ranks("the reward head", head)


def pair_logps(policy: nn.Module) -> Tensor:
    return scoring.score_examples(policy, PAIRS[:1], CONFIG, tiny.vocabulary(), "reference")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dpo_starts_at_ln_2_with_the_policy_s_own_weights_only(family):
    policy = pair_logps(sharded(Policy(tiny.causal_lm(family))))
    reference = pair_logps(sharded(Policy(tiny.causal_lm(family)).requires_grad_(False)))
    self_checks.dpo_starts_at_ln_2(policy, reference)
    other = pair_logps(sharded(Policy(tiny.causal_lm(family, seed=1)).requires_grad_(False)))
    for wrong in (other, policy.flip(-1)):  # another model, swapped columns
        with refused("ln 2", "policy and reference differ"):
            self_checks.dpo_starts_at_ln_2(policy, wrong)


def first_rollout(
    *,
    sampling_temperature: float = 0.7,
    sampler_seed: int = 0,
    ref_seed: int | None = 0,
    config: TrainConfig = CONFIG,
    shift: int = 0,
) -> None:
    """Sample, score by the reference and check, with the trainer at temperature 0.7 and seed 0."""
    policy = sharded(Policy(tiny.causal_lm("gpt2")))
    source = Policy(tiny.causal_lm("gpt2", seed=sampler_seed))
    rollouts = Sampler(source, tiny.vocabulary([STOP]), config).sample(
        PAIRS, num_samples=3, temperature=sampling_temperature
    )
    ids = rollouts.completion_ids
    prompts = [example.prompt_ids for example in PAIRS]
    batch = batching.padded_batch(prompts, [ids[:3], ids[3:]], PAD).to(distributed.device())
    sampled = rollouts.token_logps[:, : batch.completion_mask.shape[1]].to(distributed.device())
    ref_logps = None
    if ref_seed is not None:
        with torch.no_grad():
            reference = Policy(tiny.causal_lm("gpt2", seed=ref_seed))
            ref_logps = reference(batch, temperature=0.7).token_logps
    sampled = sampled.roll(shift, -1)
    self_checks.sampler_equals_trainer(policy, batch, sampled, ref_logps, config, 0.7)


def test_a_first_rollout_on_policy_is_accepted_unless_the_reference_is_another():
    first_rollout()
    first_rollout(ref_seed=None)
    with refused("reference and trainer differ"):
        first_rollout(ref_seed=1)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    "wrong", [{"sampling_temperature": 1.0}, {"sampler_seed": 1}, {"shift": 1}]
)
def test_a_sampler_that_is_not_the_policy_is_refused(wrong, bf16):
    config = tiny.train_config(**LENGTHS, bf16=bf16)
    with refused("sampler and trainer differ"):
        first_rollout(config=config, **wrong)


def test_a_gap_of_opposite_signs_does_not_cancel():
    """Two tokens that are off by +1 and -1 nats agree on average, and are refused."""
    policy = Policy(tiny.causal_lm("gpt2"))
    batch = batching.padded_batch([[5, 6, 7]], [[[8, 9]]], PAD).to(distributed.device())
    with torch.no_grad():
        logps = policy(batch).token_logps
    off = logps + torch.tensor([[1.0, -1.0]], device=logps.device)
    with refused("sampler and trainer differ by 1 nats"):
        self_checks.sampler_equals_trainer(policy, batch, off, None, CONFIG, 1.0)

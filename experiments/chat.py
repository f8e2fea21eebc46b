r"""Type prompts, and read what one or two models write.

    python -m experiments.chat output/demo/sft/model --compare output/demo/grpo/model

Keys:
  \n           in a prompt, which is one line: a line break
  ?            draws a held-out prompt of the first model's run
  empty line   or Ctrl-D: ends the command

Earlier prompts are forgotten. A prompt is put into the form of the prompts in `samples.jsonl` of
the model's run: the chat template, or the header and the cue that they share, as `TL;DR:`. For a
model without a run it is put into the chat template, if there is one. The form is printed once.
Temperature 1 samples from the policy itself, 0 takes the most likely tokens.
"""

import argparse
import contextlib
import io
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, TextStreamer, set_seed

from common import distributed
from common.config.stages import CommonConfig
from common.errors import UserError
from common.evaluation import runs
from common.model import checks, load
from common.record import run_folder, terminal
from common.record.jsonl import read_jsonl
from common.text import chat, reading, tokenise
from common.text.example import Vocabulary

TITLE = "TITLE: Is this normal?"  # a sample's own title tells facts of its post
NEARLY_ALL = 0.9  # of the sampled prompts
NUM_DRAWN_FROM = 1000  # held-out rows
READ_ALIKE = (  # flags by which the run read its prompts
    *("dataset_name", "dataset_config", "column_map", "dataset_test_split", "chat_columns"),
    *("max_prompt_length", "prompt_truncation"),
)


@dataclass(frozen=True)
class Form:
    """The form of a run's prompts, into which a typed text is put."""

    is_chat: bool  # by the chat template
    header: str = ""
    cue: str = ""

    @classmethod
    def of(cls, prompts: Sequence[str], tokenizer: Any) -> "Form":
        """The form that nearly all sampled prompts share; a chat, if it can be, without any."""
        prompts = [*dict.fromkeys(prompts)]
        least = NEARLY_ALL * len(prompts)
        if tokenizer.chat_template:
            rendered = [prompt for prompt in prompts if chat.begins_answer(prompt, tokenizer)]
            if len(rendered) >= least:
                return cls(is_chat=True)
        headers = [header for header, _, _ in map(tokenise.split_prompt, prompts) if header]
        header = headers[0] if headers and len(headers) >= least else ""
        cues = [cue for cue in map(tokenise.closing_cue, prompts) if cue]
        words, count = Counter(map(str.strip, cues)).most_common(1)[0] if cues else ("", 0)
        # What follows a blank line is a cue if several prompts say so
        is_shared = count >= least and (count > 1 or words == tokenise.CUE)
        cue = next(cue for cue in cues if cue.strip() == words) if is_shared else ""
        return cls(is_chat=False, header=re.sub("TITLE:.*", TITLE, header), cue=cue)

    def ids(self, text: str, tokenizer: Any) -> list[int]:
        """Ids of a typed text in this form; what it has of the form already is not added."""
        if self.is_chat:
            messages = [{"role": "user", "content": text}]
            prompt = chat.rendered(tokenizer, messages, {"add_generation_prompt": True})
            return tokenise.encode([prompt], tokenizer)[0]
        if self.header and not re.match("SUBREDDIT:|TITLE:|POST:", text):
            text = f"{self.header} {text}"
        whole = text.removesuffix(self.cue) + self.cue
        return tokenise.leading_ids(tokenizer) + tokenise.encode([whole], tokenizer)[0]

    def __str__(self) -> str:
        """A line about it."""
        if self.is_chat:
            return "a prompt is a user's turn of the chat template"
        if self.header or self.cue:
            return f"a prompt is put between {self.header!r} and {self.cue!r}, as in the run"
        return "a prompt is taken as it is typed"


class Drawn(NamedTuple):
    """A whole prompt of a run."""

    text: str
    is_chat: bool  # written by the chat template, with the bos that it has

    def ids(self, tokenizer: Any) -> list[int]:
        """Its ids, without the form of typed texts."""
        leading = [] if self.is_chat else tokenise.leading_ids(tokenizer)
        ids = tokenise.encode([self.text], tokenizer)[0]
        return leading + tokenise.without_leading(ids, leading)


@dataclass
class Policy:
    """A model to type prompts for, and what is known of its run."""

    path: str
    lm: Any
    vocabulary: Vocabulary
    run: dict[str, Any]  # its config.yaml; empty without a run
    sampled: list[str]  # prompts in its samples.jsonl
    form: Form

    def held_out(self) -> list[Drawn]:
        """Held-out prompts of the run, or else the sampled ones."""
        sampled = [Drawn(prompt, self.form.is_chat) for prompt in dict.fromkeys(self.sampled)]
        if not self.run.get("dataset_name"):
            return sampled
        alike = {name: self.run[name] for name in READ_ALIKE if name in self.run}
        try:
            config = CommonConfig(output_dir="unused", model_name_or_path=self.path, **alike)
            name = config.dataset_name
            with contextlib.redirect_stdout(io.StringIO()):
                split = reading.held_out_split(config, name, is_trained_on=True)
                examples = reading.load_examples(
                    config, name, split, "prompts", self.vocabulary, NUM_DRAWN_FROM
                )
        except UserError:  # the data set is not here any more, or has no prompts
            return sampled
        return [Drawn(example.prompt, bool(example.messages)) for example in examples] or sampled


def load_policy(path: str, flags: argparse.Namespace) -> Policy:
    """The model of a folder or hub id, with what is known of its run."""
    config = CommonConfig(output_dir="unused", model_name_or_path=path)
    vocabulary, run = load.load_vocabulary(config), runs.config_of_run(path)
    model_config = load.find_config(path, None, config)
    checks.check_kind(path, model_config, "policy")
    lm: Any = load.load_policy(path, model_config, config).to(distributed.device())
    lm.generation_config = GenerationConfig(
        do_sample=flags.temperature > 0,
        temperature=flags.temperature,
        top_k=0,
        max_new_tokens=flags.max_completion_length or run.get("max_completion_length", 256),
        eos_token_id=list(vocabulary.stop_ids),
        pad_token_id=vocabulary.pad_id,
    )
    samples = read_jsonl(runs.folder_of_run(path)[0] / run_folder.SAMPLES) if run else []
    sampled = [sample["prompt"] for sample in samples]
    return Policy(path, lm, vocabulary, run, sampled, Form.of(sampled, vocabulary.tokenizer))


def complete(policy: Policy, ids: Sequence[int], seed: int) -> None:
    """Print what a model writes behind a prompt, token by token; a line if that has no room."""
    limit = checks.max_positions(policy.lm.config)
    num_new = policy.lm.generation_config.max_new_tokens
    if limit is not None and len(ids) + num_new > limit:
        print(
            f"the prompt has {len(ids)} tokens and its completion up to {num_new}, too many for "
            f"{limit} positions; shorten it, or lower --max_completion_length",
            flush=True,
        )
        return
    inputs = torch.tensor([ids], device=policy.lm.device)
    tokenizer = policy.vocabulary.tokenizer
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    set_seed(seed)
    policy.lm.generate(inputs, attention_mask=torch.ones_like(inputs), streamer=streamer)


def main() -> None:
    """Load the models, and let each complete every line."""
    title, _, about = str(__doc__).partition("\n")
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=title, epilog=about, formatter_class=layout)
    parser.add_argument("model", help="folder or hub id of a policy")
    parser.add_argument("--compare", metavar="MODEL2", help="a second one")
    parser.add_argument("--temperature", type=float, default=1.0, help="(default: 1)")
    parser.add_argument("--max_completion_length", type=int, help="tokens (default: the run's)")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    if not flags.temperature >= 0:  # NaN neither
        raise UserError(f"--temperature is {flags.temperature}; it must be at least 0.")
    if flags.max_completion_length is not None and flags.max_completion_length < 1:
        number = flags.max_completion_length
        raise UserError(f"--max_completion_length is {number}; it must be at least 1.")
    distributed.quieten()
    paths = dict.fromkeys(path for path in (flags.model, flags.compare) if path)
    policies = [load_policy(path, flags) for path in paths]
    for policy in policies:
        print(f"[{policy.path}] {policy.form}", file=sys.stderr)
    with contextlib.suppress(EOFError):
        for number, line in enumerate(iter(lambda: input("\nprompt: ").strip(), "")):
            drawn: Drawn | None = None
            if line == "?":
                if not (prompts := policies[0].held_out()):
                    print("no prompt is known: the model is of no run with a data set", flush=True)
                    continue
                drawn = random.Random(flags.seed + number).choice(prompts)
                print(drawn.text, flush=True)
            for policy in policies:
                print(f"[{policy.path}]", flush=True)
                tokenizer, text = policy.vocabulary.tokenizer, line.replace("\\n", "\n")
                ids = drawn.ids(tokenizer) if drawn else policy.form.ids(text, tokenizer)
                complete(policy, ids, flags.seed + number)


if __name__ == "__main__":
    terminal.run_command(main)

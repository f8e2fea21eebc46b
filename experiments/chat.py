r"""Type prompts, and read what one or two models write.

    python -m experiments.chat output/demo/sft/model --compare output/demo/grpo/model

A prompt is one line, in which `\n` is a line break; earlier ones are forgotten. It is put into the
form of the prompts in `samples.jsonl` of the model's run: the chat template, or their header and
cue, as `TL;DR:`. For a model without a run it is put into the chat template, if there is one.
Temperature 1 samples from the policy itself, 0 takes the most likely tokens. An empty line or
Ctrl-D ends the command.
"""

import argparse
import contextlib
import re
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer, set_seed

from common import distributed
from common.config.stages import CommonConfig
from common.evaluation import runs
from common.model import checks, load
from common.record import run_folder, terminal
from common.record.jsonl import read_jsonl
from common.text import chat, tokenise

TITLE = "TITLE: Is this normal?"  # a sample's own title tells facts of its post


def prompt_ids(text: str, sample: str, tokenizer: Any) -> list[int]:
    """Ids of a typed text in the form of a sampled prompt, which may be empty."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        prompt = chat.rendered(tokenizer, messages, {"add_generation_prompt": True})
        if not sample or sample.endswith(prompt.rpartition(text)[2]):
            return tokenise.encode([prompt], tokenizer)[0]
    header, _, cue = tokenise.split_prompt(sample)
    if header and not re.match("SUBREDDIT:|TITLE:|POST:", text):
        text = f"{re.sub('TITLE:.*', TITLE, header)} {text}"
    whole = text.removesuffix(cue) + cue
    return tokenise.leading_ids(tokenizer) + tokenise.encode([whole], tokenizer)[0]


def load_policy(path: str, flags: argparse.Namespace) -> tuple[Any, Any, str]:
    """Model, tokenizer and a sampled prompt of a folder or hub id."""
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
    return lm, vocabulary.tokenizer, samples[0]["prompt"] if samples else ""


def main() -> None:
    """Load the models, and let each complete every line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("model", help="folder or hub id of a policy")
    parser.add_argument("--compare", metavar="MODEL2", help="a second one")
    parser.add_argument("--temperature", type=float, default=1.0, help="(default: 1)")
    parser.add_argument("--max_completion_length", type=int, help="tokens (default: the run's)")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    distributed.quieten()
    policies = {path: load_policy(path, flags) for path in (flags.model, flags.compare) if path}
    with contextlib.suppress(EOFError):
        for number, line in enumerate(iter(lambda: input("\nprompt: ").strip(), "")):
            for path, (lm, tokenizer, sample) in policies.items():
                print(f"[{path}]", flush=True)
                ids = prompt_ids(line.replace("\\n", "\n"), sample, tokenizer)
                inputs = torch.tensor([ids], device=lm.device)
                streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
                set_seed(flags.seed + number)
                lm.generate(inputs, attention_mask=torch.ones_like(inputs), streamer=streamer)


if __name__ == "__main__":
    terminal.run_command(main)

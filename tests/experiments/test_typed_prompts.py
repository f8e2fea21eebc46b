"""Claim: a typed prompt reaches the model in the form that its run trained on, and ends cleanly.

About `experiments.chat`.
"""

import io
import json
import sys
from functools import partial

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.record.terminal import run_command
from common.text.chat import rendered
from common.text.reading import load_examples
from experiments import chat

POST = "My aunt stole my piano. I want money."
SAMPLE = "SUBREDDIT: r/tifu\n\nTITLE: My violin\n\nPOST: Somebody sold my violin.\n\nTL;DR:"
IN_FORM = f"SUBREDDIT: r/tifu\n\n{chat.TITLE}\n\nPOST: {POST}\n\nTL;DR:"
MESSAGES = [{"role": "user", "content": POST}]


def sample_of(tokenizer):
    """A prompt in the samples of a run on conversations."""
    asked = [{"role": "user", "content": "Why?"}]
    return rendered(tokenizer, asked, {"add_generation_prompt": True})


@pytest.mark.parametrize(
    ("template", "trained_on", "typed", "expected"),
    [
        (None, "texts", POST, IN_FORM),
        (None, "texts", IN_FORM, IN_FORM),  # in its form already
        (None, "", POST, POST),  # no run is known
        (tiny.CHATML, "messages", POST, MESSAGES),
        (tiny.CHATML, "", POST, MESSAGES),
        (tiny.CHATML, "texts", POST, IN_FORM),  # of a chat model trained on texts
    ],
)
def test_ids_are_those_that_a_stage_reads(
    tmp_path, tokenizer_folder, template, trained_on, typed, expected
):
    tokenizer = tiny.with_template(AutoTokenizer.from_pretrained(tokenizer_folder), template)
    sample = sample_of(tokenizer) if trained_on == "messages" else SAMPLE if trained_on else ""
    file = tiny.write_rows(tmp_path / "train.jsonl", [{"prompt": expected}])
    config, vocabulary = tiny.train_config(max_prompt_length=128), tiny.vocabulary(of=tokenizer)
    (example,) = load_examples(config, str(file), "train", "prompts", vocabulary)
    form = chat.Form.of([sample] if sample else [], tokenizer)
    assert form.ids(typed, tokenizer) == example.prompt_ids


QUESTIONS = [f"Article {i} says so.\n\nIs it true of {i}?" for i in range(20)]
ASKED = [f"Article {i} says so.\n\nAnswer:" for i in range(20)]
HEADED = [f"SUBREDDIT: r/a{i}\n\nTITLE: b{i}\n\nPOST: c{i}" for i in range(20)]


@pytest.mark.parametrize(
    ("prompts", "header", "cue"),
    [
        (QUESTIONS, "", ""),
        (QUESTIONS[:1], "", ""),  # one prompt does not say what all share
        (QUESTIONS[:1] * 9, "", ""),
        (ASKED, "", "\n\nAnswer:"),
        ([*ASKED, QUESTIONS[0]], "", "\n\nAnswer:"),
        ([*ASKED[:10], *QUESTIONS[:10]], "", ""),
        ([*QUESTIONS, SAMPLE], "", ""),
        (HEADED, f"SUBREDDIT: r/a0\n\n{chat.TITLE}\n\nPOST:", ""),
        ([*HEADED[:9], *QUESTIONS[:9]], "", ""),
        ([SAMPLE], f"SUBREDDIT: r/tifu\n\n{chat.TITLE}\n\nPOST:", "\n\nTL;DR:"),
        (["What is the capital?"], "", ""),
    ],
)
def test_a_header_and_a_cue_are_what_nearly_all_prompts_share(prompts, header, cue):
    form = chat.Form.of(prompts, tiny.tokenizer())
    assert form == chat.Form(is_chat=False, header=header, cue=cue)
    assert (repr(cue) in str(form)) == bool(header or cue)
    typed = tiny.tokenizer().decode(form.ids("What is it?", tiny.tokenizer()))
    assert typed == (header + " ") * bool(header) + "What is it?" + cue


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer_folder):
    """Model folders of two runs: one on texts, one on conversations."""
    paths = []
    for seed, template in enumerate([None, tiny.CHATML]):
        path = tmp_path_factory.mktemp("run") / "model"
        tokenizer = tiny.with_template(AutoTokenizer.from_pretrained(tokenizer_folder), template)
        shape = {"vocab_size": len(tokenizer), "n_positions": 192}
        tiny.save(tiny.causal_lm("gpt2", seed=seed, is_plain=True, **shape), path, tokenizer)
        tiny.write_run_config(path.parent, max_completion_length=12)
        sample = {"prompt": sample_of(tokenizer) if template else SAMPLE}
        path.with_name("samples.jsonl").write_text(json.dumps(sample) + "\n")
        paths.append(path)
    return paths


@pytest.fixture
def printed(monkeypatch, capsys):
    """A function of piped text and arguments: the output of the command."""

    def run(piped, *words):
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        monkeypatch.setattr(sys, "argv", ["chat", *map(str, words)])
        run_command(chat.main)
        return capsys.readouterr()

    return run


def greedy(folder, sample):
    """The most likely completion, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([chat.Form.of([sample] if sample else [], tokenizer).ids(POST, tokenizer)])
    lm = AutoModelForCausalLM.from_pretrained(folder)
    generate = partial(lm.generate, attention_mask=torch.ones_like(ids), pad_token_id=1)
    new = generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


def test_both_models_complete_each_line_until_an_empty_one(folders, printed):
    first, second = folders
    words = (first, "--compare", second, "--temperature", 0)
    out = printed(f"{POST}\n\n{POST}\n", *words).out
    completions = [greedy(path, sample) for path, sample in ((first, SAMPLE), (second, ""))]
    assert completions[0] != completions[1]
    assert out == (
        f"\nprompt: [{first}]\n{completions[0]}\n[{second}]\n{completions[1]}\n\nprompt: "
    )


def test_the_form_is_printed_once_for_each_model(folders, printed):
    first, second = folders
    found = printed(f"{POST}\n{POST}", first, "--compare", second)
    assert [line for line in found.err.splitlines() if "a prompt is" in line] == [
        f"[{first}] {chat.Form.of([SAMPLE], tiny.tokenizer())}",
        f"[{second}] a prompt is a user's turn of the chat template",
    ]


def test_the_help_has_the_keys(printed, capsys):
    with pytest.raises(SystemExit):
        printed("", "--help")
    text = capsys.readouterr().out
    for key in (r"\n  ", "?  ", "Ctrl-D"):
        assert key in text


@pytest.mark.parametrize("has_rows", [True, False])
def test_a_question_mark_draws_a_prompt_of_the_run(folders, printed, has_rows, tmp_path):
    """A held-out one where the run's data set is there, else a sampled one, for all models."""
    for i, folder in enumerate(folders):
        rows = [{"prompt": f"Held out {i} {n}?"} for n in range(3)]
        if i:
            rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
        tiny.write_rows(tmp_path / str(i) / "test.jsonl", rows)
        name = tmp_path / str(i) if has_rows else "gone"
        tiny.write_run_config(folder.parent, max_completion_length=12, dataset_name=str(name))
    for i, (first, second) in enumerate((folders, folders[::-1])):
        out = printed("?\n", first, "--compare", second, "--temperature", 0).out
        drawn = out.removeprefix("\nprompt: ").partition(f"[{first}]\n")[0]
        assert (f"Held out {i} " in drawn) is has_rows
        assert drawn.startswith("<|im_start|>user\n") is bool(i)
        assert out.count(f"[{second}]") == 1
        if not has_rows and not i:
            assert drawn == f"{SAMPLE}\n"


def test_samples_follow_from_the_seed_alone(folders, printed):
    """At the end of the input, as after Ctrl-D, the command returns."""
    runs = [printed(f"{POST}\n{POST}", folders[0], "--seed", seed).out for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0].count(f"[{folders[0]}]") == 2


def test_what_is_no_policy_is_one_sentence(tmp_path, printed, capsys):
    with pytest.raises(SystemExit) as stopped:
        printed(f"{POST}\n", tmp_path)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: the folder '{tmp_path}' holds no tokenizer.\n"


def test_a_prompt_without_room_is_a_line_and_the_next_is_completed(folders, printed):
    first, second = folders
    words = (first, "--compare", second, "--temperature", 0)
    out = printed(f"{'word ' * 200}\n{POST}\n", *words).out
    assert out.count("and its completion up to 12, too many for 192 positions; shorten it") == 2
    assert out.endswith(printed(f"{POST}\n", *words).out)


@pytest.mark.parametrize(
    ("flag", "value", "least"),
    [("temperature", -0.5, 0), ("temperature", "nan", 0), ("max_completion_length", 0, 1)],
)
def test_flags_that_no_sampling_has_are_one_sentence(printed, capsys, flag, value, least):
    with pytest.raises(SystemExit) as stopped:
        printed("", "unused", f"--{flag}", value)
    assert stopped.value.code == 2
    error = f"error: --{flag} is {value}; it must be at least {least}.\n"
    assert capsys.readouterr().err == error

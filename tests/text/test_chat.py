"""Claim: rows of messages train on what the tokenizer's chat template writes, and on nothing else.

Prompt and completion joined are the rendered conversation, the completion begins where the
assistant's last turn does and ends in the stop token, and a prompt of messages is never cut. About
`common.text.chat`.
"""

import copy
from dataclasses import replace

import pytest
import tiny

import evaluate
from common.config.evaluate import EvaluateConfig
from common.data import PromptGroup, collate
from common.errors import UserError
from common.evaluation.measure import judge_completions
from common.rewards.models import RewardModelFunction
from common.rewards.score import RewardFunctions
from common.sampling.sampler import Rollouts
from common.text import synthetic
from common.text.chat import TurnEnd, render, to_end_of_turn
from common.text.reading import load_examples, load_splits
from common.text.schemas import COMPLETION_COLUMNS

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
LENGTHS = {"max_prompt_length": 60, "max_completion_length": 20}
ANSWER, OTHER = ([{"role": "assistant", "content": text}] for text in ("Because.", "Ask again."))


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.with_template(synthetic.train_tokenizer(), tiny.TURNS)


def load(tmp_path, tokenizer, kind, row, **limits):
    file = tiny.write_rows(tmp_path / "train.jsonl", [row])
    config = tiny.train_config(**({"max_prompt_length": 60} | limits))
    vocabulary = tiny.vocabulary([tokenizer.eos_token_id], tokenizer)
    return load_examples(config, str(file), "train", kind, vocabulary)


@pytest.mark.parametrize("truncation", ["tldr", "start"])
def test_a_conversation_is_not_cut(tmp_path, tokenizer, truncation):
    limits = {"max_prompt_length": 10, "prompt_truncation": truncation}
    with pytest.raises(UserError, match="1 prompt over max_prompt_length"):
        load(tmp_path, tokenizer, "prompts", {"prompt": ASKED}, **limits)


def test_pairs_of_conversations_that_do_not_differ_or_share_nothing(tmp_path, tokenizer):
    same = {"chosen": ASKED + ANSWER, "rejected": ASKED + ANSWER}
    with pytest.raises(UserError, match="1 identical pair"):
        load(tmp_path, tokenizer, "preference", same)
    with pytest.raises(UserError, match="1 empty or no shared prompt"):
        load(tmp_path, tokenizer, "preference", {"chosen": ANSWER, "rejected": OTHER})


# --- the forms that a conversation comes in, by a ChatML template ---------------------------------

USER, AGAIN = ({"role": "user", "content": text} for text in ("Why?", "And then?"))
SYSTEM, FIRST = ASKED[0], ANSWER[0]
SECOND, THIRD = ({"role": "assistant", "content": text} for text in ("It ends.", "No idea."))
BEGUN = {"role": "assistant", "content": "It"}


@pytest.fixture(scope="module")
def chatml():
    return tiny.chatml_tokenizer()


def chat(*turns):
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in turns)


TURN = "<|im_start|>assistant\n"
EARLIER = (SYSTEM, USER, FIRST, AGAIN)


def test_one_answer_is_trained_and_nothing_else(tmp_path, chatml):
    """Of one form; `test_templates.py` has that the others are the same conversation."""
    row, before, answer = {"topic": "none"}, EARLIER, SECOND
    (example,) = load(tmp_path, chatml, "sft", {**row, "prompt": [*before], "completion": [answer]})
    assert example.prompt == chatml.decode(example.prompt_ids) == chat(*before) + TURN
    assert example.messages == list(before)
    assert example.columns == row
    (completion,) = example.completions
    assert chatml.decode(completion) == answer["content"] + "<|im_end|>"
    group = PromptGroup(example.prompt_ids, [completion], [0])
    batch = collate([group], tiny.train_config(layout="padded"), 1)
    trained = batch.completion_ids[batch.completion_mask]
    assert trained.tolist() == completion
    whole = chatml.apply_chat_template([*before, answer], tokenize=False)
    joined = chatml(whole, add_special_tokens=False)["input_ids"]
    assert joined[: len(example.prompt_ids + completion)] == example.prompt_ids + completion


def test_a_pair_may_go_on_with_the_same_turns(tmp_path, chatml):
    """Other forms are in `test_schemas.py`."""
    both = {"chosen": [FIRST, AGAIN, SECOND], "rejected": [FIRST, AGAIN, THIRD]}
    row = {"prompt": [SYSTEM, USER], **both}
    (example,) = load(tmp_path, chatml, "preference", row)
    assert example.prompt == chat(*EARLIER) + TURN
    assert (example.messages, example.columns) == ([*EARLIER], {})
    texts = [chatml.decode(ids) for ids in example.completions]
    assert texts == ["It ends.<|im_end|>", "No idea.<|im_end|>"]


def test_a_pair_that_is_not_two_answers_to_the_same_turns_is_refused(tmp_path, chatml):
    row = {"chosen": [USER, FIRST, AGAIN, SECOND], "rejected": [USER, THIRD, AGAIN, SECOND]}
    sentence = "row 1: column 'chosen' has messages of assistant, user, assistant behind"
    with pytest.raises(UserError, match=sentence):
        load(tmp_path, chatml, "preference", row)


def test_a_prompt_may_begin_the_answer(tmp_path, chatml):
    row = {"prompt": [USER, BEGUN], "completion": [{"role": "assistant", "content": " ends."}]}
    (example,) = load(tmp_path, chatml, "sft", row)
    assert example.prompt == chat(USER) + TURN + "It"
    assert chatml.decode(example.completions[0]) == " ends.<|im_end|>"
    sentence = "row 1: column 'prompt' ends with an answer .* 'chat_template_kwargs'"
    with pytest.raises(UserError, match=sentence):
        load(tmp_path, chatml, "prompts", {"prompt": [USER, BEGUN]})
    for of_row in (row, {"prompt": [USER, BEGUN]}):
        of_row["chat_template_kwargs"] = {"continue_final_message": True}
    (prompt,) = load(tmp_path, chatml, "prompts", {**of_row})
    (again,) = load(tmp_path, chatml, "sft", row)
    assert prompt.prompt_ids == again.prompt_ids == example.prompt_ids
    assert again.completions == example.completions


def test_reward_functions_see_the_messages_and_answers_without_their_end(tmp_path, chatml):
    (example,) = load(tmp_path, chatml, "prompts", {"prompt": [SYSTEM, USER], "topic": "none"})
    (tmp_path / "judge.py").write_text(
        "def judge(prompts, completions, topic, **columns):\n"
        f"    assert prompts == [{[SYSTEM, USER]!r}] * 2, prompts\n"
        "    assert topic == ['none'] * 2\n"
        "    return [len(message['content']) for (message,) in completions]\n"
        "judge.answer = lambda completions: [m['content'] for (m,) in completions]\n"
    )
    judge = [f"{tmp_path / 'judge.py'}:judge"]
    scorer = tiny.reward_functions(judge, of=chatml, **LENGTHS)
    ids = [chatml(text, add_special_tokens=False)["input_ids"] for text in ("Yes.<|im_end|>", "Oh")]
    rollouts = Rollouts.of(ids, [[0.0] * len(row) for row in ids], [True, False])
    scorer.check_rows([example])
    assert scorer.score([example], rollouts).total.tolist() == [[4.0, 2.0]]
    generations = judge_completions(scorer, [example], rollouts, rollouts.texts(chatml), [""])
    assert [one.answers for one in generations] == [{"judge": "Yes."}, {"judge": "Oh"}]

    other = copy.deepcopy(chatml)  # which learns to write the end of the turn before its eos
    other.eos_token = "<|endoftext|>"
    scorer = tiny.reward_functions(judge, of=other, **LENGTHS)
    ended = other("Yes.<|im_end|>\n<|endoftext|>", add_special_tokens=False)["input_ids"]
    rollouts = Rollouts.of([ended, ids[1]], [], [True, False])
    assert scorer.score([example], rollouts).total.tolist() == [[4.0, 2.0]]


def test_a_reward_model_reads_to_the_end_of_the_turn(tmp_path, chatml):
    """A policy is trained up to the stop token, whatever the template writes behind it."""
    row = {"prompt": [USER], "chosen": [SECOND], "rejected": [THIRD]}
    vocabulary = tiny.vocabulary([chatml.eos_token_id], chatml)
    pairs = load(tmp_path, chatml, "preference", row)
    (read,) = to_end_of_turn(pairs, vocabulary, 96)
    for before, ids in zip(pairs[0].completions, read.completions, strict=True):
        assert chatml.decode(ids) == chatml.decode(before) + "\n"
    (cut,) = load(tmp_path, chatml, "preference", row, max_completion_length=2)
    (read,) = to_end_of_turn([cut], vocabulary, 96)
    assert chatml.decode(read.completions[0]) == chatml.decode(cut.completions[0]) + "<|im_end|>\n"
    text = replace(pairs[0], messages=[])
    assert to_end_of_turn([text], vocabulary, 96) == [text]
    with pytest.raises(UserError, match="tokens, and the model has 20 positions; lower --max_comp"):
        to_end_of_turn(pairs, vocabulary, 20)


def test_the_end_of_a_turn_is_found_in_any_template(chatml):
    """Also where its text holds letters, and where a prompt is written anew once an answer is."""
    for template, end in (
        (tiny.CHATML, "<|im_end|>\n"),
        (tiny.CHATML.replace("<|im_end|>", "<|text, Because.|>"), "<|text, Because.|>\n"),
        (
            "{{ messages | length }}{% if not add_generation_prompt %}{{ messages[-1].content }}"
            "{% endif %}",
            "",
        ),
    ):
        tokenizer = tiny.with_template(chatml, template)
        for messages in ([USER], [USER, BEGUN]):
            turn_end = TurnEnd(messages, tokenizer)
            assert turn_end.text == end
            assert turn_end.ids == tokenizer(end, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("written", "stop"),
    [
        ("One\nTwo", "<|im_end|>"),
        ("One\nTwo<|im_end|>\n", "<|endoftext|>"),
        ("One\nTwo<|im_end|>", "<|endoftext|>"),
        ("One\nTwo", "<|endoftext|>"),
        ("One\nTwo<|im_end|>", "\n"),
        ("One\nTwo", "\n"),  # which stands inside the answer too
        ("", "\n"),
        ("One\nTwo<|im_end|>\n", ""),  # broke off, here and below
        ("One\nTwo<|im_end|>", ""),
        ("One\nTwo", ""),
    ],
)
def test_the_end_of_a_turn_is_there_once(chatml, written, stop):
    ids = chatml(written, add_special_tokens=False)["input_ids"]
    stop_ids = chatml(stop, add_special_tokens=False)["input_ids"]
    assert len(stop_ids) == bool(stop)
    closed = TurnEnd([USER], chatml).closed(ids + stop_ids, bool(stop))
    assert chatml.decode(closed) == written.partition("<|im_end|>")[0] + "<|im_end|>\n"


def test_a_judge_with_another_template_reads_messages_by_its_own(tmp_path, chatml):
    tiny.classifier("llama", vocab_size=len(chatml)).save_pretrained(tmp_path)
    config = tiny.train_config(**LENGTHS)
    for template, is_same in ((tiny.CHATML, True), (None, True), (tiny.TURNS, False)):
        tiny.with_template(chatml, template).save_pretrained(tmp_path)
        judge = RewardModelFunction(str(tmp_path), chatml, config)
        assert judge.reads_ids(is_chat=True) is is_same, template
        assert judge.reads_ids(is_chat=False)
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)


def test_a_judge_without_room_for_the_end_of_a_turn_is_refused_before_it_is_loaded(
    tmp_path, chatml
):
    """A completion that broke off gets the 2 tokens of the end; one of a pair is there already."""
    (example,) = load(tmp_path, chatml, "prompts", {"prompt": [USER]})
    pair = {"prompt": [USER], "chosen": [FIRST], "rejected": [SECOND]}
    (read,) = load(tmp_path, chatml, "preference", pair)
    prompt = len(example.prompt_ids)
    whole = prompt + max(map(len, read.completions)) + 1  # the line break behind the stop token
    folder = tiny.save(tiny.classifier("llama", vocab_size=len(chatml)), tmp_path / "m", chatml)
    scorer = tiny.reward_functions([folder], of=chatml, **LENGTHS)
    (judge,) = scorer.reward_models.values()
    for one, num_tokens in ((example, prompt + 20 + 2), (read, whole)):
        judge.limit = num_tokens
        scorer.check_rows([one])
        judge.limit = num_tokens - 1
        scorer.check_rows([replace(one, messages=[])])
        with pytest.raises(UserError) as caught:
            scorer.check_rows([one])
        words = (f"row 1 is up to {num_tokens} tokens", f"has {num_tokens - 1} positions; lower")
        tiny.check_sentence(caught.value, *words)


def test_text_is_left_as_it_is(tmp_path, chatml):
    (example,) = load(tmp_path, chatml, "sft", {"prompt": "Why?", "completion": " Because."})
    assert (example.prompt, example.messages) == ("Why?", [])


BLUE, GREEN = "The sky is blue.", "The sky is green."


@pytest.mark.parametrize(
    ("kind", "row", "columns"),
    [
        ("sft", {"prompt": "Sky?\n\n", "completion": " Blue.\n"}, ("Sky?", "Blue.")),
        (
            "preference",
            {"prompt": "Sky?", "chosen": "Blue", "rejected": "Red"},
            ("Sky?", "Blue", "Red"),
        ),
        ("preference", {"chosen": BLUE, "rejected": GREEN}, ("The sky is", "blue.", "green.")),
        ("prompts", {"prompt": "Sky?", "completion": "Blue."}, ("Sky?",)),
        ("prompts", {"chosen": BLUE, "rejected": GREEN}, ("The sky is",)),
    ],
)
def test_columns_of_texts_become_turns_on_request(tmp_path, chatml, kind, row, columns):
    """They are read as the same row of messages is."""
    (example,) = load(tmp_path, chatml, kind, row, chat_columns=True)
    names = ("prompt", *COMPLETION_COLUMNS[kind])
    roles = ("user", "assistant", "assistant")
    cells = zip(names, roles, columns, strict=False)
    turns = {name: [{"role": role, "content": text}] for name, role, text in cells}
    (expected,) = load(tmp_path, chatml, kind, turns)
    assert example.messages == expected.messages == turns["prompt"]
    assert example.prompt_ids == expected.prompt_ids
    assert example.completions == expected.completions
    if "completion" in example.columns:  # evaluation compares with it
        assert example.columns["completion"] == [{"role": "assistant", "content": "Blue."}]


@pytest.mark.parametrize(("chat_columns", "is_noted"), [(True, False), (False, True)])
@pytest.mark.parametrize("score_pairs", [True, False])
def test_an_evaluation_reads_texts_as_training_does(
    tmp_path, chatml, capsys, chat_columns, is_noted, score_pairs
):
    row = {"prompt": "Sky?", "chosen": "Blue.", "rejected": "Red."}
    tiny.write_rows(tmp_path / "test.jsonl", [row] * 3)
    name = str(tmp_path / "test.jsonl")
    flags = {"dataset_name": name, "max_prompt_length": 60, "chat_columns": chat_columns}
    config = EvaluateConfig(output_dir="unused", policies=["a"], score_pairs=score_pairs, **flags)
    vocabulary = tiny.vocabulary([chatml.eos_token_id], chatml)
    rewards = RewardFunctions({}, [], vocabulary)
    _, _, pairs, prompts = evaluate.load_data(config, vocabulary, rewards)
    (trained, *_) = load_examples(
        tiny.train_config(**flags), name, "train", "preference", vocabulary
    )
    assert bool(trained.messages) is chat_columns
    assert [e.prompt_ids for e in (*pairs, *prompts)] == [trained.prompt_ids] * (
        3 + 3 * score_pairs
    )
    assert [pair.completions for pair in pairs] == [trained.completions] * 3 * score_pairs
    assert capsys.readouterr().out.count("note: 3 of 3 rows are texts") == is_noted


def test_blank_texts_are_no_turns_and_messages_stay(tmp_path, chatml):
    chat_row = {"prompt": [USER], "completion": [FIRST]}
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": " ", "completion": "b"}, chat_row] * 2
    rows += [{"prompt": "a", "completion": None}]
    file = tiny.write_rows(tmp_path / "train.jsonl", rows)
    config = tiny.train_config(chat_columns=True, max_dropped_fraction=0.5)
    vocabulary = tiny.vocabulary([chatml.eos_token_id], chatml)
    examples = load_examples(config, str(file), "train", "sft", vocabulary)
    assert [example.row for example in examples] == [0, 2, 3, 5]
    assert [e.messages[0]["content"] for e in examples[:2]] == ["a", "Why?"]


def test_turns_need_a_chat_template(tmp_path, tokenizer):
    plain = tiny.with_template(tokenizer, None)
    with pytest.raises(UserError, match="--chat_columns is true; it must be false for a tokenizer"):
        load(tmp_path, plain, "sft", {"prompt": "a", "completion": "b"}, chat_columns=True)


@pytest.mark.parametrize(
    ("row", "has_template", "chat_columns", "is_noted"),
    [
        ({"prompt": "Why?", "completion": "So."}, True, False, True),
        ({"prompt": "Why?", "completion": "So."}, True, True, False),
        ({"prompt": "Why?", "completion": "So."}, False, False, False),
        ({"prompt": [USER], "completion": [FIRST]}, True, False, False),
        # Rendered by the user
        ({"prompt": chat(USER) + TURN, "completion": "So.<|im_end|>"}, True, False, False),
    ],
)
def test_a_template_that_rows_of_text_do_not_use_is_noted_once(
    tmp_path, chatml, capsys, row, has_template, chat_columns, is_noted
):
    of = chatml if has_template else tiny.with_template(chatml, None)
    for name in ("train", "test"):
        tiny.write_rows(tmp_path / f"{name}.jsonl", [row] * 3)
    config = tiny.train_config(dataset_name=str(tmp_path), chat_columns=chat_columns)
    load_splits(config, "sft", tiny.vocabulary([of.eos_token_id], of))
    note = "note: 3 of 3 rows are texts, read without the chat template"
    assert capsys.readouterr().out.count(note) == is_noted


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "cannot render them"),
        ("{{ raise_exception('No system turn') }}", "No system turn"),
        ("{{ messages | length }}{% if add_generation_prompt %}A{% endif %}", "writes a prompt"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(template, words):
    other = tiny.with_template(tiny.tokenizer(), template)
    with pytest.raises(UserError, match=words) as caught:
        render({"prompt": ASKED, "completion": ANSWER}, "sft", other)
    assert "\n" not in str(caught.value)

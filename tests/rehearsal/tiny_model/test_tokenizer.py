"""The tokenizer encodes any text, splits digits, and has one token for each of the task's fixed texts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from post_training.data import INSTRUCTION
from rehearsal.tiny_model import tokenizer as module
from rehearsal.tiny_model.architecture import VOCABULARY_SIZE, tiny_config

TOKENIZER = module.build_tokenizer()


def token_ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@settings(max_examples=200)
@given(st.text())
def test_any_text_comes_back(text):
    assert TOKENIZER.decode(token_ids(text)) == text


@pytest.mark.parametrize(
    "text", ["Janet’s ducks lay 16 eggs", r"$\frac{m}{n} \le 10^{-3}$", "\t\n  x", "", "雪 ☃", "a+b*c-d=12.5"]
)
def test_real_problems_come_back(text):
    assert TOKENIZER.decode(token_ids(text)) == text


def test_digits_are_tokens_of_their_own():
    assert TOKENIZER.convert_ids_to_tokens(token_ids("2048x16")) == ["2", "0", "4", "8", "x", "1", "6"]


def test_the_box_is_one_token_and_survives_decoding_without_special_tokens():
    row = token_ids(r"\boxed{42}") + [TOKENIZER.eos_token_id]
    assert len(row) == 5
    assert TOKENIZER.decode(row, skip_special_tokens=True) == r"\boxed{42}"


def test_a_chat_is_the_markers_around_the_content_and_the_instruction_is_one_token():
    question = [{"role": "user", "content": f"3+4 {INSTRUCTION}"}]
    row = TOKENIZER.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert TOKENIZER.convert_ids_to_tokens(row) == [
        module.BEGIN,
        module.USER,
        "3",
        "+",
        "4",
        f" {INSTRUCTION}",
        module.ASSISTANT,
    ]
    chat = [*question, {"role": "assistant", "content": "7"}]
    answered = TOKENIZER.apply_chat_template(chat, return_dict=False)  # transformers 5 returns a dictionary by default
    assert answered == [*row, *token_ids("7"), TOKENIZER.eos_token_id]


def test_a_system_message_stands_before_the_question():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4"}]
    text = TOKENIZER.apply_chat_template(chat, tokenize=False)
    assert text == f"{module.BEGIN}Be brief.{module.USER}3+4"


def test_special_tokens_are_distinct_and_every_id_has_a_row_in_the_embedding():
    special = [TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id]
    assert len(set(special)) == 3
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(VOCABULARY_SIZE))
    assert tiny_config(*special).vocab_size == VOCABULARY_SIZE


def test_learning_it_again_gives_the_same_tokenizer():
    assert module.build_tokenizer().backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()


def test_a_text_too_short_for_the_vocabulary_is_an_error(monkeypatch):
    monkeypatch.setattr(module, "_TRAINING_TEXT", "hardly any text")
    with pytest.raises(ValueError, match="entries instead of 512"):
        module.build_tokenizer()

"""The tiny models' tokenizers: byte-level BPE learned from a fixed text, so that any string encodes and decodes."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2TokenizerFast

from post_training.data import INSTRUCTION
from rehearsal.image_task import COLOURS, QUESTIONS, SIDES
from rehearsal.tiny_model.architecture import VOCABULARY_SIZE

PAD, BEGIN, END, USER, ASSISTANT = "<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"
TOOL = "<|tool|>"
# The names that transformers' processor, verl and vLLM look for; their ids are in `TINY_MODELS`.
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
# The end token of published tokenizers, by the model_type of their config.json: verl 0.9 looks for it by name.
PUBLISHED_ENDS = {
    "deepseek_v3": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "qwen3": "<|im_end|>",
    "qwen3_moe": "<|im_end|>",
    "qwen2_5_vl": "<|im_end|>",
}
BOXED_OPENING = "\\boxed{"
# A call of the calculator as Qwen's and Hermes' templates write one, around the expression.
CALL_OPENING, CALL_CLOSING = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
# Text that verl's agent loop puts between the end of a turn and the next one, as published templates of the family do.
TURN_SEPARATORS = {"deepseek_v3": "", "qwen3": "\n", "qwen3_moe": "\n"}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)

# The same with tools: their names first, calls in the form of `CALL_OPENING`, and results. The model's own text is
# inside `generation`, so that transformers can tell it from the rest (`return_assistant_tokens_mask`).
TOOL_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}" + TOOL + "{{ tool['function']['name'] }}{% endfor %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% elif message['role'] == 'tool' %}" + TOOL + "{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}" + ASSISTANT + "{% generation %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    """<tool_call>{"name": "{{ call['function']['name'] }}", "arguments": """
    "{{ call['function']['arguments'] | tojson }}}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endgeneration %}{{ SEPARATOR }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)

# The content of a message is a text, or texts and images in their order.
IMAGE_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    + USER
    + "{% elif message['role'] == 'assistant' %}"
    + ASSISTANT
    + "{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + VISION_START + IMAGE + VISION_END + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)

_TRAINING_TEXT = r"""
Put the answer in the box. Let us think step by step and put the final answer within the box.
How many apples does she have in total? How much money will he earn in a week, in a month, in a year?
There are more books on the table than there were before. Each of the students has a number of pencils.
If the price of one ticket is half the price of the other, what is the total cost of all the tickets?
Find the sum of all positive integers such that the remainder is the same when divided by each of them.
Let $x$, $y$ and $z$ be real numbers with $x + y = z$. Determine the value of the expression below.
What is the least possible value of $\frac{a}{b}$? Suppose that $f(x) = x^2 - \sqrt{x}$ for every integer $n$.
The point $A$ lies on the circle with center $O$, and the line through $B$ and $C$ meets the triangle again.
Then the area of the region is $\frac{m}{n}$, where $m$ and $n$ are relatively prime. Find the number $m + n$.
From the first equation we get that $\log_{b} c = d \times e \cdot k$, so the solution is given by the other one.
The probability that the game is won after the second move is to be found; therefore we have this result.
\begin{align*} \left( a \right) &= \pi \\ \end{align*} and \leq \geq \ldots \text{ for all } \angle \triangle
"""


def build_tokenizer(end: str = END) -> PreTrainedTokenizerFast:
    """Learn the tokenizer from the text above; the same versions of the libraries give the same tokenizer every time.

    Digits are tokens of their own, so that arithmetic works on digits. `\\boxed{` is one ordinary (not special) token:
    special tokens would be dropped when a reward function decodes a response.

    Args:
        end: the name of the end token; its id is the same.

    Raises:
        ValueError: if the learned vocabulary has not exactly `VOCABULARY_SIZE` entries.
    """
    return _text_tokenizer(end, [USER, ASSISTANT], [], CHAT_TEMPLATE)


def build_tool_tokenizer(model_type: str) -> PreTrainedTokenizerFast:
    """Learn the tokenizer of a model that calls the calculator; the fixed parts of a call are one token each.

    Args:
        model_type: a key of `TURN_SEPARATORS`, whose published end token it has.

    Raises:
        ValueError: if the learned vocabulary has not exactly `VOCABULARY_SIZE` entries.
    """
    # As an expression: transformers drops a line feed behind a tag.
    template = TOOL_CHAT_TEMPLATE.replace("SEPARATOR", repr(TURN_SEPARATORS[model_type]))
    calls = [CALL_OPENING, CALL_CLOSING]
    return _text_tokenizer(PUBLISHED_ENDS[model_type], [USER, ASSISTANT, TOOL], calls, template)


def _text_tokenizer(end: str, roles: list[str], calls: list[str], template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=_learn([PAD, BEGIN, end, *roles], _TRAINING_TEXT.splitlines(), calls),
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=end,
        additional_special_tokens=roles,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def build_image_tokenizer(end: str = END) -> Qwen2TokenizerFast:
    """Learn the tokenizer of the model that reads images: the same, with tokens of images and the words of their task.

    Args:
        end: the name of the end token; its id is the same.

    Raises:
        ValueError: if the learned vocabulary has not exactly `VOCABULARY_SIZE` entries.
    """
    own = [USER, ASSISTANT, VISION_START, VISION_END, IMAGE, VIDEO]
    words = [*QUESTIONS.values(), *(f"{{{word}}}" for word in (*COLOURS, *SIDES))]
    return Qwen2TokenizerFast(
        tokenizer_object=_learn([PAD, BEGIN, end, *own], [*_TRAINING_TEXT.splitlines(), *words * 8]),
        pad_token=PAD,
        unk_token=PAD,  # bytes are tokens: none is unknown, and a name of its own would be one more entry
        bos_token=BEGIN,
        eos_token=end,
        additional_special_tokens=own,
        chat_template=IMAGE_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def _learn(special_tokens: list[str], text: Sequence[str], calls: Sequence[str] = ()) -> Tokenizer:
    whole = (" " + INSTRUCTION, BOXED_OPENING, *calls)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(whole),
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in whole])
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} entries instead of {VOCABULARY_SIZE}")
    return tokenizer

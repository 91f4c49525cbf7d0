"""A Qwen2.5-VL processor with a byte-level tokenizer without merges, and the published image limits."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2_5_VLProcessor, Qwen2TokenizerFast
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>")  # fmt: skip
# Renders a message with parts as the published template does.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def small_processor(**image_options):
    """Make the processor, with options for its image processor such as max_pixels."""
    alphabet = {character: at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = Qwen2TokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=list(SPECIAL), chat_template=TEMPLATE
    )
    limits = {"min_pixels": 3136, "max_pixels": 12845056} | image_options
    images, videos = Qwen2VLImageProcessor(**limits), Qwen2VLVideoProcessor(**limits)
    return Qwen2_5_VLProcessor(images, fast, videos, chat_template=TEMPLATE)

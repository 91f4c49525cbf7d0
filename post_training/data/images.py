"""Images of a row: check that verl can decode them, and count the image tokens that a processor makes of them.

A row's image column is a list of `{bytes, path}`, as `datasets` writes it, and its prompt contains `<image>` for each.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

PLACEHOLDER = "<image>"
_SPLIT = re.compile("(<image>|<video>)")
_SPECIAL = {PLACEHOLDER: "image", "<video>": "video"}

Size = tuple[int, int]
"""Width and height in pixels."""


class ImageError(ValueError):
    """An image cannot be used; the message says why, without a subject."""


@dataclass(frozen=True)
class ImageTokens:
    """The settings with which a processor of Qwen2.5-VL counts the tokens of an image.

    Attributes:
        patch: side of a patch in pixels.
        merge: patches per token, along each side.
        least, most: limits for the pixels of an image: a smaller one is enlarged, a larger one is shrunk.
    """

    patch: int = 14
    merge: int = 2
    least: int = 56 * 56
    most: int = 12845056

    @classmethod
    def of(cls, image_processor: Any) -> ImageTokens:
        """Read the settings of an image processor of transformers."""
        side, merge = image_processor.patch_size, image_processor.merge_size
        return cls(side, merge, image_processor.min_pixels, image_processor.max_pixels)

    def count(self, size: Size) -> int:
        """Return the tokens of an image, by the processor's own function.

        Raises:
            ImageError: the processor takes no image of this shape.
        """
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        factor = self.patch * self.merge
        try:
            height, width = smart_resize(size[1], size[0], factor, self.least, self.most)
        except ValueError as error:
            raise ImageError(f"has {size[0]}x{size[1]} pixels, which the processor rejects ({error})") from error
        return height * width // factor**2


def image_size(image: Any) -> Size:
    """Decode an image of a row, as `datasets` would, and return its size.

    Raises:
        ImageError: it is no image, or a truncated one.
    """
    if not isinstance(image, Mapping) or "bytes" not in image:
        raise ImageError("is not a record with the bytes of an image")
    if not isinstance(image["bytes"], bytes) or not image["bytes"]:
        raise ImageError("has a path but no bytes, and another machine does not have that file")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(image["bytes"])) as opened:
            opened.convert("RGB")
            return opened.size
    except UnidentifiedImageError as error:
        raise ImageError("is in a format that Pillow cannot read") from error
    except Image.DecompressionBombError as error:
        raise ImageError("has more pixels than Pillow decodes") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise ImageError(f"cannot be decoded ({str(error).rstrip('.')})") from error


def placeholders(chat: Sequence[Mapping[str, str]]) -> int:
    """Count the places of images in a prompt."""
    return sum(message["content"].count(PLACEHOLDER) for message in chat)


def with_images(chat: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return a prompt whose texts are split into parts, as verl passes it to a processor's chat template."""
    return [{**message, "content": list(_parts(message["content"]))} for message in chat]


def _parts(content: str) -> Iterator[dict[str, str]]:
    for text in _SPLIT.split(content):
        yield {"type": _SPECIAL[text]} if text in _SPECIAL else {"type": "text", "text": text}


def prompt_lengths(
    processor: Any, chats: Sequence[Sequence[Mapping[str, str]]], sizes: Sequence[Sequence[Size]]
) -> list[int]:
    """Return the token counts of prompts including their images, without reading pixels.

    Args:
        processor: of transformers, with a tokenizer, an image processor and a chat template.
        sizes: of the images of each prompt.

    Raises:
        ImageError: the processor takes no image of such a shape.
    """
    tokens = ImageTokens.of(processor.image_processor)
    messages = [with_images(chat) for chat in chats]
    texts = [processor.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in messages]
    words = processor.tokenizer(texts, add_special_tokens=False)["input_ids"]
    # The template has one token per image, which the processor repeats.
    return [len(row) + sum(tokens.count(size) - 1 for size in images) for row, images in zip(words, sizes, strict=True)]


def sizes_in(images: Sequence[Any] | None) -> list[Size]:
    """Return the sizes of the images of a row that `datasets` has read, decoded or not.

    Raises:
        ImageError: one cannot be decoded.
    """
    return [_size_of(image) for image in images or ()]


def _size_of(image: Mapping[str, Any] | Image.Image) -> Size:
    return image_size(image) if isinstance(image, Mapping) else image.size

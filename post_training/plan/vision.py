"""Memory of a vision tower: transformers' in training, and vLLM-Ascend's in the rollout, in bytes.

A prompt may consist only of images, so it has at most data.max_prompt_length image tokens. vLLM-Ascend measures its
engine without images before it allocates the KV cache, so the tower's memory comes on top of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from post_training.models.sizes import VisionSizes

_PIXEL_BYTES = 4  # the processor's
_NORM_BYTES = 4  # transformers computes norms in float32


@dataclass(frozen=True)
class ImageLoad:
    """The vision tower and its load of images.

    Attributes:
        tower: the tower's sizes.
        block: elements of one of its blocks, which is an FSDP unit.
        tokens: most image tokens of a prompt.
        engine_tokens: most image tokens that the engine encodes at once and keeps until they are prefilled.
        itemsize: bytes of the compute type.
        width: of an image token, equal to the decoder's hidden size.
    """

    tower: VisionSizes
    block: int
    tokens: int
    engine_tokens: int
    itemsize: int
    width: int

    @property
    def blocks(self) -> int:
        """Elements of all blocks."""
        return self.tower.depth * self.block

    def kept(self, sequences: int, recomputes: bool) -> int:
        """Return the bytes kept until the decoder's backward is over: pixels, blocks, and inputs of the merger."""
        patches = self._patches(sequences)
        pixels = patches * self.tower.patch * (_PIXEL_BYTES + self.itemsize)
        inputs = patches * self.tower.hidden * self.itemsize
        blocks = inputs if recomputes else self._kept_by_block(patches)
        # The merger's norm, and both sides of its activation.
        return pixels + self.tower.depth * blocks + 3 * inputs + patches * self.tower.hidden * _NORM_BYTES

    def backward(self, sequences: int) -> int:
        """Return the bytes of a block's backward, with its gradients in the compute type and in float32."""
        unit = self.block * (3 * self.itemsize + _NORM_BYTES)
        return self._kept_by_block(self._patches(sequences)) + unit

    def forward(self, sequences: int) -> int:
        """Return the bytes of a forward without gradients: pixels, two gathered blocks, and one's widest tensors."""
        patches = self._patches(sequences)
        pixels = patches * self.tower.patch * (_PIXEL_BYTES + self.itemsize)
        return pixels + 2 * self.block * self.itemsize + self._at_work(patches, 1)

    def engine(self, tp: int) -> int:
        """Return the bytes of a forward in the engine, with the embeddings kept for prompts not prefilled yet."""
        patches = self.engine_tokens * self.tower.patches_per_token
        pixels = patches * self.tower.patch * (_PIXEL_BYTES + self.itemsize)
        return pixels + self._at_work(patches, tp) + self.engine_tokens * self.width * self.itemsize

    def _patches(self, sequences: int) -> int:
        return sequences * self.tokens * self.tower.patches_per_token

    def _kept_by_block(self, patches: int) -> int:
        """Return the bytes that a block keeps: two float32 norms, matrix inputs, attention with softmax sums, MLP."""
        tower = self.tower
        norms = 2 * tower.hidden * (_NORM_BYTES + self.itemsize)
        attention = 6 * tower.hidden + tower.heads * 32
        return patches * (norms + self.itemsize * (4 * tower.hidden + attention + 4 * tower.intermediate))

    def _at_work(self, patches: int, tp: int) -> int:
        return patches * self.itemsize * (4 * self.tower.hidden + 3 * self.tower.intermediate // tp)

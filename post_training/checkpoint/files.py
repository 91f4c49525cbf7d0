"""Names and errors that all readers of checkpoint files share."""

INDEX_NAME = "model.safetensors.index.json"
"""The index of a HuggingFace folder: the file of each tensor."""


class CheckpointError(ValueError):
    """A checkpoint is damaged or does not fit the model; the message names the tensor, the file and the remedy."""

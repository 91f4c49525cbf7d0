"""What every reader of checkpoint files shares."""

INDEX_NAME = "model.safetensors.index.json"
"""The file of a HuggingFace folder that says which file has which tensor."""


class CheckpointError(ValueError):
    """A checkpoint does not hold what the model needs; the message names the tensor, the file and the remedy."""

"""Names of tensors in published files, for models whose tensors newer transformers name differently in memory."""

# transformers 4.52 put the two parts of a multi-modal model into one module; its files keep the earlier names.
_IN_MEMORY = {"model.language_model.": "model.", "model.visual.": "visual."}


def published_name(name: str) -> str:
    """Return the name that a tensor of a transformers model has in the files; most are the same."""
    for prefix, published in _IN_MEMORY.items():
        if name.startswith(prefix):
            return published + name.removeprefix(prefix)
    return name

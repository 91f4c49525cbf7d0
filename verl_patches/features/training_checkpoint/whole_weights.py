"""The weights of a model that FSDP has sharded, as a HuggingFace folder: what a user takes away, and no more."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from post_training.checkpoint.durable import hash_file, write_durably
from post_training.checkpoint.manifest import Manifest
from verl_patches.features.training_checkpoint.rank import agree

WEIGHTS_NAME = "model.safetensors"


def save_weights(folder: Path, model: Any, tokenizer: Any, dtype: torch.dtype, rank: int) -> None:
    """Write weights (rounded to `dtype`), config.json, tokenizer and the manifest into `folder`; every rank calls it.

    model: a transformers model under FSDP or FSDP2. The first rank gathers the weights whole on its host.
    Raises CheckpointError on every rank if the first cannot write.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    problem = ""
    if rank == 0:
        try:
            _write(folder, getattr(model, "_fsdp_wrapped_module", model), weights, tokenizer, dtype)
        except OSError as error:
            problem = f"{folder}: cannot be written ({error.strerror}); give the checkpoint room or another folder"
    agree(problem)


def _write(folder: Path, model: Any, weights: dict[str, torch.Tensor], tokenizer: Any, dtype: torch.dtype) -> None:
    import safetensors.torch

    folder.mkdir(parents=True, exist_ok=True)
    tied = model._tied_weights_keys if model.config.tie_word_embeddings else ()
    rounded = {name: value.to(dtype).contiguous() for name, value in weights.items() if name not in tied}
    content = safetensors.torch.save(rounded, metadata={"format": "pt"})
    write_durably(folder / WEIGHTS_NAME, [content], len(content), lambda _: None)
    config = copy.deepcopy(model.config)
    config.torch_dtype = dtype
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = {path.name: hash_file(path, lambda _: None) for path in sorted(folder.iterdir()) if path.is_file()}
    Manifest({"tool": "training_checkpoint"}, files=files, complete=True).write(folder)

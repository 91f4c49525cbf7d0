"""The learning rate of an FSDP run that resumes from a checkpoint equals that of an uninterrupted run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from verl_patches.features.training_checkpoint import restoring, saving
from verl_patches.utils.checkpoint import fsdp_checkpoint_manager as patches

STEPS = 10


def new_manager(schedule) -> SimpleNamespace:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    return SimpleNamespace(optimizer=optimizer, lr_scheduler=schedule(optimizer, 3, STEPS))


def rates(manager: SimpleNamespace, steps: int) -> list[float]:
    """Return the rates of the next updates; verl's worker steps the schedule after each."""
    found = []
    for _ in range(steps):
        found.append(manager.optimizer.param_groups[0]["lr"])
        manager.optimizer.step()
        manager.lr_scheduler.step()
    return found


@pytest.mark.parametrize("schedule", [get_linear_schedule_with_warmup, get_cosine_schedule_with_warmup])
@pytest.mark.parametrize("before", [0, 1, 3, 7])
@pytest.mark.parametrize("from_megatron", [False, True])
def test_learning_rate_continues_after_a_resume(schedule, before, from_megatron, monkeypatch):
    written: list[dict[str, str]] = []
    monkeypatch.setattr(patches, "_rank_of", lambda manager: None)
    monkeypatch.setattr(saving, "rank_file", lambda folder, rank, tensors, texts: texts)
    monkeypatch.setattr(saving, "save_training", written.append)
    # Megatron's ranks do not write the place in the schedule; the step number in the folder's name gives it.
    texts = (lambda: {}) if from_megatron else (lambda: written[0])
    monkeypatch.setattr(restoring, "load_training", lambda *_: SimpleNamespace(random=None, texts=texts()))
    interrupted, resumed = new_manager(schedule), new_manager(schedule)
    expected = rates(new_manager(schedule), STEPS)
    assert len(set(expected)) > STEPS / 2
    folder = str(Path(f"global_step_{before}") / "actor")
    assert rates(interrupted, before) == expected[:before]
    patches.save_checkpoint(lambda *_: None, interrupted, folder)
    patches.load_checkpoint(lambda *_: None, resumed, folder)
    assert rates(resumed, STEPS - before) == expected[before:]

"""Extends verl's training engines: a complete save can be told from an interrupted one, and more checkpoints load.

`actor_rollout_ref.model.external_lib` names this module, beside others.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from post_training.checkpoint.complete_files import withdraw_complete
from verl_plugin.engines import extend_engine, has_engine
from verl_plugin.resume.loading import AnyLayoutManager
from verl_plugin.resume.ranks import fsdp2_rank


class ReplacedWhole:
    """Mixin for an engine: a save leaves nothing of an earlier one in the folder that it writes."""

    def save_checkpoint(self, local_path: str, *arguments: Any, **named: Any) -> None:
        """Delete the files that an earlier run left at this step, then save as upstream."""
        if dist.get_rank() == 0:
            folder = Path(local_path)
            withdraw_complete(folder.parent)
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        super().save_checkpoint(local_path, *arguments, **named)  # type: ignore[misc]  # of the engine


class ResumableFSDP2(ReplacedWhole):
    """verl's engine for FSDP2, which loads more checkpoints than upstream."""

    checkpoint_manager: Any

    def initialize(self) -> None:
        """As upstream."""
        super().initialize()  # type: ignore[misc]  # of the engine that this extends
        self.checkpoint_manager = AnyLayoutManager(self.checkpoint_manager, lambda: fsdp2_rank(self))


extend_engine("fsdp2", ResumableFSDP2)
if has_engine("megatron"):
    from verl_plugin.resume.hybrid_optimizer import make_resumable
    from verl_plugin.resume.megatron_manager import MegatronManager
    from verl_plugin.resume.ranks import megatron_rank

    class ResumableMegatron(ReplacedWhole):
        """verl's engine for Megatron-core, which loads more checkpoints than upstream."""

        checkpoint_mananager: Any  # upstream's spelling

        def initialize(self) -> None:
            """As upstream."""
            super().initialize()  # type: ignore[misc]  # of the engine that this extends
            manager = getattr(self, "checkpoint_mananager", None)
            if manager is not None:  # an engine that only computes log-probs loads no checkpoint
                self.checkpoint_mananager = MegatronManager(manager, lambda: megatron_rank(self))

        def _build_optimizer(self) -> Any:
            optimizer = super()._build_optimizer()  # type: ignore[misc]  # of the engine that this extends
            make_resumable(optimizer)
            return optimizer

    extend_engine("megatron", ResumableMegatron)

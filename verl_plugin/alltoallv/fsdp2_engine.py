"""The weights that verl's FSDP2 engine hands over by alltoallv."""

from __future__ import annotations

from typing import Any

from post_training.layouts.fsdp_shards import fsdp_shards, local_tensors
from post_training.models.families import table_for
from verl_plugin.alltoallv.export import AlltoallvExport
from verl_plugin.alltoallv.transfer import Training


class AlltoallvFSDP2(AlltoallvExport):
    """A rank holds slices of HuggingFace tensors, on its die or, with offloading, on the host."""

    module: Any

    def _training(self) -> Training:
        table = table_for(self.model_config.hf_config)
        return Training(
            self.model_config.hf_config,
            tensors=lambda: local_tensors(self.module.state_dict()),
            shards=lambda: fsdp_shards(self.module.state_dict(), table.shapes),
        )

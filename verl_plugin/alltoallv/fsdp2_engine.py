"""verl's FSDP2 engine on an NPU with the hand-over by alltoallv."""

from __future__ import annotations

from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from post_training.layouts.fsdp_shards import fsdp_shards, local_tensors
from post_training.models.families import table_for
from verl_plugin.alltoallv.export import ON_NPU, AlltoallvExport
from verl_plugin.alltoallv.transfer import Training


@EngineRegistry.register(backend="fsdp2", **ON_NPU)
class AlltoallvFSDP2Engine(AlltoallvExport, FSDPEngineWithLMHead):
    """A rank holds slices of HuggingFace tensors, on its die or, with offloading, on the host."""

    def _training(self) -> Training:
        table = table_for(self.model_config.hf_config)
        return Training(
            table,
            tensors=lambda: local_tensors(self.module.state_dict()),
            shards=lambda: fsdp_shards(self.module.state_dict(), table.shapes),
        )

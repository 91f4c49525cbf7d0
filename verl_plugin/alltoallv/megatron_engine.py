"""The weights that verl's engine for Megatron-core, with MindSpeed or without, hands over by alltoallv."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from verl.utils.megatron_utils import load_megatron_model_to_gpu

from post_training.layouts.layout import Shard, Table
from post_training.layouts.model_tensors import train_tensors
from post_training.models.families import table_for
from verl_plugin.alltoallv.export import AlltoallvExport, OfferedWeights
from verl_plugin.alltoallv.megatron_layout import fitted, megatron_placement
from verl_plugin.alltoallv.transfer import Training


class AlltoallvMegatron(AlltoallvExport):
    """A rank holds its share of Megatron's parameters, each of which may contain several HuggingFace tensors."""

    module: Any
    tf_config: Any

    def get_per_tensor_param(self, **options: Any) -> tuple[OfferedWeights, None]:
        """As `AlltoallvExport`, after loading the parameters onto the die; verl offloads them afterwards."""
        load_megatron_model_to_gpu(self.module, load_grad=False)
        return super().get_per_tensor_param(**options)

    def _training(self) -> Training:
        table = table_for(self.model_config.hf_config)
        return Training(
            self.model_config.hf_config,
            tensors=lambda: train_tensors(self.module),
            shards=lambda: self._shards(table),
        )

    def _shards(self, table: Table) -> list[Shard]:
        tensors, rank = train_tensors(self.module), dist.get_rank()
        placement = megatron_placement(self.tf_config, tensors)
        return fitted(table.megatron(placement, rank), tensors, placement, rank)

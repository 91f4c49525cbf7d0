"""Ranks that write the gradients of one update in every layout that their number allows; test_layouts.py compares them.

The model is a small DeepSeek-V3, whose experts are spread over as many dies as a layout says.
"""

# Its first import is the prelude.
from tests.post_training.models.megatron.training_models_program import Layout, start_layout

# isort: split
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tests.verl_patches.features.exact_loss.gradients_program import Updates
from tests.verl_patches.features.exact_loss.whole_pass import SEQUENCES
from verl_patches.features.exact_loss.feature import ExactLossSettings

MODE = "token-mean"
# By number of dies; the job on four dies continues on two.
LAYOUTS = {
    4: [
        Layout("data4"),
        Layout("expert4", expert=4),
        Layout("tensor2_expert2", tensor=2, expert=2),
    ],
    2: [
        Layout("data2"),
        Layout("expert2", expert=2),
        Layout("tensor2", tensor=2),
        Layout("pipeline2", pipeline=2, stages=[2, 1]),
    ],
}
# The layouts in which upstream's gradients are compared.
UPSTREAMS = ("data4", "data2")
Slices = list[tuple[str, tuple[tuple[int, int], ...], torch.Tensor]]


class GradientsOfUpdate(Updates):
    """An update by verl's actor in one layout, with the gradients that it passes to the optimizer."""

    def slices(self, micro: int, exact: bool = True) -> Slices:
        """Return this rank's gradients of one update of the whole batch, as HF name of the weight, slice, and values.

        Args:
            micro: sequences of a micro batch.
            exact: whether exact loss is enabled.
        """
        data = parallel_state.get_data_parallel_world_size()
        self._choose(None, exact_loss=ExactLossSettings(exact), loss_agg_mode=MODE)
        self._trained.config.update(
            loss_agg_mode=MODE, ppo_mini_batch_size=SEQUENCES // data, ppo_micro_batch_size_per_gpu=micro
        )
        (gradients,), _ = self.update(self._batch(SEQUENCES, micro))
        # A router's bias has no gradient.
        trained = [shard for shard in self._shards if shard.local in gradients]
        return [(each.hf_name, each.bounds, each.view.of(gradients[each.local]).cpu().clone()) for each in trained]


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    reference = torch.load(folder / "reference.pt", weights_only=True)
    found: dict[str, Any] = {}
    for layout in LAYOUTS[dist.get_world_size()]:
        start_layout(layout)
        update = GradientsOfUpdate(folder, layout, reference)
        found |= {f"{layout.name}, micro batches of {micro}": update.slices(micro) for micro in (1, 4)}
        if layout.name in UPSTREAMS:
            found |= {f"{layout.name}, upstream's of {micro}": update.slices(micro, exact=False) for micro in (1, 4)}
    torch.save(found, folder / f"rank{dist.get_rank()}of{dist.get_world_size()}.pt")
    dist.barrier()

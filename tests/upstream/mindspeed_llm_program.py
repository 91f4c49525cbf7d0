"""Runs MindSpeed-LLM's pretrain_gpt.py, unmodified, on ranks that are forked after its imports.

``python -m tests.upstream.mindspeed_llm_program FOLDER`` reads FOLDER/request.json: the script, its arguments, the
number of ranks, the dtype to train in, and a part to leave out on purpose ("nothing", or "gradient synchronisation").
The training's log goes to standard output; the batches that a single rank reads go to FOLDER/batches.pt.
"""

import json
import os
import runpy
import sys
from pathlib import Path

from npu_emulator import meters
from tests.ranks import fork_ranks


def _record_batches(path: Path) -> None:
    """Record the batches that this rank trains on."""
    import torch
    from megatron.training import utils

    upstream = utils.get_batch_on_this_tp_rank
    batches = []

    def get_batch_on_this_tp_rank(data_iterator):
        batch = upstream(data_iterator)
        batches.append({name: batch[name].cpu() for name in ("tokens", "labels")})
        torch.save(batches, path)
        return batch

    utils.get_batch_on_this_tp_rank = get_batch_on_this_tp_rank


def _leave_out_gradient_synchronisation() -> None:
    from megatron.core.distributed.param_and_grad_buffer import Bucket

    Bucket.start_grad_sync = lambda self: None
    Bucket.finish_grad_sync = lambda self: None


def _train_in_float32() -> None:
    """Train in float32: Megatron rejects grouped products outside bfloat16 only when it validates the arguments."""
    import torch
    from mindspeed_llm.training import initialize

    upstream = initialize.validate_args

    def validate_args(args, defaults):
        args = upstream(args, defaults)
        args.bf16, args.params_dtype = False, torch.float32
        return args

    initialize.validate_args = validate_args


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    if os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] == "1":
        _record_batches(folder / "batches.pt")
    if request["dtype"] == "float32":
        _train_in_float32()
    if request["leave_out"] == "gradient synchronisation":
        _leave_out_gradient_synchronisation()
    # The kernels are documented for 16 bits, so strict mode would reject float32.
    os.environ["NPU_EMULATOR_STRICT"] = "1" if request["dtype"] == "bfloat16" else "0"
    runpy.run_path(request["script"], run_name="__main__")
    meters.write()


def _start(folder: Path) -> int:
    request = json.loads((folder / "request.json").read_text())
    sys.argv = [request["script"], *request["arguments"]]
    import mindspeed_llm.tasks.megatron_adaptor  # noqa: F401  (replaces parts of Megatron according to sys.argv)

    return fork_ranks(__spec__.name, request["ranks"], folder)


if __name__ == "__main__":
    sys.exit(_start(Path(sys.argv[1])))

"""vLLM's worker, with the methods that take weights by alltoallv.

verl's extension of the worker is the base class: what it does beside weights stays.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch_npu
from verl.utils.device import get_device_name
from verl.utils.vllm.vllm_quant_utils import is_quantized_model
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from post_training.layouts.layout import RolloutPlacement
from post_training.layouts.model_tensors import wholly_covered
from post_training.reshard.generation import WeightsGeneration
from post_training.reshard.handover import HandoverError, Importer
from post_training.reshard.mla_refresh import absorbed_tensors, refresh_absorbed_weights
from verl_plugin.alltoallv.addresses import control_path, own_handle
from verl_plugin.alltoallv.control import Control, Description
from verl_plugin.alltoallv.ipc_support import remember_ipc_support
from verl_plugin.alltoallv.rollout_layout import restore_expert_order, served_weights
from verl_plugin.alltoallv.settings import EXTENSION_KEY, AlltoallvSettings
from verl_plugin.alltoallv.sleep import DiscardingSleep, RolloutMeter

_TILED = 29  # ACL_FORMAT_FRACTAL_NZ
_POLL_MILLISECONDS = 500
STRANGER_SECONDS = 10.0
"""Training begins to send an update within moments of asking the worker to take it."""

Buckets = list[tuple[str, torch.Tensor]]
Receive = Callable[[Callable[[Buckets, bool], None]], None]
"""verl's receiver: calls a function with the contents of each of its buckets, and whether that is the last."""


class AlltoallvExtension(vLLMColocateWorkerExtension):
    """Set by `actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls`."""

    device: Any
    _alltoallv: RolloutWeights | None = None
    _discarding_sleep: DiscardingSleep | None = None
    _rollout_meter: RolloutMeter | None = None

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """Upstream's preparation of the model, which each server asks for when it starts; then answer to training."""
        super().monkey_patch_model(vocab_size, banned_token_ids)
        remember_ipc_support()
        self._rollout_meter = self._rollout_meter or RolloutMeter(self)
        drafts = self._use_mtp_drafter_weight_sync()
        handle = self._get_zmq_handle()
        weights = self._alltoallv = RolloutWeights(self.model_runner, drafts, handle, self._rollout_meter)
        if weights.settings.discard_on_sleep and self._discarding_sleep is None:
            self._discarding_sleep = DiscardingSleep(self, weights.written, weights.discard)

    def _get_zmq_handle(self) -> str:
        return own_handle(super()._get_zmq_handle())

    def update_weights_from_ipc(
        self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Take one update.

        Raises:
            HandoverError: it did not arrive whole. The next update may; until then nothing is sampled.
        """
        if peft_config:
            raise HandoverError(
                "LoRA adapters are not supported by alltoallv. Set actor_rollout_ref.model.lora_rank to 0."
            )
        if self._alltoallv is None:
            raise HandoverError("the server of this worker never prepared its model (monkey_patch_model)")
        if self.device is None:  # as upstream: vLLM-Ascend's worker may not set it
            self.device = torch.device(f"{get_device_name()}:{self.local_rank}")
        control, without_engines = self._alltoallv.control, super()._get_zmq_handle()
        receiver = WatchfulReceiver(self._get_zmq_handle(), self.device, use_shm, control, without_engines)
        self._alltoallv.receive(receiver.receive_weights)


class RolloutWeights:
    """The weights of one worker: whether they are whole, and how an update is written into them.

    Args:
        runner: vLLM's model runner.
        drafts: whether a second model drafts tokens.
        handle: address of verl's hand-over to this worker.
        meter: of its rollouts.
    """

    def __init__(self, runner: Any, drafts: bool, handle: str, meter: RolloutMeter) -> None:
        self._runner = runner
        self._generation = WeightsGeneration()
        if runner.vllm_config.load_config.load_format == "dummy":
            self._generation.discard()  # random until the first update
        self._refuse_partial_weights()
        description = replace(_description(runner, drafts), process=os.getpid(), handle=handle)
        self.settings = description.settings
        self.control = Control(_own_path(runner.vllm_config), description, meter.take)

    def written(self) -> list[torch.Tensor] | None:
        """The tensors of which every update writes all elements; None before training has announced one."""
        manifest, model = self.control.manifest, self._runner.get_model()
        if manifest is None:
            return None
        return [*wholly_covered(served_weights(model), manifest.shards), *absorbed_tensors(model)]

    def discard(self) -> None:
        """The weights are given up: nothing is sampled before the next update is whole."""
        self._generation.discard()

    def receive(self, receive_weights: Receive) -> None:
        """Write one update, which `receive_weights` passes on in lists of named buckets.

        Raises:
            HandoverError: it is not whole.
        """
        importer: Importer | None = None

        def write(buckets: Buckets) -> None:
            nonlocal importer
            importer = importer or self._importer(buckets)
            for name, content in buckets:
                importer.take(name, content)

        try:
            with self._generation.writing(), torch.no_grad():
                receive_all(receive_weights, write)
                if importer is None:
                    raise HandoverError("an update contained no bucket")
                importer.finish()
                refresh_absorbed_weights(self._runner.get_model())
        finally:
            self.control.settle()

    def _importer(self, buckets: Buckets) -> Importer:
        """For the update that training has announced. Its first bucket says whether training speaks our protocol."""
        manifest = self.control.manifest
        if manifest is None:
            names = ", ".join(name for name, _ in buckets[:2]) or "nothing"
            raise HandoverError(
                f"{EXTENSION_KEY} is invalid: training sends whole tensors ({names}), as verl does without "
                "actor_rollout_ref.model.external_lib=verl_plugin.alltoallv.engines or with another strategy than "
                "fsdp2 and megatron. Set both keys or neither."
            )
        model = self._runner.get_model()
        restore_expert_order(model)
        return Importer(manifest, served_weights(model), self.control.version)

    def _refuse_partial_weights(self) -> None:
        """Every token is sampled from logits, which no captured graph contains."""
        model = self._runner.model
        upstream = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            self._generation.require_whole()
            return upstream(*args, **kwargs)

        model.compute_logits = compute_logits


def receive_all(receive_weights: Receive, write: Callable[[Buckets], None]) -> None:
    """Receive an update to its end and write it, but nothing more after an error, which is raised then.

    verl's sender would wait forever for the answer to a bucket that was not received.
    """
    failure: Exception | None = None

    def receive(buckets: Buckets, is_last: bool) -> None:
        nonlocal failure
        if failure is not None:
            return
        try:
            write(buckets)
        except Exception as error:
            failure = error

    receive_weights(receive)
    if failure is not None:
        raise failure


class WatchfulReceiver(BucketedWeightReceiver):
    """verl's receiver, which does not wait for training ranks that have ended or given up.

    Args:
        zmq_handle: the socket of the job's own.
        device: of the worker.
        use_shm: whether memory of the host carries the buckets.
        control: of the worker.
        without_engines: verl's socket, at which training sends that does not have this project's engines.
    """

    socket: Any

    def __init__(
        self, zmq_handle: str, device: torch.device, use_shm: bool, control: Control, without_engines: str
    ) -> None:
        super().__init__(zmq_handle, device, use_shm)
        self._control, self._without_engines = control, without_engines

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = _WatchfulSocket(self.socket, self._control, self._without_engines)


class _WatchfulSocket:
    """A socket that looks, while nothing comes, whether anything will.

    If no training rank has introduced itself for `STRANGER_SECONDS`, it also receives at `without_engines`, so that
    training that sends whole tensors there gets an error and no silence.
    """

    def __init__(self, socket: Any, control: Control, without_engines: str) -> None:
        self._socket, self._control, self._without_engines = socket, control, without_engines

    def recv_pyobj(self) -> Any:
        stranger = time.monotonic() + STRANGER_SECONDS
        while not self._socket.poll(_POLL_MILLISECONDS):
            self._control.check()
            if not self._control.greeted and time.monotonic() > stranger:
                self._socket.connect(self._without_engines)
                stranger = math.inf
        return self._socket.recv_pyobj()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def _own_path(vllm_config: Any) -> Any:
    """Return the socket at which the training rank on this worker's die looks for it.

    verl numbers instances first, then data parallel and tensor parallel ranks.
    """
    from vllm.distributed import parallel_state

    parallel = vllm_config.parallel_config
    within = parallel_state.get_dp_group().rank_in_group * parallel.tensor_parallel_size
    within += parallel_state.get_tp_group().rank_in_group
    size = parallel.tensor_parallel_size * parallel.data_parallel_size
    instance = int(os.environ.get("VERL_REPLICA_RANK", "0"))
    return control_path(os.environ.get("VERL_RAY_JOB_ID", "0"), instance * size + within)


def _description(runner: Any, drafts: bool) -> Description:
    vllm_config = runner.vllm_config
    parallel = vllm_config.parallel_config
    size = parallel.tensor_parallel_size * parallel.data_parallel_size
    weights = served_weights(runner.get_model())
    shared = [tensor for name, tensor in weights.items() if name.endswith("shared_experts.down_proj.weight")]
    text = vllm_config.model_config.hf_text_config
    width = getattr(text, "moe_intermediate_size", 0) * (getattr(text, "n_shared_experts", None) or 0)
    placement = RolloutPlacement(
        tp=parallel.tensor_parallel_size,
        dp=parallel.data_parallel_size,
        ep=size if parallel.enable_expert_parallel else 1,
        shared_expert_replicated=bool(shared) and shared[0].shape[1] == width,
    )
    return Description(
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()},
        placement,
        AlltoallvSettings.from_additional_config(vllm_config.additional_config),
        _problem(vllm_config, weights, drafts),
    )


def _problem(vllm_config: Any, weights: dict[str, torch.Tensor], drafts: bool) -> str:
    """Why this engine cannot take weights by alltoallv; empty if it can."""
    from vllm_ascend.ascend_config import get_ascend_config

    parallel, experts = vllm_config.parallel_config, get_ascend_config().eplb_config
    remedy = f"Set it otherwise, or remove {EXTENSION_KEY}."
    if is_quantized_model(vllm_config):
        return f"rollout.quantization is invalid: alltoallv does not move FP8 weights. {remedy}"
    if drafts:
        return f"rollout.mtp.enable_rollout=true is invalid: alltoallv does not move drafting layers. {remedy}"
    if parallel.pipeline_parallel_size > 1:
        return f"rollout.pipeline_model_parallel_size is invalid: alltoallv moves weights to one stage. {remedy}"
    if parallel.enable_eplb or experts.dynamic_eplb or experts.expert_map_path:
        return f"additional_config.eplb_config is invalid: alltoallv needs experts in order. {remedy}"
    tiled = [name for name, tensor in weights.items() if torch_npu.get_npu_format(tensor) == _TILED]
    if tiled:
        return (
            f"additional_config.weight_nz_mode is invalid: {tiled[0]} is stored in tiles (NZ), into which no shard can "
            "be written. Set it to 0."
        )
    return ""

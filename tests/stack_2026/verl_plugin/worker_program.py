"""Run two updates between FSDP2 training ranks and real vLLM workers on the same dies, without verl's trainer.

The first half of the ranks are vLLM's, the second half train. `main` runs one rank of the case that the environment
names. After each update the workers write their tokens to FOLDER, and training those of transformers.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from post_training.ports import reserve_ports
from tests.ranks import fork_ranks
from tests.stack_2026.vllm_ascend import images_program
from tests.stack_2026.vllm_ascend.program import IMPORTED_ONCE
from tests.vllm_cases import import_once

EXTENSION = "verl_plugin.alltoallv.worker.AlltoallvExtension"
TOKENS, UPDATES, GREW = 8, 2, 1.25
IMAGES = images_program.WIDE
"""The model that reads images, with the prompts of `images_program`."""
PROMPTS = [[1, 3, 10 + number, 40 + 3 * number, 17, *range(4, 4 + 5 * number)] for number in range(4)]


@dataclasses.dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        model: Name in `tests.stack_2026.vllm_ascend.models.MODELS`, or `IMAGES`.
        dies: Number of dies; each has a worker and a training rank.
        experts_parallel: Whether the rollout uses expert parallelism.
        dtype: The rollout's dtype; training uses float32.
        shared_memory: Whether verl hands over through shared memory instead of IPC.
        bucket: Size of verl's own bucket in MiB.
        discards: Whether the worker discards its weights in sleep, from the first update on.
        keeps: Whether it then keeps the memory that no update writes, as it should; False plants a fault.
        cycles: Number of further cycles of sleep and update, without generation.
        shifted: Whether the first worker reads part of another die's weights 16 bytes too far; makes one update only.
    """

    model: str
    dies: int = 1
    experts_parallel: bool = False
    dtype: str = "float32"
    shared_memory: bool = False
    bucket: int = 4
    discards: bool = True
    keeps: bool = True
    cycles: int = 0
    shifted: bool = False

    @property
    def name(self) -> str:
        return " ".join(str(value) for value in dataclasses.astuple(self))

    @property
    def updates(self) -> int:
        return 1 if self.shifted else UPDATES


def main(folder: Path) -> None:
    """Run one rank."""
    case = Case(**json.loads(os.environ["HANDOVER_CASE"]))
    rank = int(os.environ["RANK"])
    place = rank % case.dies
    os.environ |= {"RANK": str(place), "LOCAL_RANK": str(place), "WORLD_SIZE": str(case.dies), "VERL_REPLICA_RANK": "0"}
    done = folder / f"{case.name}.{place}.done"
    if rank < case.dies:
        serve(case, folder, place)
        # The acknowledgement of the last bucket may still be on its way, and would end with this process.
        wait_for(done)
    else:
        os.environ["MASTER_PORT"] = os.environ["TRAINING_PORT"]
        train(case, folder, place)
        done.touch()
    os._exit(0)


def engine_options(case: Case) -> dict[str, Any]:
    """Return the arguments of vllm.LLM."""
    options: dict[str, Any] = {"load_format": "dummy", "enforce_eager": True, "enable_sleep_mode": True}
    if case.dies > 1:
        options |= {"tensor_parallel_size": case.dies, "distributed_executor_backend": "external_launcher"}
    alltoallv = {"bucket_megabytes": 1, "verify": True, "discard_on_sleep": case.discards}
    return options | {
        "worker_extension_cls": EXTENSION,
        "enable_expert_parallel": case.experts_parallel,
        **(
            {"limit_mm_per_prompt": {"image": 2, "video": 0}} if case.model == IMAGES else {"skip_tokenizer_init": True}
        ),
        "additional_config": {"weight_nz_mode": 0, "alltoallv": alltoallv},
        "max_model_len": 128,
        "dtype": case.dtype,
    }


def serve(case: Case, folder: Path, place: int) -> None:
    """Run a worker, which takes each update after sleeping, and then generates."""
    import torch
    from vllm import LLM, SamplingParams

    if not case.keeps:
        import verl_plugin.alltoallv.sleep

        verl_plugin.alltoallv.sleep.blocks_to_keep = lambda *_: []
    if case.shifted and place == 0:
        read_further_on()
    llm = LLM(
        model=str(folder / case.model), max_num_seqs=8, seed=0, num_gpu_blocks_override=32,
        gpu_memory_utilization=0.3, **engine_options(case),
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    requests = requests_of(case, folder)
    llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": llm.llm_engine.model_config.get_vocab_size()})
    refusal = sampling_refused(llm)
    if case.shifted:
        (folder / f"{case.name}.{place}.error").write_text(error_of_update(llm, case))
        return
    for update in range(case.updates):
        copied = sleep_and_take_update(llm, case)
        outputs = llm.generate(requests, greedy, use_tqdm=False)
        found = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "addresses": {name: tensor.data_ptr() for name, tensor in driver_model(llm).named_parameters()},
            "refusal": refusal,
            "copied": copied,
            "weights": sum(tensor.nbytes for tensor in driver_model(llm).parameters()),
        }
        if case.model == IMAGES:
            found["differing"] = differing_from_own_load(driver_model(llm), folder / case.model, GREW**update)
        (folder / f"{case.name}.{place}.{update}.json").write_text(json.dumps(found))
    memory = []
    for _ in range(case.cycles):
        sleep_and_take_update(llm, case)
        memory.append([torch.npu.memory_allocated(), torch.npu.memory_reserved(), torch.npu.mem_get_info()[0]])
    (folder / f"{case.name}.{place}.memory.json").write_text(json.dumps(memory))


def sleep_and_take_update(llm: Any, case: Case) -> int:
    """Sleep and take an update, as verl does between rollouts. Return the bytes that sleeping copied to the host."""
    from npu_emulator import meters

    before = meters.snapshot()["copies"]["device_to_host"]["bytes"]
    llm.sleep(level=1)
    copied = meters.snapshot()["copies"]["device_to_host"]["bytes"] - before
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": case.shared_memory})
    llm.wake_up(tags=["kv_cache"])
    return copied


def requests_of(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Return the requests to vLLM."""
    if case.model != IMAGES:
        return [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return images_program.vllm_requests(processor_of(folder / case.model))[: len(PROMPTS)]


def encoded_prompts(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Return the same prompts in the form that transformers takes."""
    import torch

    if case.model != IMAGES:
        return [{"input_ids": torch.tensor([prompt])} for prompt in PROMPTS]
    prompts = images_program.encoded_prompts(processor_of(folder / case.model))
    return [dict(prompt) for prompt in prompts[: len(PROMPTS)]]


def processor_of(checkpoint: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(checkpoint)


def differing_from_own_load(model: Any, checkpoint: Path, scale: float) -> list[str]:
    """Return names of weights that differ from vLLM's own load of the file, scaled as training's were."""
    import safetensors.torch
    import torch

    arrived = {name: tensor.clone() for name, tensor in model.named_parameters()}
    file = safetensors.torch.load_file(checkpoint / "model.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        model.load_weights((name, tensor * scale) for name, tensor in file.items())
    return [name for name, tensor in model.named_parameters() if not torch.equal(tensor, arrived[name])]


def read_further_on() -> None:
    """Make this worker read part of the weights from other dies 16 bytes too far."""
    from tests.stack_2026.verl_plugin.fsdp_program import FAULTS
    from verl_plugin.alltoallv import worker

    upstream = worker.Importer
    worker.Importer = lambda manifest, *rest: upstream(FAULTS["wrong offset"](manifest), *rest)


def error_of_update(llm: Any, case: Case) -> str:
    """Return this worker's error in an update; empty without one."""
    from post_training.reshard.handover import HandoverError

    try:
        sleep_and_take_update(llm, case)
    except HandoverError as error:
        return str(error)
    return ""


def sampling_refused(llm: Any) -> str:
    """Return the error if vLLM asks for logits now, or "" if it gets them."""
    import torch

    try:
        width = llm.llm_engine.model_config.get_hidden_size()
        driver_model(llm).compute_logits(torch.zeros(1, width, device="npu"))
    except RuntimeError as error:
        return str(error)
    return ""


def driver_model(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def train(case: Case, folder: Path, place: int) -> None:
    """Run a training rank, which hands its weights over, scales them, and hands them over again."""
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    from post_training.layouts.fsdp_shards import fsdp_shards, local_tensors
    from post_training.models.families import table_for
    from verl_plugin.alltoallv.addresses import control_path
    from verl_plugin.alltoallv.transfer import Training, WeightTransfer

    torch.npu.set_device(place)
    dist.init_process_group("cpu:gloo,npu:hccl")
    kind = AutoModelForImageTextToText if case.model == IMAGES else AutoModelForCausalLM
    model = kind.from_pretrained(folder / case.model, dtype=torch.float32)
    reference = copy.deepcopy(model) if place == 0 else None
    for layer in layers_of(model):
        fully_shard(layer.npu())
    fully_shard(model.npu())
    table = table_for(model.config)
    training = Training(
        model.config, lambda: local_tensors(model.state_dict()), lambda: fsdp_shards(model.state_dict(), table.shapes)
    )
    job = os.environ["VERL_RAY_JOB_ID"]
    transfer = WeightTransfer(training, control_path(job, place), dist.group.WORLD, torch.device("npu", place))
    handle = f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-{place}.sock"
    wait_for(Path(f"/tmp/rl-colocate-alltoallv-{job}-{place}.sock"))
    for update in range(case.updates + case.cycles):
        sender = BucketedWeightSender(handle, case.bucket, case.shared_memory)
        asyncio.run(sender.async_send_weights(transfer.buckets()))
        if update >= case.updates:
            continue
        (folder / f"{case.name}.{place}.{update}.report").write_text(json.dumps(dataclasses.asdict(transfer.report)))
        if reference is not None:
            tokens = [greedy_tokens(reference, prompt) for prompt in encoded_prompts(case, folder)]
            (folder / f"{case.name}.{update}.expected").write_text(json.dumps(tokens))
        for each in (model, reference):
            if each is not None:
                grow(each)
    dist.barrier()


def layers_of(model: Any) -> list[Any]:
    """Return the modules that are sharded one by one, as verl does: layers of the decoder and of a vision tower."""
    inner = model.model
    if not hasattr(inner, "visual"):
        return list(inner.layers)
    return [*inner.language_model.layers, *inner.visual.blocks]


def grow(model: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(GREW)


def greedy_tokens(model: Any, prompt: dict[str, Any], count: int = TOKENS) -> list[int]:
    """Return the tokens that transformers chooses after a prompt."""
    import torch

    given, length = dict(prompt), prompt["input_ids"].shape[1]
    with torch.no_grad():
        for _ in range(count):
            best = model(**given).logits[:, -1:].argmax(-1)
            given["input_ids"] = torch.cat([given["input_ids"], best], 1)
            for name in {"attention_mask", "mm_token_type_ids"} & given.keys():
                more = torch.full_like(best, name == "attention_mask")
                given[name] = torch.cat([given[name], more], 1)
    return given["input_ids"][0, length:].tolist()


def wait_for(path: Path) -> None:
    end = time.monotonic() + 90
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.05)


def run(folder: Path, cases: list[Case]) -> None:
    """Run cases one after another. Exit with an error if a rank failed."""
    import_once(IMPORTED_ONCE)
    for number, case in enumerate(cases):
        os.environ |= {
            "HANDOVER_CASE": json.dumps(dataclasses.asdict(case)),
            "VERL_RAY_JOB_ID": f"test{os.getpid()}.{number}",
            "TRAINING_PORT": str(reserve_ports()),
            "NPU_EMULATOR_NODE": f"handover.{os.getpid()}.{number}",
        }
        if fork_ranks(__spec__.name, 2 * case.dies, folder):
            sys.exit(f"{case.name} failed")


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    run(Path(sys.argv[1]), [Case(**json.loads(argument)) for argument in sys.argv[2:]])

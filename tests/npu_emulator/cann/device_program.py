"""What one process sees of the second engine; started by `test_cann_engine` with NPU_EMULATOR_ENGINE=cann.

    python -m tests.npu_emulator.cann.device_program RESULTS CHECK ...

Each check returns what the test asserts on. RESULTS becomes a JSON object: by check what it returned, or, if it raised,
``{"raised": text}``.
"""

import copy
import ctypes
import json
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import npu_emulator_engine
import torch
import torch_npu

DEVICE = "npu:0"
MIB = 1 << 20
CHECKS: dict[str, Callable[[], object]] = {}


def check(function: Callable[[], object]) -> Callable[[], object]:
    CHECKS[function.__name__] = function
    return function


def message_of(call: Callable[[], object]) -> str:
    """What a call that must fail says, at the latest when the device is waited for."""
    try:
        call()
        torch.npu.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@check
def loaded() -> dict:
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    return {"torch_npu": torch_npu.__file__, "version": torch_npu.__version__, "libraries": sorted(mapped)}


@check
def chip() -> dict:
    torch.npu.synchronize()  # the chip is asked for when the device is first used
    return {
        "name": torch.npu.get_device_name(0),
        "soc": torch_npu._C._npu_get_soc_version(),
        "count": torch.npu.device_count(),
    }


@check
def arithmetic() -> dict:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(7, 7, generator=generator) for _ in range(2))
    host = [left + right, left @ right, left.softmax(-1), left.sum(0), left[right > 0], left.sort(-1).values]
    left, right = left.to(DEVICE), right.to(DEVICE)
    device = [left + right, left @ right, left.softmax(-1), left.sum(0), left[right > 0], left.sort(-1).values]
    return {
        "sum": (torch.ones(3).npu() + 1).cpu().tolist(),
        "equal": [torch.equal(a, b.cpu()) for a, b in zip(host, device, strict=True)],
    }


@check
def thread_without_device() -> dict:
    """A thread that has chosen no device has none, and autograd's thread can run a backward pass."""
    library, answer = npu_emulator_engine.library(), []
    thread = threading.Thread(target=lambda: answer.append(library.aclrtGetDevice(ctypes.byref(ctypes.c_int()))))
    thread.start()
    thread.join()
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    (weight * 2).sum().backward()
    return {"code": answer[0], "gradient": weight.grad.cpu().tolist()}


@check
def refusals() -> dict:
    image, half = torch.ones(1, 2, 5, 5, device=DEVICE), torch.ones(32, 32, dtype=torch.float16, device=DEVICE)
    torch.npu.config.allow_internal_format = True
    return {
        "operator": message_of(lambda: torch.nn.functional.adaptive_avg_pool2d(image, 2)),
        "format": message_of(lambda: torch_npu.npu_format_cast(half, 29) + 1),
        "shapes": message_of(lambda: torch.ones(2, 3, device=DEVICE).add_(torch.ones(4, device=DEVICE))),
        "device": message_of(lambda: torch.npu.set_device(5)),
        "afterwards": (torch.ones(2, device=DEVICE) * 2).cpu().tolist(),
    }


@check
def allocator() -> dict:
    torch.npu.empty_cache()
    before, free_before = torch.npu.memory_allocated(), torch.npu.mem_get_info()[0]
    block = torch.empty(40 * MIB, dtype=torch.uint8, device=DEVICE)
    held, free = torch.npu.memory_allocated() - before, torch.npu.mem_get_info()[0]
    refused = message_of(lambda: torch.empty(torch.npu.mem_get_info()[1], dtype=torch.uint8, device=DEVICE))
    del block
    reserved = torch.npu.memory_reserved()
    torch.npu.empty_cache()
    return {
        "held": held,
        "taken": free_before - free,
        "refused": refused,
        "kept": reserved - torch.npu.memory_reserved(),
        "back": torch.npu.mem_get_info()[0] - free_before,
    }


@check
def growing() -> dict:
    """Tensors that grow in turn, as a key-value cache does: with expandable segments they share one segment."""
    for size in range(3, 40, 4):
        tensor = torch.full((size * MIB,), 7, dtype=torch.uint8, device=DEVICE)
        assert int(tensor[-1]) == 7
        del tensor
    return {"segments": len(torch.npu.memory_snapshot()), "reserved": torch.npu.memory_reserved()}


@check
def graph() -> dict:
    weight = torch.arange(16.0, device=DEVICE).view(4, 4)
    given = torch.ones(2, 4, device=DEVICE)
    side = torch.npu.Stream()
    captured = torch.npu.NPUGraph()
    with torch.npu.graph(captured):
        product = given @ weight
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):  # takes part in the capture
            squared = product * product
        torch.npu.current_stream().wait_stream(side)
        out = squared.sum(0)
    answers = []
    for value in (1.0, 2.0):
        given.fill_(value)
        unreplayed = out.cpu().tolist()
        captured.replay()
        torch.npu.synchronize()
        expected = ((given.cpu() @ weight.cpu()) ** 2).sum(0)
        answers.append({"equal": torch.equal(out.cpu(), expected), "moved": out.cpu().tolist() != unreplayed})
    return {"replays": answers}


def _train(model: torch.nn.Module, tokens: torch.Tensor, rate: float, foreach: bool) -> list[list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=foreach)
    rows = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append([loss.item(), norm.item()])
    return rows


@check
def training() -> dict:
    """Losses and gradient norms of a tiny Qwen2, in float32, on the CPU and on the device."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = {"hidden_size": 80, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 384}
    heads = {"num_attention_heads": 5, "num_key_value_heads": 1}
    config = Qwen2Config(**shape, **heads, tie_word_embeddings=True, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)
    tokens = torch.randint(3, 380, (2, 17))

    def run(device: str, rate: float, foreach: bool) -> list[list[float]]:
        return _train(copy.deepcopy(model).to(device), tokens.to(device), rate, foreach)

    return {
        "host": run("cpu", 3e-3, False),
        "device": run(DEVICE, 3e-3, False),
        "foreach": run(DEVICE, 3e-3, True),
        "other_rate": run(DEVICE, 2e-3, False),
    }


@check
def fused() -> dict:
    """Fused operators in bfloat16 against float32 arithmetic that is rounded once."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    wide = x.float()
    gate, value = wide.chunk(2, -1)
    expected = {
        "rms_norm": (wide * torch.rsqrt(wide.square().mean(-1, True) + 1e-6) * weight.float()).bfloat16(),
        "swiglu": (torch.nn.functional.silu(gate) * value).bfloat16(),
    }
    x, weight = x.to(DEVICE), weight.to(DEVICE)
    computed = {"rms_norm": torch_npu.npu_rms_norm(x, weight, 1e-6)[0], "swiglu": torch_npu.npu_swiglu(x)}
    return {name: torch.equal(computed[name].cpu(), expected[name]) for name in expected}


@check
def kernels_of_vllm_ascend() -> dict:
    """vllm-ascend's compiled module as it is published: an alias, a part of the vocabulary, rotary embeddings."""
    from vllm_ascend import vllm_ascend_C

    values = torch.arange(3.0, device=DEVICE)
    alias = torch.ops._C.weak_ref_tensor(values)
    values.add_(1)
    tokens = torch.tensor([1, 5, 9, 12], dtype=torch.int32, device=DEVICE)
    own, foreign = torch.ops._C.get_masked_input_and_mask(tokens, 4, 8, 0, 12, 14)
    generator = torch.Generator().manual_seed(2)
    table, query = (torch.randn(2, 32, generator=generator).half() for _ in range(2))  # cosines, then sines; one head
    positions = torch.tensor([1, 0])
    given = (tensor.to(DEVICE) for tensor in (positions, query, query))
    turned, _ = torch.ops._C.rotary_embedding(*given, 32, table.to(DEVICE), True)
    cos, sin, first, second = (half.float() for tensor in (table[positions], query) for half in tensor.chunk(2, -1))
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).half()
    return {
        "file": vllm_ascend_C.__file__,
        "alias": alias.cpu().tolist(),
        "own": own.cpu().tolist(),
        "foreign": foreign.cpu().tolist(),
        "turned": torch.equal(turned.view(2, 32).cpu(), expected),
    }


@check
def operators() -> str:
    """Every operator that is written, with the C types of its parameters."""
    function = npu_emulator_engine.library().npu_emulator_cann_operators
    function.restype = ctypes.c_char_p
    return function().decode()


def main() -> None:
    results, names = Path(sys.argv[1]), sys.argv[2:]
    answers = {}
    for name in names:
        try:
            answers[name] = CHECKS[name]()
        except Exception:
            answers[name] = {"raised": traceback.format_exc()}
    results.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()

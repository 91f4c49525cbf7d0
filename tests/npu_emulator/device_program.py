"""The emulated NPU as one process sees it; started by `test_engine`.

    python -m tests.npu_emulator.device_program RESULTS CHECK ...

Each check returns the values that the test asserts on. RESULTS becomes a JSON object with each check's values or, if it
raised, ``{"raised": text}``.
"""

import copy
import ctypes
import itertools
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch_npu

from npu_emulator import engine, meters
from tests.npu_emulator.mapped_files import mapped_files

DEVICE = "npu:0"
MIB = 1 << 20
CHECKS: dict[str, Callable[[], object]] = {}


def check(function: Callable[[], object]) -> Callable[[], object]:
    CHECKS[function.__name__] = function
    return function


def message_of(call: Callable[[], object]) -> str:
    """Return the error of a call, which may appear only when the device is synchronized; empty if it succeeds."""
    try:
        call()
        torch.npu.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@check
def loaded() -> dict:
    libraries = [file for file in mapped_files() if ".so" in file]
    return {"torch_npu": torch_npu.__file__, "version": torch_npu.__version__, "libraries": libraries}


@check
def timers() -> dict:
    """Return how many nanoseconds late the kernel may wake this thread and, if readable, the thread that frees."""
    (torch.ones(2).to(DEVICE) + 1).cpu()
    named, begun = None, time.monotonic()
    while named is None and time.monotonic() - begun < 20:  # a thread names itself once it runs
        tasks = Path("/proc/self/task").iterdir()
        named = next((task.name for task in tasks if (task / "comm").read_text() == "release_thread\n"), None)
    found = {"own": int(Path("/proc/self/timerslack_ns").read_text()), "is named": named is not None}
    try:
        return found | {"release": int(Path(f"/proc/{named}/timerslack_ns").read_text())}
    except PermissionError:
        return found


@check
def chip() -> dict:
    torch.npu.synchronize()  # the chip is asked for when the device is first used
    return {
        "name": torch.npu.get_device_name(0),
        "soc": torch_npu._C._npu_get_soc_version(),
        "count": torch.npu.device_count(),
    }


def _results(left: torch.Tensor, right: torch.Tensor) -> list[torch.Tensor]:
    results = [left + right, left @ right, left.softmax(-1), left.sum(0), left[right > 0], left.sort(-1).values]
    # Without the two results that can be asked for, there is no memory for them.
    for inverted, counted in ((False, False), (True, False), (False, True), (True, True)):
        for unique in (torch.unique, torch.unique_consecutive):
            found = unique(left.round(), return_inverse=inverted, return_counts=counted)
            results += [found] if torch.is_tensor(found) else found
    return results


@check
def arithmetic() -> dict:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(7, 7, generator=generator) for _ in range(2))
    host, device = (_results(left.to(place), right.to(place)) for place in ("cpu", DEVICE))
    return {
        "sum": (torch.ones(3).npu() + 1).cpu().tolist(),
        "equal": [torch.equal(a, b.cpu()) for a, b in zip(host, device, strict=True)],
    }


@check
def thread_without_device() -> dict:
    """A thread that has chosen no device has none, and autograd's thread can run a backward pass."""
    library, answer = engine.library(), []
    thread = threading.Thread(target=lambda: answer.append(library.aclrtGetDevice(ctypes.byref(ctypes.c_int()))))
    thread.start()
    thread.join()
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    (weight * 2).sum().backward()
    return {"code": answer[0], "gradient": weight.grad.cpu().tolist()}


@check
def refusals() -> dict:
    return {
        "operator": message_of(lambda: torch.nn.functional.pdist(torch.ones(2, 5, device=DEVICE))),
        "shapes": message_of(lambda: torch.ones(2, 3, device=DEVICE).add_(torch.ones(4, device=DEVICE))),
        "device": message_of(lambda: torch.npu.set_device(5)),
        "afterwards": (torch.ones(2, device=DEVICE) * 2).cpu().tolist(),
    }


@check
def tiles() -> dict:
    """A matrix in the private format NZ: its memory, its values after casting back, and the calls that reject it."""
    torch.npu.config.allow_internal_format = True
    generator = torch.Generator().manual_seed(4)
    plain = torch.randint(-9, 9, (24, 40), generator=generator).half()
    cast = torch_npu.npu_format_cast(plain.to(DEVICE), 29)
    torch.npu.synchronize()
    memory = (ctypes.c_int16 * (32 * 48)).from_address(cast.data_ptr())
    # Caches of 2 blocks with 16 tokens, of 2 heads with 32 and 16 elements: columns of 16, each with all tokens.
    states = [torch.randn(3, 2, size, generator=generator).half() for size in (32, 16)]
    caches = [torch_npu.npu_format_cast(torch.zeros(2, columns, 16, 16).half().to(DEVICE), 29) for columns in (4, 2)]
    slots = torch.tensor([17, -1, 5], dtype=torch.int32)
    torch_npu._npu_reshape_and_cache(*(given.to(DEVICE) for given in states), *caches, slots.to(DEVICE))
    plain_caches = [torch_npu.npu_format_cast(cache, 2).cpu() for cache in caches]
    return {
        "caches": [
            [
                torch.equal(cache[slot // 16, :, slot % 16].flatten(), given[token].flatten())
                for token, slot in ((0, 17), (2, 5))
            ]
            + [int(cache.count_nonzero()) == 2 * given[0].numel()]
            for cache, given in zip(plain_caches, states, strict=True)
        ],
        "format": torch_npu.get_npu_format(cast),
        "memory": torch.tensor(memory[:], dtype=torch.int16).view(torch.float16).tolist(),
        "plain": plain.tolist(),
        "back": torch.equal(torch_npu.npu_format_cast(cast, 2).cpu(), plain),
        "sum": torch.equal(torch_npu.npu_format_cast(cast + 1, 2).cpu(), plain + 1),
        "product": torch.equal(
            (torch.ones(5, 24, dtype=torch.float16, device=DEVICE) @ cast).cpu(), plain.sum(0).expand(5, 40)
        ),
        "sine": message_of(lambda: cast.sin()),
    }


@check
def channel_blocks() -> list[dict]:
    """Check tensors in the private formats NC1HWC0 and FRACTAL_Z.

    Returned are their memory, their values after casting back, and the result of an operator on two of them, which
    torch_npu calls by name.
    """
    torch.npu.config.allow_internal_format = True
    found = []
    for name, shape in itertools.product((3, 4), ((2, 20, 3, 4), (3, 16), (5,), (0, 3, 2, 2))):
        plain = torch.randn(shape, generator=torch.Generator().manual_seed(5)).half()
        cast = torch_npu.npu_format_cast(plain.to(DEVICE), name)
        torch.npu.synchronize()
        memory = (ctypes.c_int16 * torch_npu.get_storage_size(cast)).from_address(cast.data_ptr())
        found.append(
            {
                "format": torch_npu.get_npu_format(cast),
                "memory": torch.tensor(memory[:], dtype=torch.int16).view(torch.float16).tolist(),
                "plain": plain.flatten().tolist(),
                "back": torch.equal(torch_npu.npu_format_cast(cast, 2).cpu(), plain),
                "difference": torch.equal(torch_npu.npu_format_cast(cast - plain.to(DEVICE) * 2, 2).cpu(), -plain),
            }
        )
    return found


@check
def quantised() -> dict:
    """Operators on 8 and 4 bits beside exact ones."""
    generator = torch.Generator().manual_seed(5)
    rows, weight = torch.randn(6, 64, generator=generator), torch.randn(64, 32, generator=generator)
    return _of_8_bits(rows, weight) | _of_4_bits(rows, weight) | _quantising(rows, generator)


def _of_8_bits(rows: torch.Tensor, weight: torch.Tensor) -> dict:
    """Products of rows [6, 64] and weights [64, 32], with weights in plain order and in NZ."""
    whole, of_rows = torch_npu.npu_dynamic_quant(rows.half().to(DEVICE))
    columns, of_columns = torch_npu.npu_dynamic_quant(weight.t().half().contiguous().to(DEVICE))
    columns = columns.t().contiguous()
    exact = (whole.cpu().double() @ columns.cpu().double()) * of_rows.cpu()[:, None] * of_columns.cpu()

    def product(matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16
        return torch_npu.npu_quant_matmul(whole, matrix, scales, pertoken_scale=of_rows, output_dtype=dtype).cpu()

    groups = torch.tensor([2, 6], device=DEVICE)
    scales = torch.stack([of_columns, 2 * of_columns]).bfloat16()

    def grouped(matrices: torch.Tensor) -> torch.Tensor:
        (result,) = torch_npu.npu_grouped_matmul(
            [whole], [matrices], scale=[scales], per_token_scale=[of_rows], group_list=groups,
            split_item=2, group_type=0, group_list_type=0, output_dtype=torch.bfloat16,
        )  # fmt: skip
        return result.cpu()

    def cast(matrix: torch.Tensor) -> torch.Tensor:
        return torch_npu.npu_format_cast(matrix.contiguous(), 29)

    matrices = torch.stack([columns, columns])
    twice = exact * torch.tensor([1.0, 1, 2, 2, 2, 2])[:, None]
    quarter = torch.full((1,), 0.25, device=DEVICE)
    return {
        "rounded once": torch.equal(product(columns, of_columns), exact.float().bfloat16()),
        "tiles": torch.equal(product(cast(columns), of_columns), product(columns, of_columns)),
        "tiles transposed": torch.equal(product(cast(columns.t()).t(), of_columns), product(columns, of_columns)),
        "of the float product": ((exact - rows @ weight).norm() / (rows @ weight).norm()).item(),
        "half": torch.equal(
            torch_npu.npu_quant_matmul(whole, columns, quarter, output_dtype=torch.float16).cpu(),
            (whole.cpu().float() @ columns.cpu().float() / 4).half(),
        ),
        "other scales": torch.equal(product(columns, 2 * of_columns), exact.float().bfloat16()),
        "grouped": ((grouped(matrices) - twice).norm() / twice.norm()).item(),
        "grouped tiles": torch.equal(grouped(cast(matrices)), grouped(matrices)),
    }


def _of_4_bits(rows: torch.Tensor, weight: torch.Tensor) -> dict:
    """Numbers of 4 bits, eight in an int32: unpacked, and in a product."""
    small, of_small = torch_npu.npu_dynamic_quant(rows.half().to(DEVICE), dst_type=torch.quint4x2)
    low = small.cpu().view(torch.uint8)
    unpacked = torch.stack([low & 15, low >> 4], -1).flatten(-2).to(torch.int16)
    unpacked = torch.where(unpacked > 7, unpacked - 16, unpacked)
    ones = torch.ones(1, device=DEVICE)
    four = torch_npu.npu_quantize(weight.t().contiguous().to(DEVICE), ones, None, torch.quint4x2, -1, False)
    of_four = torch_npu.npu_quant_matmul(
        small, four.t(), ones, pertoken_scale=of_small, output_dtype=torch.bfloat16
    ).cpu()
    by_hand = (unpacked.float() @ weight.round().clamp(-8, 7)) * of_small.cpu()[:, None]
    near = (unpacked * of_small.cpu()[:, None] - rows).abs().amax(-1) <= of_small.cpu() * 0.51
    return {"4 bits": [near.all().item(), torch.equal(of_four, by_hand.bfloat16())]}


def _quantising(rows: torch.Tensor, generator: torch.Generator) -> dict:
    """Fused operators whose result has 8 bits: the norm of a sum, and SwiGLU of groups."""
    ready, scale = torch.randn(32, generator=generator), torch.rand(32, generator=generator) + 0.5
    added, gain, halves = rows[:, :32].half(), ready.half(), torch.randint(-50, 50, (6, 64), generator=generator)
    first, _, total = torch_npu.npu_add_rms_norm_quant(
        *(given.to(DEVICE) for given in (added, added, gain, scale)), None, epsilon=1e-6
    )
    normal = 2 * added.float()
    normal = normal * torch.rsqrt(normal.square().mean(-1, True) + 1e-6) * gain.float()
    counts, of_groups = torch.tensor([2, 4]), torch.rand(2, 64, generator=generator) / 50
    of_activations = torch.rand(6, generator=generator)
    second, of_second = torch_npu.npu_dequant_swiglu_quant(
        halves.int().to(DEVICE), weight_scale=of_groups.to(DEVICE), activation_scale=of_activations.to(DEVICE),
        group_index=counts.to(DEVICE), activate_left=True, quant_mode=1,
    )  # fmt: skip
    gate, value = (halves * of_groups.repeat_interleave(counts, 0) * of_activations[:, None]).chunk(2, -1)
    activated = torch.nn.functional.silu(gate) * value
    within = (second.cpu() * of_second.cpu()[:, None] - activated).abs() <= 0.51 * of_second.cpu()[:, None]
    return {
        "norm": [
            torch.equal(total.cpu(), added + added),
            (first.cpu() - (normal / scale).round().clamp(-128, 127)).abs().max().item(),
        ],
        "swiglu": within.all().item(),
    }


@check
def torchair_graph() -> dict:
    """A function compiled by the wheel's torchair, with a scope and a wait, and one that it cannot convert."""
    import torchair

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torchair.scope.npu_stream_switch("side", 1):
            normal = torch_npu.npu_rms_norm(x, weight, 1e-6)[0]
        normal.add_(1)
        return torchair.scope.npu_wait_tensor(normal, x) * 2

    def compiled(function: Callable) -> Callable:
        return torch.compile(function, backend=torchair.get_npu_backend(), dynamic=True, fullgraph=True)

    x, weight = torch.randn(3, 64).to(DEVICE), torch.randn(64).to(DEVICE)
    expected = (torch_npu.npu_rms_norm(x, weight, 1e-6)[0] + 1) * 2
    # The graph engine has no converter for this operator, whether or not it is emulated.
    unknown = message_of(lambda: compiled(lambda t: torch.special.bessel_j0(t))(x))
    return {"equal": torch.equal(compiled(step)(x, weight).cpu(), expected.cpu()), "unknown": unknown}


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
def triangles() -> dict:
    """Triangles of matrices beside the CPU's: those with rows one after another, and others."""
    given: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
        "floats": (torch.randn(2, 3, 5), lambda tensor: tensor),
        "truths": (torch.ones(4, 4, dtype=torch.bool), lambda tensor: tensor),
        "transposed": (torch.randn(5, 3), lambda tensor: tensor.t()),
        "part": (torch.randn(4, 6), lambda tensor: tensor[1:, 2:]),
        "empty": (torch.ones(0, 3), lambda tensor: tensor),
    }
    wrong = []
    for name, (tensor, view) in given.items():
        for diagonal, function in product(range(-6, 7), (torch.triu, torch.tril)):
            expected = function(view(tensor), diagonal)
            into = view(tensor.to(DEVICE))
            alone = function(into, diagonal).cpu()
            function(into.clone(), diagonal, out=into)
            if not (torch.equal(alone, expected) and torch.equal(into.cpu(), expected)):
                wrong.append(f"{function.__name__} of {name} at {diagonal}")
    return {"wrong": wrong, "of": len(given)}


@check
def graph() -> dict:
    weight = torch.arange(16.0, device=DEVICE).view(4, 4)
    given = torch.ones(2, 4, device=DEVICE)
    side = torch.npu.Stream()
    captured = torch.npu.NPUGraph()
    meters.reset_phases()
    with meters.phase("captured"), torch.npu.graph(captured):
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
        with meters.phase("replayed"):
            captured.replay()
            torch.npu.synchronize()
        expected = ((given.cpu() @ weight.cpu()) ** 2).sum(0)
        answers.append({"equal": torch.equal(out.cpu(), expected), "moved": out.cpu().tolist() != unreplayed})
    return {"replays": answers, "phases": meters.snapshot()["phases"]}


@check
def updated_graph() -> dict:
    """A graph that waits at each replay until one of its tasks has been replaced."""
    given, product = torch.arange(4.0, device=DEVICE), torch.empty(4, device=DEVICE)
    graph, event, side = torch.npu.NPUGraph(), torch.npu.ExternalEvent(), torch.npu.Stream()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        doubled = given + given
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch.mul(doubled, 2.0, out=product)
        handle = torch.npu.graph_task_group_end(stream)
        result = product + 1

    def update(*replace: Callable[[], object]) -> None:
        torch.npu.graph_task_update_begin(side, handle)
        try:
            for each in replace:
                each()
        finally:
            torch.npu.graph_task_update_end(side)

    answers = []
    for factor in (3.0, 5.0):
        graph.replay()
        waits = not torch.npu.current_stream().query()
        with torch.npu.stream(side):
            update(partial(torch.mul, doubled, factor, out=product))
            event.record(side)
        torch.npu.synchronize()
        answers.append({"waits": waits, "equal": torch.equal(result.cpu(), 2 * given.cpu() * factor + 1)})
    with torch.npu.stream(side):
        multiply = partial(torch.mul, doubled, 2.0, out=product)
        other = message_of(lambda: update(partial(torch.add, doubled, doubled, out=product)))
        more, none = message_of(lambda: update(multiply, multiply)), message_of(update)
        event.record(side)
    graph.replay()  # the rejected updates have replaced nothing
    torch.npu.synchronize()
    last = torch.equal(result.cpu(), 2 * given.cpu() * 5 + 1)
    outside = message_of(lambda: torch.npu.graph_task_group_begin(torch.npu.current_stream()))
    return {"answers": answers, "other": other, "more": more, "none": none, "last": last, "outside": outside}


@check
def paged_attention() -> dict:
    """Paged attention with more lengths than queries, and with a block that the cache does not have.

    The last check: a stream with a thread does not survive it.
    """
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(n, *s, generator=generator).to(DEVICE) for n, s in
                           ((2, (2, 16)), (4, (128, 2, 16)), (4, (128, 2, 16))))  # fmt: skip
    options = {"num_kv_heads": 2, "num_heads": 2, "scale_value": 0.25}

    def attend(lengths: list[int], first: int) -> torch.Tensor:
        blocks = torch.arange(first, first + len(lengths), dtype=torch.int32).view(-1, 1).to(DEVICE)
        out = torch.zeros_like(query)
        torch_npu._npu_paged_attention(query=query, key_cache=keys, value_cache=values, block_table=blocks, out=out,
                                       context_lens=torch.tensor(lengths, dtype=torch.int32), **options)  # fmt: skip
        torch.npu.synchronize()
        return out

    equal = torch.equal(attend([3, 5], 0), attend([3, 5, 7, 9], 0))
    told = message_of(lambda: attend([3, 5], 90))
    return {"equal": equal, "told": told}


@check
def task_group_codes() -> list[int]:
    """The codes of a chain of calls, most of them in the wrong state."""
    library = engine.library()
    stream, graph, handle, none = (ctypes.c_void_p() for _ in range(4))
    library.aclrtCreateStream(ctypes.byref(stream))

    def call(name: str, *arguments: object) -> int:
        function = getattr(library, f"aclmdlRICapture{name}" if name != "Destroy" else "aclmdlRIDestroy")
        return function(*arguments)

    to_graph, to_handle = ctypes.byref(graph), ctypes.byref(handle)
    calls = [
        ("TaskGrpBegin", stream), ("TaskGrpEnd", stream, to_handle), ("TaskUpdateBegin", stream, none),
        ("TaskUpdateEnd", stream), ("TaskUpdateBegin", none, none), ("TaskUpdateEnd", none),
        ("End", stream, to_graph), ("Begin", stream, 0), ("Begin", stream, 0), ("TaskGrpEnd", stream, to_handle),
        ("TaskGrpBegin", stream), ("TaskGrpBegin", stream), ("TaskGrpEnd", stream, to_handle),
        ("TaskGrpEnd", stream, to_handle), ("TaskUpdateBegin", stream, handle), ("End", stream, to_graph),
        ("TaskUpdateBegin", stream, handle), ("TaskUpdateBegin", stream, handle), ("TaskUpdateEnd", stream),
        ("Destroy", graph), ("TaskUpdateBegin", stream, handle),
        ("Begin", stream, 0), ("TaskGrpBegin", stream), ("End", stream, to_graph), ("Begin", stream, 0),
        ("TaskGrpBegin", stream), ("TaskGrpEnd", stream, to_handle), ("End", stream, to_graph),
    ]  # fmt: skip
    return [call(*each) for each in calls]


@check
def metered() -> dict:
    """The meters' counters for one kind of work at a time."""
    matrix, host = torch.ones(6, 10, device=DEVICE), torch.ones(10)
    cube, on_device = torch.ones(2, 3, 4, device=DEVICE), host.to(DEVICE)
    copied = {
        "straight": [matrix[1:], matrix[:, 2:5], matrix.t().t(), cube[1, :, 2:]],
        "crossing": [matrix.t(), matrix.t()[2:4], cube.transpose(1, 2)],
    }
    work: dict[str, Callable[[], object]] = {
        "nothing": lambda: host + host,
        "products": lambda: [matrix @ matrix.t() for _ in range(3)],
        "swiglu": lambda: torch_npu.npu_swiglu(matrix),
        "up": lambda: host.to(DEVICE),
        "down": on_device.cpu,
        "one": on_device[3].item,
        "clone": on_device.clone,
    }
    for name, sources in copied.items():
        targets = [torch.empty(source.shape, device=DEVICE) for source in sources]
        work[name] = partial(list, map(torch.Tensor.copy_, targets, sources))
    meters.reset_phases()
    torch.npu.synchronize()
    for name, do in work.items():
        with meters.phase(name):
            do()
            torch.npu.synchronize()
    return {"phases": meters.snapshot()["phases"], "crossing": sum(s.nbytes for s in copied["crossing"])}


@check
def metered_memory() -> dict:
    """The memory that meters report as allocated, in MiB above the amount before.

    torch_npu asks for 32 bytes more than a tensor has, and for whole blocks of 2 MiB.
    """
    torch.npu.empty_cache()
    before = meters.snapshot()["memory"]["0"]["allocated"]
    meters.reset_phases()
    with meters.phase("outer"):
        first = torch.empty(31 << 20, dtype=torch.uint8, device=DEVICE)
        with meters.phase("inner"):
            second = torch.empty(15 << 20, dtype=torch.uint8, device=DEVICE)
            del second
        torch.npu.empty_cache()
    del first
    torch.npu.empty_cache()
    with meters.phase("later"):
        pass
    phases = meters.snapshot()["phases"]
    return {
        name: [(phase[what].get("0", before) - before) >> 20 for what in ("peak_bytes", "allocated_bytes")]
        for name, phase in phases.items()
    }


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
def layer_norm() -> dict:
    """Gradients of a layer norm, with and without that of its input: on the device beside the CPU."""
    torch.manual_seed(0)
    norm, x = torch.nn.LayerNorm(8), torch.randn(2, 3, 8)

    def gradients(device: str, wants_input: bool) -> list[torch.Tensor]:
        layer, states = copy.deepcopy(norm).to(device), x.clone().to(device).requires_grad_(wants_input)
        layer(states).square().mean().backward()
        found = [layer.weight.grad, layer.bias.grad] + ([states.grad] if wants_input else [])
        return [gradient.cpu() for gradient in found]

    return {
        str(wanted): all(map(torch.equal, gradients("cpu", wanted), gradients(DEVICE, wanted)))
        for wanted in (True, False)
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
def added_products() -> dict:
    """Products of groups of 2, 0 and 3 rows of bfloat16, added to a total in float32."""
    generator = torch.Generator().manual_seed(0)
    rows, others = (torch.randn(5, width, generator=generator).bfloat16() for width in (3, 4))
    total, ends = torch.randn(9, 4, generator=generator), torch.tensor([2, 2, 5])
    parts = zip(rows.float().split([2, 0, 3]), others.float().split([2, 0, 3]), strict=True)
    expected = total + torch.cat([one.t() @ other for one, other in parts])
    given = [each.to(DEVICE) for each in (total, rows, others, ends)]
    torch_npu.npu_grouped_matmul_add_(*given)
    narrow = given[0].bfloat16()
    refused = message_of(lambda: torch_npu.npu_grouped_matmul_add_(narrow, *given[1:]))
    return {"close": torch.allclose(given[0].cpu(), expected, rtol=1e-6, atol=1e-6), "refused": refused}


@check
def routing() -> dict:
    """Three tokens and four experts: of equal scores the first expert, and for a finished token one that nobody has."""
    scores = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0.0, 3.0, 1.0, 2.0], [4.0, 0.0, 0.0, 5.0]], device=DEVICE)
    finished = torch.tensor([False, True, False], device=DEVICE)
    weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(scores, finished, 2)
    expected = scores.cpu().softmax(-1).gather(1, torch.tensor([[1, 2], [1, 3], [3, 0]]))
    unfinished = torch_npu.npu_moe_gating_top_k_softmax(scores, None, 2)[1]
    totals = torch_npu.npu_moe_compute_expert_tokens(experts.flatten().sort().values, 4)
    return {
        "experts": experts.tolist(),
        "none finished": unfinished.tolist(),
        "weights": torch.allclose(weights.cpu(), expected),
        "totals": totals.tolist(),
    }


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
    """Return every emulated operator with the C types of its parameters."""
    function = engine.library().npu_emulator_cann_operators
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

"""The published torch_npu, unmodified, on the emulated CANN: results, rejected calls, memory and counters.

The programs run in processes of their own, with settings that are read when the libraries are loaded.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from npu_emulator import engine
from scripts.health_checks.installed_files import check_files
from tests.npu_emulator.engine_process import finish, start

# Tiles first: whether private formats are allowed is asked once, before the first operator.
CHECKS = (
    "tiles channel_blocks refusals loaded chip arithmetic thread_without_device allocator graph training fused"
    " quantised kernels_of_vllm_ascend torchair_graph layer_norm triangles routing added_products metered"
    " metered_memory updated_graph task_group_codes paged_attention"
).split()
CAPACITY_MB = 256


@pytest.fixture(
    scope="module", params=["", pytest.param("1", marks=pytest.mark.exhaustive)], ids=["at once", "streams"]
)
def device(request, tmp_path_factory) -> dict:
    """The values that every check of the device program returned."""
    results = tmp_path_factory.mktemp("device") / "results.json"
    finish(
        start(
            "device_program",
            results,
            *CHECKS,
            NPU_EMULATOR_CAPACITY_MB=str(CAPACITY_MB),
            NPU_EMULATOR_DEVICES="2",
            NPU_EMULATOR_STREAM_SEED=request.param,
            TASK_QUEUE_ENABLE="0",
        )
    )
    return json.loads(results.read_text())


def test_the_wheel_is_what_is_imported_and_its_libraries_are_mapped(device):
    loaded = device["loaded"]
    assert loaded["version"] == "2.5.1.post1"
    folders = {Path(path).name: Path(path).parent for path in loaded["libraries"]}
    assert {"libtorch_npu.so", "libop_plugin_atb.so"} <= folders.keys()
    ours = {"libascendcl.so", "libhccl.so", "libopapi.so"}
    assert {folders[name] for name in ours} == {engine.FOLDER / "lib"}


def test_no_file_of_the_wheel_is_changed(device, tmp_path):
    """Its METADATA has another hash in the published RECORD, and is left out."""
    found = check_files(Path(device["loaded"]["torch_npu"]).parents[1], ["torch_npu"])
    assert found.damages == () and found.files > 1000
    info = tmp_path / "torch_npu-1.dist-info"
    info.mkdir()
    (tmp_path / "module.py").write_text("changed")
    (info / "RECORD").write_text("module.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n")
    (damage,) = check_files(tmp_path, ["torch_npu"]).damages
    assert str(damage) == "module.py of torch_npu 1 has been changed", "control: a changed file is noticed"


def test_chip_is_an_a3_and_devices_are_those_of_the_setting(device):
    assert device["chip"] == {"name": "Ascend910_9391", "soc": 250, "count": 2}


def test_a_thread_of_torch_npu_that_only_asks_does_not_do_so_all_the_time(tmp_path):
    results = tmp_path / "results.json"
    finish(start("device_program", results, "timers", TASK_QUEUE_ENABLE="1"))  # whose thread it is
    answer = json.loads(results.read_text())["timers"]
    assert answer.pop("own") < 1_000_000, "the others are woken as they always are"
    assert answer.pop("is named")
    assert answer == {"release": 5_000_000} or os.geteuid() != 0, "other threads' can be read by root alone"


def test_arithmetic_is_the_cpus(device):
    assert device["arithmetic"] == {"sum": [2, 2, 2], "equal": [True] * 22}


def test_a_thread_that_chose_no_device_has_none(device):
    assert device["thread_without_device"] == {"code": 107002, "gradient": [2, 2, 2]}


def test_unemulated_operator_rejected_with_its_arguments(device):
    refused = device["refusals"]
    assert "aclnnPdist is not emulated" in refused["operator"]
    assert "self:Tensor=Float[2, 5]" in refused["operator"]
    assert "The size of tensor a (3) must match the size of tensor b (4)" in refused["shapes"]
    assert "device" in refused["device"]
    assert refused["afterwards"] == [2, 2], "the process goes on after refusals"


def in_tiles(matrix: list[list[float]], size: int = 16) -> list[float]:
    """Return elements in the order of NZ: tiles row by row, tiles below each other one after the other."""
    padded = [len(edge) + -len(edge) % size for edge in (matrix, matrix[0])]
    filled = [[*row, *[0] * (padded[1] - len(row))] for row in matrix] + [[0] * padded[1]] * (padded[0] - len(matrix))
    return [
        filled[top + row][left + column]
        for left in range(0, padded[1], size)
        for top in range(0, padded[0], size)
        for row in range(size)
        for column in range(size)
    ]


def test_a_matrix_in_nz_lies_in_tiles_and_is_read_so(device):
    answer = device["tiles"]
    assert answer["format"] == 29
    assert answer["memory"] == in_tiles(answer["plain"])
    assert answer["memory"] != sum(answer["plain"], []), "control: plain order is another"
    assert answer["back"]
    assert answer["caches"] == [[True] * 3] * 2, "two tokens are where their slots say, and nothing else is written"
    assert answer["sum"] and answer["product"], "operators that torch_npu asks for by name read tiles"
    assert "the aclop operator Sin is not emulated" in answer["sine"]


def in_channel_blocks(plain: list[float], sizes: tuple[int, int, int, int], block: int = 16) -> list[float]:
    """Return a tensor [n, c, h, w] in blocks of channels: at each position, the channels of one block are adjacent."""
    images, channels, height, width = sizes
    return [
        plain[((image * channels + channel) * height + row) * width + column] if channel < channels else 0.0
        for image in range(images)
        for first in range(0, channels, block)
        for row in range(height)
        for column in range(width)
        for channel in range(first, first + block)
    ]


def in_fractal_z(plain: list[float], sizes: tuple[int, int, int, int], block: int = 16) -> list[float]:
    """Return a tensor [n, c, h, w] in tiles of images and channels: at each position, one tile after the other."""
    images, channels, height, width = sizes

    def element(image: int, channel: int, row: int, column: int) -> float:
        if image >= images or channel >= channels:
            return 0.0
        return plain[((image * channels + channel) * height + row) * width + column]

    return [
        element(image, channel, row, column)
        for first in range(0, channels, block)
        for row in range(height)
        for column in range(width)
        for image in range(-(-images // block) * block)
        for channel in range(first, first + block)
    ]


def test_tensors_with_channels_in_blocks_are_read_and_written_in_their_formats(device):
    as_images = ((2, 20, 3, 4), (1, 3, 16, 1), (1, 5, 1, 1), (0, 3, 2, 2))
    for number, laid_out in ((3, in_channel_blocks), (4, in_fractal_z)):
        answers = [answer for answer in device["channel_blocks"] if answer["format"] == number]
        for answer, sizes in zip(answers, as_images, strict=True):
            assert answer["memory"] == laid_out(answer["plain"], sizes)
            assert answer["back"] and answer["difference"]
        assert answers[0]["memory"][: len(answers[0]["plain"])] != answers[0]["plain"], (
            "control: plain order is another"
        )


def test_products_in_8_bits_are_summed_exactly_and_read_weights_in_tiles(device):
    answer = device["quantised"]
    assert answer["rounded once"] and answer["tiles"] and answer["tiles transposed"]
    assert 0.001 < answer["of the float product"] < 0.02, "what quantisation itself costs"
    assert answer["grouped"] < 0.006, "scales of the groups are bfloat16"
    assert answer["grouped tiles"]
    assert answer["norm"][0] and answer["norm"][1] <= 1, "at most where a half is rounded"
    assert answer["swiglu"], "every row's largest has 127 steps"
    assert answer["half"], "a scale in 64 bits"
    assert answer["4 bits"] == [True, True], "rounding to the nearest, and the product of packed numbers"
    assert not answer["other scales"], "control: the scales count"


def test_a_graph_of_torchair_is_converted_and_runs_node_by_node(device):
    answer = device["torchair_graph"]
    assert answer["equal"]
    assert "bessel_j0" in answer["unknown"], "control: a node that the graph engine would not take is refused"


def test_caching_allocator_keeps_and_returns_memory_of_a_small_device(device):
    mib = 1 << 20
    answer = device["allocator"]
    assert 40 * mib <= answer["held"] < 41 * mib and answer["taken"] >= 40 * mib
    assert answer["refused"].startswith("RuntimeError") and "out of memory" in answer["refused"]
    assert answer["kept"] >= 40 * mib and answer["back"] == 0


@pytest.mark.parametrize(("setting", "expected"), [("True", 1), ("False", 2)])
def test_expandable_segments_grow_in_place(tmp_path, setting, expected):
    """The control is a run without them, in which every larger block is a segment of its own."""
    results = tmp_path / "results.json"
    variables = {"PYTORCH_NPU_ALLOC_CONF": f"expandable_segments:{setting}", "NPU_EMULATOR_CAPACITY_MB": "1024"}
    finish(start("device_program", results, "growing", **variables))
    segments = json.loads(results.read_text())["growing"]["segments"]
    assert segments == 1 if expected == 1 else segments >= expected


def test_a_captured_graph_is_replayed_with_new_input(device):
    assert device["graph"]["replays"] == [{"equal": True, "moved": True}] * 2
    # Capturing does no work; replaying does.
    captured, replayed = (device["graph"]["phases"][name] for name in ("captured", "replayed"))
    assert "aclnnReduceSum" not in captured["operators"] and replayed["operators"]["aclnnReduceSum"] == {"calls": 2}
    assert captured["graphs"] == {"captured": 1, "replayed": 0, "tasks": 0}
    tasks = sum(entry["calls"] for entry in replayed["operators"].values())
    assert replayed["graphs"] == {"captured": 0, "replayed": 2, "tasks": tasks}


def test_a_replay_waits_until_its_tasks_are_replaced(device):
    found = device["updated_graph"]
    assert found["answers"] == [{"waits": True, "equal": True}] * 2 and found["last"] is True
    assert "aclnnAdd is to replace aclnnMuls" in found["other"]
    assert "2 tasks are to replace 1" in found["more"] and "0 tasks are to replace 1" in found["none"]
    assert "a group of tasks begins on a stream that is not being captured" in found["outside"]


def test_a_kernel_of_atb_that_fails_is_told_when_the_device_is_waited_for(device):
    """torch_npu ignores the return value of an operation of ATB."""
    found = device["paged_attention"]
    assert found["equal"] is True
    assert "507015" in found["told"] and "index out of range" in found["told"]


def test_groups_of_tasks_rejected_in_the_wrong_state_with_the_runtimes_codes(device):
    """The codes that the unit tests of CANN's runtime expect: task_group_no_captured, repeat, unclosed, update_3."""
    captured, not_captured, status, parameter = 107027, 107029, 107033, 107000
    assert device["task_group_codes"] == [
        not_captured, not_captured, parameter,
        status, parameter, parameter,
        not_captured, 0, captured, status,
        0, status, 0,
        status, captured, 0,
        0, status, 0,
        0, parameter,
        0, 0, status, 0,
        0, 0, 0,
    ]  # fmt: skip


def test_meters_count_operators_and_copies_of_a_phase(device):
    phases = device["metered"]["phases"]
    copies = {name: {kind: tuple(now.values()) for kind, now in phases[name]["copies"].items()} for name in phases}
    none = dict.fromkeys(("host_to_device", "device_to_host", "device_to_device", "transposing_on_device"), (0, 0))
    assert phases["nothing"]["operators"] == {} and copies["nothing"] == none
    assert phases["products"]["operators"] == {"aclnnMatmul": {"calls": 3}}
    assert phases["swiglu"]["operators"] == {"aclnnSwiGlu": {"calls": 1}}
    assert copies["up"] == none | {"host_to_device": (1, 40)}
    assert copies["down"] == none | {"device_to_host": (1, 40)}
    assert copies["one"] == none | {"device_to_host": (1, 4)}
    assert copies["clone"] == none | {"device_to_device": (1, 40)}
    assert copies["straight"]["transposing_on_device"] == (0, 0) and copies["straight"]["device_to_device"][0] == 4
    assert copies["crossing"]["transposing_on_device"] == (3, device["metered"]["crossing"])


def test_a_phase_has_a_peak_of_the_memory_that_the_device_gave(device):
    """The peak, and the memory still allocated at the end, in MiB."""
    found = device["metered_memory"]
    assert found["inner"] == [48, 48] and found["outer"] == [48, 32] and found["later"] == [0, 0]


def test_triangles_are_the_cpus_whatever_order_memory_has(device):
    assert device["triangles"] == {"wrong": [], "of": 5}


def test_training_equals_the_cpus_to_the_last_digit(device):
    answer = device["training"]
    assert answer["device"] == answer["host"]
    assert answer["foreach"] == answer["host"]
    assert answer["other_rate"] != answer["host"], "control: another rate gives other losses"


def test_operator_gets_the_requested_gradients(device):
    assert device["layer_norm"] == {"True": True, "False": True}


def test_fused_operators_round_once(device):
    assert device["fused"] == {"rms_norm": True, "swiglu": True}


def test_products_of_16_bits_are_added_to_a_total_in_float32(device):
    """They are the gradient of experts' weights that are trained in 16 bits."""
    assert device["added_products"]["close"]
    assert "y float32, not BFloat16, BFloat16 and BFloat16" in device["added_products"]["refused"]


def test_a_finished_token_goes_to_no_expert(device):
    answer = device["routing"]
    assert answer["experts"] == [[1, 2], [4, 4], [3, 0]] and answer["none finished"] == [[1, 2], [1, 3], [3, 0]]
    assert answer["weights"] and answer["totals"] == [1, 2, 3, 4]


def test_vllm_ascends_compiled_module_runs_as_it_is_published(device):
    answer = device["kernels_of_vllm_ascend"]
    assert Path(answer.pop("file")).name.startswith("vllm_ascend_C.") and "raised" not in answer
    # Tokens 4 to 7 are rows 0 to 3, and token 12 the first that was added.
    assert answer == {
        "alias": [1, 2, 3],
        "own": [0, 1, 0, 4],
        "foreign": [True, False, True, False],
        "turned": True,
    }


def run_ranks(folder: Path, ranks: int, *more: str, **variables: str) -> list[dict]:
    results = [folder / f"{rank}.json" for rank in range(ranks)]
    variables |= {"HCCL_EXEC_TIMEOUT": "60"}
    processes = [
        start("hccl_program", rank, ranks, folder / "store", results[rank], *more, **variables) for rank in range(ranks)
    ]
    for process in processes:
        finish(process)
    return [json.loads(result.read_text()) for result in results if result.exists()]


def left_in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "emulator_hccl" in path.name}


def test_collectives_between_processes_and_a_rank_that_goes_away(tmp_path):
    before = left_in_shared_memory()
    answers = run_ranks(tmp_path, 2, "leave", NPU_EMULATOR_DEFERRED_COLLECTIVES="0")
    (answer,) = answers
    assert answer["there"] == {"before": True, "after": True}
    assert sum(name.startswith("captured") for name in answer["equal"]) == 8
    assert all(answer["equal"].values()), answer["equal"]
    counts = answer["counts"]
    assert counts["broadcast"]["2"]["count"] == 1 and counts["all_gather"]["2"] == {"count": 1, "bytes": 24}
    assert counts["send"]["2"] == counts["recv"]["2"] == {"count": 2, "bytes": 48}
    assert "rank 1 (its process has ended" in answer["told"]
    assert left_in_shared_memory() == before


@pytest.mark.parametrize(
    "mode",
    ["NPU_EMULATOR_DEFERRED_COLLECTIVES", pytest.param("NPU_EMULATOR_STREAM_SEED", marks=pytest.mark.exhaustive)],
)
def test_late_collectives_show_a_missing_wait(tmp_path, mode):
    """A read without waiting returns the old values; the test above is the control."""
    for answer in run_ranks(tmp_path, 2, **{mode: "1"}):
        assert all(answer["equal"].values()), answer["equal"]
        assert answer["there"] == {"before": False, "after": True}


@pytest.mark.parametrize(
    ("machine", "visible", "count"),
    [("", None, 8), ("3", None, 3), ("3", "0,2", 2), ("3", "0,3,1", 1), ("3", "", 0), ("3", "1, x", 1)],
)
def test_dies_are_counted_without_the_libraries(machine, visible, count):
    environment = {**os.environ, "NPU_EMULATOR_DEVICES": machine}
    environment |= {} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible}
    program = "import acl, sys; print(acl.rt.get_device_count(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout == f"({count}, 0) False\n", done.stderr


def test_a_killed_process_gives_its_memory_back(tmp_path):
    """The account of the dies is in a file that all processes share."""
    hold = "import torch, torch_npu; x = torch.empty(150 << 20, dtype=torch.uint8).npu(); print('held'); input()"
    environment = {**os.environ, "NPU_EMULATOR_CAPACITY_MB": str(CAPACITY_MB)}
    command = [sys.executable, "-W", "ignore", "-c", hold]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        second = subprocess.run(command, env=environment, capture_output=True, text=True, input="\n", timeout=600)
        assert second.returncode != 0 and "out of memory" in second.stderr, "control: the die is taken"
        holder.send_signal(signal.SIGKILL)
    third = subprocess.run(command, env=environment, capture_output=True, text=True, input="\n", timeout=600)
    assert third.returncode == 0, third.stderr

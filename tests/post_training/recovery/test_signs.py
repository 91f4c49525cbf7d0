"""Each message of the table is found in a realistic log, and none in the log of a healthy run."""

from pathlib import Path

import pytest

from post_training.recovery.causes import classify
from post_training.recovery.decision import Again, Attempt, Supervision
from post_training.recovery.policy import NEVER_RETRIED, Policy
from post_training.recovery.signs import CAUSES, SIGNS, Sign
from scripts.internal.document_failure_signs import PAGES, written

HEALTHY = (Path(__file__).parent / "healthy_run.log").read_text()
# Warnings of healthy runs on NPUs, and metrics whose values look like codes.
HARMLESS = """\
(NPURayWorkerWrapper pid=44419) [rank7]:[W609 06:57:47.819535026 compiler_depend.ts:877] Warning: The HCCL execution \
timeout was set to never timeout, so it is bigger than watchdog timeout 1800000ms which is set by init_process_group! \
The plog may not be recorded. You can disable watchdog by 'export HCCL_ASYNC_ERROR_HANDLING=0'. (function \
ProcessGroupHCCL)
(WorkerDict pid=7) [W compiler_depend.ts:51] Warning: CAUTION: The operator 'aten::unique' is not currently supported \
on the NPU backend and will fall back to run on the CPU.
(TaskRunner pid=9) step:12 - perf/total_num_tokens:507014 - global_seqlen/max:207001.000 - response_length/mean:107001.0
(TaskRunner pid=9) error_code_counts: 0, EI00021, REI0006X, model EE1002b, 507035 tokens
(raylet) 0 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons at node
"""
# Codes from rt_error_codes.h, one of each kind; the tests put them into lines of torch_npu, vLLM-Ascend and CANN.
CODES = {
    100000: "operator_error",
    107001: "bad_configuration",
    107002: "operator_error",
    107020: "hang",
    161002: "operator_error",
    200000: "OOM",
    207000: "bad_configuration",
    207001: "OOM",
    207005: "bad_configuration",
    207016: "operator_error",
    207018: "OOM",
    500002: "operator_error",
    507001: "operator_error",
    507010: "device_error",
    507014: "hang",
    507015: "operator_error",
    507018: "operator_error",
    507033: "device_error",
    507034: "hang",
    507035: "operator_error",
    507046: "hang",
    507048: "hang",
    507054: "device_error",
    507056: "network_error",
    507057: "network_error",
    507899: "device_error",
    507904: "network_error",
    545000: "operator_error",
    561003: "operator_error",
}
LINES = (
    "NPU function error: c10_npu::acl::AclrtSynchronizeStreamWithTimeout(copy_stream), error code is {}",
    "RuntimeError: ACL stream synchronize failed, error code:{}",
    "       wait for compute device to finish failed, runtime result = {}.[FUNC:ReportCallError][FILE:log_inner.cpp]",
    "[PID: 91798] 2025-11-29-10:54:13.230.208 rtKernelLaunchWithHandleV2 failed: {}",
    "[ERROR] aclrtSynchronizeStream(stream) failed: {} (main.cpp:84)",
)


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: f"{sign.cause} {sign.example[:40]}")
def test_published_message_classified(sign: Sign) -> None:
    log = f"{HEALTHY}(WorkerDict pid=101) {sign.example}\n(WorkerDict pid=102)   warnings.warn(\n"
    found = classify(1, "", log)
    assert found.cause == sign.cause and sign.example in found.sentence


def test_healthy_log_not_classified() -> None:
    assert classify(1, "", HEALTHY + HARMLESS).cause == "unknown"


@pytest.mark.parametrize("code, cause", CODES.items())
def test_runtime_code_classified_in_every_line(code: int, cause: str) -> None:
    assert {classify(1, "", f"{HARMLESS}{line.format(code)}\n").cause for line in LINES} == {cause}


@pytest.mark.parametrize("code", [*range(107000, 107037), *range(207000, 207020), *range(507000, 507058), 507900])
def test_no_runtime_code_unknown(code: int) -> None:
    assert classify(1, "", LINES[0].format(code)).cause != "unknown"


@pytest.mark.parametrize(
    "log, cause",
    [
        # vllm-ascend#1443: the waiting rank logs before the one that failed.
        ("EI0002: The wait execution of the Notify register times out.\nNPU out of memory. Tried to allocate", "OOM"),
        ("error code is 507048\nRuntimeError: ACL stream synchronize failed, error code:507015", "operator_error"),
        ("error code is 507048\nray.exceptions.ActorDiedError: The actor died unexpectedly", "hang"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'\nNo space left on device", "host_memory"),
        # hw-native-sys/PTOAS#341: the device cannot be set up for lack of memory.
        ("failed: 507033\nMemory_Allocation_Failure(EL0004): Failed to allocate memory.", "OOM"),
        ("EZ9999: Inner Error!\nray.exceptions.ActorDiedError: The actor died", "operator_error"),
        ("Connection reset by peer\nray.exceptions.ActorDiedError: The actor died", "worker_died"),
        ("WARNING: no flash_attn\nModuleNotFoundError: No module named 'flash_attn'\nActorDiedError", "worker_died"),
        ("WARNING: ImportError(ModuleNotFoundError: No module named 'flash_attn'), going on without", "unknown"),
    ],
)
def test_cause_named_before_its_consequences(log: str, cause: str) -> None:
    assert classify(1, "", log).cause == cause


def test_root_cause_in_log_beats_vague_last_sentence() -> None:
    said = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_0': 1}"
    assert classify(1, said, "ValueError: No available memory for the cache blocks.").cause == "bad_configuration"
    assert classify(1, said, "Traceback").cause == "worker_died"


def test_full_die_at_engine_start_lowers_its_share() -> None:
    log = next(sign.example for sign in SIGNS if sign.stage)
    failure = classify(1, "", log)
    rollout = {"gpu_memory_utilization": 0.9, "engine_kwargs": {"vllm": {"max_num_seqs": 64}}}
    decided = Supervision(Policy()).decide(Attempt(failure, 0, 0, {"actor_rollout_ref": {"rollout": rollout}}))
    assert isinstance(decided, Again)
    assert decided.overrides["actor_rollout_ref.rollout.gpu_memory_utilization"] == 0.45


def test_operator_that_fails_again_ends_the_run() -> None:
    supervision, failure = Supervision(Policy()), classify(1, "", "error code:507035")
    assert isinstance(supervision.decide(Attempt(failure, 3, 2)), Again)
    assert not isinstance(supervision.decide(Attempt(failure, 3, 2)), Again)


def test_every_cause_has_an_action() -> None:
    assert set(Policy().actions) == set(CAUSES) >= {sign.cause for sign in SIGNS}
    assert "unknown" in NEVER_RETRIED


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_has_the_table_as_it_is(page: Path) -> None:
    assert page.read_text() == written(page.read_text()), "run: python -m scripts.internal.document_failure_signs"

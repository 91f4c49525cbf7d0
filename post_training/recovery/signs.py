"""Messages by which failures are recognised: real ones, each with the public report or document that it comes from.

A message is kept as a pattern of its fixed part. The order of the table is the order of precedence: consequences of a
failure, such as connections that break when a worker dies, come after it. `docs/failure-signs.md` is generated from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from post_training.start_status import Cause

Stage = Literal["rollout", "log_prob", "update"]
CAUSES: tuple[Cause, ...] = get_args(Cause)

_GITHUB = "https://github.com"
_HIASCEND = "https://www.hiascend.com/document/detail"
_ACL_CODES = "https://docs.rs/cann-sys/0.1.3/cann_sys/acl_error_code/"  # rt_error_codes.h of CANN 8.5
_HCCL_CODES = (
    "https://www.hiascend.com/doc_center/source/zh/CANNCommunityEdition/81RC1beta1/maintenref/troubleshooting/"
    "atlaserrorcode_15_0240.html"
)
_DRIVER_CODES = (
    f"{_HIASCEND}/zh/canncommercial/80RC22/developmentguide/maintenref/troubleshooting/atlaserrorcode_15_0263.html"
)
_HCCP_CODES = f"{_HIASCEND}/zh/canncommercial/850/maintenref/troubleshooting/atlaserrorcode_15_0252.html"

# Text before a code of CANN's runtime in lines of torch_npu, vLLM-Ascend and CANN. A bare number may be a metric.
_BEFORE_CODE = (
    r"(?:error code(?: is)?[: ]\s*|runtime result = |ErrCode=|WithHandleV2 failed: "
    r"|aclrt\w+(?:\([^)]*\))? failed: |\bret = )"
)


@dataclass(frozen=True)
class Sign:
    """A message, and the cause that it indicates for a failed run.

    Attributes:
        pattern: regular expression of the message's fixed part.
        example: such a line as it was published.
        source: where it was published.
        secondary: whether it may be the consequence of another failure; it then counts only if the run's whole output
            has no other sign.
        stage: the only stage in which it occurs; None if the message does not tell.
    """

    cause: Cause
    pattern: str
    example: str
    source: str
    secondary: bool = False
    stage: Stage | None = None

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """The pattern, compiled."""
        return re.compile(self.pattern)


def _codes(numbers: Iterable[int]) -> str:
    """Return the pattern of these codes of CANN's runtime (aclError)."""
    return rf"{_BEFORE_CODE}(?:{'|'.join(map(str, numbers))})\b"


def _named(*codes: str) -> str:
    """Return the pattern of CANN's lettered codes, which precede their text (`EI0006: ...`) or follow a name in
    brackets."""
    return rf"(?<![\w.])(?:{'|'.join(codes)})(?![\w.])"


_TIMEOUTS = (107019, 107020, 507012, 507014, 507017, 507034, 507046, 507047, 507048)
_MEMORY = (200000, 207001, 207018, 245000)
_LINKS = (507056, 507057, 507904)
_HARDWARE = (507010, 507013, 507033, 507051, 507052, 507053, 507054, 507055, 507899, 507901)
_SURROUNDINGS = (107001, 207000, 207004, 207005, 207006, *range(207007, 207012), 207019, 507008)
# All codes of the runtime (1, 2, 5 with 07), of its interface (00), of the graph engine (45) and of operators (61).
_OTHERS = r"(?:[125](?:00|07|45)|[135]61)\d{3}"

SIGNS: tuple[Sign, ...] = (
    # Host: /dev/shm before the disks, because both report that no space is left.
    Sign(
        "host_memory",
        r"No space left on device.{0,80}/dev/shm|unable to write to file </torch_\w+>",
        "OSError: [Errno 28] No space left on device: '/dev/shm/psm_3f2a9c1d'",
        f"{_GITHUB}/pytorch/pytorch/issues/5040",
    ),
    Sign(
        "host_memory",
        r"[Bb]us error",
        "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
        f"{_GITHUB}/pytorch/pytorch/issues/108861",
    ),
    Sign(
        "full_disk",
        r"No space left on device|Disk quota exceeded|the disk that holds .* is full|OutOfDiskError",
        "OSError: [Errno 28] No space left on device",
        "https://man7.org/linux/man-pages/man3/errno.3.html",
    ),
    Sign(
        "host_memory",
        r"exceeds the memory usage threshold|the node running low on memory",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        f"{_GITHUB}/ray-project/ray/issues/28776",
    ),
    Sign(
        "host_memory",
        r"[1-9]\d* Workers \(tasks / actors\) killed due to memory pressure",
        "(raylet) node_manager.cc:3277: 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers "
        "crashed "
        "due to other reasons at node (ID: 8289f87b, IP: 172.24.0.226) over the last time period.",
        f"{_GITHUB}/WM-PO/WMPO/issues/3",
    ),
    Sign(
        "host_memory",
        r"[Dd]etected [1-9]\d* oom[-_]kill event|[Oo]ut of memory: Kill(?:ed)? process|oom-kill:constraint=",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been OOM "
        "Killed.",
        f"{_GITHUB}/nextflow-io/nextflow/issues/5932",
    ),
    Sign(
        "host_memory",
        r"(?m)^(?:\([^)]*\) )?MemoryError\b|std::bad_alloc|\[Errno 12\] Cannot allocate memory"
        r"|Cannot allocate memory \(12\)|Error code 12 \(Cannot allocate memory\)"
        r"|DefaultCPUAllocator: (?:can't|not enough) ",
        "RuntimeError: unable to mmap 280 bytes from file </torch_59534_1208885928>: Cannot allocate memory (12)",
        f"{_GITHUB}/facebookresearch/SlowFast/issues/473",
    ),
    Sign(
        "host_memory",
        r"ObjectStoreFullError",
        "ray.exceptions.ObjectStoreFullError: Failed to put object ffffffffffffffff in object store because it is "
        "full.",
        "https://docs.ray.io/en/releases-2.46.0/ray-core/api/doc/ray.exceptions.ObjectStoreFullError.html",
    ),
    # Device memory.
    Sign(
        "OOM",
        r"(?:NPU|CUDA|HIP) out of memory|CUDA error: out of memory",
        "RuntimeError: NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity; 10.24 GiB "
        "already "
        "allocated; 10.24 GiB current active; 19.52 MiB free; 10.65 GiB reserved in total by PyTorch)",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/19",
    ),
    Sign(
        "OOM",
        _codes(_MEMORY),
        "operator():build/CMakeFiles/torch_npu.dir/compiler_depend.ts:128 NPU function error: call "
        "aclnnMoeDistributeDispatchV2 failed, error code is 207001",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/3141",
    ),
    Sign(
        "OOM",
        _named("EL0004"),
        "[PID: 1613532] 2026-03-24-12:14:45.885.234 Memory_Allocation_Failure(EL0004): Failed to allocate memory.",
        f"{_GITHUB}/hw-native-sys/PTOAS/pull/341",
    ),
    Sign(
        "OOM",
        _named("EI0007", "EI0011") + r"|Failed to allocate resource\[DeviceMemory\]",
        "RuntimeError: EI0007: [PID: 50935] 2025-09-10-03:36:31.100.592 Failed to allocate resource[qp] with info "
        "[aicpu "
        "rank:7,localUserrank:7,deviceLogicId:3,send_cq_depth:32768]. Reason: Memory resources are exhausted.",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/2643",
    ),
    Sign(
        "OOM",
        r"Free memory on device .{0,80}is less than desired GPU memory utilization",
        "ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization "
        "(0.95, "
        "45.01 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        f"{_GITHUB}/vllm-project/vllm/issues/20305",
        stage="rollout",
    ),
    # Settings that the next start meets again. Less memory for the engine would make the first two worse.
    Sign(
        "bad_configuration",
        r"No available memory for the cache blocks",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing "
        "the engine.",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/9099",
    ),
    Sign(
        "bad_configuration",
        r"larger than the available KV cache memory|larger than the maximum number of tokens that can be stored in",
        "ValueError: To serve at least one request with the models's max seq len (22528), (2.1 GiB KV cache is "
        "needed, which "
        "is larger than the available KV cache memory (1.3 GiB). Try increasing `gpu_memory_utilization` or decreasing "
        "`max_model_len` when initializing the engine.",
        f"{_GITHUB}/vllm-project/vllm/issues/20726",
    ),
    Sign(
        "bad_configuration",
        r"is smaller than max_model_len|is greater than the derived max_model_len"
        r"|must be divisible by tensor parallel size|Too large swap space",
        "ValueError: max_num_batched_tokens (2048) is smaller than max_model_len (4096). This effectively limits the "
        "maximum "
        "sequence length to max_num_batched_tokens and makes vLLM reject longer sequences.",
        "https://docs.vllm.ai/en/v0.9.1/api/vllm/config.html",
    ),
    Sign(
        "bad_configuration",
        r"(?i:HCCL[ _]BUFF\w* is too small)",
        "HCCL BUFFSIZE is too small",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/2674",
    ),
    Sign(
        "bad_configuration",
        r"Too many open files|can't start new thread|pthread_create failed|Thread creation failed",
        "OSError: [Errno 24] Too many open files",
        "https://man7.org/linux/man-pages/man3/errno.3.html",
    ),
    Sign(
        "bad_configuration",
        _codes(_SURROUNDINGS),
        "[ERROR] RUNTIME(42,mindie_llm_backend_connector):2025-11-18-09:33:13.673.869 [api_c_device.cc:92]58 "
        "rtSetDevice:ErrCode=107001, desc=[device id error], InnerCode=0x7010003",
        f"{_GITHUB}/gpustack/gpustack/issues/3352",
    ),
    Sign(
        "bad_configuration",
        _named("EI0001", "EI0004", "EI0008", "EI0014", "EI0016", "EI0017", "EJ0004"),
        "EI0001 Invalid Environment Variable Configuration",
        f"{_HIASCEND}/en/CANNCommunityEdition/900/API/hcclug/hcclug_000029.html",
    ),
    Sign(
        "bad_configuration",
        _named("EL0002", "EL0006", "EL0007", "EL0008", "EL0009", "EL0010", "EL0011", "EL0013", "EL0014", "EL0015"),
        "EL0009 Insufficient Stream Resources",
        _DRIVER_CODES,
    ),
    # Dies and the operators on them.
    Sign(
        "device_error",
        _codes(_HARDWARE),
        "Initialize:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:152 NPU function error: "
        "c10_npu::SetDevice(device_id_), error code is 507033",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/4284",
    ),
    Sign(
        "device_error",
        _named("EL0001", "EI0012") + r"|(?:HBM MULTI BIT ECC|UCE) ERROR",
        "EL0001 Device Absent/Abnormal",
        _DRIVER_CODES,
    ),
    Sign(
        "operator_error",
        rf"{_BEFORE_CODE}(?!(?:{'|'.join(map(str, (*_TIMEOUTS, *_LINKS)))})\b){_OTHERS}\b",
        "ERROR 08-28 02:33:28 [core.py:634] RuntimeError: ACL stream synchronize failed, error code:507035",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/2349",
    ),
    Sign(
        "operator_error",
        r"there is an? (?:exception of )?(?:fftsplus )?(?:aivec|aicore)[ a-z]* (?:error|exception)"
        r"|vector core exception|The DDR address of the MTE instruction is out of range",
        "EZ9999[PID: 2366001] 2026-03-27-12:02:45.016.250 (EZ9999):  The error from device(chipId:1, dieId:0), "
        "serial number "
        "is 470, there is an exception of aivec error, core id is 23, error code = 0x4000000000000000",
        f"{_GITHUB}/hw-native-sys/PTOAS/pull/372",
    ),
    Sign(
        "operator_error",
        _named("EI0003", "EI0005"),
        "EI0005 Inconsistent Collective Communication Arguments Between Ranks",
        _HCCL_CODES,
    ),
    # Ray's own processes.
    Sign(
        "ray_died",
        r"NodeDiedError|its node has died",
        "The actor died because its node has died. Node Id: 5c0d.",
        "https://docs.ray.io/en/releases-2.46.0/ray-core/fault_tolerance/nodes.html",
    ),
    Sign(
        "ray_died",
        r"Failed to connect to GCS within|LocalRayletDiedError|Raylet connection closed|Couldn't reconnect to GCS",
        "[2024-05-26 11:26:16,798 E 177479 178526] gcs_rpc_client.h:554: Failed to connect to GCS within 60 seconds. "
        "GCS may "
        "have been killed.",
        f"{_GITHUB}/ray-project/ray/issues/45570",
    ),
    # Timeouts. A rank that failed for another reason matches a pattern above.
    Sign(
        "hang",
        _codes(_TIMEOUTS),
        "RuntimeError: npuSynchronizeDevice:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:479 NPU function error: "
        "AclrtSynchronizeDeviceWithTimeout, error code is 507048",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/1443",
    ),
    Sign(
        "hang",
        _named("EE1002")
        + r"|[Ss]tream synchronize timeout|reason=\[?(?:stream sync|event sync|task|aicore|aicpu) timeout",
        "EE1002: 2026-01-03-10:00:00.041.231 Stream synchronize timeout. rtDeviceSynchronize execute failed, "
        "reason=[stream "
        "sync timeout]",
        f"{_GITHUB}/Ascend/pytorch/issues/48",
    ),
    Sign(
        "hang",
        r"Watchdog caught collective operation timeout",
        "[rank1]:[E324 13:00:25.428029551 compiler_depend.ts:574] [Rank 1] Watchdog caught collective operation "
        "timeout: "
        "WorkHCCL(SeqNum=196, OpType=ALLREDUCE, Timeout(ms)=3600000) ran for 3600185 milliseconds before timing out.",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/382",
    ),
    Sign(
        "hang",
        r"hccl fftsplus task timeout occurred|Some HCCL operations have failed or timed out",
        "EI9999: 2024-10-21-10:42:00.358.410  The error from device(chipId:3, dieId:0), serial number is 9, hccl "
        "fftsplus task "
        "timeout occurred during task execution, stream_id:5, sq_id:5, task_id:38827, stuck notify num:1",
        f"{_GITHUB}/Ascend/pytorch/issues/54",
    ),
    Sign(
        "hang",
        r"Timed out waiting \d+ms for (?:recv|send) operation to complete",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
        "1800000ms for recv "
        "operation to complete",
        f"{_GITHUB}/meta-pytorch/torchtune/issues/2676",
    ),
    # Consequences of other failures, in this order.
    Sign(
        "operator_error",
        r"(?<!\w)E[A-Z\d]\d{4}\b.{0,80}Inner Error!|\(E[ZEHI]9\d{3}\)|(?<![\w.])EZ\d{4}(?![\w.])"
        r"|The process exits for this inner error",
        "EZ9999: Inner Error!",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/1972",
        secondary=True,
    ),
    Sign(
        "worker_died",
        r"ActorDiedError|ActorUnavailableError|WorkerCrashedError|worker died or was killed",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        f"{_GITHUB}/verl-project/verl/issues/4921",
        secondary=True,
    ),
    Sign(
        "worker_died",
        r"Segmentation fault|\*\*\* SIG(?:SEGV|ABRT|BUS|ILL|FPE) received|killed by signal: (?!Bus)\w+"
        r"|[1-9]\d* Workers crashed due to other reasons",
        "RuntimeError: DataLoader worker (pid 812) is killed by signal: Killed.",
        f"{_GITHUB}/pytorch/pytorch/issues/8976",
        secondary=True,
    ),
    Sign(
        "worker_died",
        r"Signal \d+ \(SIG(?:KILL|SEGV|BUS|ABRT|ILL|FPE)\) received by PID",
        "traceback : Signal 9 (SIGKILL) received by PID 8122",
        f"{_GITHUB}/pytorch/pytorch/blob/v2.5.1/torch/distributed/elastic/multiprocessing/errors/__init__.py",
        secondary=True,
    ),
    Sign(
        "worker_died",
        r"EngineDeadError|Worker proc \S+ died unexpectedly|Engine core initialization failed",
        "(EngineCore_DP0 pid=54) ERROR 12-30 06:28:17 [multiproc_executor.py:231] Worker proc VllmWorker-0 died "
        "unexpectedly, "
        "shutting down executor.",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/5509",
        secondary=True,
    ),
    Sign(
        "network_error",
        _named(r"EI0002", r"EI0006", r"EI0009", r"EI0010", r"EI0015"),
        "EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank did not "
        "send the data "
        "in time. Please check the reason for the rank being stuck",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/486",
        secondary=True,
    ),
    Sign(
        "network_error",
        _named("EI0013", "EI0018"),
        "[PID: 335] 2026-03-13-06:55:06.896.485 Execution_Error_ROCE_CQE(EI0013): An error CQE occurred during "
        "operator "
        "execution. Local information: server xx.xx.xx.199, device ID 3, device IP 10.20.13.9.",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/7384",
        secondary=True,
    ),
    Sign(
        "network_error",
        _named("EJ0001", "EL0005", "EL0012"),
        "EJ0001: 2024-05-21-11:57:54.167.645 Failed to initialize the HCCP process. Reason: Maybe the last training "
        "process is "
        "running.",
        _HCCP_CODES,
        secondary=True,
    ),
    Sign(
        "network_error",
        _named("EJ0002") + r"|The network port is down",
        "RuntimeError: EJ0002: [PID: 38079] 2025-07-15-12:45:31.202.787 The network port is down.",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/1815",
        secondary=True,
    ),
    Sign(
        "network_error",
        _named("EJ0003", "EI0019", "EI0020") + r"|[Aa]ddress already in use|EADDRINUSE",
        "EJ0003: [PID: 159] 2025-03-26-17:01:02.816.428 Failed to bind the IP port. Reason: The IP address and port "
        "have been "
        "bound already.",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/405",
        secondary=True,
    ),
    Sign(
        "network_error",
        _codes(_LINKS),
        "NPU function error: c10_npu::acl::AclrtSynchronizeStreamWithTimeout(copy_stream), error code is 507056",
        _ACL_CODES,
        secondary=True,
    ),
    Sign(
        "network_error",
        r"HCCL function error: .{0,120}error code is (?:9|1[1-4]|19|21)\b",
        "RuntimeError: createHCCLComm:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:1479 HCCL function error: "
        "HcclGetRootInfo(&hcclID), error code is 11",
        f"{_GITHUB}/vllm-project/vllm-ascend/issues/405",
        secondary=True,
    ),
    Sign(
        "network_error",
        r"DistStoreError|DistNetworkError|wait timeout after \d+ms, keys:"
        r"|Rendezvous(?:Connection|Timeout)Error|RuntimeError: Socket Timeout",
        "torch.distributed.DistStoreError: Timed out after 6 seconds waiting for workers. 1/2 workers joined.",
        f"{_GITHUB}/pytorch/pytorch/pull/111805",
        secondary=True,
    ),
    Sign(
        "network_error",
        r"ncclRemoteError|ncclSystemError",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or "
        "there was a "
        "network error, NCCL version 2.18.1 ncclRemoteError: A call failed possibly due to a network error",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        secondary=True,
    ),
    Sign(
        "network_error",
        r"Stale file handle|\[Errno 5\] Input/output error",
        "OSError: [Errno 116] Stale file handle: '/nfs/run/checkpoints/global_step_4.partial'",
        "https://man7.org/linux/man-pages/man3/errno.3.html",
        secondary=True,
    ),
    Sign(
        "network_error",
        r"Connection (?:refused|reset by peer|timed out|closed by peer)|No route to host|Network is unreachable",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection reset by peer",
        "https://man7.org/linux/man-pages/man3/errno.3.html",
        secondary=True,
    ),
    # Last, because a library that looks for an optional one may log the same and continue.
    Sign(
        "bad_configuration",
        r"(?m)^(?:\([^)]*\) )?(?:ModuleNotFoundError: No module named|OSError: .* does not appear to have a file)",
        "ModuleNotFoundError: No module named 'torch_npu'",
        "https://docs.python.org/3.11/library/exceptions.html#ModuleNotFoundError",
        secondary=True,
    ),
)

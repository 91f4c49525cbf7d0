"""Check one node: versions, CANN, NPUs and links, network, limits, memory and disks."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from overlay.pins import Pins
from post_training.chips import family_of_this_machine
from post_training.inherited_environment import VISIBLE, describe_visible
from scripts.health_checks.chips import check_chips
from scripts.health_checks.finding import Finding, ask
from scripts.health_checks.installed_files import check_files
from scripts.health_checks.npus import check_npus
from scripts.health_checks.occupied_dies import dies_in_use

CANN = {"2025": "8.2.RC1", "2026": "9.1.0"}
"""CANN's version, by stack."""
PYTHONS = {"2025": ("3.11",), "2026": ("3.11", "3.12")}
"""Versions of Python for which the pins are published, by stack."""
OPEN_FILES = 65536
# Ray keeps objects in shared memory: by default in three tenths of the memory, but at most this many bytes.
OBJECT_STORE_SHARE, OBJECT_STORE_MOST = 0.3, 200 * 10**9


def check_node(
    settings: Mapping[str, str], root: Path = Path("/"), job_runs: bool = False, stack: str = "2025"
) -> list[Finding]:
    """Check this machine.

    Args:
        settings: those of the cluster's file.
        root: the top of the file system.
        job_runs: whether the job may already hold its dies.
        stack: the stack whose versions are required.
    """
    findings = check_software(stack, root)
    findings += npus(int(settings["DIES_PER_NODE"]), root, int(settings.get("NODES", "2")))
    findings += chips(settings, root)
    findings += visible_npus(settings)
    findings += [] if job_runs else occupied_dies(settings, root)
    findings += network(settings)
    findings += [limit_of_files(), limit_of_locked_memory(), jemalloc(settings["JEMALLOC"]), shared_memory(root)]
    findings += paths(settings)
    return findings


def check_software(stack: str, root: Path = Path("/")) -> list[Finding]:
    """Check the installed software, the part of `check_node` that applies to any stack."""
    return [*python_and_pins(stack), *installed_files(stack), platform_plugin(), cann(root, CANN[stack])]


def versions(stack: str = "2025") -> dict[str, str]:
    """Return the installed version of every pinned distribution; `absent` if it is not installed."""
    found = {}
    for upstream in Pins.read(stack=stack).upstreams:
        name = upstream.distribution or upstream.name
        try:
            found[upstream.name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[upstream.name] = "absent"
    return found


def emulated() -> bool:
    """Return whether the emulated NPU is installed here."""
    try:
        importlib.metadata.version("npu-emulator")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def python_and_pins(stack: str = "2025") -> Iterator[Finding]:
    """Check the versions of Python and of the pinned upstreams.

    Upstreams that a workspace of stack 2025 has as source are left out; stack 2026 has releases instead of a workspace.
    """
    found, fitting = ".".join(map(str, sys.version_info[:2])), PYTHONS[stack]
    remedy = "" if found in fitting else f"use Python {' or '.join(fitting)}, for which the pins are built"
    yield Finding("python", found, remedy)
    installed = versions(stack)
    for upstream in Pins.read(stack=stack).upstreams:
        pin = upstream.version or (upstream.release if stack == "2026" else "")
        if not pin:
            continue
        version, wanted = installed[upstream.name], {pin, upstream.release} - {""}
        remedy = "" if version.split("+")[0] in wanted else f"install {upstream.name}=={pin}"
        yield Finding(upstream.name, f"{version} (pin: {pin})", remedy)


def installed_files(stack: str = "2025") -> Iterator[Finding]:
    """Check that the files of the pinned upstreams are those of their packages.

    Upstreams that a workspace has as source have no list of files; the workspace checks their commits.
    """
    by_site: dict[Path, list[str]] = {}
    for upstream in Pins.read(stack=stack).upstreams:
        name = upstream.distribution or upstream.name
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if distribution.read_text("RECORD"):
            by_site.setdefault(Path(str(distribution.locate_file(""))), []).append(name)
    stamps = Path(sys.prefix) / "stamps"
    for site, names in by_site.items():
        checked = check_files(site, names, stamps / "files.json" if stamps.is_dir() else None)
        detail = f"{checked.files} of {', '.join(names)} match their packages"
        for damage in checked.damages[:5]:
            yield Finding("installed files", str(damage), f"install {damage.package.partition(' ')[0]} again")
        if not checked.damages:
            yield Finding("installed files", detail)


def platform_plugin() -> Finding:
    """Check the metadata by which vLLM finds the NPU; sources in a workspace or a fork have none by themselves."""
    named = [plugin.name for plugin in importlib.metadata.entry_points(group="vllm.platform_plugins")]
    remedy = "write vLLM-Ascend's metadata with scripts/assemble_workspace.sh; in a fork with its --in-place"
    return Finding("vLLM's platform", ", ".join(named) or "none", "" if "ascend" in named else remedy)


def cann(root: Path, pin: str = CANN["2025"]) -> Finding:
    """Check CANN's toolkit at the place that its environment variable names."""
    if emulated():
        return Finding("CANN", "the emulated NPU needs none")
    home = Path(os.environ.get("ASCEND_HOME_PATH") or root / "usr/local/Ascend/ascend-toolkit/latest")
    texts = [path.read_text(errors="ignore") for path in home.rglob("ascend_toolkit_install.info")]
    match = re.search(r"^version=(\S+)", "\n".join(texts), re.MULTILINE)
    if not match:
        return Finding("CANN", f"none in {home}", f"install CANN {pin}, or source its set_env.sh first")
    right = match[1].upper() == pin.upper()
    return Finding("CANN", f"{match[1]} (pin: {pin})", "" if right else f"install CANN {pin}")


def npus(dies: int, root: Path = Path("/"), nodes: int = 2) -> list[Finding]:
    """Check number and health of the NPUs, and the links that a job on this many nodes uses."""
    if emulated():
        count = int(os.environ.get("NPU_EMULATOR_DEVICES", "8"))
        return [Finding("NPUs", f"{count} emulated", "" if count >= dies else f"set NPU_EMULATOR_DEVICES={dies}")]
    return check_npus(dies, root, nodes)


def chips(settings: Mapping[str, str], root: Path = Path("/")) -> list[Finding]:
    """Check family and memory of the NPUs against CHIP and DIE_MEMORY of the cluster's file."""
    if not emulated():
        return list(check_chips(settings, root))
    family, wanted = family_of_this_machine(), settings.get("CHIP")
    names = {"A2": "Ascend910B3", "A3": "Ascend910_9391"}
    remedy = f"set NPU_EMULATOR_CHIP={names[wanted]}" if wanted in names and family != wanted else ""
    return [Finding("chip", f"Atlas {family}, emulated", remedy)]


def visible_npus(settings: Mapping[str, str]) -> list[Finding]:
    """Check CANN's list of visible NPUs, from the cluster's file or inherited, against the dies of a node."""
    dies, environment = int(settings["DIES_PER_NODE"]), _environment(settings)
    if VISIBLE not in environment:
        return []
    sentence = describe_visible(environment, dies)
    remedy = "" if sentence is None else sentence.partition("is invalid: ")[2]
    return [Finding("visible NPUs", f"{VISIBLE}={environment[VISIBLE][:100]}", remedy)]


def occupied_dies(settings: Mapping[str, str], root: Path = Path("/")) -> list[Finding]:
    """Check that no other job uses the dies of this one. Emulated dies belong to each run alone."""
    return [] if emulated() else [dies_in_use(int(settings["DIES_PER_NODE"]), _environment(settings), root)]


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the cluster file's list of visible NPUs, which overrides an inherited one."""
    return {**os.environ, **{name: settings[name] for name in (VISIBLE,) if name in settings}}


def network(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Check the interface, and Ray's port on the head."""
    name, port = settings["SOCKET_IFNAME"], int(settings["RAY_PORT"])
    said = ask("ip", "-o", "-4", "addr", "show") or ""
    addresses = re.findall(r"^\d+:\s+(\S+)\s+inet (\S+?)/", said, re.MULTILINE)
    held = dict(addresses)
    if name == "auto":
        yield Finding("interface", "auto: the one that reaches MASTER_ADDR")
    elif name in held:
        yield Finding("interface", f"{name} {held[name]}")
    else:
        there = ", ".join(sorted(held)) or "none"
        yield Finding("interface", f"no {name} with an address", f"set SOCKET_IFNAME to one of {there}")
    yield public_addresses(addresses, settings)
    if settings["MASTER_ADDR"] in [address for _, address in addresses]:
        with socket.socket() as probe:
            taken = probe.connect_ex((settings["MASTER_ADDR"], port)) == 0
        yield Finding(
            "Ray's port", f"{port} is {'taken' if taken else 'free'}", "choose another RAY_PORT" if taken else ""
        )


def public_addresses(held: Sequence[tuple[str, str]], settings: Mapping[str, str]) -> Finding:
    """Find interfaces with public addresses: Ray listens on all interfaces, whatever its options say."""
    public = [f"{name} {text}" for name, text in held if ipaddress.ip_address(text).is_global]
    if not public:
        return Finding("public addresses", "none")
    closed = settings["ALLOW_PUBLIC_ADDRESS"] == "yes" or settings["RAY_TLS_DIR"] != "none"
    detail = ", ".join(public)
    remedy = "block others from Ray's ports there, and set RAY_TLS_DIR or ALLOW_PUBLIC_ADDRESS=yes"
    return Finding("public addresses", detail, "" if closed else remedy)


def limit_of_files() -> Finding:
    """Check the limit of open files: every die has a connection to every other."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding("open files", str(soft), "" if soft >= OPEN_FILES or soft < 0 else f"ulimit -n {OPEN_FILES}")


def limit_of_locked_memory() -> Finding:
    """Check the limit of locked memory, which transfers between host and device need."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    detail = "unlimited" if unlimited else f"{soft} bytes"
    return Finding("locked memory", detail, "" if unlimited or emulated() else "ulimit -l unlimited")


def jemalloc(path: str) -> Finding:
    """Check the allocator that is preloaded."""
    if path == "none":
        return Finding("jemalloc", "none: the C library's allocator keeps more memory of the host")
    there = os.access(path, os.R_OK)
    return Finding("jemalloc", path, "" if there else "install jemalloc, or correct JEMALLOC in the cluster's file")


def shared_memory(root: Path) -> Finding:
    """Check that shared memory has room for Ray's objects."""
    free = shutil.disk_usage(root / "dev/shm").free
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = min(OBJECT_STORE_SHARE * memory, OBJECT_STORE_MOST)
    remedy = f"give the container --shm-size {wanted / 1e9:.0f}g" if free < wanted else ""
    return Finding("shared memory", f"{free / 1e9:.0f} GB free", remedy)


def paths(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Check that model and data are readable, and that the output's file system is writable; report its free space."""
    model = Path(settings["MODEL_PATH"])
    for file in (model / "config.json", model / "tokenizer.json"):
        there = os.access(file, os.R_OK)
        yield Finding(file.name, str(file), "" if there else "put the model's files there, or correct MODEL_PATH")
    for name in ("TRAIN_FILES", "TEST_FILES"):
        there = os.access(settings[name], os.R_OK)
        yield Finding(name, settings[name], "" if there else "make it with scripts/json_to_parquet.py")
    output = Path(settings["OUTPUT_DIR"]).absolute()
    existing = next(folder for folder in (output, *output.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    remedy = "" if writable else f"make {existing} writable, or correct OUTPUT_DIR"
    yield Finding("OUTPUT_DIR", f"{free / 1e9:.0f} GB free in {existing}; scripts/plan.py says what is needed", remedy)

"""Build the emulated CANN: one library with all of it, and the names under which torch_npu asks for its parts.

setup.py calls this; run as a program, it only compiles, and a later build finds that done. torch_npu's wheel brings
the public headers of CANN that the sources are compiled against. Object files are kept below ``build/`` beside this
file, so that a second build compiles only what has changed.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the headers are needed, and no device

import torch  # noqa: E402
from documented import documented_demands  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402

ROOT = Path(__file__).resolve().parent


class Release(NamedTuple):
    """A supported torch_npu.

    Attributes:
        cann: version of the CANN below it.
        chip: the chip that is emulated if none is set.
        calls: files with tables of calls; the first is that of its op-plugin.
    """

    cann: str
    chip: str
    calls: tuple[str, ...]

    @property
    def cann_numbers(self) -> tuple[int, ...]:
        """The numbers of the CANN's version, for comparisons: (8, 2, 1) for "8.2.RC1"."""
        return tuple(int(number) for number in re.findall(r"\d+", self.cann))


VLLM_ASCEND_CALLS = "vllm_ascend_calls.txt"  # of vllm-ascend 0.23, whose compiled module is for CANN 9
# vllm-ascend's published module of 2026 is for an Atlas A2, that of 2025 for both. The table of 2.10.0 is made from the
# commits that the wheel of 2.10.0.post4 names: Ascend/pytorch 5dd8ef3f and its op-plugin 8b9c8534. torch_npu 2.13.0
# names no CANN; 9.1.0 is the newest whose documents are public.
RELEASES = {
    "2.5.1": Release("8.2.RC1", "Ascend910_9391", ("op_plugin_calls.txt",)),
    "2.10.0": Release("9.1.0", "Ascend910B3", ("op_plugin_calls_2.10.txt", VLLM_ASCEND_CALLS)),
    "2.13.0": Release("9.1.0", "Ascend910B3", ("op_plugin_calls_2.13.txt", VLLM_ASCEND_CALLS)),
}
FIRST_WITH_NPU_SMI = (9,)  # upstream of 2025 takes a machine without the command for one without a driver
PARTS = 2  # that are compiled; what the headers cost is paid once a part, and not once a file
CORE = "libnpu_emulator_cann.so"
# Libraries of CANN that the wheel or an extension links or loads. Each is an empty library that depends on the one with
# everything.
NAMES = [
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "libge_runner.so",
    "libgraph.so",
    "libfmk_parser.so",
    "libascend_protobuf.so",
    "libhccl.so",
    "libopapi.so",
    "libnnopbase.so",
    "libmsprofiler.so",
    "libascend_hal.so",
    # Libraries that vllm-ascend's compiled module links beside them. The first, its kernels, is emulated here too.
    "libvllm_ascend_kernels.so",
    "libplatform.so",
    "libregister.so",
    "libge_common_base.so",
    "libhcomm.so",  # of CANN 9: HCCL is built on it
    # Libraries that the module of vllm-ascend 0.23 links as well.
    "libascendalog.so",
    "libascend_dump.so",
    "libc_sec.so",
    "liberror_manager.so",
    "libmmpa.so",
    "libprofapi.so",
    "libruntime.so",
    "libunified_dlog.so",
]
ATB_NAMES = ["libatb.so", "libasdops.so", "liblcal.so"]
# Folders from which they are loaded, and in which the compiler looks for them when it builds extensions.
PLACES = {"lib": NAMES + ATB_NAMES, "toolkit/lib64": NAMES, "toolkit/atb/lib": ATB_NAMES}
# ATB's headers as extensions include them: there is one header with everything.
ATB_HEADERS = ("types.h", "operation.h", "context.h", "utils.h", "infer_op_params.h", "train_op_params.h")


def refusals(calls: str) -> str:
    """Return source text that rejects each operator of a table of calls by name; an emulated operator replaces it."""
    first: dict[str, str] = {}
    for line in calls.splitlines():
        name, _, parameters = line.partition(" ")
        first.setdefault(name, parameters)
    quoted = {name: parameters.replace("\\", "\\\\").replace('"', "'") for name, parameters in first.items()}
    return "".join(f'REFUSED({name}, "{parameters}")\n' for name, parameters in sorted(quoted.items()))


def release() -> Release:
    """Return the release of the installed torch_npu; ends the process with a sentence if it is not supported."""
    installed = re.split(r"\.post|\+", metadata.version("torch_npu"))[0]
    if installed not in RELEASES:
        known = ", ".join(RELEASES)
        sys.exit(f"error: torch_npu {installed} is installed, but the emulator supports {known}. Install one of these.")
    return RELEASES[installed]


def make_toolkit(folder: Path) -> None:
    """Write the parts of an installed CANN that torch_npu looks for: folders, the file with the version, and commands.

    Extensions are compiled against it too: beside the headers that torch_npu brings they need those of ATB.
    """
    for name in ("runtime", "compiler", "opp", "include", f"{platform.machine()}-linux"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "emulated").touch()  # a wheel holds no empty folders
    (folder / "bin").mkdir(exist_ok=True)
    shutil.copy(ROOT / "msprof.py", folder / "bin" / "msprof")
    (folder / "bin" / "msprof").chmod(0o755)
    (folder / "chip").write_text(release().chip + "\n")
    if release().cann_numbers >= FIRST_WITH_NPU_SMI:
        shutil.copy(ROOT / "npu_smi.py", folder / "bin" / "npu-smi")
        (folder / "bin" / "npu-smi").chmod(0o755)
    information = folder / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    information.write_text(f"package_name=Ascend-cann-toolkit\nversion={release().cann}\n")
    headers = folder / "atb" / "include" / "atb"
    headers.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "csrc" / "atb_interface.h", headers)
    for name in ATB_HEADERS:
        (headers / name).write_text('#include "atb_interface.h"\n')


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def join_sources(build: Path) -> list[Path]:
    """Write files in `build` that include the sources. A name must not mean different things in two sources.

    Sources that define the rejected symbols are compiled alone: other sources define the same symbols for operators
    that are emulated.
    """
    sources = sorted((ROOT / "csrc").glob("*.cpp"))
    alone = [source for source in sources if '#include "refused' in source.read_text()]
    sources = [source for source in sources if source not in alone]
    joined = [build / f"part_{part}.cpp" for part in range(PARTS)]
    for part, path in enumerate(joined):
        includes = [f'#include "{os.path.relpath(source, build)}"\n' for source in sources[part::PARTS]]
        write_if_changed(path, "".join(includes))
    return [*joined, *alone]


def rules(sources: list[Path], wheel: Path, build: Path, out: Path) -> str:
    """Return a build file for ninja, which runs in `build`.

    All paths are relative, since those of a checkout may hold spaces and quotes.
    """

    def relative(path: Path | str) -> str:
        return os.path.relpath(path, build)

    headers = wheel / "torch_npu" / "include"
    folders = [ROOT / "csrc", build, headers]
    folders += [headers / "third_party/acl/inc", headers / "third_party/hccl/inc"]
    flags = ["-std=c++17", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall"]
    # torch's headers hold pragmas and unused variables that are not ours to mend.
    flags += ["-Wno-unknown-pragmas", "-Wno-unused-variable", "-Wno-unused-function"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    flags.append(f"'-DCANN_VERSION=\"{release().cann}\"' '-DDEFAULT_CHIP=\"{release().chip}\"'")
    flags += [f"-I{relative(folder)}" for folder in folders]
    flags += [f"-isystem {relative(folder)}" for folder in cpp_extension.include_paths()]
    libraries = relative(Path(torch.__file__).parent / "lib")
    lines = [
        f"cxx = {os.environ.get('CXX', 'c++')}",
        f"flags = {' '.join(flags)}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $flags -c $in -o $out",
        "  depfile = $out.d",
        "rule link",
        f"  command = $cxx -shared -o $out $in -L{libraries} -ltorch_cpu -lc10 -ldl -lrt -lpthread",
        "rule name",
        "  command = $cxx -shared -nostdlib -Wl,-soname,$soname -Wl,--no-as-needed '-Wl,-rpath,$$ORIGIN/$core' "
        f"-o $out -L{relative(out)} -l:{CORE} -x c /dev/null",
    ]
    objects = []
    for source in sources:
        objects.append(f"{source.stem}.o")
        lines.append(f"build {objects[-1]}: compile {relative(source)}")
    lines.append(f"build {relative(out / CORE)}: link {' '.join(objects)}")
    for place, names in PLACES.items():
        for name in names:
            library = relative(out.parent / place / name)
            lines += [f"build {library}: name | {relative(out / CORE)}", f"  soname = {name}"]
            lines.append(f"  core = {os.path.relpath('lib', place)}")
    return "\n".join(lines) + "\n"


def graph_engine_refusals(wheel: Path) -> str:
    """Return source text with a function that rejects its call, for every symbol of GE that torchair links."""
    libraries = sorted((wheel / "torch_npu/dynamo/torchair/core").glob("*.so"))
    wanted = set().union(*map(undefined_symbols, libraries)) - set().union(*map(defined_symbols, libraries))
    names = sorted(name for name in wanted if re.match(r"_ZN?K?2ge|acltdt", name))
    return "".join(f'REFUSED_SYMBOL({number}, "{name}")\n' for number, name in enumerate(names))


def undefined_symbols(library: Path) -> set[str]:
    text = subprocess.run(["nm", "-D", "--undefined-only", str(library)], check=True, capture_output=True, text=True)
    return {line.split()[-1] for line in text.stdout.splitlines() if " w " not in line}


def defined_symbols(library: Path) -> set[str]:
    text = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True)
    return {line.split()[-1].split("@")[0] for line in text.stdout.splitlines()}


def missing_symbols(wheel: Path, core: Path) -> list[str]:
    """Return the symbols of CANN that the wheel's libraries need and the emulated CANN lacks."""
    libraries = list(wheel.glob("torch_npu/**/*.so"))
    wanted = set().union(*map(undefined_symbols, libraries))
    given = set().union(defined_symbols(core), *map(defined_symbols, libraries))
    of_cann = re.compile(r"(acl|Hccl|hccl|rt)[A-Za-z]\w*$|_ZN?K?(2ge|3atb)")
    return sorted(name for name in wanted - given if of_cann.match(name))


def compile_cann(wheel: Path) -> Path:
    """Compile what has changed, and return the folder with the libraries in ``lib``.

    `wheel` is the folder in which torch_npu's wheel is installed. On failure the process ends with the compiler's exit
    code, or with one sentence. MAX_JOBS limits how many files are compiled at a time, as for torch.
    """
    # Libraries are made beside the object files of this torch_npu: in `folder`, which the builds for all of them share,
    # those of another one would be newer than these object files, and stay.
    build = ROOT / "build" / metadata.version("torch_npu")
    made = build / "package"
    out = made / "lib"
    if not (wheel / "torch_npu" / "include").is_dir():
        sys.exit(f"error: {wheel} does not contain torch_npu's wheel. Install torch_npu in the environment first.")
    build.mkdir(parents=True, exist_ok=True)
    for place in PLACES:
        (made / place).mkdir(parents=True, exist_ok=True)
    calls = "".join((ROOT / table).read_text() for table in (*release().calls, "mindspeed_calls.txt"))
    write_if_changed(build / "refused.inc", refusals(calls))
    write_if_changed(build / "documented.inc", documented_demands())
    write_if_changed(build / "refused_graph_engine.inc", graph_engine_refusals(wheel))
    write_if_changed(build / "build.ninja", rules(join_sources(build), wheel, build, out))
    command = ["ninja", "-C", str(build), f"-j{os.environ.get('MAX_JOBS') or os.cpu_count() or 1}"]
    status = subprocess.run(command).returncode
    if status:
        sys.exit(status)
    return made


def build_cann(wheel: Path, folder: Path) -> None:
    """Put libraries in ``folder/lib``, and the files by which CANN is found in ``folder/toolkit``.

    For `wheel` and failures see `compile_cann`.
    """
    made = compile_cann(wheel)
    missing = missing_symbols(wheel, made / "lib" / CORE)
    if missing:
        sys.exit(f"error: the wheel needs symbols of CANN that are not emulated: {', '.join(missing)}")
    make_toolkit(folder / "toolkit")
    shutil.copytree(made, folder, dirs_exist_ok=True)


if __name__ == "__main__":
    compile_cann(Path(sysconfig.get_path("platlib")))

"""The cluster's image: its pins, the paths that it copies and runs, and the command that starts it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.scripts.cluster_files import ROOT

DOCKERFILE = ROOT / "Dockerfile.vllm_ascend.mindspeed.deepseekV3"
DOCKERFILES = {"2025": DOCKERFILE, "2026": ROOT / "Dockerfile.vllm_ascend.mindspeed.verl_0_9"}
RUN_CONTAINER = ROOT / "scripts" / "run_container.sh"
STACKS = tomllib.loads((ROOT / "overlay" / "pins.toml").read_text())["stack"]
# The pins of the default stack, because the image is that of the published recipe.
PINS = STACKS["2025"]


def instructions(dockerfile: Path = DOCKERFILE) -> list[tuple[str, str]]:
    """Return every instruction with its arguments, with continued lines joined and without comments."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def arguments(dockerfile: Path = DOCKERFILE) -> dict[str, str]:
    """Return the build arguments that have a default, with their defaults."""
    return dict(text.split("=", 1) for name, text in instructions(dockerfile) if name == "ARG" and "=" in text)


@pytest.mark.parametrize("stack", DOCKERFILES)
def test_the_commits_are_those_of_the_pins(stack):
    clusters = {name: pin.get("cluster", {}) for name, pin in STACKS[stack].items() if isinstance(pin, dict)}
    # The packages of 2026 without a commit are installed as packages.
    sources = {name: cluster for name, cluster in clusters.items() if "commit" in cluster}
    wanted = {}
    for name, cluster in sources.items():
        prefix = name.upper().replace("-", "_")
        wanted |= {f"{prefix}_REPOSITORY": cluster["repository"], f"{prefix}_COMMIT": cluster["commit"]}
    given = arguments(DOCKERFILES[stack])
    del given["CHIP"], given["BASE_IMAGE"], given["SOC_VERSION"]
    assert given == wanted


@pytest.mark.parametrize(
    ("chip", "image"),
    [
        (None, "quay.io/ascend/cann:8.2.rc1-a3-openeuler22.03-py3.11"),
        # As in Dockerfile.openEuler of vLLM-Ascend at the cluster's pin.
        ("910b", "quay.io/ascend/cann:8.2.rc1-910b-openeuler22.03-py3.11"),
    ],
)
def test_base_image_is_that_of_the_chip(chip, image):
    given = arguments()
    assert given["BASE_IMAGE"].replace("${CHIP}", chip or given["CHIP"]) == image
    before = [text for name, text in instructions()[: [name for name, _ in instructions()].index("FROM")]]
    assert [text.partition("=")[0] for text in before] == ["CHIP", "BASE_IMAGE"], "Docker expands what stands above"


def test_kernels_are_built_for_the_chip_that_is_given():
    (build,) = [text for name, text in instructions() if name == "RUN" and "build_ext" in text]
    assert 'SOC_VERSION="${SOC_VERSION}"' in build and arguments()["SOC_VERSION"] == "ASCEND910B1"


def test_every_source_is_fetched_at_its_commit_into_the_folder_that_the_workspace_expects():
    fetched = [shlex.split(text)[2:] for name, text in instructions() if name == "RUN" and "fetch_source" in text]
    given = arguments()
    for repository, commit, folder in fetched:
        assert re.fullmatch(r"[0-9a-f]{40}", given[commit.strip("${}")])
        assert given[repository.strip("${}")].rstrip("/").rpartition("/")[2] == folder
    assert len(fetched) == 6


@pytest.mark.parametrize("stack", DOCKERFILES)
def test_every_path_that_is_copied_or_run_exists(stack):
    paths = []
    for name, text in instructions(DOCKERFILES[stack]):
        words = shlex.split(text)
        if name == "COPY" and not words[0].startswith("--from"):
            paths += words[:-1]
        if name == "RUN":
            paths += [word for word in words if word.startswith("scripts/")]
    assert len(paths) >= 5 and [path for path in paths if not (ROOT / path).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {path.partition("/")[0] for path in paths} & set(ignored)


def test_the_last_stage_checks_what_was_built():
    stages = [index for index, (name, _) in enumerate(instructions()) if name == "FROM"]
    last = " ".join(text for _, text in instructions()[stages[-1] :])
    assert "assemble_workspace.sh --from /workspace" in last and "check_image.py" in last
    assert "overlay check" in (ROOT / "scripts" / "assemble_workspace.sh").read_text()


def test_only_packages_with_hashes_are_installed():
    installs = [text for name, text in instructions() if name == "RUN" and "pip install" in text]
    common = "python3 -m pip install --no-cache-dir --require-hashes --no-deps"
    assert installs == [f"{common} -r /tmp/bootstrap.lock && {common} --no-build-isolation -r /tmp/requirements.txt"]


# These are in the image but in no test environment; SwanLab's are those of the trackers' lock.
OF_DOWNLOADS_AND_SWANLAB = {
    "modelscope": "1.40.2", "modelscope-hub": "0.5.1", "nvidia-ml-py": "13.615.71", "prettytable": "3.18.0",
    "pwinput": "1.0.3", "pydantic-settings": "2.16.3", "pyecharts": "2.1.0", "pyroaring": "1.0.3",
    "python-dotenv": "1.2.4", "simplejson": "4.3.0", "swanlab": "0.10.3", "watchdog": "7.1.0", "wcwidth": "0.9.4",
}  # fmt: skip


def test_swanlab_of_the_image_is_the_tested_one():
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / "trackers.lock").read_text(), re.MULTILINE))
    of_swanlab = OF_DOWNLOADS_AND_SWANLAB.keys() - {"modelscope", "modelscope-hub"}
    assert {name: locked[name] for name in of_swanlab} == {name: OF_DOWNLOADS_AND_SWANLAB[name] for name in of_swanlab}
    # The guide's line has SwanLab and all of these.
    for name in ("tracking.md", "tracking.zh.md"):
        (line,) = re.findall(r"^    (.* --no-deps swanlab.*)$", (ROOT / "docs" / name).read_text(), re.MULTILINE)
        assert {word.partition("==")[0] for word in line.split()} >= of_swanlab


def test_the_image_has_the_versions_of_the_lock():
    text = (ROOT / "requirements" / "image.in").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    locked = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / "runtime.lock").read_text(), re.MULTILINE)
    wanted = {name.lower(): version for name, version in locked}
    wanted |= {name: PINS[name]["cluster"]["version"] for name in ("transformers", "torch-npu")}
    wanted["setuptools-scm"] = "8.3.1"
    wanted |= OF_DOWNLOADS_AND_SWANLAB | {"qwen-vl-utils": "0.0.14"}  # as in upstream.lock
    assert wanted["torch"] == PINS["torch"]["cluster"]["version"]
    x86 = ' ; platform_machine == "x86_64"'
    expected = [
        f"{name}=={version}{x86 if re.match('nvidia-.*cu12|triton|tensordict', name) else ''}"
        for name, version in wanted.items()
    ]
    assert sorted(lines) == sorted([*expected, 'tensordict==0.8.3 ; platform_machine == "aarch64"'])
    # Exactly this list is installed, each line with hashes.
    made = (ROOT / "requirements.txt").read_text()
    entries = re.findall(r"^(\S.*?) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", made, re.MULTILINE)
    assert sorted(entry.replace("'", '"') for entry, _ in entries) == sorted(lines)
    assert "".join(f"{entry} \\\n{hashes}" for entry, hashes in entries) == made


def test_a_package_that_is_not_the_one_of_the_hash_rejected(tmp_path):
    """This tests pip itself: a package with another hash is not installed."""
    package = tmp_path / "other-1.0.tar.gz"
    package.write_bytes(b"not it")
    (tmp_path / "r.txt").write_text(f"other==1.0 --hash=sha256:{'0' * 64}\n")
    line = [sys.executable, "-m", "pip", "download", "--no-index", "--find-links", tmp_path, "--require-hashes"]
    done = subprocess.run(
        [*line, "--no-deps", "-d", tmp_path / "out", "-r", tmp_path / "r.txt"], capture_output=True, text=True
    )
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr


def resolve(requirements: Path, machine: str) -> subprocess.CompletedProcess:
    """Ask the package registry for a wheel of every requirement, for Python 3.11 on Linux."""
    # These two pure Python packages have no wheel anywhere.
    options = [
        "--only-binary",
        ":all:",
        "--no-binary",
        "antlr4-python3-runtime,pwinput",
        "--no-deps",
        "--quiet",
        "--no-header",
    ]
    line = ["uv", "pip", "compile", "--python-version", "3.11", "--python-platform", f"{machine}-unknown-linux-gnu"]
    line[0] = str(Path(sys.executable).with_name("uv"))
    return subprocess.run([*line, *options, requirements], capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
def test_every_package_of_the_image_can_be_had_for_the_machine(machine, tmp_path):
    probe = tmp_path / "probe.txt"
    probe.write_text("six\n")
    if resolve(probe, machine).returncode:
        pytest.skip("NOT RUN: no package registry can be reached")
    resolved = resolve(ROOT / "requirements.txt", machine)
    assert resolved.returncode == 0, resolved.stderr
    assert ("nvidia-cudnn-cu12" in resolved.stdout) is (machine == "x86_64")
    if machine == "aarch64":
        probe.write_text("tensordict==0.6.2\n")
        assert "tensordict==0.6.2" in resolve(probe, machine).stderr


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
def test_the_hashes_are_those_of_the_packages_for_the_machine(machine, tmp_path):
    made = (ROOT / "requirements.txt").read_text()
    (small,) = re.findall(r"^xxhash==.*(?:\n    --hash.*)+\n", made, re.MULTILINE)
    (tmp_path / "r.txt").write_text(small)
    line = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
    line += [
        "--platform",
        f"manylinux_2_17_{machine}",
        "--platform",
        f"manylinux2014_{machine}",
        "--python-version",
        "3.11",
    ]
    line += ["-d", tmp_path / "out", "-r", tmp_path / "r.txt"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    if "Could not find a version" in done.stderr or "onnection" in done.stderr:
        pytest.skip("NOT RUN: no package registry can be reached")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "out").glob(f"*{machine}.whl")]


@pytest.mark.parametrize(
    ("stack", "spoilt", "rule"), [("2025", "dnf install", "DL3038"), ("2026", "apt-get install", "DL3014")]
)
def test_hadolint_finds_nothing(stack, spoilt, rule):
    hadolint, dockerfile = Path(sys.executable).with_name("hadolint"), DOCKERFILES[stack]
    done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = dockerfile.read_text().replace(f"{spoilt} -y", spoilt)
    control = subprocess.run([hadolint, "-"], input=text, capture_output=True, text=True)
    assert control.returncode == 1 and rule in control.stdout


def test_image_of_2026_installs_by_hash_what_it_does_not_build(tmp_path):
    """The Dockerfile's awk, run on the locks, leaves out the named packages with all of their hashes."""
    (install,) = [text for name, text in instructions(DOCKERFILES["2026"]) if name == "RUN" and "without()" in text]
    assert install.count("--require-hashes --no-deps") == install.count("pip install") == 3
    function = install.partition(" && ")[0]
    for lock, names, left in (("upstream", "vllm-ascend|megatron-core", 6), ("runtime", "none", None)):
        file = ROOT / "requirements" / "2026" / f"{lock}.lock"
        ran = subprocess.run(["bash", "-c", f"{function}; without '{names}' {file}"], capture_output=True, text=True)
        entries = re.findall(r"^([\w.-]+)==", ran.stdout, re.MULTILINE)
        whole = re.findall(r"^([\w.-]+)==", file.read_text(), re.MULTILINE)
        assert entries == [name for name in whole if name not in names.split("|")] and left in (None, len(entries))
        assert all("--hash=sha256:" in part for part in re.split(r"^[\w.-]+==", ran.stdout, flags=re.MULTILINE)[1:])


@pytest.fixture
def repository(tmp_path) -> tuple[Path, str]:
    """Return a repository with one commit, and that commit, as the image fetches them."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    (folder / "value").write_text("1\n")
    for line in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", *line], cwd=folder, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    return folder, head.stdout.strip()


def fetch_source(*line: object) -> subprocess.CompletedProcess:
    script = ROOT / "scripts" / "internal" / "fetch_source.sh"
    return subprocess.run(["bash", script, *map(str, line)], capture_output=True, text=True)


def test_a_source_is_fetched_by_its_commit(repository, tmp_path):
    folder, commit = repository
    assert fetch_source(folder, commit, tmp_path / "copy").returncode == 0
    assert (tmp_path / "copy" / "value").read_text() == "1\n"


@pytest.mark.parametrize("wanted", ["v0.9.1", "main", "0" * 40])
def test_a_tag_a_branch_and_an_unknown_commit_rejected(repository, tmp_path, wanted):
    assert fetch_source(repository[0], wanted, tmp_path / "copy").returncode != 0
    assert not (tmp_path / "copy" / "value").exists()


@pytest.fixture
def host(tmp_path):
    """Return `run(runtimes, ...)`, which starts run_container.sh on two dies; its docker prints its arguments."""
    for path in ("dev/davinci0", "dev/davinci1", "dev/davinci_manager", "dev/devmm_svm", "dev/hisi_hdc"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "usr/local/dcmi").mkdir(parents=True)
    docker = tmp_path / "docker"
    # info prints more than a pipe holds, so that a reader who stops early would end docker with SIGPIPE.
    docker.write_text(
        '#!/bin/bash\n[[ $1 != info ]] || { echo "$RUNTIMES"; exec seq 30000; }\nprintf "[%s]" "$@"\necho\n'
    )
    docker.chmod(0o755)

    def run(runtimes: str, *line: str) -> tuple[int, str]:
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RUNTIMES": runtimes}
        done = subprocess.run(
            ["bash", RUN_CONTAINER, "--root", tmp_path, *line], env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_container_gets_its_dies_and_nothing_that_was_not_asked_for(host, tmp_path):
    folder = tmp_path / "my data"
    folder.mkdir()
    code, said = host(
        "{}", "--image", "i:1", "--name", "n", "--dies", "2", "--mount", f"{folder}:ro", "--", "sleep", "1 h"
    )
    assert code == 0, said
    for expected in ("[--device][/dev/davinci0][--device][/dev/davinci1][--device][/dev/davinci_manager]", "[--init]"):
        assert expected in said
    assert "[--volume][/usr/local/dcmi:/usr/local/dcmi:ro]" in said and f"[--volume][{folder}:{folder}:ro]" in said
    assert said.splitlines()[0].endswith("[i:1][sleep][1 h]")
    assert "privileged" not in said and "/home" not in said and "davinci2" not in said


def test_the_ascend_runtime_is_used_where_it_is_installed(host):
    code, said = host('{"ascend":{},"runc":{}}', "--image", "i", "--name", "n", "--dies", "2", "--dry-run")
    assert code == 0 and "--runtime ascend --env ASCEND_VISIBLE_DEVICES=0-1" in said and "--device" not in said


@pytest.mark.parametrize("runtimes", ["{}", '{"ascend":{}}'])
@pytest.mark.parametrize(("line", "numbers"), [([], "01"), (["--devices", "1"], "1"), (["--devices", "1,0"], "10")])
def test_npus_passed_in_are_all_or_those_named(host, runtimes, line, numbers):
    code, said = host(runtimes, "--image", "i", "--name", "n", "--dry-run", *line)
    named = re.search(r"ASCEND_VISIBLE_DEVICES=([\d\\,-]+)", said)
    found = re.sub(r"\D", "", named[1]) if named else "".join(re.findall(r"/dev/davinci(\d+)", said))
    assert code == 0 and found == numbers, said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["--image", "i", "--name", "n", "--devices", "0-3"], "--devices=0-3 is invalid. Set it to numbers of NPUs"),
        (["--image", "i", "--name", "n", "--devices", "7"], "/dev/davinci7 does not exist"),
        (["--image", "i", "--name", "n", "--devices", "0", "--dies", "1"], "Remove one of them"),
        (["--name", "n"], "--image and --name are needed"),
        (["--image", "i", "--name", "n", "--dies", "3"], "/dev/davinci2 does not exist. Is the NPU driver installed"),
        (["--image", "i", "--name", "n", "--dies", "none"], "Set it to a whole number"),
        (["--image", "i", "--name", "n", "--dies", "1", "--mount", "/no/such"], "--mount=/no/such is invalid"),
        (["--privileged"], 'Unknown argument "--privileged"'),
    ],
)
def test_unworkable_settings_rejected(host, line, says):
    code, said = host("{}", *line)
    assert code == 2 and says in said

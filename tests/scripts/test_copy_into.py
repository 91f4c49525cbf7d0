"""scripts/copy_into.sh on git checkouts of the packages installed here."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from overlay.pins import Pins

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "docs/workspace.md").read_text().partition("## In a fork of your own")[2].partition("##")[0]
SETUP = 'setup(name="vllm-ascend", entry_points={"vllm.platform_plugins": ["ascend = vllm_ascend:register"]})\n'
PRELUDE = "from verl_patches import prelude_patch"
# Uses only the fork, which does not have verl; torch_npu and Megatron are the installed ones.
ACTIVATE = """
import sys
sys.modules["verl"] = None
import overlay
overlay.activate()
{lines}
report = overlay.assert_effective()
print(overlay.__file__, len(report.applied), *sorted({{name.partition('.')[0] for name in report.pending}}))
"""


def installed(package: str) -> Path:
    """Return the folder of an installed package; skip the test if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed here")
    return Path(next(iter(spec.submodule_search_locations)))


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def checkout(folder: Path, *packages: str) -> Path:
    """Create a git repository with the Python files of packages, and with its own scripts."""
    for package in packages:
        source = installed(package)
        for file in source.rglob("*.py"):
            place = folder / package / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "theirs.sh").write_text("echo theirs\n")
    (folder / "setup.py").write_text(SETUP)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")
    return folder


def copy_into(folder: Path, *arguments: str, script: Path = ROOT / "scripts/copy_into.sh") -> str:
    """Run the script, and return its output."""
    command = ["bash", str(script), "--into", str(folder), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        command, env={**environment, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=600
    )
    if result.returncode:
        assert result.returncode == 2 and result.stderr.splitlines()[-1].startswith("error: "), result.stderr
        raise RuntimeError(result.stderr)
    return result.stdout


def run_in(folder: Path, program: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def fork(tmp_path_factory) -> Path:
    return checkout(tmp_path_factory.mktemp("fork"), "verl", "vllm_ascend")


def clean(folder: Path) -> bool:
    """Return whether git sees no change but upstream's bytecode, and no folder of ours is left."""
    ours = [folder / each for each in ("overlay", "post_training", ".overlay_copy", *Pins.read().patch_packages())]
    changes = git(folder, "status", "--porcelain", "--ignored").splitlines()
    return all(each.endswith("/__pycache__/") for each in changes) and not any(each.exists() for each in ours)


def test_a_fork_gets_everything_twice_the_same_and_is_as_it_was_after_an_undo(fork):
    assert "nothing was changed" in copy_into(fork, "--dry-run") and clean(fork)
    said = copy_into(fork)
    assert "changes verl/workers/megatron_workers.py" in said and "overlay check is clean" in said
    assert PRELUDE in (fork / "verl/workers/megatron_workers.py").read_text()
    assert PRELUDE in (fork / "verl/__init__.py").read_text()
    assert git(fork, "diff", "--name-only").split() == [
        "verl/__init__.py",
        "verl/workers/megatron_workers.py",
        "vllm_ascend/attention/mla_v1.py",
    ]
    (metadata,) = fork.glob("vllm_ascend-*.dist-info")
    assert "ascend = vllm_ascend:register" in (metadata / "entry_points.txt").read_text()
    # The folders that the guide names; the fork keeps its own scripts.
    named = set(re.findall(r"`(\w+)/`", SECTION))
    assert named >= {"overlay", "scripts", *(each for each in Pins.read().patch_packages() if (ROOT / each).is_dir())}
    assert all((fork / name).is_dir() for name in named) and (fork / "scripts/theirs.sh").is_file()
    assert (fork / "verl_patches/scripts/plan.py").is_file(), "the recipe's folder of scripts is a link"
    used = run_in(fork, f"{PRELUDE}; import overlay; print(overlay.__file__)")
    assert used.strip() == str(fork / "overlay/__init__.py")

    before = git(fork, "status", "--porcelain", "--untracked-files=all")
    assert "is up to date" in copy_into(fork)
    assert git(fork, "status", "--porcelain", "--untracked-files=all") == before
    # The copied script can undo the copy too.
    assert "is restored" in copy_into(fork, "--undo", script=fork / "scripts/copy_into.sh") and clean(fork)
    assert "nothing to undo" in copy_into(fork, "--undo")


def test_changed_files_are_neither_replaced_nor_removed(fork):
    copy_into(fork, "--only", "verl")
    changed = fork / "verl_patches/prelude_patch.py"
    changed.write_text("mine = 1\n")
    for arguments in (("--undo",), ()):
        with pytest.raises(RuntimeError, match="prelude_patch.py was changed after the copy"):
            copy_into(fork, *arguments)
    assert changed.read_text() == "mine = 1\n"
    copy_into(fork, "--undo", "--discard")
    assert clean(fork)


def test_a_checkout_that_does_not_fit_or_has_something_in_the_way_stays_as_it_is(fork):
    registry = fork / "verl/models/mcore/registry.py"
    text = registry.read_text()
    registry.write_text(text.replace("def init_mcore_model(", "def init_another_model("))
    with pytest.raises(RuntimeError, match="the patches do not apply to these sources"):
        copy_into(fork)
    registry.write_text(text)
    (fork / "overlay").mkdir()
    (fork / "overlay/__init__.py").write_text("theirs = 1\n")
    with pytest.raises(RuntimeError, match="overlay/__init__.py is in the way"):
        copy_into(fork)
    shutil.rmtree(fork / "overlay")
    assert clean(fork)


@pytest.mark.parametrize(
    ("packages", "only", "lines", "patches"),
    [
        (["megatron"], "megatron", "import megatron.core.packed_seq_params", "megatron_patches"),
        pytest.param(["vllm"], "vllm", "import vllm.utils", "vllm_patches", marks=pytest.mark.exhaustive),
    ],
)
def test_one_patch_package_can_be_activated_alone(tmp_path, packages, only, lines, patches):
    folder = checkout(tmp_path, *packages)
    copy_into(folder, "--only", only)
    found = [each for each in Pins.read().patch_packages() if (folder / each).exists()]
    assert sorted(found) == sorted(["verl_patches", patches]), "features lie with verl's"
    assert [path.name for path in (folder / "verl_patches").iterdir()] == ["features"]
    assert list((folder / "scripts").iterdir()) == [folder / "scripts/theirs.sh"]
    file, applied, *pending = run_in(folder, ACTIVATE.format(lines=lines)).splitlines()[-1].split()
    assert file == str(folder / "overlay/__init__.py") and int(applied) >= 1
    assert set(pending) <= {*packages, "torch", "apex"}, "no other package's patches"
    copy_into(folder, "--undo")
    assert clean(folder)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--into", "/nowhere"], "--into=/nowhere is invalid: no such folder"),
        (["--into", "EMPTY"], "it has none of verl vllm vllm_ascend megatron mindspeed"),
        (["--into", "EMPTY", "--only", "sglang"], "--only=sglang is invalid: no such patches. Set it to one of verl"),
        (["--into", str(ROOT)], "is this project itself"),
        (["--wrong"], 'Unknown argument "--wrong"'),
        (["--stack", "2026"], "--stack=2026 is invalid: its patches are not copied into a checkout"),
        (["--stack", "2024"], "--stack=2024 is invalid: no such stack"),
        ([], "--into DIR is missing"),
    ],
)
def test_wrong_arguments_are_one_sentence(tmp_path, arguments, sentence):
    given = [str(tmp_path) if each == "EMPTY" else each for each in arguments]
    command = ["bash", str(ROOT / "scripts/copy_into.sh"), *given]
    result = subprocess.run(
        command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 2 and sentence in result.stderr and result.stderr.startswith("error: ")

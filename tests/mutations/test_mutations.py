"""The list of mutants fits the tree, the draw is reproducible, and the outcome of a trial is correct."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from rich.console import Console

from post_training.processes.command import SignalFlag
from rehearsal.environment import environment_of
from tests.mutations import __main__ as command_line
from tests.mutations import cheapest_first, selection, workbench
from tests.mutations.__main__ import Results, choose, parse_arguments
from tests.mutations.drawn import _changes_something, draw
from tests.mutations.fault import ROOT, Fault, FaultError, read_list
from tests.mutations.selection import _using, of_other_stack, tiers
from tests.mutations.workbench import Outcome, Verdict, Workbench

SOURCE = "def double(x):\n    return 2 * x\n"
ENTRY = """
[[fault]]
name = "half"
file = "product.py"
text = "2 * x"
replacement = "x / 2"
tests = ["tests/test_product.py"]
"""

ENDLESS = """
from pathlib import Path
from product import double

def test():
    while double(3) != 6:
        Path({begun!r}).touch()
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small checkout with one module, a test that checks it, one that does not, and one that always fails."""
    (tmp_path / "product.py").write_text(SOURCE)
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_product.py").write_text("from product import double\n\ndef test(): assert double(3) == 6\n")
    (tests / "test_asleep.py").write_text("from product import double\n\ndef test(): assert double\n")
    (tests / "test_red.py").write_text("def test(): assert False\n")
    (tests / "test_endless.py").write_text(ENDLESS.format(begun=str(tmp_path / "begun")))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def fault(*tiers: str, source: str = SOURCE.replace("2 * x", "x / 2")) -> Fault:
    return Fault("half", "product.py", source, tuple((f"tests/test_{tier}.py",) for tier in tiers))


@pytest.mark.parametrize("changed", ["tests/test_product.py", "tests/program.py", None])
def test_a_verdict_is_kept_until_its_test_or_a_program_beside_it_changes(tree, tmp_path, monkeypatch, changed):
    monkeypatch.setattr(command_line, "ROOT", tree)
    (tree / "tests/program.py").write_text("first\n")
    verdict, kept = Verdict(Outcome.SURVIVED, (), 1.0), tmp_path / "kept" / "verdicts.jsonl"
    Results(kept).add(fault("product"), verdict)
    (tree / (changed or "tests/test_asleep.py")).write_text("second\n")
    assert Results(kept).get(fault("product")) == (None if changed else verdict)


def test_the_list_fits_the_tree():
    faults = read_list()
    assert len(faults) >= 120
    for entry in faults:
        if entry.file.endswith(".py"):
            ast.parse(entry.source)
            assert _changes_something((ROOT / entry.file).read_text(encoding="utf-8"), entry.source), entry.name


def test_choice_depends_on_the_seed_and_little_on_the_list():
    faults = read_list()
    chosen = choose(faults, 60, 1)
    assert len(chosen) == 60 and chosen == [fault for fault in faults if fault in set(chosen)]
    assert chosen == command_line.chosen_faults(parse_arguments(["--choose", "60"]))
    assert choose(faults, 60, 2) != chosen
    assert len(set(choose(faults[10:], 60, 1)) & set(chosen)) > 50


@pytest.mark.parametrize("arguments", [["--choose", "0"], ["--choose", "9", "--sample", "9"]])
def test_choice_that_cannot_be_made_rejected(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        parse_arguments(arguments)
    assert end.value.code == 2 and "--choose" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('text = "2 * x"', 'text = "3 * x"'), "occurs 0 times"),
        (('text = "2 * x"', 'text = "x"'), "occurs 2 times"),
        (("test_product", "test_gone"), "there is no test"),
        (('file = "product.py"', 'file = "gone.py"'), "does not exist"),
        (('name = "half"\n', ""), "give name, file, text"),
        (('["tests/test_product.py"]', "[]"), "names no test"),
        ((ENTRY, ENTRY + ENTRY), "a name of its own"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(tree, change, sentence):
    (tree / "list.toml").write_text(ENTRY.replace(*change))
    with pytest.raises(FaultError, match=sentence):
        read_list(tree, tree)


def test_an_entry_is_the_file_with_the_bug(tree):
    (tree / "list.toml").write_text(ENTRY)
    (entry,) = read_list(tree, tree)
    assert (entry.source, entry.tiers) == (SOURCE.replace("2 * x", "x / 2"), (("tests/test_product.py",),))


@pytest.mark.slow
def test_the_draw_is_reproducible_and_changes_programs():
    first, again, other = draw(4, 1), draw(4, 1), draw(4, 2)
    assert first == again
    assert first != other
    for entry in first:
        assert _changes_something((ROOT / entry.file).read_text(encoding="utf-8"), entry.source)
        assert entry.tiers


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ("def f(x: int | None = 1) -> int:\n    return x\n", True),
        ("def f(x: int + None = 0) -> str:\n    return x\n", False),
        ('def f(x: int | None = 0) -> int:\n    """Says what it does."""\n    return x\n', True),
        ("def f(x: int | None = 0) -> int:\n    return (x)  # the same\n", False),
        ("def f(x: int | None = 0) -> int:\n    return -\n", False),
    ],
)
def test_annotations_and_layout_are_no_change_of_the_program(other, differs):
    assert _changes_something("def f(x: int | None = 0) -> int:\n    return x\n", other) is differs


@pytest.mark.parametrize(("condition", "differs"), [("<=", False), (">=", True), ("!=", True)])
def test_a_program_that_runs_when_it_did_is_no_change(condition, differs):
    other = f'if __name__ {condition} "__main__":\n    main()\n'
    assert _changes_something('if __name__ == "__main__":\n    main()\n', other) is differs


@pytest.mark.parametrize(("test", "differs"), [("not TYPE_CHECKING", False), ("DEBUG", True)])
def test_imports_for_annotations_are_no_change(test, differs):
    assert _changes_something("if TYPE_CHECKING:\n    import x\n", f"if {test}:\n    import x\n") is differs


@pytest.mark.parametrize(
    ("number", "other", "differs"),
    [("1e9", "1e9 + 1", True), ("1e9", "1000000001.0", False), ("600.0", "601.0", True), ("0.1", "0.1000001", True),
     ("1e300", "1e299", True), ("1000000000", "1000000001", True)],
)  # fmt: skip
def test_a_fraction_is_what_single_precision_keeps_of_it(number, other, differs):
    assert _changes_something(f"x = {number}", f"x = {other}") is differs


@pytest.mark.parametrize(
    ("line", "other", "differs"),
    [
        ("pairs = zip(x, y, strict=True)", "pairs = zip(x, y, strict=False)", False),
        ("pairs = zip(x, y, strict=True)", "pairs = zip(x, x, strict=True)", True),
        ("pairs = zip(x, y, strict=exact)", "pairs = zip(x, y, strict=not exact)", True),
        ("load(x, strict=True)", "load(x, strict=False)", True),
        ('print("ready", flush=True)', 'print("ready", flush=False)', False),
        ("print(x, flush=True)", "print(-x, flush=True)", True),
        ("assert x is not None", "assert x is None or y", False),
    ],
)
def test_what_only_asserts_or_only_hurries_is_no_change(line, other, differs):
    assert _changes_something(line, other) is differs


@pytest.mark.parametrize(("base", "differs"), [("torch.autograd.Function", False), ("KeyGroup", True)])
def test_a_method_of_an_autograd_function_is_a_static_one_anyway(base, differs):
    source = f"class Permute({base}):\n    @staticmethod\n    def forward(ctx, x):\n        return x\n"
    assert _changes_something(source, source.replace("    @staticmethod\n", "")) is differs
    assert _changes_something(source, source.replace("return x", "return -x"))


@pytest.mark.parametrize(("base", "differs"), [("Protocol", False), ("Sized", True)])
def test_whether_a_protocol_declares_a_property_is_no_change(base, differs):
    source = f"class Shard({base}):\n    @property\n    def start(self) -> int:\n        return 1\n"
    assert _changes_something(source, source.replace("    @property\n", "")) is differs
    assert _changes_something(source, source.replace("return 1", "return 2"))


@pytest.mark.parametrize(("decorator", "differs"), [("lru_cache(maxsize=8)", False), ("cache", True)])
def test_whether_a_function_keeps_what_it_may_forget_is_no_change(decorator, differs):
    source = f"@{decorator}\ndef views(count):\n    return [count]\n"
    assert _changes_something(source, source.partition("\n")[2]) is differs
    assert not _changes_something(source, source.replace("8", "9"))
    assert _changes_something(source, source.replace("[count]", "[-count]"))


def test_the_demonstrations_are_near_to_a_patch_and_to_nothing_else():
    switches = "tests/overlay/test_real_switches.py"
    assert switches in tiers("vllm_patches/v1/engine/llm_engine.py", ROOT)[0]
    near = tiers("post_training/hang_detection/limits.py", ROOT)[0]
    assert "tests/post_training/hang_detection/test_limits.py" in near and switches not in near
    assert "tests/test_dataclasses.py" in near
    assert "tests/scripts/test_configuration_document.py" in tiers("verl_patches/features/alerts/feature.py", ROOT)[0]


def test_a_program_is_near_to_the_tests_that_start_it_by_its_path():
    assert "tests/scripts/test_readme.py" in tiers("scripts/internal/update_sample_run.py", ROOT)[0]
    assert "tests/scripts/test_commands.py" in tiers("scripts/doctor.py", ROOT)[0]
    # These tests join the path from parts: ROOT / "scripts" / "plan.py".
    assert "tests/post_training/plan/step_time/test_configured.py" in tiers("scripts/plan.py", ROOT)[0]


def test_a_module_that_no_test_names_is_near_to_those_that_hold_its_names():
    nearest, *_ = tiers("npu_emulator/extract_rules.py", ROOT)
    assert "tests/npu_emulator/test_documented_rules.py" in nearest
    nearest, *_ = tiers("npu_emulator/msprof.py", ROOT)
    assert "tests/npu_emulator/test_profiler.py" in nearest


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("verl_plugin/alltoallv/transfer.py", "tests/stack_2026/verl_plugin/test_control.py"),
        ("verl_plugin/rollout/experts.py", "tests/stack_2026/rollout/test_experts.py"),
        ("verl_plugin/engines.py", "tests/stack_2026/heartbeats/test_engines.py"),
        ("rehearsal/stack_2026/records.py", "tests/stack_2026/verl/test_records.py"),
    ],
)
def test_module_of_the_stack_2026_is_near_to_its_tests(file, test):
    """Its own stack comes first; tests of both stacks share no tier, as each needs its environment."""
    found = tiers(file, ROOT)
    assert of_other_stack(found[0]) and test in found[0]
    for tier in found:
        assert len({of_other_stack([selector]) for selector in tier}) == 1, tier
    if file.startswith("verl_plugin"):
        assert found[-1] == ("tests/stack_2026",) and of_other_stack(found[-1])


def test_module_of_both_stacks_asks_its_own_stack_first():
    found = tiers("post_training/reshard/handover.py", ROOT)
    assert [of_other_stack(tier) for tier in found[:2]] == [False, True]


def test_untested_module_is_near_the_cheap_tests_of_its_folder(tmp_path):
    for name in ("test_cheap.py", "test_dear.py"):
        (tmp_path / "tests" / "overlay").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / "overlay" / name).touch()
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay" / "product.py").write_text("x = 1\n")
    dear = {"tests/overlay/test_dear.py": 1000.0}
    with mock.patch.object(selection, "measured", lambda: dear):
        assert tiers("overlay/product.py", tmp_path)[0] == ("tests/overlay/test_cheap.py",)


def test_a_test_of_one_side_of_a_module_is_near_to_it():
    assert "tests/npu_emulator/test_run_command.py" in tiers("npu_emulator/src/npu_emulator/run.py", ROOT)[0]


def test_what_every_patch_and_key_is_asked_is_not_all_that_a_module_is_asked():
    nearest, *_ = tiers("verl_patches/trainer/configuration_checks/fsdp_schema.py", ROOT)
    asked = {"tests/scripts/test_configuration_document.py", "tests/verl_patches/trainer/configuration_checks"}
    assert asked <= set(nearest)


def test_keys_that_are_numbers_say_nothing(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "product.py").write_text('def half_of(x):\n    return {1: x / 2, "a_half": 0.5}\n')
    (tmp_path / "tests" / "test_halves.py").write_text("from elsewhere import halves\n\nassert halves.a_half\n")
    assert _using(Path("product.py"), tmp_path, ()) == ["tests/test_halves.py"]


def test_cheap_tests_run_before_slow_ones(monkeypatch):
    def item(file: str, *marks: str) -> SimpleNamespace:
        return SimpleNamespace(path=ROOT / file, get_closest_marker=lambda name: name in marks)

    slow, dear, cheap = item("tests/a.py", "slow"), item("tests/b.py"), item("tests/c.py")
    emulators = item("tests/npu_emulator/d.py", "slow")
    monkeypatch.setattr(cheapest_first, "measured", lambda: {"tests/b.py": 9.0, "tests/c.py": 1.0})
    items = [slow, dear, cheap, emulators]
    cheapest_first.pytest_collection_modifyitems(items)
    assert items == [emulators, cheap, dear, slow]


def test_tests_of_the_other_stack_have_its_environment(tree, monkeypatch):
    for folder in (".venv-2026/bin", "tests/stack_2026"):
        (tree / folder).mkdir(parents=True)
    test, runs = "tests/stack_2026/test_product.py::test", []

    def run(command, variables, *_):
        runs.append((Path(command[0]), variables, command[-1]))
        return 0

    monkeypatch.setattr(workbench, "run_to_the_end", run)
    with SignalFlag() as signals, Workbench(signals, 60, tree) as bench:
        bench.require_green([test, "tests/test_product.py"])
        (own, ours, first), (other, theirs, second) = runs
        assert (own, other) == (Path(sys.executable), bench._tree / ".venv-2026/bin/python")
        assert other.parent.resolve() == (tree / ".venv-2026/bin").resolve()
        assert (first, second) == ("tests/test_product.py", test)
        assert ours == environment_of("2025") | {"PYTHONPATH": str(bench._tree)} != theirs
        assert theirs == environment_of("2026", "a2") | {"PYTHONPATH": str(bench._tree)}


def test_stack_that_is_not_set_up_rejected(tree, monkeypatch):
    monkeypatch.setattr(command_line, "ROOT", tree)
    of_other_stack = Fault("half", "product.py", SOURCE, (("tests/stack_2026/test_product.py",),))
    with pytest.raises(FaultError, match='"half" need .venv-2026/. Run bash scripts/test.sh --stack 2026 first.'):
        command_line.try_all(Console(), [of_other_stack], 60)


@pytest.mark.slow
def test_a_trial_asks_tier_by_tier_and_leaves_the_tree_as_it_was(tree):
    with SignalFlag() as signals, Workbench(signals, 60, tree) as bench:
        assert bench.try_fault(fault("product")).outcome is Outcome.NOTICED
        assert bench.try_fault(fault("asleep")).outcome is Outcome.SURVIVED
        asked = bench.try_fault(fault("asleep", "product"))
        assert (asked.outcome, asked.by) == (Outcome.NOTICED, ("tests/test_product.py::test",))
        for source in ("def double(x)\n", "import sys\nsys.exit(4)\n"):
            assert bench.try_fault(fault("asleep", source=source)).outcome is Outcome.NOTICED
    assert (tree / "product.py").read_text() == SOURCE


# A stand-in for the emulator's build: the library is the text of its source, and "bad" does not compile.
BUILD = """
import sys

def build_cann(wheel, package):
    text = open("csrc/rt.cpp").read()
    if "bad" in text:
        sys.exit("error: bad")
    (package / "lib").mkdir(parents=True, exist_ok=True)
    (package / "lib" / "librt.so").write_text(text)
"""


@pytest.fixture
def installed(tree, monkeypatch):
    """The site-packages of an environment in which the tree's emulator is installed."""
    prefix = tree.with_name(f"{tree.name}-prefix")
    site = prefix / "lib" / "python3" / "site-packages"
    for folder in (tree / "npu_emulator/src", site):
        (folder / "npu_emulator").mkdir(parents=True)
        (folder / "npu_emulator" / "rt.py").write_text("DIES = 8\n")
    (site / "npu_emulator" / "lib").mkdir()
    (site / "npu_emulator" / "lib" / "librt.so").write_text("8 dies")
    (tree / "npu_emulator/csrc").mkdir()
    (tree / "npu_emulator/csrc/rt.cpp").write_text("8 dies")
    (tree / "npu_emulator/build.py").write_text(BUILD)
    (tree / "npu_emulator/setup.py").write_text("def installed_torch_npu(): ...\n")
    (site / "other.py").touch()
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(workbench, "get_path", lambda name: str(site))
    return site


@pytest.mark.slow
@pytest.mark.parametrize("file", ["src/npu_emulator/rt.py", "csrc/rt.cpp"])
def test_what_set_up_installs_is_planted_in_an_environment_of_its_own(tree, installed, file):
    compiled = file.endswith("cpp")
    with SignalFlag() as signals, Workbench(signals, 60, tree) as bench:
        assert bench._interpreter("product.py") == sys.executable
        (bench._tree / "npu_emulator" / file).write_text("9 dies")
        python = Path(bench._interpreter(f"npu_emulator/{file}"))
        made = python.parents[1] / "lib" / "python3" / "site-packages"
        assert (made / "npu_emulator" / "rt.py").read_text() == ("DIES = 8\n" if compiled else "9 dies")
        assert (made / "npu_emulator/lib/librt.so").read_text() == ("9 dies" if compiled else "8 dies")
        assert (made / "other.py").exists()
        (bench._tree / "npu_emulator" / file).write_text("bad")
        if compiled:
            with pytest.raises(FaultError, match="does not compile: error: bad"):
                bench._interpreter(f"npu_emulator/{file}")
        else:
            assert Path(bench._interpreter(f"npu_emulator/{file}")) == python
        assert python.resolve() == Path(sys.executable).resolve()
    assert (installed / "npu_emulator/rt.py").read_text() == "DIES = 8\n"
    assert (installed / "npu_emulator/lib/librt.so").read_text() == "8 dies"


@pytest.mark.slow
def test_tests_that_are_red_without_the_fault_say_nothing(tree):
    with SignalFlag() as signals, Workbench(signals, 60, tree) as bench:
        verdict = bench.try_fault(fault("red"))
        with pytest.raises(FaultError, match=r"failed without any fault.*tests/test_red.py::test"):
            bench.require_green((*verdict.by, "tests/test_product.py"))
        bench.require_green(("tests/test_product.py",))


def test_a_hang_is_stopped(tree):
    # The clock jumps by an hour when the endless test begins, and stands still before, however slow the machine is.
    with SignalFlag() as signals, Workbench(signals, 60, tree, lambda: 3600.0 * (tree / "begun").exists()) as bench:
        verdict = bench.try_fault(fault("endless"))
    assert verdict.outcome is Outcome.HUNG and verdict.outcome.counts_as_noticed

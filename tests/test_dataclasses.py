"""All dataclasses are frozen, except those listed here, which collect something."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Extends Megatron's own configuration, which is not frozen either.
CHANGING = {
    "overlay/drift.py": {"ModuleSource"},
    "overlay/engine.py": {"Effect"},
    "overlay/history.py": {"Course"},
    "overlay/lock.py": {"Lock"},
    "post_training/checkpoint/manifest.py": {"Manifest"},
    "post_training/checkpoint/source.py": {"HFTensor"},
    "post_training/data/inspection.py": {"DataFinding"},
    "post_training/models/megatron/deepseek_v3_config.py": {"DeepseekV3TransformerConfig"},
    "post_training/models/megatron/moe_config.py": {"MoETransformerConfig"},
    "post_training/report/faults.py": {"RunFaults"},
    "post_training/run_lock.py": {"Ownership"},
    "rehearsal/prefork/launch.py": {"Template"},
    "scripts/health_checks/device_test.py": {"_Rank"},
    "post_training/device_phases.py": {"PhaseMeter"},
    "rehearsal/prefork/template.py": {"_Worker"},
    "verl_patches/features/dynamic_sampling/acceptance.py": {"Acceptance"},
    "verl_patches/features/measure/serialized.py": {"_Serialized"},
    "verl_patches/features/measure/step_record.py": {"LogProbDifference", "StepRecord"},
    "verl_patches/features/expert_sets/records.py": {"StepChoices"},
    "post_training/finite_steps/norm.py": {"NormDecision"},
    "verl_patches/features/step.py": {"Step"},
    "verl_patches/features/temperature/sampled.py": {"Draw"},
    "post_training/hang_detection/limits.py": {"Seen"},
    "verl_patches/trainer/isolated_ray/machine.py": {"IsolatedRay"},
}


def not_frozen(source: str) -> set[str]:
    """Return the names of a file's dataclasses that are not frozen; NamedTuples and plain classes do not count."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            called = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
            if ast.unparse(called.func).endswith("dataclass"):
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in called.keywords}
                if options.get("frozen") != "True":
                    found.add(node.name)
    return found


def test_dataclasses_are_frozen_but_those_that_are_named():
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    files = [name for name in listed if not name.startswith("tests/") and (ROOT / name).is_file()]
    found = {name: not_frozen((ROOT / name).read_text()) for name in files}
    assert {name: classes for name, classes in found.items() if classes} == CHANGING


@pytest.mark.parametrize(
    ("decorator", "frozen"),
    [("@dataclass(frozen=True)", True), ("@dataclasses.dataclass(frozen=False)", False), ("@dataclass", False)],
)
def test_a_dataclass_that_may_change_is_seen(decorator, frozen):
    assert not_frozen(f"{decorator}\nclass Size:\n    width: int\n") == (set() if frozen else {"Size"})

"""README.md agrees with the tree: its pins, its commands and its links."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.scripts.cluster_files import load_script

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def pins_table():
    """Returns the table of README.md that overlay/pins.toml asks for."""
    rows = ["| upstream | on the cluster | where packages come from a registry |", "|---|---|---|"]
    for name, pin in tomllib.loads((ROOT / "overlay" / "pins.toml").read_text()).items():
        if not isinstance(pin, dict):
            continue
        cluster, release = pin["cluster"], pin.get("release")
        parts = [cluster.get(key) for key in ("repository", "reference", "commit", "version")]
        stand_in = f"{release['distribution']} {release['version']}" if release else "none"
        rows.append(f"| {name} | {' '.join(filter(None, parts))} | {stand_in} |")
    return "\n".join(rows)


def test_pins_are_those_of_the_overlay():
    assert pins_table() in README, f"README.md needs this table:\n{pins_table()}"


def test_locks_hold_the_pinned_releases():
    locked = "".join((ROOT / "requirements" / f"{name}.lock").read_text() for name in ("runtime", "upstream"))
    for pin in tomllib.loads((ROOT / "overlay" / "pins.toml").read_text()).values():
        if isinstance(pin, dict) and "release" in pin:
            assert f"\n{pin['release']['distribution']}=={pin['release']['version']} " in f"\n{locked}"


@pytest.mark.parametrize(
    "name", ["README.md", "docs/cluster.md", "docs/cluster.zh.md", "docs/rehearsal.md", "docs/weights.md"]
)
def test_named_paths_exist(name):
    text = (ROOT / name).read_text()
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    named = re.findall(r"(?:bash|python) (?:\./)?((?:scripts|verl_patches/scripts)/[\w./]+)", text)
    assert linked + named
    for path in linked:
        assert (ROOT / name).parent.joinpath(path).exists(), path
    for path in named:
        assert (ROOT / path).exists(), path


def test_the_sample_run_is_replaced_by_a_command():
    script = load_script("scripts/internal/update_readme_sample.py")
    begin, _, rest = README.partition("    Making the parquet files")
    shown = "\n".join(
        line[4:] for line in ("    Making the parquet files" + rest).partition(script.END)[0].splitlines()
    )
    text, patches = script.sample(f"Environment is ready\n{shown}\n", ROOT)
    # The sample that is there comes back as it is, up to how the sentence before it is broken into lines.
    assert re.sub(r"\s+", " ", script.with_sample(README, text, patches)) == re.sub(r"\s+", " ", README)
    newer = shown.replace(f"{patches} applied, {patches} effective", "7 applied, 7 effective")
    assert "when the overlay had 7 patches" in script.with_sample(README, *script.sample(newer, ROOT))
    for broken in (shown.replace("  files ", "  nothing "), newer.replace("7 effective", "6 effective"), ""):
        with pytest.raises(script.SampleError):
            script.sample(broken, ROOT)


def test_requirements_name_no_host():
    for path in (ROOT / "requirements").iterdir():
        assert "://" not in path.read_text(), path

"""README.md and the pages that it links to agree with the repository: pins, commands, the sample run and links."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.scripts.cluster_files import load_script

ROOT = Path(__file__).resolve().parents[2]
PINS = ("docs/overview.md", "docs/overview.zh.md")
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def pins_table():
    """Return the table that overlay/pins.toml asks for."""
    rows = ["| upstream | on the cluster | where packages come from a registry |", "|---|---|---|"]
    for name, pin in tomllib.loads((ROOT / "overlay" / "pins.toml").read_text())["stack"]["2025"].items():
        if not isinstance(pin, dict):
            continue
        cluster, release = pin["cluster"], pin.get("release")
        parts = [cluster.get(key) for key in ("repository", "reference", "commit", "version")]
        stand_in = f"{release['distribution']} {release['version']}" if release else "none"
        rows.append(f"| {name} | {' '.join(filter(None, parts))} | {stand_in} |")
    return "\n".join(rows)


@pytest.mark.parametrize("page", PINS)
def test_pins_are_those_of_the_overlay(page):
    assert pins_table() in (ROOT / page).read_text(), f"{page} needs this table:\n{pins_table()}"


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_readme_is_a_landing_page(name):
    """It is short, and every evidence cell has a link (test_documents.py checks that links work)."""
    lines = (ROOT / name).read_text().splitlines()
    assert len(lines) < 150
    assert {"    bash scripts/rehearse.sh", "    bash scripts/test.sh"} <= set(lines)
    (header,) = (number for number, line in enumerate(lines) if re.match(r"\| (Model|模型) ", line))
    rows = lines[header + 2 : lines.index("", header)]
    assert len(rows) >= 10 and all(row.split(" | ")[-1].count("](") >= 1 for row in rows)


@pytest.mark.parametrize("name", sorted(str(path.relative_to(ROOT)) for path in DOCUMENTS))
def test_named_paths_exist(name):
    text = (ROOT / name).read_text()
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    named = re.findall(r"(?:bash|python) (?:\./)?((?:scripts|verl_patches/scripts)/[\w./]+)", text)
    for path in linked:
        if "://" in path:
            continue
        assert (ROOT / name).parent.joinpath(path).exists(), path
    for path in named:
        assert (ROOT / path).exists(), path


PRINTED = """\
Environment is ready
Training for 3 steps on 4 emulated dies; log: {root}/outputs/rehearsal/1/logs/run.log

   step  reward   step s
    1/3  0.367     4.20
    2/3  0.430     2.81
    3/3  0.520     2.68

Done in 1:35: 3 steps on 4 emulated dies, seed 1
  reward          0.466 -> 0.898
  seconds a step  2.78: rollout 1.23, reward 0.04,
                  adv 0.01
  log-probs       rollout and training differ
  patches         7 applied, 7 effective
  files           {root}/outputs/rehearsal/1
"""
SHOWN = """\
   step  reward   step s
    1/3  0.367     4.20
    ...
    3/3  0.520     2.68

Done in 1:35: 3 steps on 4 emulated dies, seed 1
  reward          0.466 -> 0.898
  seconds a step  2.78: rollout 1.23, reward 0.04,
                  adv 0.01
  patches         7 applied, 7 effective"""


@pytest.mark.parametrize("name", ["docs/rehearsal.md", "docs/rehearsal.zh.md"])
def test_the_sample_run_is_replaced_by_a_command(name):
    script = load_script("scripts/internal/update_sample_run.py")
    readme, printed = (ROOT / name).read_text(), PRINTED.format(root=ROOT)
    assert script.sample(printed, ROOT) == (SHOWN, 7)
    newer = script.with_sample(readme, SHOWN, 7)
    shown = "\n".join(f"    {line}".rstrip() for line in SHOWN.splitlines())
    assert newer.count(shown) == 1 and re.search(r"\b7 (patches|个补丁)", newer) and newer != readme
    # Text outside the sample is unchanged; the present sample is short, of a run in which all patches had an effect.
    outside = [text.partition(script.BEGINS[name])[0] + text.partition(script.END)[2] for text in (readme, newer)]
    assert outside[0] == outside[1] and script.END in readme
    there = readme.partition(script.BEGINS[name])[2].partition(script.END)[0]
    assert "25/25" in there and len(there.splitlines()) <= 18
    for broken in (printed.replace("  files ", "  nothing "), printed.replace("7 effective", "6 effective"), ""):
        with pytest.raises(script.SampleError):
            script.sample(broken, ROOT)


def test_sample_run_and_picture_are_of_one_run(tmp_path, monkeypatch):
    script = load_script("scripts/internal/update_sample_run.py")
    for name in script.BEGINS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "PICTURE", tmp_path / "docs" / "sample_run.png")
    (printed := tmp_path / "printed.txt").write_text(PRINTED.format(root=tmp_path))
    assert script.main([str(printed)]) == 2 and not script.PICTURE.exists()
    (drawn := tmp_path / "outputs" / "rehearsal" / "1" / "report.png").parent.mkdir(parents=True)
    drawn.write_bytes(b"picture")
    assert script.main([str(printed)]) == 0 and script.PICTURE.read_bytes() == b"picture"
    for name in script.BEGINS:
        text = (tmp_path / name).read_text()
        assert "Done in 1:35" in text and "](sample_run.png)" in text


def test_requirements_name_no_host():
    for path in (path for path in (ROOT / "requirements").rglob("*") if path.is_file()):
        assert "://" not in path.read_text(), path

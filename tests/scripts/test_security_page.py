"""docs/security.md covers the locked versions, and every package whose advisories are known here."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = [ROOT / "requirements.txt", *sorted((ROOT / "requirements").glob("*.lock"))]
ROW = re.compile(r"^\| ([a-z-]+) ([0-9.]+(?:[,、] ?[0-9.]+)*) \|", re.MULTILINE)


@pytest.mark.parametrize("page", ["security.md", "security.zh.md"])
def test_versions_of_page_are_locked(page):
    text = (ROOT / "docs" / page).read_text()
    rows = {(name, version) for name, versions in ROW.findall(text) for version in re.split(r"[,、] ?", versions)}
    locked = set(re.findall(r"^([a-z-]+)==([0-9.]+)", "\n".join(file.read_text() for file in LOCKS), re.MULTILINE))
    assert rows <= locked | {("vllm", "0.9.1")}
    assert {name for name, _ in rows} == {"ray", "vllm", "torch", "transformers", "starlette", "diskcache"}
    named = {"CVE-2023-48022", "CVE-2025-62593", "CVE-2026-27482", "CVE-2025-48956", "CVE-2025-59425", "CVE-2025-66448",
             "CVE-2025-32434", "CVE-2025-62727", "CVE-2025-69872"}  # fmt: skip
    assert named <= set(re.findall(r"CVE-\d+-\d+", text))


def test_shipped_configurations_trust_no_remote_code():
    for file in (ROOT / "verl_patches" / "trainer" / "config").rglob("*.yaml"):
        assert not re.search(r"trust_remote_code:\s*(?i:true)", file.read_text()), file

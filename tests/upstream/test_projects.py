"""How outcomes of other projects' tests are read and classified. The runs themselves are started by hand."""

from __future__ import annotations

import tomllib

from tests.upstream import projects
from tests.upstream.op_plugin import Outcome, share

KINDS = {
    "broken upstream",
    "defect",
    "needs a hub",
    "needs another package",
    "needs another torch",
    "needs hardware",
    "not emulated",
    "time limit",
}
REPORT = """<testsuites><testsuite>
<testcase classname="a.TestA" name="test_good"/>
<testcase classname="a.TestA" name="test_bad"><failure message="aclnnX is not emulated">text</failure></testcase>
<testcase classname="a.TestA" name="test_worse"><error message="cannot be set up"/></testcase>
<testcase classname="a.TestA" name="test_left_out"><skipped message="needs four dies"/></testcase>
</testsuite></testsuites>"""


def table() -> list[dict[str, str]]:
    return tomllib.loads(projects.TABLE.read_text())["failure"]


def test_a_report_is_read_whole(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    outcome = projects.read_report("a.py", report, "")
    assert share([outcome]) == (1, 3) and outcome.skipped == {"a.TestA::test_left_out": "needs four dies"}
    assert projects.classify([outcome], table()) == {
        ("not emulated", "an operator of CANN"): 1,
        (projects.UNKNOWN, ""): 1,
    }


def test_a_file_that_leaves_no_report_has_failed(tmp_path):
    outcome = projects.read_report("a.py", tmp_path / "none.xml", "the process ended with code -11: words")
    assert share([outcome]) == (0, 1)
    assert projects.classify([outcome], table()) == {("defect", "the process ended with a signal"): 1}


def test_the_first_entry_that_fits_counts_and_every_entry_is_of_a_kind():
    assert {entry["kind"] for entry in table()} <= KINDS
    words = "aclop operator Abs is not emulated; ModuleNotFoundError: No module named 'x'"
    (found,) = projects.classify([Outcome("a.py", failed={"test": words})], table())
    assert found[0] == "needs another package"

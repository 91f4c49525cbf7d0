"""Command-line numbers must be finite and in range; paths may point anywhere."""

from argparse import ArgumentParser, ArgumentTypeError

import pytest

from post_training.arguments import absolute, finite, whole
from scripts import supervise


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "", "x", "9" * 6000, "0x10", "١e9999"])
def test_number_that_is_none_rejected(text):
    with pytest.raises(ArgumentTypeError, match="is invalid. Set it to a number"):
        finite()(text)


def test_range_kept():
    assert [finite(0, 1)("0"), finite(0, 1)("1"), finite(above=0)("0.5")] == [0.0, 1.0, 0.5]
    for convert, text in ((finite(0, 1), "1.01"), (finite(above=0), "0"), (finite(1), "0.5")):
        with pytest.raises(ArgumentTypeError, match="Set it to"):
            convert(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.0", "", "x", "9" * 6000, "٣", "1e3"])
def test_number_that_counts_nothing_rejected(text):
    assert whole(1)("1") == 1 and whole(0)("0") == 0
    with pytest.raises(ArgumentTypeError, match="is invalid. Set it to a whole number from 1"):
        whole(1)(text)


def test_link_to_itself_is_a_path(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert absolute(tmp_path / "loop" / "a") == tmp_path / "loop" / "a"
    assert absolute("~no-such-user-here/a").is_absolute()


def test_parser_names_option(capsys):
    parser = ArgumentParser()
    parser.add_argument("--share", type=finite(0, 1))
    with pytest.raises(SystemExit):
        parser.parse_args(["--share", "nan"])
    assert "argument --share: 'nan' is invalid. Set it to a number from 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "inf", "1e300"])
def test_supervisor_rejects_limit_that_is_none(seconds, capsys):
    with pytest.raises(SystemExit) as ended:
        supervise.main(["--silent-after", seconds, "--", "true"])
    assert ended.value.code == 2 and "argument --silent-after" in capsys.readouterr().err


def test_supervisor_rejects_output_that_links_to_itself(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    assert supervise.main(["--output", str(tmp_path / "loop"), "--", "true"]) == 2
    assert capsys.readouterr().err.startswith(f"error: --output={tmp_path / 'loop'} is invalid: it cannot be")

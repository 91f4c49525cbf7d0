"""Output of a process and its children reaches logs and terminals without secrets, however it is split."""

import io
import logging
import os
import sys
import tarfile
import threading
import traceback
from random import Random

import pytest

from post_training.masking import Secrets, masked_output, streams
from post_training.masking.archive import write_archive
from post_training.masking.streams import MaskingWriter, copy_masked
from tests.post_training.masking.planted import KEY_BLOCK, VALUE, texts


def test_text_in_any_pieces_masked():
    whole = "".join(f"{text}\n" for text, _ in texts())
    for seed in range(5):
        draw, shown, position = Random(seed), io.StringIO(), 0
        writer = MaskingWriter(Secrets({}), shown.write)
        while position < len(whole):
            size = draw.randint(1, 300)
            writer.feed(whole[position : position + size])
            position += size
        writer.flush()
        assert shown.getvalue().count("\n") >= len(texts())
        assert not [secret for _, secret in texts() if secret in shown.getvalue()]


def test_ordinary_output_passed_on_unchanged():
    text = "one\rtwo\r\nthree\n\nlast without its end"
    shown = io.StringIO()
    writer = MaskingWriter(Secrets({}), shown.write)
    for character in text:
        writer.feed(character)
    writer.flush()
    assert shown.getvalue() == text


def test_long_line_masked_in_bounded_memory():
    shown = io.StringIO()
    writer = MaskingWriter(Secrets({"A_KEY": VALUE}), shown.write)
    for _ in range(60):
        writer.feed("x" * 9990 + VALUE)
    writer.flush()
    assert VALUE not in shown.getvalue() and shown.getvalue().count("***") == 60


def test_secret_at_the_cut_of_a_long_line_masked(monkeypatch):
    # A long unfinished line is written except for its last characters, which are masked again with what follows.
    longest, overlap = 1 << 10, 1 << 8
    monkeypatch.setattr(streams, "_LONGEST_LINE", longest)
    monkeypatch.setattr(streams, "_OVERLAP", overlap)
    secrets = Secrets({})
    for text, secret in [each for each in texts() if "\n" not in each[0]][::3]:
        for behind in range(1, len(text) + 1, 2):
            parts = f"begin{' ' * longest}{text}{' ' * (overlap - behind)}", " end\n"
            shown = io.StringIO()
            writer = MaskingWriter(secrets, shown.write)
            writer.feed(parts[0])
            assert shown.getvalue()  # the line is split across the parts
            writer.feed(parts[1])
            whole = secrets.text("".join(parts))
            assert secret not in whole
            assert shown.getvalue() == whole, (text, behind)


@pytest.mark.parametrize("cut", range(1, len(VALUE)))
def test_secret_in_two_pieces_of_a_long_line_masked(monkeypatch, cut):
    """The writer splits the line when it has half of a secret."""
    monkeypatch.setattr(streams, "_LONGEST_LINE", 1 << 10)
    monkeypatch.setattr(streams, "_OVERLAP", 1 << 8)
    shown = io.StringIO()
    writer = MaskingWriter(Secrets({"A_KEY": VALUE}), shown.write)
    writer.feed("x " * 600 + VALUE[:cut])
    assert len(shown.getvalue()) == 1200 + cut - 256
    writer.feed(VALUE[cut:] + " end")
    writer.flush()
    assert shown.getvalue() == "x " * 600 + "*** end"


def test_text_without_a_line_end_is_masked():
    shown = io.StringIO()
    writer = MaskingWriter(Secrets({"A_KEY": VALUE}), shown.write)
    writer.feed(f"no end: {VALUE}")
    assert shown.getvalue() == ""
    writer.flush()
    writer.flush()
    assert shown.getvalue() == "no end: ***"


def test_private_key_masked_line_by_line():
    shown = io.StringIO()
    writer = MaskingWriter(Secrets({}), shown.write)
    writer.feed(f"before\n{KEY_BLOCK}after\n")
    assert shown.getvalue() == "before\n***\nafter\n"


def test_private_key_masked_wherever_its_writer_pauses():
    text = f"before\n{KEY_BLOCK}\nafter\n"
    for cut in range(len(text)):
        said: list[str] = []
        writer = MaskingWriter(Secrets({}), said.append)
        for part in (text[:cut], text[cut:]):
            writer.feed(part)
            writer.flush()
        writer.flush(at_end=True)
        told = "".join(said)
        assert not any(line in told for line in KEY_BLOCK.splitlines()[1:-1]), cut
        assert told.startswith("before\n") and told.endswith("after\n")


def test_dashes_shown_at_the_end():
    said: list[str] = []
    writer = MaskingWriter(Secrets({}), said.append)
    writer.feed("a table\n-----")
    writer.flush()
    assert said == ["a table\n"]
    writer.flush(at_end=True)
    assert said == ["a table\n", "-----"]


def test_private_key_in_one_line_hides_no_later_line():
    """Keys have this form in a JSON document or a shell variable."""
    shown = io.StringIO()
    writer = MaskingWriter(Secrets({}), shown.write)
    one_line = KEY_BLOCK.strip().replace("\n", "\\n")
    writer.feed(f'{{"pem": "{one_line}"}}\nafter\n')
    lines = shown.getvalue().splitlines()
    assert len(lines) == 2 and lines[1] == "after" and "***" in lines[0] and "PRIVATE" not in lines[0]


def test_streams_are_the_process_own_again_behind_the_block():
    before = sys.stdout, sys.stderr
    try:
        with masked_output(Secrets({})):
            assert sys.stdout is not before[0] and sys.stderr is not before[1]
            raise KeyError
    except KeyError:
        assert (sys.stdout, sys.stderr) == before


def test_prints_logs_and_traces_masked(capsys):
    with masked_output(Secrets({"A_KEY": VALUE})) as secrets:
        secrets.learn({"password": "learned-later"})
        print("printed", VALUE, "learned-later")
        handler = logging.StreamHandler()
        handler.emit(logging.LogRecord("a", logging.INFO, "", 0, f"logged {VALUE}", (), None))
        try:
            raise ValueError(VALUE)
        except ValueError:
            traceback.print_exc()
        sys.stderr.writelines([VALUE, "\n"])
    said = capsys.readouterr()
    assert VALUE not in said.out + said.err and said.out == "printed *** ***\n"
    assert "logged ***" in said.err and "ValueError: ***" in said.err


def test_pipe_copied_to_its_end_and_bytes_replaced():
    source, sink = os.pipe()
    copied = bytearray()
    copying = threading.Thread(target=copy_masked, args=(source, Secrets({"A_KEY": VALUE}), copied.extend))
    copying.start()
    os.write(sink, f"a {VALUE[:5]}".encode())
    os.write(sink, f"{VALUE[5:]}\n\xff\n".encode("latin-1") + "ä".encode()[:1])
    os.close(sink)
    copying.join()
    os.close(source)
    assert copied.decode() == "a ***\n�\n�"


def test_archive_masked_and_private(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_PASSWD", "hunter2-in-the-environment")
    log = tmp_path / "start_1.log"
    log.write_bytes(f"ok\npassword={VALUE}\nhunter2-in-the-environment \xff\n".encode("latin-1"))
    made = tmp_path / "bundle.tar.gz"
    write_archive(made, "bundle", {log.name: log})
    assert made.stat().st_mode & 0o777 == 0o600
    with tarfile.open(made) as archive:
        (member,) = archive.getmembers()
        assert (member.name, member.mode) == ("bundle/start_1.log", 0o600)
        assert archive.extractfile(member).read().decode() == "ok\npassword=***\n*** �\n"

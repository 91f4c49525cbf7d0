"""Configurations that tests read once are those of OmegaConf, and nobody's changes show in a later one."""

from omegaconf import OmegaConf

from tests import configurations


def test_each_reader_gets_a_configuration_of_its_own(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("model:\n  path: /here\nsame: ${model.path}\n")
    first = OmegaConf.load(file)
    assert first == configurations._load(file)
    first.model.path = "/elsewhere"
    second = OmegaConf.load(file)
    assert (first.same, second.same) == ("/elsewhere", "/here")
    with file.open() as opened:
        assert OmegaConf.load(opened) == second


def test_file_that_has_changed_is_read_anew(tmp_path):
    file = tmp_path / "config.yaml"
    for number in (1, 2):
        file.write_text(f"value: {number}\n")
        assert OmegaConf.load(str(file)).value == number

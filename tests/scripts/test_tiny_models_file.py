"""The list that rehearse.sh reads without a Python environment equals the one in Python."""

from pathlib import Path

from rehearsal.tiny_model.architecture import TINY_MODELS

LIST = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "tiny_models.txt"


def test_list_of_tiny_models_is_current():
    assert LIST.read_text() == " ".join(sorted(TINY_MODELS)) + "\n", "run `python -m overlay update`"

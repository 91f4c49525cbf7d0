"""The program that answers prompts: its calls to vLLM's engine, which is a stand-in here, and its file of answers."""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.scripts.cluster_files import load_script

program = load_script("scripts/internal/generate_responses.py")


@pytest.fixture
def made(monkeypatch):
    """Return the calls to the engine, which answers a prompt n times with its own tokens."""
    asked = []

    class Engine:
        def __init__(self, **arguments):
            asked.append(arguments)

        def generate(self, prompts, sampling):
            asked.append(sampling)
            outputs = [[SimpleNamespace(token_ids=each["prompt_token_ids"], finish_reason="stop")] for each in prompts]
            return [SimpleNamespace(outputs=answers * sampling["n"]) for answers in outputs]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=lambda **given: given))
    return asked


def test_each_way_of_sampling_has_an_answer_for_each_prompt(made, tmp_path):
    request, answers = tmp_path / "request.json", tmp_path / "answers.json"
    sampling = {"greedy": {"n": 1, "temperature": 0}, "drawn": {"n": 2}}
    request.write_text(json.dumps({"engine": {"model": "m"}, "prompts": [[1, 2], [3]], "sampling": sampling}))
    program.main(request, answers)
    assert made == [
        {"model": "m", "skip_tokenizer_init": True},
        {"n": 1, "temperature": 0, "detokenize": False},
        {"n": 2, "detokenize": False},
    ]
    first, second = [[1, 2], "stop"], [[3], "stop"]
    assert json.loads(answers.read_text()) == {"greedy": [[first], [second]], "drawn": [[first] * 2, [second] * 2]}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["answers.json", "request.json"]


def test_it_runs_only_as_a_program_and_ends_without_destructors(made, tmp_path, monkeypatch):
    """Importing it, as above, does not call the engine."""
    import runpy

    request, answers = tmp_path / "request.json", tmp_path / "answers.json"
    request.write_text(json.dumps({"engine": {}, "prompts": [[1]], "sampling": {"drawn": {"n": 1}}}))
    codes = []
    monkeypatch.setattr(sys, "argv", ["generate_responses.py", str(request), str(answers)])
    monkeypatch.setattr("os._exit", codes.append)
    runpy.run_path(program.__file__, run_name="imported")
    assert codes == [] and not answers.exists()
    runpy.run_path(program.__file__, run_name="__main__")
    assert codes == [0] and json.loads(answers.read_text()) == {"drawn": [[[[1], "stop"]]]}

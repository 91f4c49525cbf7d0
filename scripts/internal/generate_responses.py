#!/usr/bin/env python3
"""Answer prompts with vLLM: `generate_responses.py REQUEST ANSWERS`, two JSON files; evaluate.py starts it.

REQUEST holds the engine's arguments, prompts as token ids, and sampling parameters by name. ANSWERS gets, for each of
those names and each prompt, its answers as [token ids, why it ended]. Each model has a process of its own: what an
engine takes of a device is free again for the next one.
"""

import json
import os
import sys
from pathlib import Path


def main(request: Path, answers: Path) -> None:
    """Generate the answers, and write the file under its name when all are there."""
    from vllm import LLM, SamplingParams

    asked = json.loads(request.read_text())
    engine = LLM(**asked["engine"], skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": tokens} for tokens in asked["prompts"]]
    found = {}
    for name, parameters in asked["sampling"].items():
        outputs = engine.generate(prompts, SamplingParams(**parameters, detokenize=False))
        found[name] = [[[list(each.token_ids), each.finish_reason] for each in output.outputs] for output in outputs]
    unfinished = answers.with_name(f"{answers.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(found))
    unfinished.replace(answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    # The answers are written; failing destructors of an engine would only hide that.
    sys.stdout.flush()
    os._exit(0)

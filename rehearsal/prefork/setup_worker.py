"""Set up the environment of a Ray worker and become its program, as Ray's program of this name does.

Ray's imports Ray for that, which takes 0.7 CPU seconds for each worker. A runtime environment with other fields than
`env_vars` and `py_executable` is left to Ray's.
"""

import json
import os
import re
import shlex
import sys

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main(arguments: list[str]) -> None:
    """Execute the worker's command; ``arguments`` begin with Ray's script of a worker."""
    context, language = (
        next((each.removeprefix(name) for each in arguments if each.startswith(name)), "")
        for name in (_CONTEXT, _LANGUAGE)
    )
    fields = {name: value for name, value in json.loads(context or "{}").items() if value}
    variables, executable = fields.pop("env_vars", {}), fields.pop("py_executable", "")
    if language != "PYTHON" or fields or not executable:
        rays = os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, rays, *arguments])
    for name, value in variables.items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    rest = [each for each in arguments if not each.startswith((_CONTEXT, _LANGUAGE))]
    command = [*shlex.split(executable), *rest]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

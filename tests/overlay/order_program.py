"""Import the targets of all real patches in given orders, each in its own process, and say what state that ends in.

    python -m tests.overlay.order_program < SCENARIOS

Reads a JSON list of scenarios `{"before": [modules], "after": [modules], "spoil": "module:copy"}`: what is imported
before the overlay is activated and after, and optionally a copy of a patched function to be set back to upstream's.
Writes a JSON list of states, `null` for a scenario that does not apply because what it imports first already imports a
module that some patch must come before. The interpreter that forks holds everything that upstream imports and that is
not upstream itself, so that a scenario takes a second or two.
"""

import contextlib
import importlib
import json
import os
import sys
import traceback
from typing import Any

from overlay.discovery import load
from overlay.pins import Pins, within

PINS = Pins.read()
PATCHES = load(PINS.rooms())
PATCHED = tuple(
    package for upstream in PINS.upstreams if upstream.room for package in (*upstream.packages, upstream.room)
)


def run(scenario: dict[str, list[str]]) -> dict[str, Any] | None:
    """Carry out one scenario in this process."""
    import overlay

    for module in scenario["before"]:
        importlib.import_module(module)
    if any(patch.kind == "before_import" and patch.module in sys.modules for patch in PATCHES):
        return None
    overlay.activate()
    for module in scenario["after"]:
        importlib.import_module(module)
    if scenario.get("spoil"):
        holder, _, name = scenario["spoil"].partition(":")
        ours = vars(sys.modules[holder])[name]
        setattr(sys.modules[holder], name, ours.__wrapped__)
    return state()


def state() -> dict[str, Any]:
    """What the patches have done: the nesting of every target, every name that leads to it, and the engine's report."""
    import overlay

    report = overlay.report()
    engine = overlay._engine
    nested = {name: nesting(effect.current) for name, effect in engine.effects.items()}
    ours = {id(effect.current): name for name, effect in engine.effects.items() if callable(effect.current)}
    names = {
        f"{module_name}:{name}": ours[id(value)]
        for module_name, module in list(sys.modules.items())
        if any(within(module_name, package) for package in PATCHED)
        for name, value in list(vars(module).items())
        if id(value) in ours
    }
    return {
        "applied": sorted(report.applied),
        "effective": sorted(name for name, holds in report.effective.items() if holds),
        "problems": report.problems,
        "nesting": nested,
        "names": names,
    }


def nesting(current: Any) -> list[str]:
    """The patch bodies around upstream's own function, outermost first."""
    bodies = []
    function = getattr(current, "__func__", getattr(current, "fget", current))
    while getattr(function, "__closure__", None):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        if "body" not in cells:
            break
        body = cells["body"].cell_contents
        bodies.append(f"{body.__module__}:{body.__code__.co_firstlineno}")
        function = cells["upstream"].cell_contents
    return bodies


def in_child(work: Any) -> Any:
    """Call `work` in a forked process and return its JSON result; a failure is returned as a text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with open(writing, "w") as out, contextlib.redirect_stdout(sys.stderr):
            try:
                json.dump(work(), out)
            except BaseException:
                json.dump({"failed": traceback.format_exc()}, out)
        os._exit(0)
    os.close(writing)
    with open(reading) as result:
        answer = result.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else {"failed": "the process died"}


def imported_by(scenario: dict[str, list[str]]) -> list[str]:
    """The modules that a scenario imports and that are not upstream's or ours."""
    run(scenario)
    return [name for name in sys.modules if not any(within(name, package) for package in (*PATCHED, "overlay"))]


def main() -> None:
    """Read the scenarios, run them, write the states."""
    scenarios = json.load(sys.stdin)
    everything = {
        "before": [],
        "after": sorted({name for each in scenarios for name in each["before"] + each["after"]}),
    }
    shared = in_child(lambda: imported_by(everything))
    for name in shared if isinstance(shared, list) else ():
        if name.partition(".")[0] not in ("torch_npu", "torchair", "acl", "hccl", "apex", "flash_attn"):
            with contextlib.suppress(Exception), contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(name)
    json.dump([in_child(lambda each=each: run(each)) for each in scenarios], sys.stdout)


if __name__ == "__main__":
    main()

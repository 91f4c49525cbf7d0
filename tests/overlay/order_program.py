"""Import the targets of all real patches in many orders, each in a process of its own, and compare the final states.

    python -m tests.overlay.order_program --all        every ordered pair, and 200 random full orders; minutes
    python -m tests.overlay.order_program < SCENARIOS  the states, for the tests

A scenario is a list of steps: the name of a module to import, ACTIVATE for the overlay's activation, or `spoil
MODULE:NAME` to set a copy of a patched function back to upstream's own. Every step runs in a process that has run the
scenario's earlier steps and nothing else of upstream or ours: scenarios that begin alike share that beginning and fork
where they part. The first process holds what upstream imports and is not upstream itself, so that a scenario takes
about a second.
"""

import contextlib
import gc
import hashlib
import importlib
import inspect
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from overlay.discovery import load
from overlay.pins import Pins, within

ACTIVATE = "activate"
TOO_LATE = "too late"
NEEDS_PATCHES = "cannot be imported without the patches"
REJECTED = (TOO_LATE, NEEDS_PATCHES)
RANDOM_ORDERS = 200
PINS = Pins.read()
PATCHES = load(PINS.patch_packages())
PATCHED = PINS.patched_packages()
# An upstream without a release in a package index, such as MindSpeed, is not installed here.
MODULES = sorted(
    {patch.module for patch in PATCHES if patch.kind != "provide" and PINS.of_module(patch.module).release}
)

Steps = Sequence[str]
Answers = dict[str, Any]


def all_pairs() -> list[Steps]:
    """Yield every ordered pair of target modules, with the activation before, between and after."""
    pairs = [(first, second) for first in MODULES for second in MODULES if first != second]
    return [
        steps
        for first, second in pairs
        for steps in ((ACTIVATE, first, second), (first, ACTIVATE, second), (first, second, ACTIVATE))
    ]


def random_orders(count: int, seed: int = 2) -> list[Steps]:
    """Yield full orders with the activation first."""
    generator = random.Random(seed)
    return [[ACTIVATE, *generator.sample(MODULES, len(MODULES))] for _ in range(count)]


def run(scenarios: Sequence[Steps], jobs: int = 1) -> tuple[list[str], dict[str, Any]]:
    """Return for each scenario the digest of its final state, and the states by digest.

    `jobs` parts of them run at the same time. A scenario ends in TOO_LATE where it activates the overlay after the
    import of a module that a patch must precede, and in NEEDS_PATCHES where upstream itself refuses to be imported
    before the overlay is active.
    """
    branches = [(index, tuple(steps)) for index, steps in enumerate(scenarios)]
    result = _started(lambda: _follow(branches, jobs))()
    if "failed" in result:
        raise RuntimeError(result["failed"])
    return [result["digests"][str(index)] for index in range(len(scenarios))], result["states"]


def _follow(branches: list[tuple[int, tuple[str, ...]]], jobs: int) -> Answers:
    """Take the steps that all branches share in this process, and each different continuation in a child."""
    while all(steps for _, steps in branches) and len({steps[0] for _, steps in branches}) == 1:
        if rejection := _take(branches[0][1]):
            return {"digests": {str(index): rejection for index, _ in branches}, "states": {rejection: None}}
        branches = [(index, steps[1:]) for index, steps in branches]
    if not any(steps for _, steps in branches):
        content = state()
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        return {"digests": {str(index): digest for index, _ in branches}, "states": {digest: content}}
    parts: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
    for index, steps in branches:
        parts.setdefault(steps[0] if steps else "", []).append((index, steps))
    # In parallel where no part is a large one; a large one is divided further inside.
    largest = max(map(len, parts.values()))
    at_once, inside = (jobs, 1) if largest * 2 * jobs <= len(branches) else (1, jobs)
    answers: Answers = {"digests": {}, "states": {}}
    waiting, running = list(parts.values()), []
    while waiting or running:
        while waiting and len(running) < at_once:
            part = waiting.pop(0)
            running.append(_started(lambda part=part: _follow(part, inside)))
        answer = running.pop(0)()
        if "failed" in answer:
            return answer
        answers["digests"] |= answer["digests"]
        answers["states"] |= answer["states"]
        if at_once > 1:
            print(f"{len(answers['digests'])} of {len(branches)}: {sorted(answers['states'])}", file=sys.stderr)
    return answers


def _take(steps: Steps) -> str:
    """Take the first remaining step of a scenario; returns why it is rejected, or an empty text."""
    import overlay

    step = steps[0]
    if step == ACTIVATE:
        if any(patch.kind == "before_import" and patch.module in sys.modules for patch in PATCHES):
            return TOO_LATE
        overlay.activate()
    elif step.startswith("spoil "):
        holder, _, name = step.removeprefix("spoil ").partition(":")
        setattr(sys.modules[holder], name, vars(sys.modules[holder])[name].__wrapped__)
    else:
        try:
            importlib.import_module(step)
        except Exception:
            # vLLM raises ValueError on torch 2.5, verl ImportError on megatron-core 0.8; none of it is ours yet.
            if ACTIVATE not in steps:
                raise
            return NEEDS_PATCHES
    return ""


def state() -> dict[str, Any]:
    """Return the patches' effects: every target's nesting, every name that leads to it, and the engine's report."""
    import overlay

    report = overlay.report()
    engine = overlay._engine
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
        "nesting": {name: nesting(effect.current) for name, effect in engine.effects.items()},
        "names": names,
    }


def nesting(current: Any) -> list[str]:
    """Return the patch bodies around upstream's own function, outermost first."""
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


def _started(work: Callable[[], Any]) -> Callable[[], Any]:
    """Call `work` in a forked process; returns a function that waits for its JSON result. A failure comes as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with open(writing, "w") as out, contextlib.redirect_stdout(sys.stderr):
            try:
                json.dump(work(), out)
            except BaseException:
                json.dump({"failed": traceback.format_exc()}, out)
        os._exit(0)
    os.close(writing)

    def finish() -> Any:
        with open(reading) as result:
            answer = result.read()
        os.waitpid(child, 0)
        return json.loads(answer) if answer else {"failed": "the process died"}

    return finish


def import_what_upstream_needs() -> None:
    """Import the targets' imports that are neither upstream's nor ours, and read the sources that the targets read."""
    sources: dict[str, str] = {}
    read_source = inspect.getsource

    def remembered(thing: Any) -> str:
        # vLLM reads the source of its own classes while it is imported, which is most of the time that this takes.
        name = f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', '')}"
        if not isinstance(thing, type):
            return read_source(thing)
        if name not in sources:
            sources[name] = read_source(thing)
        return sources[name]

    def needed() -> tuple[list[str], dict[str, str]]:
        for step in (ACTIVATE, *MODULES):
            _take([step])
        found = [name for name in sys.modules if not any(within(name, package) for package in (*PATCHED, "overlay"))]
        return found, sources

    inspect.getsource = remembered
    result = _started(needed)()
    if "failed" in result:
        raise RuntimeError(result["failed"])
    names, read = result
    sources.update(read)
    for name in names:
        if name.partition(".")[0] not in ("torch_npu", "torchair", "acl", "hccl", "apex", "flash_attn"):
            with contextlib.suppress(Exception), contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(name)
    # Collecting garbage would touch, and so copy, all of this in every child.
    gc.collect()
    gc.freeze()
    gc.disable()


def run_all() -> int:
    """Run everything and print the results in numbers.

    The scenarios of one pair must end in one state, in which every target and every name is as in the state that the
    full orders end in; those must all end in one. Returns 0 if all of this holds.
    """
    began = time.monotonic()
    import_what_upstream_needs()
    pairs, orders = all_pairs(), random_orders(RANDOM_ORDERS)
    digests, states = run([*orders, *pairs], jobs=os.cpu_count() or 1)
    full, of_pairs = digests[: len(orders)], digests[len(orders) :]
    faults = [f"full orders end in {dict(Counter(full))}"] * (len(set(full)) > 1) + contradictions(states, full[0])
    ends: dict[frozenset[str], set[str]] = {}
    for steps, digest in zip(pairs, of_pairs, strict=True):
        if digest not in REJECTED:
            ends.setdefault(frozenset(steps) - {ACTIVATE}, set()).add(digest)
    faults += [f"{sorted(pair)} end in {sorted(found)}" for pair, found in ends.items() if len(found) > 1]
    late, bare = of_pairs.count(TOO_LATE), of_pairs.count(NEEDS_PATCHES)
    print(f"{len(PATCHES)} patches in {len(MODULES)} modules, {len(pairs) // 3} ordered pairs: {len(pairs)} scenarios")
    print(f"  {late} of them activate after a module that a patch must precede, and are rejected")
    print(f"  {bare} import a module that upstream cannot import before the overlay is active")
    alike = sum(len(found) == 1 for found in ends.values())
    print(f"  {len(pairs) - late - bare} ran; {alike} of {len(ends)} pairs end alike")
    print(f"  {len(orders)} random full orders end in {len(set(full))} state(s)")
    print("\n".join(f"  {fault}" for fault in faults) or "  nothing contradicts the state of the full orders")
    print(f"  {time.monotonic() - began:.0f} s")
    return 1 if faults else 0


def contradictions(states: dict[str, Any], reference: str) -> list[str]:
    """Return how states differ from the reference, and the problems that they report themselves."""
    faults = []
    for digest, found in states.items():
        if found is None:
            continue
        if found["problems"] or found["applied"] != found["effective"]:
            faults.append(f"{digest}: {found['problems']}")
        for key in ("nesting", "names"):
            other = [name for name, value in found[key].items() if states[reference][key].get(name) != value]
            faults += [f"{digest}: {key} of {name}" for name in other]
    return faults


def main() -> int:
    """Run the command line."""
    if sys.argv[1:] == ["--all"]:
        return run_all()
    scenarios = json.load(sys.stdin)
    import_what_upstream_needs()
    digests, states = run(scenarios)
    json.dump([states[digest] for digest in digests], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())

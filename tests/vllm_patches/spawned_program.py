"""Spawn processes as vLLM does, and write their report as JSON to the file named by the first argument."""

import json
import multiprocessing
import sys
from pathlib import Path


def report(connection) -> None:
    """Send whether this process has the overlay, its applied patches and its precision setting."""
    found = {"overlay": "overlay" in sys.modules}
    if found["overlay"]:
        import vllm.v1.sample.sampler  # noqa: F401

        import overlay
        from verl_patches.features import settings

        found["applied"] = overlay.assert_effective(["vllm.v1.sample.sampler:Sampler.forward"]).applied
        found["precision"] = settings.current().precision
    connection.send(found)


def asked(context) -> dict:
    """Return the report of a process started by a context."""
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(sending,), name="engine")
    process.start()
    sending.close()
    found = receiving.recv()
    process.join()
    return found


def main(file: Path) -> None:
    """Get the reports of a process from vLLM's context and of one from Python's own."""
    from verl_patches import prelude_patch  # noqa: F401
    from verl_patches.features import settings

    settings.activate(settings.OverlaySettings(precision="float32"))
    from vllm.utils import get_mp_context

    found = [asked(get_mp_context()), asked(multiprocessing.get_context("spawn"))]
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

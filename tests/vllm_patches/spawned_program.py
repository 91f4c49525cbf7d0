"""Spawn processes as vLLM does, and say what is in them. Written to the file that the first argument names, as JSON."""

import json
import multiprocessing
import sys
from pathlib import Path


def report(connection) -> None:
    """Send what this process has of the overlay."""
    found = {"overlay": "overlay" in sys.modules}
    if found["overlay"]:
        import vllm.v1.sample.sampler  # noqa: F401

        import overlay
        from verl_patches.features import settings

        found["applied"] = overlay.assert_effective(["vllm.v1.sample.sampler:Sampler.forward"]).applied
        found["precision"] = settings.current().precision
    connection.send(found)


def asked(context) -> dict:
    """What a process of a context reports."""
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(sending,), name="engine")
    process.start()
    sending.close()
    found = receiving.recv()
    process.join()
    return found


def main(file: Path) -> None:
    """Ask a process of vLLM's context, and one of Python's own."""
    from verl_patches import prelude_patch  # noqa: F401
    from verl_patches.features import settings

    settings.activate(settings.OverlaySettings(precision="float32"))
    from vllm.utils import get_mp_context

    found = [asked(get_mp_context()), asked(multiprocessing.get_context("spawn"))]
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

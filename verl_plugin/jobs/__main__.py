"""The command line: `python -m verl_plugin.jobs --config-name NAME key=value ...` checks a job and starts nothing."""

import sys

from post_training.command_parser import CommandParser
from post_training.masking import masked_output
from post_training.terminal import escape_output
from verl_plugin.jobs import JobError, check_job, compose_job

_DESCRIPTION = """
Compose a job for verl 0.9.1 and check it, as its launcher does before Ray starts. Starts nothing, and needs no NPU.

Example:
    python -m verl_plugin.jobs --config-name qwen3_0_6b_gsm8k_one_card \\
        actor_rollout_ref.model.path=MODEL

Exit codes: 0 it can run; 2 it is rejected.
"""


def main(arguments: list[str] | None = None) -> int:
    """Check the job and return the exit code."""
    parser = CommandParser(prog="python -m verl_plugin.jobs", description=_DESCRIPTION)
    parser.add_argument("--config-name", required=True, metavar="NAME", help="a file of verl_plugin/config")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = check_job(compose_job(options.config_name, options.overrides))
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.print_config:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(OmegaConf.create(config)), end="")
    else:
        print(f"{options.config_name} passes every check")
    return 0


if __name__ == "__main__":
    escape_output()
    with masked_output():
        sys.exit(main())

#!/usr/bin/env bash
# Trains Qwen2.5-1.5B-Instruct on MATH with GRPO and FSDP on one die, or a tiny one on none. See --help.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/internal/launch_one_node.sh" qwen2_5_1_5b_math_one_card 1 "$@"

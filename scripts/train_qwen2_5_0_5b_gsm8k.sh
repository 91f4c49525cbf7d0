#!/usr/bin/env bash
# Trains Qwen2.5-0.5B-Instruct on GSM8K with GRPO and FSDP on the 8 dies of a node, or a tiny one on none. See --help.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/internal/launch_one_node.sh" qwen2_5_0_5b_gsm8k 8 "$@"

#!/usr/bin/env bash
# Trains Qwen3-30B-A3B on GSM8K with GRPO and Megatron-core on the 16 dies of a node (stack 2026), or a tiny one on none. See --help.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/internal/launch_one_node.sh" qwen3_30b_a3b_gsm8k_one_node 16 "$@"

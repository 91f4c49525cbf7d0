#!/usr/bin/env bash
# Trains Qwen3-0.6B on GSM8K with GRPO and FSDP2 on one die (stack 2026), or a tiny one on none. See --help.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/internal/launch_one_node.sh" qwen3_0_6b_gsm8k_one_card 1 "$@"

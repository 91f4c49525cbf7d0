#!/usr/bin/env bash
# Trains Qwen2.5-VL-3B-Instruct on Geometry3K with GRPO and FSDP on the two dies of an Atlas A3 card, or a tiny one on none. See --help.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/internal/launch_one_node.sh" qwen2_5_vl_3b_geo3k_one_card 2 "$@"

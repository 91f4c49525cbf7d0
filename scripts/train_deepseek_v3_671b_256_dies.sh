#!/usr/bin/env bash
# Trains DeepSeek-V3-671B with GRPO and Megatron-core on 256 dies (stack 2026), or a tiny one on none. Start it on every node. See --help.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/internal/launch.sh" deepseek_v3_671b_256_dies "$@"

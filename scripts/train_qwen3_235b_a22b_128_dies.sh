#!/usr/bin/env bash
# Trains Qwen3-235B-A22B with GRPO and Megatron-core on 128 dies (stack 2026), or a tiny one on none. Start it on every node. See --help.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/internal/launch.sh" qwen3_235b_a22b_128_dies "$@"

#!/usr/bin/env bash
# Trains DeepSeek-V3-671B from random weights on 256 dies: what the speed is. Start it on every node. See --help.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/internal/launch.sh" deepseek_v3_256die_random_init "$@"

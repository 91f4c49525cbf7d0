#!/usr/bin/env bash
# Builds the documentation site, and serves it to a browser of this machine. See --help.
set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly project_root
# shellcheck source=scripts/lib/terminal.sh
source "$project_root/scripts/lib/terminal.sh"
# shellcheck source=scripts/lib/arguments.sh
source "$project_root/scripts/lib/arguments.sh"
# shellcheck source=scripts/lib/environment.sh
source "$project_root/scripts/lib/environment.sh"
# shellcheck source=scripts/lib/documentation.sh
source "$project_root/scripts/lib/documentation.sh"

usage() {
    cat <<'USAGE'
Usage: bash scripts/docs.sh [--output DIR] [--serve] [--port PORT] [--dry-run]

Builds the documentation as a site in English and Chinese, with search. A link
or anchor that leads nowhere stops the build. The first run sets up .venv.docs/
(270 MB) from requirements/docs.lock.

  --output DIR   write the site there; default: .cache/site. Any web server can
                 serve the folder, and it asks no other host for anything
  --serve        show the site at http://127.0.0.1:PORT/ until Ctrl-C, and build
                 it again when a page changes; writes no folder
  --port PORT    default: 8000
  --dry-run      print the commands; set up and build nothing
  --help, -h     print this

Example:
  bash scripts/docs.sh --serve
USAGE
}

main() {
    local output="" serve="" port=8000 dry_run=""
    while (($#)); do
        case $1 in
            --help | -h) usage; return ;;
            --serve) serve=1; shift ;;
            --dry-run) dry_run=1; shift ;;
            --output)
                argument_require_value "$1" $#
                output=$2
                shift 2
                ;;
            --port)
                argument_require_value "$1" $#
                argument_require_decimal "$1" "$2" 1 65535
                port=$2
                shift 2
                ;;
            *) fail "Unknown argument \"$1\": see --help." ;;
        esac
    done
    [[ -z $serve || -z $output ]] || fail "--output is invalid with --serve: a served site is not written. Use one of them."
    local command=("$project_root/.venv.docs/bin/python" -m mkdocs)
    if [[ -n $serve ]]; then
        command+=(serve --config-file "$project_root/mkdocs.yml" --strict --dev-addr "127.0.0.1:$port")
    else
        output=$(realpath --canonicalize-missing -- "${output:-$project_root/.cache/site}")
        [[ ! -e $output || -f $output/search/search_index.json || -z $(ls -A -- "$output" 2>/dev/null) ]] ||
            fail "--output=$output is invalid: it contains something other than a site, which the build would remove. Set it to a new folder."
        command+=(build --config-file "$project_root/mkdocs.yml" --strict --site-dir "$output")
    fi
    if [[ -n $dry_run ]]; then
        say "run$(printf ' %q' "${command[@]}")"
        return
    fi
    documentation_ensure "$project_root"
    # Material for MkDocs prints a notice about its own successor with every build.
    export NO_MKDOCS_2_WARNING=1
    [[ -z $serve ]] || exec "${command[@]}"
    # --quiet would silence --strict as well.
    local printed
    if ! printed=$("${command[@]}" 2>&1); then
        grep -v '^INFO' <<<"$printed" >&2 || true
        quit 1 "The site was not built: correct what the lines above name."
    fi
    say "Site: $output/index.html"
}

main "$@"

# shellcheck shell=bash
# What the scripts print: one form for progress, one for errors.

# Prints a progress line.
say() {
    printf '%s\n' "$*"
}

# Prints one sentence on standard error and ends the script with status 2.
fail() {
    quit 2 "$@"
}

# Prints one sentence on standard error and ends the script with CODE.
quit() {
    local code=$1
    shift
    printf 'error: %s\n' "$*" >&2
    exit "$code"
}

# shellcheck shell=bash
# What the scripts print: one form for progress, one for errors.

# Prints TEXT with a question mark for every control character but line feeds and tabs: what a name holds commands no
# terminal.
terminal_escape() {
    local LC_ALL=C
    printf '%s\n' "${1//[$'\001'-$'\010'$'\013'-$'\037'$'\177']/?}"
}

# Prints a progress line.
say() {
    terminal_escape "$*"
}

# Prints one sentence on standard error and ends the script with status 2.
fail() {
    quit 2 "$@"
}

# Prints one sentence on standard error and ends the script with CODE.
quit() {
    local code=$1
    shift
    terminal_escape "error: $*" >&2
    exit "$code"
}

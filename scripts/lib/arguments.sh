# shellcheck shell=bash
# Checks of command-line values. Needs terminal.sh.

# Fails unless an option has a value.
argument_require_value() {
    local option=$1 count=$2
    ((count >= 2)) || fail "$option needs a value: see --help."
}

# Fails unless VALUE is a whole number from LOWEST on.
argument_require_number() {
    local option=$1 value=$2 lowest=$3
    # Nine digits: more would overflow the shell's arithmetic or mean nothing.
    if [[ ! $value =~ ^[0-9]{1,9}$ ]] || ((10#$value < lowest)); then
        fail "$option=$value is invalid. Set it to a whole number, at least $lowest."
    fi
}

# Fails unless VALUE is a file that can be read. FORM says which file the option takes.
argument_require_file() {
    local option=$1 value=$2 form=${3:-a .json or .jsonl file}
    [[ -e $value ]] || fail "$option=$value is invalid: the file does not exist. Check the path."
    [[ -f $value && -r $value ]] || fail "$option=$value is invalid: not a readable file. Set it to $form."
}

# Fails unless VALUE is a whole number from LOWEST to HIGHEST as people write it: a leading zero means octal to some
# programs that read the number, and nothing to others. REASON, if given, says where a bound comes from.
argument_require_decimal() {
    local option=$1 value=$2 lowest=$3 highest=$4 reason=${5:-}
    if [[ ! $value =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((value < lowest || value > highest)); then
        fail "$option=$value is invalid${reason:+: $reason}. Set it to a whole number from $lowest to $highest, without leading zeros."
    fi
}

# Fails unless VALUE is a chip that is emulated.
argument_require_chip() {
    [[ $1 == a2 || $1 == a3 ]] || fail "--chip=$1 is invalid. Set it to a2 or a3."
}

# Fails unless VALUE is the stack whose patches lie in a checkout: those of 2026 are loaded by verl itself.
argument_require_copied_stack() {
    [[ $1 == 2026 ]] && fail "--stack=2026 is invalid: its patches are not copied into a checkout. Set VERL_USE_EXTERNAL_MODULES to a module and PYTHONPATH to this repository (docs/stacks.md)."
    [[ $1 == 2025 ]] || fail "--stack=$1 is invalid: no such stack. Set it to 2025."
}

# shellcheck shell=bash
# Files of NAME=value lines, and the vendor's scripts that they name. Needs terminal.sh.

# Reads FILE into the associative array GIVEN, and the names in their order into the array NAMES.
settings_read() {
    local file=$1 line name
    local -n settings_given=$2 settings_names=$3
    while IFS= read -r line || [[ -n $line ]]; do
        # A comment begins a line, or follows a space: a path may hold a #.
        line=${line%%[[:space:]]#*}
        line="${line#"${line%%[![:space:]]*}"}"
        line="${line%"${line##*[![:space:]]}"}"
        [[ -n $line && $line != \#* ]] || continue
        [[ $line =~ ^([A-Za-z][A-Za-z0-9_]*)=(.*)$ ]] || fail "$file: \"${line:0:60}\" is not a NAME=value line."
        name=${BASH_REMATCH[1]}
        [[ -z ${settings_given[$name]+set} ]] || fail "$file sets $name twice. Keep one."
        # shellcheck disable=SC2004,SC2034 # the caller's arrays, of which this one is associative
        settings_given[$name]=${BASH_REMATCH[2]}
        settings_names+=("$name")
    done <"$file"
}

# Prints the scripts of the value of CANN_ENV, a line each; fails where one cannot be read.
settings_cann_scripts() {
    local value=$1 entry scripts
    [[ $value != none ]] || return 0
    IFS=: read -ra scripts <<<"$value"
    for entry in "${scripts[@]}"; do
        [[ -r $entry ]] || fail "CANN_ENV=$entry is invalid: it cannot be read. Install CANN there, correct the path, or set it to none."
        printf '%s\n' "$entry"
    done
}

# Sources the vendor's scripts.
settings_source() {
    local script
    for script in "$@"; do
        # The vendor's scripts read variables that need not exist, and go on after commands that fail.
        set +u
        # shellcheck source=/dev/null
        source "$script" || fail "CANN_ENV=$script is invalid: it ended with code $?. Run it by hand to see why."
        set -u
    done
}

# Prints a path in Hydra's quotes, because Hydra gives meaning to =, {, comma and space. In them only the backslashes
# before a quote are escapes.
settings_quoted() {
    printf "'%s'" "$(printf '%s' "$1" | sed -E "s/(\\\\*)'/\\1\\1\\\\'/g; s/(\\\\+)\$/\\1\\1/")"
}

# Turns the value of --resume into settings of the training, the caller's array resume. A complete step has FILE.
# shellcheck disable=SC2034 # the caller's array
settings_resume() {
    local file=${2:-trainer.json}
    case $1 in
        auto) resume=(trainer.resume_mode=auto) ;;
        never) resume=(trainer.resume_mode=disable) ;;
        *)
            # Every stack resumes what the stack 2025 saved.
            [[ -f $1/$file || -f $1/trainer.json ]] ||
                fail "--resume=$1 is invalid: not the folder of a complete step (global_step_N with $file). Set it to such a folder, auto or never."
            resume=(trainer.resume_mode=resume_path "trainer.resume_from_path=$(settings_quoted "$(realpath "$1")")")
            ;;
    esac
}

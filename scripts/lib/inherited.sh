# shellcheck shell=bash
# Variables that a job does not inherit from the shell that starts it; see post_training/inherited_environment.py.
# Needs terminal.sh.

# Takes the variables of other jobs out of the environment, and says so. On emulated dies nothing chooses NPUs either.
inherited_drop() {
    local root=$1 line name match dropped=()
    while IFS= read -r line || [[ -n $line ]]; do
        name=${line%%#*}
        name=${name%%[[:space:]]*}
        [[ -n $name ]] || continue
        if [[ $name == *'*' ]]; then
            mapfile -t match < <(compgen -e "${name%'*'}" || true)
        else
            match=()
            [[ ! -v $name ]] || match=("$name")
        fi
        for name in "${match[@]}"; do
            unset "$name"
            dropped+=("$name")
        done
    done <"$root/post_training/inherited_variables.txt"
    ((${#dropped[@]} == 0)) || say "ignored in the environment, because they belong to another job: ${dropped[*]}"
}

# Fails where the list of visible NPUs, of the environment or of NAME=value words, is not one of DIES NPUs.
inherited_check_visible() {
    local dies=$1 value=${ASCEND_RT_VISIBLE_DEVICES-none} word entries fitting
    shift
    for word in "$@"; do
        [[ $word != ASCEND_RT_VISIBLE_DEVICES=* ]] || value=${word#*=}
    done
    [[ $value != none ]] || return 0
    IFS=, read -ra entries <<<"$value"
    [[ ! $value =~ ^[0-9]+(,[0-9]+)*$ ]] || ((${#entries[@]} != dies)) || return 0
    fitting=$(seq -s , 0 $((dies - 1)))
    fail "ASCEND_RT_VISIBLE_DEVICES=$value is invalid: it shows ${#entries[@]} NPUs, but the job takes $dies. Unset it, or set it to $fitting."
}

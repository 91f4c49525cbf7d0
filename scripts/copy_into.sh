#!/usr/bin/env bash
# Puts what a fork needs of the overlay into a checkout of upstream, and takes it out again.
#
# Everything is tried on a copy of the packages first; the checkout changes only after overlay check has found it fitting.
set -euo pipefail

project_root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
readonly project_root
# shellcheck source=scripts/lib/terminal.sh
source "$project_root/scripts/lib/terminal.sh"
# shellcheck source=scripts/lib/arguments.sh
source "$project_root/scripts/lib/arguments.sh"

readonly RECORD=.overlay_copy

usage() {
    cat <<'TEXT'
Usage: bash scripts/copy_into.sh --into DIR [--only NAME...] [--dry-run]
       bash scripts/copy_into.sh --into DIR --undo [--discard]

Copies the overlay, the patches and their dependencies beside the packages of a
checkout, applies numbered patch files, writes the metadata by which vLLM finds
its NPU plugin, inserts the prelude line into verl, and runs overlay check. A
checkout may hold any of verl, vllm, vllm_ascend and megatron. Run it again to
update the copies.

  --into DIR    the folder of the packages
  --only NAME   only the patches of verl, vllm, vllm-ascend, megatron or
                mindspeed, no scripts; repeatable
  --stack NAME  2025, which is the default and the only one: the patches of the
                stack 2026 are not copied (docs/stacks.md)
  --dry-run     print what would change, and change nothing
  --undo        restore the checkout
  --discard     replace or remove files that were changed after the copy
  --help        print this

Example:
  bash scripts/copy_into.sh --into /workspace/verl --dry-run
TEXT
}

# Prints the package, the patch package and the commit of every upstream that is patched here, by tabs.
patch_packages() {
    (cd "$project_root" && "$python" - <<'PROGRAM'
from overlay.pins import Pins
for upstream in Pins.read().upstreams:
    if upstream.patch_package and upstream.repository:
        print(upstream.packages[0], upstream.patch_package, upstream.cluster_label, sep="\t")
PROGRAM
    ) || fail "the pins cannot be read (see above)."
}

# Sets `folders` to what is copied, and `packages` to the packages of CHECKOUT.
choose() {
    local rows name package patches known=() wanted=()
    rows=$(patch_packages)
    for name in "${only[@]}"; do
        wanted+=("${name//-/_}")
    done
    folders=(overlay post_training)
    while IFS=$'\t' read -r package patches _; do
        known+=("$package")
        [[ ! -d $into/$package ]] || packages+=("$package")
        ((${#wanted[@]} == 0)) || [[ " ${wanted[*]} " == *" $package "* ]] || continue
        [[ ! -d $project_root/$patches ]] || folders+=("$patches")
    done <<<"$rows"
    for name in "${wanted[@]}"; do
        [[ " ${known[*]} " == *" $name "* ]] || fail "--only=$name is invalid: no such patches. Set it to one of ${known[*]}."
    done
    ((${#packages[@]})) || fail "--into=$into is invalid: it has none of ${known[*]}. Set it to the folder that contains the package."
    if [[ " ${folders[*]} " == *" verl_patches "* ]]; then
        folders+=(scripts)
    else
        folders+=(verl_patches/features)
    fi
}

# Prints the files and links of FOLDERs below ROOT, relative to it.
files_of() {
    local root=$1
    shift
    (cd "$root" && find "$@" -name __pycache__ -prune -o \( -type f -o -type l \) -print)
}

# Reads what the files and links at PATHs below ROOT hold, one word each, into the array NAME; none where there is none.
# shellcheck disable=SC2004,SC2034 # NAME is an associative array of the caller's
read_contents() {
    local -n contents=$1
    local root=$2 path word there=()
    shift 2
    for path in "$@"; do
        [[ ! -e $root/$path && ! -L $root/$path ]] || there+=("$path")
    done
    ((${#there[@]})) || return 0
    while read -r word path; do
        contents[$path]=$word
    done < <(cd "$root" && find "${there[@]}" -name __pycache__ -prune -o -type f -print0 | xargs -0 -r sha256sum)
    while read -r word path; do
        contents[$path]=$word
    done < <(cd "$root" && find "${there[@]}" -type l -printf 'link:%l %p\n')
}

# Reads CHECKOUT's record into `kind_of` and `content_put`, by path.
read_record() {
    local kind content path
    declare -gA kind_of=() content_put=()
    [[ -f $into/$RECORD/manifest ]] || return 0
    while IFS=$'\t' read -r kind content path; do
        kind_of[$path]=$kind
        content_put[$path]=$content
    done <"$into/$RECORD/manifest"
}

# Fails where a file that this script put into CHECKOUT was changed since.
require_unchanged() {
    local path
    local -A found=() original=()
    [[ $discard == no ]] || return 0
    read_contents found "$into" "${!kind_of[@]}"
    read_contents original "$into/$RECORD/original" "${!kind_of[@]}"
    for path in "${!kind_of[@]}"; do
        # A run that was cut short has not put everything there: what was there before is no change of anybody's.
        [[ ${found[$path]:-} == "${content_put[$path]}" || ${found[$path]:-} == "${original[$path]:-}" ]] ||
            fail "$into/$path was changed after the copy. Save the changes and use --discard."
    done
}

# Makes a fork of the packages and of what is copied in SCRATCH, and prepares it there.
try() {
    local scratch=$1 folder package checkouts=()
    for folder in "${folders[@]}" scripts; do
        mkdir -p "$scratch/$(dirname "$folder")"
        (cd "$project_root" && files_of . "$folder" | tar -cf - -T -) | tar -xf - -C "$scratch"
    done
    for package in "${packages[@]}"; do
        # A name may be a folder of a namespace that the checkout shares with others.
        cp -a "$into/$package" "$scratch/$package"
        checkouts+=("$package=$into")
    done
    find "$into" -maxdepth 1 -name '*.dist-info' -exec cp -a {} "$scratch" \;
    PYTHON=$python bash "$scratch/scripts/assemble_workspace.sh" --in-place "${checkouts[@]}" >"$scratch/.said" 2>&1 || {
        grep -v '^error: ' "$scratch/.said" >&2 || true
        fail "$(sed -n 's/^error: //p' "$scratch/.said" | sed "s#$scratch#$into#g")"
    }
}

# Sets `kind_of` and `content_put` to what SCRATCH has and CHECKOUT had not, and fails where something is in the way.
compare() {
    local scratch=$1 path places=("${folders[@]}" "${packages[@]}")
    local -A was=() found=() tried=()
    for path in "${!kind_of[@]}"; do was[$path]=${kind_of[$path]}; done
    kind_of=() content_put=()
    for path in "$scratch"/*.dist-info; do
        [[ ! -d $path ]] || places+=("$(basename "$path")")
    done
    read_contents found "$into" "${places[@]}"
    read_contents tried "$scratch" "${places[@]}"
    for path in "${!tried[@]}"; do
        if [[ -n ${was[$path]:-} ]]; then
            kind_of[$path]=${was[$path]}
        elif [[ -z ${found[$path]:-} ]]; then
            kind_of[$path]=new
        elif [[ ${found[$path]} == "${tried[$path]}" ]]; then
            continue
        elif [[ " ${packages[*]} " == *" ${path%%/*} "* ]]; then
            kind_of[$path]=changed
        else
            fail "$into/$path is in the way of the overlay's file. Move it away first."
        fi
        content_put[$path]=${tried[$path]}
        [[ ${found[$path]:-} == "${tried[$path]}" ]] || different+=("$path")
    done
    for path in "${!was[@]}"; do
        [[ -n ${kind_of[$path]:-} ]] || stale+=("$path")
    done
}

# Puts the files of SCRATCH that differ into CHECKOUT, each at once, after writing down what was there.
install() {
    local scratch=$1 path
    mkdir -p "$into/$RECORD/original"
    for path in "${different[@]}"; do
        [[ ${kind_of[$path]} == changed && ! -e $into/$RECORD/original/$path ]] || continue
        mkdir -p "$into/$RECORD/original/$(dirname "$path")"
        cp -p "$into/$path" "$into/$RECORD/original/$path"
    done
    for path in "${!kind_of[@]}"; do
        printf '%s\t%s\t%s\n' "${kind_of[$path]}" "${content_put[$path]}" "$path"
    done | sort -k 3 >"$into/$RECORD/manifest.new"
    mv "$into/$RECORD/manifest.new" "$into/$RECORD/manifest"
    for path in "${different[@]}"; do
        mkdir -p "$into/$(dirname "$path")"
        cp -dp "$scratch/$path" "$into/$path.new"
        mv -T "$into/$path.new" "$into/$path"
    done
    for path in "${stale[@]}"; do
        remove "$path"
    done
}

# Removes a file of ours from CHECKOUT, and the folders that this leaves empty.
remove() {
    local folder
    folder=$into/$(dirname "$1")
    rm -f "$into/$1"
    while [[ $folder != "$into" && -d $folder ]]; do
        # What Python compiled of ours has nothing left to be compiled from.
        [[ -n $(find "$folder" -mindepth 1 -maxdepth 1 ! -name __pycache__ -print -quit) ]] || rm -rf "$folder/__pycache__"
        rmdir "$folder" 2>/dev/null || break
        folder=$(dirname "$folder")
    done
}

copy() {
    local scratch
    choose
    read_record
    require_unchanged
    scratch=$(mktemp -d)
    # shellcheck disable=SC2064 # the folder as it is called now
    trap "rm -rf '$scratch'" EXIT
    try "$scratch"
    compare "$scratch"
    local path
    for path in "${different[@]}"; do
        [[ ${kind_of[$path]} != changed ]] || say "changes $path"
    done
    say "$((${#different[@]})) files to copy into $into, ${#stale[@]} to remove: ${folders[*]}"
    if [[ $dry_run == yes ]]; then
        say "nothing was changed"
    elif ((${#different[@]} + ${#stale[@]})); then
        install "$scratch"
        say "the patches are in $into, and overlay check is clean"
    else
        say "$into is up to date"
    fi
}

undo() {
    local path
    [[ -f $into/$RECORD/manifest ]] || {
        say "nothing to undo in $into"
        return 0
    }
    read_record
    require_unchanged
    say "${#kind_of[@]} files to remove from $into or to restore"
    [[ $dry_run == no ]] || return 0
    for path in "${!kind_of[@]}"; do
        if [[ ${kind_of[$path]} == changed ]]; then
            cp -p "$into/$RECORD/original/$path" "$into/$path.new"
            mv "$into/$path.new" "$into/$path"
        else
            remove "$path"
        fi
    done
    rm -rf "${into:?}/$RECORD"
    say "$into is restored"
}

main() {
    declare -g into='' python=${PYTHON:-python3} dry_run=no discard=no
    declare -ga only=() folders=() packages=() different=() stale=()
    local action=copy
    while (($#)); do
        case $1 in
            --into)
                argument_require_value "$1" $#
                into=$2
                shift
                ;;
            --stack)
                argument_require_value "$1" $#
                argument_require_copied_stack "$2"
                shift
                ;;
            --only)
                argument_require_value "$1" $#
                only+=("$2")
                shift
                ;;
            --dry-run) dry_run=yes ;;
            --undo) action=undo ;;
            --discard) discard=yes ;;
            -h | --help)
                usage
                return 0
                ;;
            *) fail "Unknown argument \"$1\": see --help." ;;
        esac
        shift
    done
    [[ -n $into ]] || fail "--into DIR is missing: see --help."
    [[ -d $into ]] || fail "--into=$into is invalid: no such folder. Set it to a checkout of upstream."
    into=$(cd "$into" && pwd -P)
    [[ $into != "$project_root" || $action == undo ]] || fail "--into=$into is invalid: it is this project itself. Set it to a checkout of upstream."
    [[ $python != */* ]] || python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
    "$python" -c 'import tomllib' 2>/dev/null || fail "$python is older than Python 3.11. Set PYTHON to a newer one."
    "$action"
}

main "$@"

#!/usr/bin/env bash
# Puts the upstream packages, at their pins, beside the patch folders, and turns the overlay on in verl.
#
# Nothing in the workspace changes until everything has been copied to one side, verified, patched and checked there.
set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly project_root
# shellcheck source=scripts/lib/terminal.sh
source "$project_root/scripts/lib/terminal.sh"
# shellcheck source=scripts/lib/arguments.sh
source "$project_root/scripts/lib/arguments.sh"

readonly MANIFEST=$project_root/.workspace
readonly STAGING=$project_root/.workspace.new
# The package, for every entry point and for FSDP; the workers, where the published recipe has the line.
readonly PRELUDE_FILES=(verl/__init__.py verl/workers/megatron_workers.py)
readonly PRELUDE_LINE='from verl_patches import prelude_patch  # noqa: F401'
readonly SERIES=$project_root/vllm_ascend_patches/series

usage() {
    cat <<'TEXT'
Usage: bash scripts/assemble_workspace.sh [--from DIR] [--clone] [--any-commit]
                                          [NAME=DIR...]
       bash scripts/assemble_workspace.sh --in-place [NAME=DIR...]
       bash scripts/assemble_workspace.sh --undo

Copies the packages verl, vllm, vllm_ascend, megatron, mindspeed and
mindspeed_llm beside the patch folders, from git checkouts at the commits of
overlay/pins.toml, with the metadata by which vLLM finds its NPU plugin.

  --from DIR     folder of the checkouts, named like their repositories
                 (default: /workspace)
  NAME=DIR       the checkout with package NAME
  --clone        clone missing checkouts, at their pins
  --any-commit   also take checkouts at other commits, with changes or without
                 git; overlay check still decides
  --discard      replace or remove packages that were changed after the copy
  --in-place     prepare the packages of your own fork, at whatever commit; DIR
                 is a checkout whose setup.py names the plugins. Repeating it
                 changes nothing
  --stack NAME   2025, which is the default and the only one: the patches of the
                 stack 2026 are not copied (docs/stacks.md)
  --undo         remove everything that this script copied
  --help         print this

Example:
  bash scripts/assemble_workspace.sh --from /workspace --clone
TEXT
}

# Prints the checkout that holds PACKAGE of REPOSITORY.
source_folder() {
    local package=$1 repository=$2 name
    name=$(basename "$repository")
    printf '%s\n' "${given[$package]:-$from/$name}"
}

# Clones REPOSITORY at COMMIT (or REFERENCE) to FOLDER.
clone_at_pin() {
    local repository=$1 wanted=$2 folder=$3
    say "cloning $repository at $wanted"
    git clone --quiet --no-checkout "$repository" "$folder" || fail "$repository cannot be cloned. Pass a checkout as NAME=DIR."
    git -C "$folder" checkout --quiet --detach "$wanted" || fail "$repository has no $wanted. See overlay/pins.toml."
}

# Fails unless the checkout FOLDER of PACKAGE is at the pinned commit and unchanged.
verify_commit() {
    local package=$1 folder=$2 wanted=$3 found expected
    found=$(git -C "$folder" rev-parse --verify --quiet HEAD 2>/dev/null) ||
        fail "$folder is not a git checkout, so its commit cannot be verified. Use --clone or --any-commit."
    expected=$(git -C "$folder" rev-parse --verify --quiet "$wanted^{commit}") || expected=$wanted
    [[ $found == "$expected" ]] ||
        fail "$package: $folder is at $found, but the pin is $wanted. Check out that commit, or use --any-commit."
    [[ -z $(git -C "$folder" status --porcelain -- "$package") ]] ||
        fail "$package: $folder has changes under $package. Undo them, or use --any-commit."
}

# Copies one package to the staging folder.
stage() {
    local package=$1 repository=$2 wanted=$3 folder
    folder=$(source_folder "$package" "$repository")
    if [[ ! -d $folder/$package && $clone == yes && -z ${given[$package]:-} ]]; then
        folder=$STAGING/clones/$package
        clone_at_pin "$repository" "$wanted" "$folder"
    fi
    [[ -d $folder/$package ]] || fail "$package: $folder/$package does not exist. Pass $package=FOLDER or --clone."
    [[ $any_commit == yes ]] || verify_commit "$package" "$folder" "$wanted"
    say "$package from $folder"
    cp -a "$folder/$package" "$STAGING/$package"
    find "$STAGING/$package" -name __pycache__ -type d -prune -exec rm -rf {} +
}

# Writes beside a staged package what its installation would have told importlib.metadata.
stage_metadata() {
    local package=$1 repository=$2 reference=$3 folder name needs=()
    folder=$(source_folder "$package" "$repository")
    [[ -d $folder/$package ]] || folder=$STAGING/clones/$package
    # vLLM finds no NPU without it.
    [[ $package != vllm_ascend ]] || needs=(--needs vllm.platform_plugins)
    name=$("$python" "$project_root/scripts/internal/write_metadata.py" "${needs[@]}" "$package" "${reference#v}" "$folder" "$STAGING") ||
        fail "$package: its metadata cannot be written (see above). Pass the whole checkout."
    require_ours "$name"
    packages+=("$name")
}

# Applies vllm_ascend_patches/series to the staged packages, after a check of the whole series.
apply_series() {
    [[ -f $SERIES ]] || return 0
    local names=() files=() backwards=() name
    mapfile -t names < <(grep -Ev '^[[:space:]]*(#|$)' "$SERIES")
    for name in "${names[@]}"; do
        files+=("$project_root/vllm_ascend_patches/$name")
        backwards=("$project_root/vllm_ascend_patches/$name" "${backwards[@]}")
    done
    ((${#files[@]})) || return 0
    if (cd "$STAGING" && GIT_CEILING_DIRECTORIES=$project_root git apply --reverse --check "${backwards[@]}" 2>/dev/null); then
        say "vllm_ascend already has the patches of vllm_ascend_patches/series"
        return 0
    fi
    # The staging folder may lie in a repository; its paths must not be taken for that repository's.
    (
        cd "$STAGING"
        export GIT_CEILING_DIRECTORIES=$project_root
        git apply --check "${files[@]}"
    ) || fail "vllm_ascend_patches/series does not apply to this vllm_ascend. Nothing was changed."
    (cd "$STAGING" && GIT_CEILING_DIRECTORIES=$project_root git apply "${files[@]}")
    say "applied ${#files[@]} patches of vllm_ascend_patches/series"
}

# Inserts the prelude line before the first import of verl's package and of its Megatron workers.
insert_prelude() {
    local name
    for name in "${PRELUDE_FILES[@]}"; do
        insert_prelude_into "$name"
    done
}

insert_prelude_into() {
    local file=$STAGING/$1
    [[ -f $file ]] || fail "verl has no $1, the file for the prelude line."
    ! grep -q '^from verl_patches import prelude_patch' "$file" || return 0
    if ! grep -Eq '^(import|from) ' "$file"; then
        printf '%s\n' "$PRELUDE_LINE" >>"$file"
        return 0
    fi
    local patched=$file.patched
    awk -v line="$PRELUDE_LINE" '
        !done && /^(import|from) / && !/^from __future__/ { print line; print ""; done = 1 }
        { print }' "$file" >"$patched"
    cat "$patched" >"$file"
    rm "$patched"
    say "inserted the prelude line into $1"
}

# Prints a checksum over all files of a folder and their names.
checksum() {
    (cd "$1" && find . -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 -r sha256sum) | sha256sum | cut -d ' ' -f 1
}

# Fails if a package in the workspace is not this script's, or was changed since.
require_ours() {
    local package=$1 recorded
    [[ -e $project_root/$package ]] || return 0
    recorded=$(awk -v name="$package" '$1 == name { print $2 }' "$MANIFEST" 2>/dev/null || true)
    [[ -n $recorded ]] || fail "$project_root/$package was not copied by this script. Move it away first."
    [[ $discard == yes || $(checksum "$project_root/$package") == "$recorded" ]] ||
        fail "$project_root/$package was changed after the copy. Save the changes and use --discard."
}

# Moves the staged packages into place and writes down what they are.
install_staged() {
    local package
    : >"$STAGING/manifest"
    for package in "${packages[@]}"; do
        printf '%s %s\n' "$package" "$(checksum "$STAGING/$package")" >>"$STAGING/manifest"
    done
    # Metadata of another version would stay beside the new ones.
    while read -r package _; do
        [[ " ${packages[*]} " == *" $package "* ]] || rm -rf "${project_root:?}/$package"
    done < <(cat "$MANIFEST" 2>/dev/null)
    # The manifest comes first: whatever is cut short after it can still be undone.
    cp "$STAGING/manifest" "$MANIFEST"
    for package in "${packages[@]}"; do
        rm -rf "${project_root:?}/$package"
        mv "$STAGING/$package" "$project_root/$package"
    done
}

# Brings the staged files that series and prelude line changed to their places, each at once.
replace_changed() {
    local file
    while IFS= read -r -d '' file; do
        cmp --silent "$STAGING/$file" "$project_root/$file" && continue
        cp -p "$STAGING/$file" "$project_root/$file.new"
        mv "$project_root/$file.new" "$project_root/$file"
        say "changed $file"
    done < <(cd "$STAGING" && find "$@" -type f ! -path '*/__pycache__/*' -print0)
}

# Prepares the packages of a fork where they lie, after everything has succeeded on copies of them.
in_place() {
    local rows package repository commit reference checked=() changed=() metadata
    rows=$(cd "$project_root" && "$python" -m overlay pins) || fail "the pins cannot be read (see above)."
    rm -rf "$STAGING"
    mkdir -p "$STAGING"
    trap 'rm -rf "$STAGING"' EXIT
    while IFS=$'\t' read -r package repository commit reference; do
        if [[ ! -d $project_root/$package ]]; then
            say "no $package in this folder"
            continue
        fi
        cp -a "$project_root/$package" "$STAGING/$package"
        checked+=(--upstream "$package=$STAGING")
        changed+=("$package")
        if [[ $package == vllm* ]] && ! compgen -G "$project_root/$package-*.dist-info" >/dev/null; then
            stage_metadata "$package" "$repository" "$reference"
        fi
    done <<<"$rows"
    ((${#changed[@]})) || fail "$project_root has no package of overlay/pins.toml. Copy them there first."
    [[ " ${changed[*]} " != *" vllm_ascend "* ]] || apply_series
    # Without a verl here, an entry point of the overlay turns it on.
    # Nor does the line belong into a verl beside which only the patches of another package lie.
    [[ " ${changed[*]} " != *" verl "* || ! -f $project_root/verl_patches/prelude_patch.py ]] || insert_prelude
    (cd "$project_root" && "$python" -m overlay check "${checked[@]}") ||
        fail "the patches do not apply to these sources. Nothing was changed in $project_root."
    replace_changed "${changed[@]}"
    for metadata in "${packages[@]}"; do
        mv "$STAGING/$metadata" "$project_root/$metadata"
        say "wrote $metadata"
    done
    say "the fork $project_root is ready"
}

undo() {
    [[ -f $MANIFEST ]] || {
        say "nothing to undo"
        return 0
    }
    local package
    while read -r package _; do
        require_ours "$package"
    done <"$MANIFEST"
    while read -r package _; do
        rm -rf "${project_root:?}/$package"
        say "removed $package"
    done <"$MANIFEST"
    rm "$MANIFEST"
}

assemble() {
    local rows row package repository commit reference wanted checked=()
    rows=$(cd "$project_root" && "$python" -m overlay pins) || fail "the pins cannot be read (see above)."
    rm -rf "$STAGING"
    mkdir -p "$STAGING"
    trap 'rm -rf "$STAGING"' EXIT
    while IFS=$'\t' read -r package repository commit reference; do
        wanted=$commit
        [[ $wanted != - ]] || wanted=$reference
        require_ours "$package"
        stage "$package" "$repository" "$wanted"
        packages+=("$package")
        checked+=(--upstream "$package=$STAGING")
        [[ $package != vllm* ]] || stage_metadata "$package" "$repository" "$reference"
    done <<<"$rows"
    for row in "${!given[@]}"; do
        [[ " ${packages[*]} " == *" $row "* ]] || fail "$row is not a package of overlay/pins.toml, which has ${packages[*]}."
    done
    apply_series
    insert_prelude
    (cd "$project_root" && "$python" -m overlay check "${checked[@]}") ||
        fail "the patches do not apply to these sources. Nothing was changed in the workspace."
    install_staged
    say "the workspace $project_root is ready"
}

main() {
    declare -gA given=()
    declare -ga packages=()
    declare -g from=/workspace clone=no any_commit=no discard=no python=${PYTHON:-python3}
    local action=assemble
    while (($#)); do
        case $1 in
            --from)
                (($# >= 2)) || fail "--from needs a folder."
                from=$2
                shift
                ;;
            --stack)
                argument_require_value "$1" $#
                argument_require_copied_stack "$2"
                shift
                ;;
            --clone) clone=yes ;;
            --any-commit) any_commit=yes ;;
            --discard) discard=yes ;;
            --in-place) action=in_place ;;
            --undo) action=undo ;;
            -h | --help)
                usage
                return 0
                ;;
            [a-z]*=?*) given[${1%%=*}]=${1#*=} ;;
            *) fail "Unknown argument \"$1\": see --help." ;;
        esac
        shift
    done
    "$python" -c 'import tomllib' 2>/dev/null || fail "$python is older than Python 3.11. Set PYTHON to a newer one."
    "$action"
}

main "$@"

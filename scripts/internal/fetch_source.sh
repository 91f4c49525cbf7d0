#!/usr/bin/env bash
# Fetches one commit of a repository: fetch_source.sh REPOSITORY COMMIT FOLDER. Only a whole commit hash is taken, because
# a tag or a branch may point elsewhere tomorrow.
set -euo pipefail

main() {
    local repository=$1 commit=$2 folder=$3
    [[ $commit =~ ^[0-9a-f]{40}$ ]] || {
        printf 'error: %s is not a commit hash of 40 digits\n' "$commit" >&2
        exit 2
    }
    git init --quiet "$folder"
    git -C "$folder" fetch --quiet --depth 1 "$repository" "$commit"
    git -C "$folder" -c advice.detachedHead=false checkout --quiet --detach FETCH_HEAD
    [[ $(git -C "$folder" rev-parse HEAD) == "$commit" ]]
}

main "$@"

# shellcheck shell=bash
# The environment of the documentation site: .venv.docs/ from requirements/docs.lock. It stands by itself: the site needs
# nothing of .venv/, and the rehearsal nothing of this. Needs terminal.sh and environment.sh. The entry for other scripts is
# documentation_ensure.

# Prints a hash of everything that the site's packages depend on.
documentation_stamp() {
    local root=$1 python=$2
    {
        printf '%s\n' "$root"
        "$python" -c 'import sys; print(sys.version, sys.platform)'
        cat "$root"/requirements/{bootstrap,docs}.lock
    } | sha256sum | cut -d ' ' -f 1
}

# Installs every locked package into a new .venv.docs.
documentation_install() {
    local root=$1 python=$2 log=$3 environment=$1/.venv.docs
    rm -rf "$environment"
    environment_step "$log" "creating .venv.docs" "$python" -m venv "$environment"
    environment_step "$log" "installing the installer" "$environment/bin/python" -m pip install --quiet \
        --disable-pip-version-check --require-hashes --no-deps -r "$root/requirements/bootstrap.lock"
    environment_step "$log" "installing MkDocs" "$environment/bin/uv" pip install --python "$environment/bin/python" \
        --require-hashes --no-deps --no-build-isolation --compile-bytecode --link-mode copy \
        -r "$root/requirements/docs.lock"
}

# Makes sure that ROOT/.venv.docs is what requirements/docs.lock asks for.
documentation_ensure() {
    local root=$1 python stamp lock log=$1/.cache/documentation.log
    python=$(environment_find_python)
    stamp=$(documentation_stamp "$root" "$python")
    [[ $(cat "$root/.venv.docs/stamp" 2>/dev/null) != "$stamp" ]] || return 0
    mkdir -p "$root/.cache" 2>/dev/null || fail "$root/.cache cannot be created. Use a checkout of your own."
    exec {lock}>"$root/.cache/documentation.lock"
    flock "$lock"
    # Another run may have set it up meanwhile.
    if [[ $(cat "$root/.venv.docs/stamp" 2>/dev/null) != "$stamp" ]]; then
        say "Setting up the environment of the documentation in $root/.venv.docs"
        : >"$log"
        documentation_install "$root" "$python" "$log"
        printf '%s\n' "$stamp" >"$root/.venv.docs/stamp"
    fi
    exec {lock}>&-
}

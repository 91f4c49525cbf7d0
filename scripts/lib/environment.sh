# shellcheck shell=bash
# The environment of a stack (overlay/pins.toml): .venv/ or .venv-NAME/ from the locks in requirements/ or
# requirements/NAME/, with the emulated NPU built into it. Needs terminal.sh. The entry for other scripts is
# environment_ensure.

readonly ENVIRONMENT_PYTHON_VERSION=3.11
readonly ENVIRONMENT_DEFAULT_STACK=2025
# Every stack with what its environment takes: MB of disk, and minutes on two cores with the packages in the installer's
# cache or nearby, both measured.
readonly -A ENVIRONMENT_MEGABYTES=([2025]=9300 [2026]=9500)
readonly -A ENVIRONMENT_MINUTES=([2025]=3 [2026]=3)
# What PyTorch needs to be imported and compiled against; it is installed first. setuptools too: replaced while the emulated NPU
# is compiled, it would be missing for a moment.
readonly ENVIRONMENT_PYTORCH='torch|torch-npu|numpy|nvidia-[a-z0-9-]+|ninja|setuptools|packaging|typing-extensions|filelock|fsspec|jinja2|markupsafe|networkx|sympy|mpmath|tqdm|dill'
readonly ENVIRONMENT_PROBE='#include <Python.h>
#include <optional>
int main() { return std::optional<int>(0).value(); }'

# Prints the path of a Python 3.11; fails with one sentence where there is none.
environment_find_python() {
    local candidate version seen=()
    for candidate in python3.11 python3 python; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        if [[ $version == "$ENVIRONMENT_PYTHON_VERSION" ]]; then
            command -v "$candidate"
            return
        fi
        seen+=("$candidate is $version")
    done
    local found="no Python was found"
    if ((${#seen[@]})); then
        found=$(printf '%s, ' "${seen[@]}")
        found=${found%, }
    fi
    fail "Python $ENVIRONMENT_PYTHON_VERSION is needed ($found): install python$ENVIRONMENT_PYTHON_VERSION with its venv module and headers and put it on PATH."
}

# Fails unless NAME is a stack.
environment_require_stack() {
    [[ -n ${ENVIRONMENT_MEGABYTES[$1]:-} ]] || fail "--stack=$1 is invalid. Set it to 2025 or 2026."
}

# Prints the folder of a stack's environment.
environment_folder() {
    local root=$1 stack=$2
    if [[ $stack == "$ENVIRONMENT_DEFAULT_STACK" ]]; then
        printf '%s\n' "$root/.venv"
    else
        printf '%s\n' "$root/.venv-$stack"
    fi
}

# Prints the folder of a stack's locks.
environment_locks() {
    local root=$1 stack=$2
    if [[ $stack == "$ENVIRONMENT_DEFAULT_STACK" ]]; then
        printf '%s\n' "$root/requirements"
    else
        printf '%s\n' "$root/requirements/$stack"
    fi
}

# Prints what the names of a stack's own files below .cache/ end with.
environment_suffix() {
    [[ $1 == "$ENVIRONMENT_DEFAULT_STACK" ]] || printf -- '-%s\n' "$1"
}

# Fails with one sentence where a raylet, which takes the path of its workers' Python apart as a shell does, finds another.
environment_check_path() {
    local root=$1 python=$2 environment=$3
    "$python" -I -S "$root/verl_patches/trainer/isolated_ray/interpreter.py" "$environment/bin/python" ||
        fail "Ray cannot start workers from $environment, because it misreads the quotes in that path. Move the project to a path without quotes and backslashes."
}

# Fails with one sentence unless the disk has room for the packages; what is there already is replaced.
environment_check_disk() {
    local root=$1 environment=$3 needed=${ENVIRONMENT_MEGABYTES[$2]} free there=0
    free=$(df --output=avail --block-size=1000000 "$root" | tail -n 1)
    [[ ! -d $environment ]] || there=$(du --summarize --block-size=1000000 "$environment" | cut -f 1)
    ((free + there >= needed)) ||
        fail "$environment needs $(environment_gigabytes "$needed") GB, but its disk has $(environment_gigabytes "$free") GB left. Free space, or use a checkout on another disk."
}

# Prints MB as GB with one decimal.
environment_gigabytes() {
    printf '%d.%d\n' $(($1 / 1000)) $(($1 % 1000 / 100))
}

# Fails with one sentence unless the locks are for this machine, PYTHON can make environments, and its headers compile
# with a C++17 compiler.
environment_check_toolchain() {
    local python=$1 compiler=${CXX:-c++} include
    [[ $(uname -m) == x86_64 ]] ||
        fail "This machine is $(uname -m), but the locks in requirements/ are for Linux on x86_64. Use such a machine."
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module. Install it (Debian: apt-get install python$ENVIRONMENT_PYTHON_VERSION-venv)."
    command -v "${compiler%% *}" >/dev/null 2>&1 ||
        fail "No C++ compiler: $compiler was not found, but the emulated NPU is built here. Install one (Debian: apt-get install g++) or set CXX to it."
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    # CXX may hold a command with arguments, as build tools allow.
    # shellcheck disable=SC2086
    $compiler -std=c++17 -I "$include" -fsyntax-only -x c++ - >/dev/null 2>&1 <<<"$ENVIRONMENT_PROBE" ||
        fail "The C++ compiler $compiler cannot compile C++17 against $include/Python.h. Install a C++17 compiler and the headers of Python $ENVIRONMENT_PYTHON_VERSION (Debian: apt-get install g++ python$ENVIRONMENT_PYTHON_VERSION-dev)."
}

# Prints a hash of everything that the installed packages depend on.
environment_packages_stamp() {
    local root=$1 python=$2 locks=$3
    {
        printf '%s\n' "$root"
        "$python" -c 'import sys; print(sys.version, sys.platform)'
        cat "$root/requirements/bootstrap.lock" "$locks"/{runtime,upstream,dev}.lock
    } | sha256sum | cut -d ' ' -f 1
}

# Prints a hash of what the search of settings is installed from; nothing for a stack without one.
environment_search_stamp() {
    [[ ! -e $1/tune.lock ]] || sha256sum <"$1/tune.lock"
}

# Prints a hash of the sources of the emulated NPU.
environment_emulator_stamp() {
    local root=$1
    (
        cd "$root/npu_emulator" || exit
        find . -type f \( -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.toml' -o -name '*.txt' -o -name '*.pth' \) \
            -not -path './build/*' -not -path '*.egg-info/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    ) | sha256sum | cut -d ' ' -f 1
}

# Runs a command with its output in the set-up log; prints what it is doing and how long it took.
# The command has a session of its own, so that a signal to this script ends it with everything that it started.
environment_step() {
    local log=$1 title=$2 started=$SECONDS status=0 earlier=${!:-}
    shift 2
    printf '  %-48s' "$title"
    printf '\n== %s: %s\n' "$title" "$*" >>"$log"
    # Set before the command starts: a signal in between must not leave it behind.
    trap 'environment_abandon 130 "$earlier" "${!:-}"' INT
    trap 'environment_abandon 143 "$earlier" "${!:-}"' TERM
    trap 'environment_abandon 129 "$earlier" "${!:-}"' HUP
    trap 'environment_abandon 131 "$earlier" "${!:-}"' QUIT
    setsid "$@" >>"$log" 2>&1 &
    wait "$!" || status=$?
    trap - INT TERM HUP QUIT
    if ((status)); then
        printf 'failed\n'
        tail -n 15 "$log" >&2
        fail "Setting up the environment stopped at \"$title\". The end of $log is shown above."
    fi
    printf '%4d s\n' $((SECONDS - started))
}

# Ends the command of a step at a signal, and this script with CODE. EARLIER is the process before the step's own.
environment_abandon() {
    local code=$1 earlier=$2 child=$3
    if [[ $child != "$earlier" ]]; then
        kill -TERM -- "-$child" "$child" 2>/dev/null || true
    fi
    printf 'interrupted\n'
    quit "$code" "Setting up the environment was interrupted; the next run starts it again."
}

# Prints the entries of PyTorch and what it needs, with their hashes.
environment_pytorch_lock() {
    cat "$@" | awk -v names="^($ENVIRONMENT_PYTORCH)==" '/^[a-zA-Z0-9]/ { wanted = $0 ~ names } wanted'
}

# Installs every locked package into a new environment. PyTorch comes first: the emulated NPU is compiled against it while
# the other packages are installed.
environment_install_packages() {
    local root=$1 python=$2 log=$3 environment=$4 locks=$5 pytorch=$4/pytorch.lock
    local install=("$environment/bin/uv" pip install --python "$environment/bin/python" --require-hashes --no-build-isolation)
    # Copies: a file that is a link into the installer's cache changes in every environment when it is edited in one.
    install+=(--no-deps --link-mode copy)
    rm -rf "$environment"
    environment_step "$log" "creating ${environment##*/}" "$python" -m venv "$environment"
    environment_step "$log" "installing the installer" "$environment/bin/python" -m pip install --quiet \
        --disable-pip-version-check --require-hashes --no-deps -r "$root/requirements/bootstrap.lock"
    environment_pytorch_lock "$locks"/{runtime,upstream}.lock >"$pytorch"
    environment_step "$log" "installing PyTorch" "${install[@]}" -r "$pytorch"
    environment_step "$log" "installing the rest, compiling the emulated NPU" bash "$root/scripts/lib/together.sh" \
        env PATH="$environment/bin:$PATH" "$environment/bin/python" "$root/npu_emulator/build.py" --and \
        "${install[@]}" -r "$locks/runtime.lock" -r "$locks/upstream.lock" -r "$locks/dev.lock" --then \
        "$environment/bin/python" "$root/scripts/lib/compile_bytecode.py"
}

# Installs what scripts/tune.py searches with, beside the packages that are there.
environment_install_search() {
    local log=$1 environment=$2 locks=$3
    environment_step "$log" "installing the search of settings" "$environment/bin/uv" pip install \
        --python "$environment/bin/python" --require-hashes --no-deps --compile-bytecode --link-mode copy \
        -r "$locks/tune.lock"
}

# Builds the emulated NPU against torch_npu's headers and installs it.
environment_install_emulator() {
    local root=$1 log=$2 environment=$3
    environment_step "$log" "building the emulated NPU" env PATH="$environment/bin:$PATH" "$environment/bin/uv" pip install \
        --python "$environment/bin/python" --no-build-isolation --no-deps --reinstall --compile-bytecode \
        --link-mode copy "$root/npu_emulator"
}

# Fails unless every installed file is the one that its package brought. Isolated and without site-packages: nothing of
# what is to be checked runs, and it takes a second where nothing has changed.
environment_check_files() {
    local root=$1 environment=$2
    "$environment/bin/python" -I -S "$root/scripts/health_checks/installed_files.py" "$environment" || exit 2
}

# Whether the stamps of what has been set up are those that the sources ask for.
environment_is_ready() {
    local stamps=$1 packages=$2 search=$3 emulator=$4
    [[ $(cat "$stamps"/{packages,search,emulator} 2>/dev/null) == "$packages${search:+$'\n'}$search"$'\n'"$emulator" ]]
}

# Fails with one sentence where this user cannot set ENVIRONMENT up; makes ROOT/.cache.
environment_check_writable() {
    local root=$1 environment=$2 lock=$3 path
    mkdir -p "$root/.cache" 2>/dev/null || true
    for path in "$root" "$root/.cache" "$lock" "$environment"; do
        [[ ! -e $path || -w $path ]] ||
            fail "$environment has to be set up, but $path belongs to $(stat -c %U "$path") and $(id -un) cannot write it. Let its owner run scripts/test.sh, or use a checkout of your own."
    done
    [[ -d $root/.cache ]] || fail "$root/.cache cannot be created. Use a checkout of your own."
}

# Makes what the stamps say is missing.
# A stamp is written only after the step it stands for has ended, so an interrupted set-up is done again.
environment_set_up() {
    local root=$1 stack=$2 python=$3 environment=$4 locks=$5 log=$6 packages=$7 search=$8 emulator=$9
    local stamps=$environment/stamps
    say "Setting up the environment in $environment"
    environment_check_path "$root" "$python" "$environment"
    environment_check_toolchain "$python"
    : >"$log"
    if [[ $(cat "$stamps/packages" 2>/dev/null) != "$packages" ]]; then
        environment_check_disk "$root" "$stack" "$environment"
        say "It takes $(environment_gigabytes "${ENVIRONMENT_MEGABYTES[$stack]}") GB there, as much in the installer's cache, and ${ENVIRONMENT_MINUTES[$stack]} minutes on two cores; downloads take longer."
        environment_install_packages "$root" "$python" "$log" "$environment" "$locks"
        mkdir -p "$stamps"
        printf '%s\n' "$packages" >"$stamps/packages"
    fi
    if [[ $(cat "$stamps/search" 2>/dev/null) != "$search" ]]; then
        environment_install_search "$log" "$environment" "$locks"
        printf '%s\n' "$search" >"$stamps/search"
    fi
    if [[ $(cat "$stamps/emulator" 2>/dev/null) != "$emulator" ]]; then
        rm -f "$stamps/emulator"
        environment_install_emulator "$root" "$log" "$environment"
        printf '%s\n' "$emulator" >"$stamps/emulator"
    fi
}

# Makes sure that the environment of STACK is what the sources of this checkout ask for.
# Nothing is written where nothing is to be set up: the checkout may belong to another user.
environment_ensure() {
    local root=$1 stack=${2:-$ENVIRONMENT_DEFAULT_STACK} python packages search emulator lock environment locks suffix
    # Container images often set this. Every process would then compile this project's modules again.
    unset PYTHONDONTWRITEBYTECODE
    environment=$(environment_folder "$root" "$stack")
    locks=$(environment_locks "$root" "$stack")
    suffix=$(environment_suffix "$stack")
    local lock_file=$root/.cache/setup$suffix.lock
    python=$(environment_find_python)
    packages=$(environment_packages_stamp "$root" "$python" "$locks")
    search=$(environment_search_stamp "$locks")
    emulator=$(environment_emulator_stamp "$root")
    if environment_is_ready "$environment/stamps" "$packages" "$search" "$emulator"; then
        environment_check_files "$root" "$environment"
        return
    fi
    environment_check_writable "$root" "$environment" "$lock_file"
    exec {lock}>"$lock_file"
    if ! flock --nonblock "$lock"; then
        say "Another run is setting up $environment; waiting for it."
        flock "$lock"
    fi
    # Another run may have set it up meanwhile.
    if ! environment_is_ready "$environment/stamps" "$packages" "$search" "$emulator"; then
        environment_set_up "$root" "$stack" "$python" "$environment" "$locks" "$root/.cache/setup$suffix.log" \
            "$packages" "$search" "$emulator"
    fi
    exec {lock}>&-
    environment_check_files "$root" "$environment"
}

# shellcheck shell=bash
# A job on the dies of one machine. Needs terminal.sh, masking.sh, inherited.sh, settings.sh,
# environment.sh and stack.sh.
# shellcheck disable=SC2154 # launch_one_node.sh sets what its options say

# Finds the run that --resume goes on with, whose folder is --output unless a step of it is given.
one_node_resume() {
    [[ -n $going_on && $going_on != never && -z $output ]] || return 0
    [[ $going_on != auto ]] || fail "--resume=auto is invalid without --output. Set --output to the folder of the run to resume."
    # RUN/checkpoints/global_step_N
    output=$(realpath -m -- "$going_on/../..")
}

# Becomes a rehearsal of the job on emulated dies.
one_node_emulate() {
    local root=$1 configuration=$2 python stack module=rehearsal
    stack=$(stack_of "$root" "$configuration")
    [[ -z $model ]] || fail "--model=$model is invalid with --emulate, which makes its own tiny model. Remove one of them."
    [[ -z $test_data ]] || fail "--test-data=$test_data is invalid with --emulate, which validates on a part of --data. Remove the option."
    if [[ $stack == 2026 ]]; then
        module=rehearsal.stack_2026
        [[ -z $chip || $chip == a2 ]] || fail "--chip=$chip is invalid: this job is rehearsed on an Atlas A2, for which its vllm-ascend is built. Remove the option."
        chip=''
        # The rehearsal finds the newest complete step itself.
        [[ $going_on != auto ]] || resume=()
    fi
    local options=(--job "$configuration")
    output=${output:-$(one_node_folder "$root" "$configuration")}
    if [[ -n $going_on && $going_on != never ]] && [[ $going_on != auto || -f $output/rehearsal.json ]]; then
        [[ -z $data ]] || fail "--data=$data is invalid: a resumed run keeps its data. Remove the option."
        [[ -z $chip ]] || fail "--chip=$chip is invalid: a resumed run keeps its chip. Remove the option."
        options=(--resume "$output")
        [[ -z $steps ]] || resume+=("trainer.total_training_steps=$steps")
        overrides=("${resume[@]}" "${overrides[@]}")
    else
        [[ -z $data ]] || options+=(--data "$data")
        [[ -z $chip ]] || options+=(--chip "$chip")
        [[ -z $steps ]] || options+=(--steps "$steps")
        options+=(--output "$output")
    fi
    python=$(environment_folder "$root" "$stack")/bin/python
    if $dry_run; then
        options+=(--dry-run)
        [[ -x $python ]] || python=$(environment_find_python)
    else
        environment_ensure "$root" "$stack"
    fi
    export PYTHONPATH=$root TOKENIZERS_PARALLELISM=false
    exec "$python" -m "$module" "${options[@]}" -- "${overrides[@]}"
}

# Prints a folder for the files of a run that starts now.
one_node_folder() {
    local root=$1 configuration=$2
    printf '%s/outputs/%s/%s' "$root" "$configuration" "$(date +%Y%m%d-%H%M%S)"
}

# Checks the machine, makes the parquet files, checks the configuration, and becomes the training.
one_node_train() {
    local root=$1 configuration=$2 dies=$3 stack=$4 name entry scripts=() python=python3
    local -A given=()
    local names=() environment=() loggers places convert train reject keys die_memory=''
    one_node_require_input
    settings=${settings:-$root/scripts/env/one_node$(stack_suffix "$stack").env}
    settings_read "$settings" given names
    [[ -n ${given[CANN_ENV]:-} ]] || fail "$settings does not set CANN_ENV. scripts/env/one_node.env explains it."
    for name in "${names[@]}"; do
        [[ $name == CANN_ENV ]] || environment+=("$name=${given[$name]}")
    done
    ! $check || one_node_check_folder
    output=$(realpath -m -- "${output:-$(one_node_folder "$root" "$configuration")}")
    stack_places "$root" "$stack" "$output"
    environment+=("${loggers[@]}")
    dies=$(one_node_dies "$dies")
    [[ ! $dies =~ ^[1-9][0-9]{0,3}$ ]] || inherited_check_visible "$dies" "${environment[@]}"
    ! $check || python=$(one_node_python "$root" "$stack")
    convert=("$python" scripts/json_to_parquet.py --output_dir "$output/data" --json_path "$(realpath -- "$data")")
    [[ -z $test_data ]] || convert+=(--test_json_path "$(realpath -- "$test_data")")
    one_node_command "$root" "$configuration" "$output" "$(realpath -- "$model")"
    if $dry_run; then
        one_node_show "$root" "${given[CANN_ENV]}" | masking_show "$root"
        return
    fi
    if ! $check; then
        entry=$(settings_cann_scripts "${given[CANN_ENV]}")
        [[ -z $entry ]] || mapfile -t scripts <<<"$entry"
        settings_source "${scripts[@]}"
    fi
    for entry in "${environment[@]}"; do
        export "${entry?}"
    done
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    cd "$root" || fail "$root cannot be entered."
    $check || one_node_require_dies "$dies"
    "${convert[@]}" || exit $?
    one_node_plan "$configuration" "${reject[@]}"
    if $check; then
        say "$configuration passes every check; nothing was started"
        return
    fi
    say "training; results are in $output"
    exec "${train[@]}"
}

# Gives a check a folder for its parquet files that is gone afterwards.
one_node_check_folder() {
    [[ -z $output ]] || fail "--output=$output is invalid with --check, which writes nothing. Remove one of them."
    output=$(mktemp -d)
    # shellcheck disable=SC2064 # this folder, whatever the variable is at the end
    trap "rm -rf $(printf '%q' "$output")" EXIT
}

# Prints the Python that a check without NPUs runs with: the environment's, or in an image the image's own.
one_node_python() {
    local python
    python=$(environment_folder "$1" "$2")/bin/python
    [[ -x $python ]] || python=python3
    printf '%s\n' "$python"
}

# Fails unless model and data are given.
one_node_require_input() {
    local remedy="use --emulate, which makes a tiny one without NPUs and downloads"
    [[ -z $chip ]] || fail "--chip=$chip is invalid without --emulate: this machine's NPUs are used. Remove the option, or add --emulate."
    [[ -n $model ]] || fail "--model is missing. Set it to the folder of the published model, or $remedy."
    [[ -r $model/config.json ]] || fail "--model=$model is invalid: no config.json. Set it to the folder of the published model, or $remedy."
    [[ -n $data ]] || fail "--data is missing. Set it to a file of problems with answers; --emulate has its own arithmetic."
}

# Checks the job by the command that follows CONFIGURATION, prints the memory that it needs of a die, by phase, and fails
# if a die has less.
one_node_plan() {
    local configuration=$1 status=0
    shift
    local options=(--config-name "$configuration" --model "$(realpath -- "$model")/config.json")
    [[ -z $die_memory ]] || options+=(--die-memory "$die_memory")
    if [[ $stack == "$ENVIRONMENT_DEFAULT_STACK" ]]; then
        "$@" >/dev/null || exit $?
    else
        # Its plan makes the same checks, and would import verl a second time.
        options+=(--stack "$stack")
    fi
    "$python" scripts/plan.py "${options[@]}" --cluster "$settings" "${keys[@]}" || status=$?
    ((status != 1)) || fail "the job does not fit a die of this machine (see DOES NOT FIT above). Change the named settings after --."
    ((status == 0)) || exit "$status"
}

# Prints the dies that the job takes; DIES is what the configuration says.
one_node_dies() {
    local dies=$1 override
    for override in "${overrides[@]}"; do
        [[ $override != trainer.n_gpus_per_node=* ]] || dies=${override#*=}
    done
    printf '%s' "$dies"
}

# Fails unless torch_npu sees as many NPUs as the job takes. Sets die_memory to
# the bytes of a die.
one_node_require_dies() {
    local dies=$1 found remedy="try it with --emulate"
    local asked='import torch, torch_npu; n = torch.npu
print(n.device_count(), n.get_device_properties(0).total_memory if n.device_count() else 0)'
    found=$(python3 -c "$asked" 2>/dev/null) ||
        fail "$(type -P python3) cannot import torch_npu. Start this in the image (docs/first-hour.md), or $remedy."
    # The last line: CANN prints warnings before it.
    read -r found die_memory <<<"${found##*$'\n'}"
    if [[ ! $dies =~ ^[1-9][0-9]{0,3}$ ]] || ((found < dies)); then
        fail "torch_npu sees $found NPUs, but the job takes $dies. Use a machine with that many, pass -- trainer.n_gpus_per_node=N, or $remedy."
    fi
}

# Works out the keys, the training's command and that of its check, as the caller's arrays keys, train and reject.
one_node_command() {
    local root=$1 configuration=$2 folder=$3 weights=$4
    local own=(
        "actor_rollout_ref.model.path=$(settings_quoted "$weights")"
        "data.train_files=[$(settings_quoted "$folder/data/train.parquet")]"
        "data.val_files=[$(settings_quoted "$folder/data/test.parquet")]"
        "${places[@]}" "trainer.default_local_dir=$(settings_quoted "$folder/checkpoints")"
    )
    [[ -z $steps ]] || own+=("trainer.total_training_steps=$steps")
    own+=("${resume[@]}" "${overrides[@]}")
    stack_commands "$root" "$stack" "$configuration" "$python" "$folder" "${own[@]}"
}

# Prints what a run would do: lines that begin with source, export, cd and run are what it runs, in this order.
one_node_show() {
    local root=$1 cann=$2 line
    [[ $cann == none ]] || while IFS= read -r line; do say "source $(printf '%q' "$line")"; done < <(tr : '\n' <<<"$cann")
    for line in "${environment[@]}"; do
        say "export ${line%%=*}=$(printf '%q' "${line#*=}")"
    done
    # shellcheck disable=SC2016 # to be expanded after the lines above
    say "export PYTHONPATH=$(printf '%q' "$root")"'${PYTHONPATH:+:$PYTHONPATH}'
    say "cd $(printf '%q' "$root")"
    printf -v line '%q ' "${convert[@]}"
    say "run ${line% }"
    printf -v line '%q ' "${train[@]}"
    say "run ${line% }"
}

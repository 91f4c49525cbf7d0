# shellcheck shell=bash
# What a launcher does differently for each stack of upstream versions. Needs settings.sh and environment.sh.
# shellcheck disable=SC2034 # the caller's arrays

# Prints the stack of a configuration: that in whose folder it lies.
stack_of() {
    local root=$1 configuration=$2
    if [[ -f $root/verl_plugin/config/$configuration.yaml ]]; then
        printf '2026\n'
    else
        printf '%s\n' "$ENVIRONMENT_DEFAULT_STACK"
    fi
}

# Prints the file of a step's folder that is written last.
stack_step_file() {
    if [[ $(stack_of "$@") == 2026 ]]; then
        printf 'complete.json\n'
    else
        printf 'trainer.json\n'
    fi
}

# Prints what the names of a stack's settings end with.
stack_suffix() {
    [[ $1 == "$ENVIRONMENT_DEFAULT_STACK" ]] || printf '_%s' "$1"
}

# Sets the caller's arrays: places, the keys for the run's output folder and rule reward; and loggers, the NAME=value
# variables that give verl 0.9 its output folder.
stack_places() {
    local root=$1 stack=$2 folder=$3
    loggers=()
    if [[ $stack == 2026 ]]; then
        places=("reward.custom_reward_function.path=$(settings_quoted "$root/verl_patches/utils/reward/rule_reward.py")")
        places+=(reward.custom_reward_function.name=compute_score)
        loggers=("VERL_FILE_LOGGER_PATH=$folder/verl_metrics.jsonl" "TENSORBOARD_DIR=$folder/tensorboard")
    else
        places=("actor_rollout_ref.overlay.measure.output_dir=$(settings_quoted "$folder")")
    fi
}

# Sets the caller's arrays: keys, all that follow FOLDER; train and reject, the commands that train with them and that
# check them.
stack_commands() {
    local root=$1 stack=$2 configuration=$3 python=$4 folder=$5
    shift 5
    keys=("$@")
    if [[ $stack == 2026 ]]; then
        # verl's own entry point, which finds the job by Hydra's options.
        train=("$python" -m verl.trainer.main_ppo "--config-path=$root/verl_plugin/config" "--config-name=$configuration")
        train+=("hydra.run.dir=$(settings_quoted "$folder/hydra")" "$@")
        reject=("$python" -m verl_plugin.jobs --config-name "$configuration" "$@")
    else
        train=("$python" -m verl_patches.trainer.main_ppo --config-name "$configuration" "$@")
        reject=("${train[@]}" --check)
    fi
}

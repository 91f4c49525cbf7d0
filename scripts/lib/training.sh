# shellcheck shell=bash
# A node's part of a training job. Needs terminal.sh, settings.sh, stack.sh, one_node.sh, cluster.sh, network.sh,
# processes.sh and ray_node.sh.
# shellcheck disable=SC2154 # variables of the other files of the launcher

# Sets training_weights, the settings by which a job reads converted shards: those of DIST_CKPT_PATH, which the cluster's file
# or the environment gives, as the published recipe has it.
training_find_shards() {
    local configuration=$1 shards=${cluster_given[DIST_CKPT_PATH]:-none} role quoted
    declare -ga training_weights=()
    [[ $shards != none ]] || shards=${DIST_CKPT_PATH:-none}
    [[ $shards != none ]] || return 0
    if [[ $configuration == *_random_init ]]; then
        say "DIST_CKPT_PATH is ignored: this job begins with random weights"
        return 0
    fi
    [[ -d $shards ]] ||
        fail "DIST_CKPT_PATH=$shards is invalid: no such folder on this node. Set it to the --save-dir of convert_ckpt_deepseek3.py, or to none."
    quoted=$(settings_quoted "$(realpath "$shards")")
    for role in actor ref; do
        training_weights+=(
            "actor_rollout_ref.$role.megatron.use_dist_checkpointing=True"
            "actor_rollout_ref.$role.megatron.dist_checkpointing_path=$quoted"
        )
    done
}

# Works out the command and the folder of this start.
training_prepare() {
    local root=$1 configuration=$2 stack=$3 output=$OUTPUT_DIR start places loggers train reject keys ray=ray_init.address
    start=$(date +%Y%m%d-%H%M%S)
    [[ $output == /* ]] || output=$root/$output
    declare -ga training_weights=()
    # mbridge of stack 2026 reads safetensors alone.
    if [[ $stack == 2026 ]]; then
        ray=+ray_kwargs.$ray
    else
        training_find_shards "$configuration"
    fi
    declare -g training_root=$root training_child=0 training_folder=$output/$start
    # All nodes may share the output's file system.
    [[ $network_role == head ]] || training_folder=$output/nodes/$network_address/$start
    # Never reuse the folder of another run, not even after the clock was set back.
    [[ ! -e $training_folder ]] || training_folder+=-$$
    declare -g training_log=$training_folder/train.log ray_log=$training_folder/ray.log
    stack_places "$root" "$stack" "$training_folder"
    cluster_environment+=("${loggers[@]}")
    stack_commands "$root" "$stack" "$configuration" python3 "$training_folder" \
        "trainer.nnodes=$NODES" "trainer.n_gpus_per_node=$DIES_PER_NODE" \
        "$ray=$MASTER_ADDR:$RAY_PORT" \
        "actor_rollout_ref.model.path=$(settings_quoted "$MODEL_PATH")" \
        "data.train_files=[$(settings_quoted "$TRAIN_FILES")]" "data.val_files=[$(settings_quoted "$TEST_FILES")]" \
        "${places[@]}" "trainer.default_local_dir=$(settings_quoted "$output/checkpoints")" \
        "${training_weights[@]}" "${resume[@]}" "${overrides[@]}"
    declare -ga training_command=("${train[@]}") training_check=("${reject[@]}") training_keys=("${keys[@]}")
    declare -ga training_wait=(
        python3 scripts/internal/wait_for_nodes.py --address "$MASTER_ADDR:$RAY_PORT" --nodes "$NODES"
        --dies "$DIES_PER_NODE" --timeout "$NODES_TIMEOUT_S" --interval "$POLL_S" --stack "$stack"
    )
}

# Checks the configuration of the cluster's file, and prints the memory that it needs of a die, on a machine that need not be
# a node of it.
training_check_only() {
    local root=$1 configuration=$2 stack=$3 settings=$4 python model keys
    # shellcheck disable=SC2034 # one_node_plan reads it: the file's DIE_MEMORY counts
    local die_memory=''
    cluster_read "$settings"
    declare -g network_role="head" network_address=$MASTER_ADDR
    declare -ga cluster_environment=()
    training_prepare "$root" "$configuration" "$stack"
    python=$(one_node_python "$root" "$stack")
    model=$MODEL_PATH
    [[ -r $model/config.json ]] || fail "MODEL_PATH=$model is invalid: no config.json there on this machine. Set it to the model's folder."
    cd "$root" || fail "$root cannot be entered."
    export PYTHONPATH=$root
    # shellcheck disable=SC2034 # one_node_plan reads it
    keys=("${training_keys[@]}")
    one_node_plan "$configuration" "$python" "${training_check[@]:1}"
    say "$configuration passes every check; nothing was started"
}

# Prints what this node would do, for masking_show: lines that begin with source, export, cd and run are what it runs, in this order.
training_show() {
    local name
    say "node $network_address on $network_interface: $network_role of $NODES nodes with $DIES_PER_NODE dies each${joined:+, of the Ray at $joined}"
    for name in "${CLUSTER_SETTINGS[@]}"; do
        say "setting $name=${cluster_given[$name]}"
    done
    for name in "${cluster_scripts[@]}"; do
        say "source $(printf '%q' "$name")"
    done
    for name in "${cluster_environment[@]}"; do
        say "export ${name%%=*}=$(printf '%q' "${name#*=}")"
    done
    # shellcheck disable=SC2016 # to be expanded after the lines above
    say "export PYTHONPATH=$(printf '%q' "$training_root")"'${PYTHONPATH:+:$PYTHONPATH}'
    say "cd $(printf '%q' "$training_root")"
    [[ $network_role == worker ]] || training_show_command "${training_check[@]}"
    [[ -n $joined ]] || training_show_command "${ray_command[@]}"
    [[ $network_role == worker ]] || training_show_command "${training_wait[@]}"
    [[ $network_role == worker ]] || training_show_command "${training_command[@]}"
}

# Prints this node's part of the job as one line of JSON for a program; see post_training/node_part.py.
training_describe() {
    (cd "$training_root" && python3 -m post_training.node_part "$network_role" "${cluster_environment[@]}" -- "${training_command[@]}")
}

# Tells whoever started this what it is doing, as NAME=VALUE; see post_training/start_status.py.
training_report() {
    [[ -z ${POST_TRAINING_STATUS:-} ]] || python3 -m post_training.start_status "$@"
}

# Prints a command as a shell would take it.
training_show_command() {
    local quoted
    printf -v quoted '%q ' "$@"
    say "run ${quoted% }"
}

# Does this node's part and ends with the exit code that tells how it went.
training_run() {
    ray_node_folder
    process_keep_node
    process_end_noted
    mkdir -p "$ray_folder/t"
    cluster_export
    export PYTHONPATH=$training_root${PYTHONPATH:+:$PYTHONPATH}
    cd "$training_root" || fail "$training_root cannot be entered."
    [[ $network_role == worker ]] || training_reject
    mkdir -p "$training_folder" || fail "OUTPUT_DIR=$training_folder is invalid: it cannot be created. Correct the path, or free space."
    trap 'training_interrupted 130' INT
    trap 'training_interrupted 143' TERM
    trap 'training_interrupted 129' HUP
    trap 'training_interrupted 131' QUIT
    trap ray_node_stop EXIT
    training_report "role=$network_role" phase=waiting
    say "node $network_address is the $network_role; logs are in $training_folder"
    if [[ $network_role == head ]]; then
        training_lead
    else
        training_follow
    fi
}

# Rejects a configuration that cannot run before anything is started.
training_reject() {
    local said
    said=$("${training_check[@]}" 2>&1 >/dev/null) || fail "${said##*error: }"
}

# The head: Ray, unless one is joined, the other nodes, the training.
training_lead() {
    local status=0
    [[ -n $joined ]] || ray_node_start "$ray_log"
    training_child_run "${training_wait[@]}" || status=$?
    case $status in
        0) ;;
        1) [[ -z $joined ]] || quit "$EXIT_MISSING" "The Ray at $joined does not have $NODES nodes with $DIES_PER_NODE NPUs each within $NODES_TIMEOUT_S s: start Ray on the missing ones with --resources='{\"NPU\": $DIES_PER_NODE}', or correct NODES and DIES_PER_NODE."
            quit "$EXIT_MISSING" "Not all of the $NODES nodes joined within $NODES_TIMEOUT_S s: start this script on the missing ones, and look at their logs." ;;
        3) fail "Node configurations differ (see above). Fix them and start again." ;;
        *) training_ray_ended "$status" ;;
    esac
    training_child_run "${training_command[@]}" || status=$?
    ((status == 0)) || ! ray_node_ended || training_ray_ended "$status"
    training_report phase=ended "exit_code=$status"
    ((status == 0)) || quit 1 "The training failed with $(training_code "$status"). The log is $training_log."
    say "done; results are in $training_folder"
}

# Ends the head where its own Ray has gone or does not answer.
training_ray_ended() {
    local logs="$ray_log or $training_log" where="on this node"
    [[ -z $joined ]] || logs=$training_log where="at $joined"
    quit "$EXIT_RAY_ENDED" "Ray $where does not answer any more ($(training_code "$1")); the reason is in $logs."
}

# Prints an exit code in words.
training_code() {
    local words="exit code $1"
    if (($1 > 128)); then
        words+=" (signal $(kill -l "$1" 2>/dev/null || printf '%d' $(($1 - 128))))"
    fi
    printf '%s' "$words"
}

# Another node: gives its dies to the head's Ray until the head ends it.
training_follow() {
    local status=0
    network_wait "$MASTER_ADDR" "$RAY_PORT" "$HEAD_TIMEOUT_S" 0 "the head" ||
        quit "$EXIT_MISSING" "The head did not answer at $MASTER_ADDR:$RAY_PORT within $HEAD_TIMEOUT_S s: is it started, and is that its address?"
    ray_node_start "$ray_log"
    say "lending $DIES_PER_NODE dies to the head at $MASTER_ADDR:$RAY_PORT until it ends the job"
    wait "$ray_process" || status=$?
    if network_answers "$MASTER_ADDR" "$RAY_PORT"; then
        quit "$EXIT_RAY_ENDED" "Ray on this node ended with $(training_code "$status") although the head is there; $(ray_node_reason "$ray_log")."
    fi
    say "the head has ended the job; see its log for the result"
}

# Runs a command in a session of its own, shows and keeps what it prints, and returns its exit code.
training_child_run() {
    local status=0
    # Ctrl-C reaches every process of the terminal; what writes the log has to outlive the training.
    process_become "$@" > >(trap '' INT QUIT; exec {process_lock}>&-; exec tee -a "$training_log") 2>&1 &
    training_child=$!
    wait "$training_child" || status=$?
    training_child=0
    return "$status"
}

# At a signal: ends the training, then (at exit) Ray.
training_interrupted() {
    trap '' INT TERM HUP QUIT
    say "interrupted; stopping what this node runs"
    ((training_child == 0)) || process_end_session "$training_child"
    exit "$1"
}

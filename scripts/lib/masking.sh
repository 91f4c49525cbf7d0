# shellcheck shell=bash
# Secrets in what a launcher shows. Needs terminal.sh.

# Prints standard input with every secret masked, by the rules of post_training/masking.
masking_show() {
    local root=$1 python=$1/.venv/bin/python
    [[ -x $python ]] || python=$(type -P python3) ||
        fail "python3 was not found, and a dry run needs it to mask secrets. Install Python 3.10 or later."
    # Isolated: neither a PYTHONPATH nor a package of the user's takes part.
    "$python" -I -S "$root/scripts/internal/mask_secrets.py"
}

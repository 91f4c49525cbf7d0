"""Prints the variables of scripts/env/rehearsal.env as NAME=value lines, for the shell."""

from post_training.environment_files import read_environment
from rehearsal.plan import ENVIRONMENT_FILE

if __name__ == "__main__":
    for name, value in read_environment(ENVIRONMENT_FILE).items():
        print(f"{name}={value}")

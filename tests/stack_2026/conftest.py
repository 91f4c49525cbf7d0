"""Leave out the tests of the stack 2026 if another one is installed; `bash scripts/test.sh --stack 2026` runs them."""

from tests.stack_2026 import IS_INSTALLED

collect_ignore_glob = [] if IS_INSTALLED else ["*"]

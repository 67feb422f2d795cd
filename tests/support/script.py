"""Run a script: ``python -m tests.support.script FILE`` does what ``python FILE`` does, and tests fork it warm."""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

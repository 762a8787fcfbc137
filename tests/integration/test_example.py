import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "handoff.py"


def test_the_example_hands_a_cache_from_one_process_to_another():
    ran = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == "done 262144 bytes; pages hold [1. 1. 1. 1. 5. 5. 5. 5.]\n"

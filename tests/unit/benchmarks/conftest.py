import sys
from pathlib import Path

# `benchmarks` is no part of the package; it is found from the root of the repository only.
sys.path.insert(0, str(Path(__file__).parents[3]))

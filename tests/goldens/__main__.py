"""Rewrite the golden file: ``python -m tests.goldens --write``."""

from __future__ import annotations

import argparse

from tests.goldens.golden import CASES, FILE, write

parser = argparse.ArgumentParser(prog="python -m tests.goldens", description=__doc__)
parser.add_argument("--write", action="store_true", required=True, help=f"replace {FILE.name}")
parser.parse_args()
write()
print(f"{FILE}: {len(CASES)} messages")

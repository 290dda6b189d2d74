#!/usr/bin/env bash
# Checks that take too long for every change: campaigns that are killed, full disks (as root), a million samples;
# random histories of the prefix cache, beams and samples under memory pressure.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
python scripts/campaign_soak.py kills --runs 20 --kills 10
python scripts/campaign_soak.py devices --kills 10
python scripts/campaign_soak.py million
if [ "$(id -u)" -eq 0 ]; then python scripts/campaign_soak.py disk; fi
python scripts/memory_soak.py machine
python scripts/memory_soak.py beams --steps 10000
python scripts/memory_soak.py pressure --preemptions 500

#!/usr/bin/env bash
# Keep what this version of parity computes, to compare another version with it:
#
#     scripts/keep_records.sh FOLDER [suite] [blackwell] [zoo] [false_alarms] [studies]     (without any, all)
#     python -m lab same OLD_FOLDER NEW_FOLDER
#
# What was interrupted goes on where it stopped, but for the suite, which begins anew.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd) && shift
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PARITY_BACKEND=cpu
run() { "${PYTHON:-.venv/bin/python}" -m "$@"; }
suite() { # without a limit of real time, so that a slow machine finds the same; a failure (1) is recorded, too
    PARITY_EMULATED_GPU=$1 run parity run --seeds 3 --diagnosis 0 --report "$folder" --name "$1" -n 2 || [ $? -eq 1 ]
}

[ $# -gt 0 ] || set -- suite blackwell zoo false_alarms studies
for part; do
    case $part in
    suite) suite hopper ;;
    blackwell) suite blackwell ;;
    zoo) run lab zoo --sizes small --seeds 3 -n 2 -o "$folder/zoo.md" ;;
    false_alarms) run parity false-alarms --seeds 500-503 -n 2 -o "$folder/false_alarms.md" ;;
    studies) run lab study --all -o "$folder/studies" ;;
    *) echo "keep_records.sh: there is no part $part" >&2 && exit 2 ;;
    esac
done

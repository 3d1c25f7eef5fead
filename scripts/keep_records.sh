#!/usr/bin/env bash
# Keep what this version of parity computes, to compare another version with it:
#
#     scripts/keep_records.sh FOLDER [suite] [blackwell] [zoo] [false_alarms] [studies]     (without any, all)
#     parity lab same OLD_FOLDER NEW_FOLDER
#
# What is recorded already is not computed again. On two cores the suite takes minutes, the rest takes hours.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd) && shift
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PARITY_BACKEND=cpu
parity() { "${PYTHON:-.venv/bin/python}" -m parity "$@"; }
suite() { # without a limit of real time, so that a slow machine finds the same; a failure (1) is recorded, too
    [ -e "$folder/$1.jsonl" ] ||
        PARITY_EMULATED_GPU=$1 parity run --seeds 3 --diagnosis 0 --report "$folder" --name "$1" -n 2 || [ $? -eq 1 ]
}

for part in "${@:-suite blackwell zoo false_alarms studies}"; do
    for each in $part; do
        case $each in
        suite) suite hopper ;;
        blackwell) suite blackwell ;;
        zoo) parity zoo --sizes small --seeds 3 -n 2 -o "$folder/zoo.md" ;;
        false_alarms) parity false-alarms --seeds 500-503 -n 2 -o "$folder/false_alarms.md" ;;
        studies) parity study --all -o "$folder/studies" ;;
        *) echo "keep_records.sh: there is no part $each" >&2 && exit 2 ;;
        esac
    done
done

#!/usr/bin/env bash
# Builds build/types/rlmq: the package as it imports (setuptools maps common/api to rlmq, common to rlmq.common, …),
# made of symlinks, for the tools that read sources and know nothing of that mapping (mypy, import-linter, editors).
# Touches only what differs, so that two tools may run it at once.
set -euo pipefail
cd "$(dirname "$0")/.."

tree=build/types/rlmq

link() {  # link TARGET NAME: a relative symlink; replaces another one
  [ "$(readlink "$2" 2>/dev/null || true)" = "$1" ] || ln -sfn "$1" "$2"
}

# A package's entries one by one, so that common/api does not appear a second time as rlmq.common.api.
mirror() {  # mirror SOURCE TREE_FOLDER UPWARDS
  if [ -L "$2" ]; then rm -f "$2"; fi
  mkdir -p "$2"
  for entry in "$1"/*; do
    case "${entry##*/}" in api | __pycache__) continue ;; esac
    link "$3/$entry" "$2/${entry##*/}"
  done
  for entry in "$2"/*; do
    [ -e "$entry" ] || rm -f "$entry"
  done
}

mirror common/api "$tree" ../../..
for package in common buffer controller producers consumers; do
  mirror "$package" "$tree/$package" ../../../..
done

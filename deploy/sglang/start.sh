#!/usr/bin/env bash
# Runs SGLang with the options of a file: one option per line, `#` begins a comment line.
#   deploy/sglang/start.sh deploy/sglang/kimi-k2.6-b300.args [more options]
# DRY_RUN=1 prints the command instead.
set -euo pipefail

usage="usage: start.sh FILE [options of SGLang]"
file=${1:?$usage}
if [[ $file == -h || $file == --help ]]; then
  echo "$usage"
  exit
fi
shift
args=()
while read -r option value; do
  case $option in '' | '#'*) continue ;; esac
  args+=("$option")
  if [[ -n $value ]]; then args+=("$value"); fi
done <"$file"
command=("${PYTHON:-python3}" -m sglang.launch_server "${args[@]}" "$@")
if [[ ${DRY_RUN:-} == 1 ]]; then
  printf '%s\n' "${command[@]}"
else
  exec "${command[@]}"
fi

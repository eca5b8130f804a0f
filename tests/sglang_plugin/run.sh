#!/usr/bin/env bash
# The tests of the SGLang plugin, with the real package's classes on the CPU: run.sh [options of pytest]
#
# The environment takes 6 GB (torch comes with its CUDA libraries) and two minutes. It is kept, and made anew when its
# versions change; clones may share it.
#   SGLANG_VENV  where it is (default .venv-sglang); PYTHON  what makes it (default python3)
# Ends with 75 when SGLang can't be installed here.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/plugin_env.sh
venv=${SGLANG_VENV:-.venv-sglang}
versions=tests/sglang_plugin/constraints.txt

install_packages() {
  # SGLang itself without its dependencies: most are kernels for GPUs. The rest is what its LoRA classes import.
  "$@" install -c "$versions" --no-deps sglang || return
  "$@" install -c "$versions" torch torchvision transformers safetensors pytest pytest-timeout 'setuptools>=77' aiohttp \
    apache-tvm-ffi compressed-tensors dill einops fastapi gguf ipython msgspec openai orjson partial-json-parser pillow \
    psutil pybase64 pydantic pyzmq requests scipy sentencepiece setproctitle uvloop
}
make_environment "$venv" "$versions" sglang.srt.lora.lora_manager SGLang
install_plugin "$venv"
timeout 1200 "$venv/bin/python" -m pytest --timeout 600 tests/sglang_plugin "$@"

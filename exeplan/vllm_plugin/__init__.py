"""A scheduler for vLLM that keeps the cadence of an `rra` plan, where vLLM's own options cannot.

    cadence.py      when a pass prefills and how many requests, and how vLLM's scheduler is held to it; no vLLM here
    scheduler.py    the classes that `vllm serve --scheduler-cls` names

exeplan must be installed in vLLM's environment. `exeplan export PLAN --to vllm --plug-in` writes the command.
"""

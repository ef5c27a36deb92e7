"""A profile from a serving engine itself: whole passes of the installed engine, at two numbers of layers.

    vllm_driver.py      the program that runs passes, by the interpreter that has vLLM
    driver.py           one such process: an engine with some number of layers, and seconds of batches on it
    batches.py          which batches are timed
    decompose.py        their seconds, as rows of a profile
    profile_engine.py   all of it: what `exeplan profile MODEL --engine vllm` does

Not here: constants of engines fitted to published runs (`datasheets/engine_constants.py`), which need no engine.
"""

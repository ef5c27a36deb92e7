"""CTranslate2: python ctranslate2_generate.py CHECKPOINT WORK COMPUTE_TYPE; prints one JSON object.

WORK is a JSON file of prompts, of equal length, and of the output tokens of each. A token's text is `t` and its number.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import ctranslate2
import numpy as np

checkpoint, work, kind = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3]
prompts = [[f"t{token}" for token in prompt] for prompt in work["prompts"]]

with tempfile.TemporaryDirectory() as folder:
    ctranslate2.converters.TransformersConverter(checkpoint).convert(folder, quantization=kind, force=True)
    model = ctranslate2.Generator(folder, device="cpu", compute_type=kind, inter_threads=1, intra_threads=1)


def generate(some: list[list[str]], count: int) -> list[list[int]]:
    options = {"max_length": count, "min_length": count, "sampling_topk": 1, "include_prompt_in_result": False}
    return [one.sequences_ids[0] for one in model.generate_batch(some, **options)]


rates = []
generate(prompts[:2], 4)
for size in work["batches"]:
    began = time.process_time()
    tokens = generate(prompts[:size], work["outputs"])
    rates.append(sum(map(len, tokens)) / (time.process_time() - began))
logits = np.array(model.forward_batch(prompts))[:, -1]
np.save(sys.argv[2] + ".logits.npy", logits)
print("RESULT " + json.dumps({"rates": rates, "version": ctranslate2.__version__}))

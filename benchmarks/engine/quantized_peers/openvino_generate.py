"""OpenVINO by optimum-intel: python openvino_generate.py CHECKPOINT WORK BITS; prints one JSON object.

WORK is a JSON file of prompts, of equal length, and of the output tokens of each. Weights are compressed by NNCF.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

checkpoint, work, bits = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])
how = OVWeightQuantizationConfig(bits=bits, sym=True, **({"group_size": 128, "ratio": 1.0} if bits == 4 else {}))
config = {"INFERENCE_NUM_THREADS": "1", "PERFORMANCE_HINT": "LATENCY"}
model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, quantization_config=how, ov_config=config)


def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
    ids = torch.tensor(prompts)
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
    return found[:, ids.shape[1] :].tolist()


rates = []
generate(work["prompts"][:2], 4)
for size in work["batches"]:
    began = time.process_time()
    tokens = generate(work["prompts"][:size], work["outputs"])
    rates.append(sum(map(len, tokens)) / (time.process_time() - began))
ids = torch.tensor(work["prompts"])
logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1].float().numpy()
np.save(sys.argv[2] + ".logits.npy", logits)
print("RESULT " + json.dumps({"rates": rates, "version": version("openvino")}))
